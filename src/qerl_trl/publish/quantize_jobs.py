"""How each tensor of a quantized folder is made: read from the dense checkpoint in pieces, quantized or copied, and its error measured.

Nothing is mapped, and what passes between a file and a GPU goes through small buffers, so that little host memory is ever touched.
"""

import io
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from ..base_identity import Pieces, row_of
from ..nvfp4 import headers
from ..nvfp4.format import NVFP4Tensor, dequantize, largest_magnitude, power_of_two_global_scale, quantize
from ..nvfp4.fused import share_global_scale
from ..nvfp4.headers import TensorInfo
from ..nvfp4.layouts import TensorSpec, packed_specs
from ..nvfp4.linear import NVFP4Linear
from .records import QuantizedLayer, QuantizedNote
from .writer import Job, bytes_of

#: quantizes a matrix by a scale rule
Quantize = Callable[[torch.Tensor, str], NVFP4Tensor]
#: weights of a layer on which its error is measured: evenly spaced rows
_ERROR_SAMPLE = 1 << 16
#: what passes through a buffer at a time
_PIECE_BYTES = 1 << 24


class Budget:
    """Bytes that may be in work at a time; one job may always run, however large."""

    def __init__(self, total: int):
        self._free, self._total = total, total
        self._changed = threading.Condition()

    def acquire(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size or self._free == self._total)
            self._free -= size

    def release(self, size: int) -> None:
        with self._changed:
            self._free += size
            self._changed.notify_all()


def prepare_quantizer(device: str, scale_rule: str) -> "Future[Quantize]":
    """Begin to make ready what quantizes on `device`: on a GPU that takes half a second or more (CUDA's start, for some rules the
    kernel's compilation), in which the largest dense tensors are copied."""

    def prepare() -> Quantize:
        on_device = _quantizer_for(torch.device(device), scale_rule)
        if torch.device(device).type == "cuda":
            sample = torch.ones(256, 256, dtype=torch.bfloat16, device=device)
            _error("", sample, on_device(sample, scale_rule))
        return on_device

    pool = ThreadPoolExecutor(1)
    started = pool.submit(prepare)
    pool.shutdown(wait=False)
    return started


def _quantizer_for(device: torch.device, scale_rule: str) -> Quantize:
    """What quantizes a matrix on `device`: the reference, or the kernel where there is one and it saves more than its compilation takes,
    a second in which the interpreter is busy: not for rtn. Both give the same bytes."""
    if device.type == "cuda" and scale_rule != "rtn":
        import qerl_nvfp4

        if qerl_nvfp4.is_available(device):
            lock = threading.Lock()  # Triton's launcher is not made for several threads; launching is short

            def by_kernel(weight: torch.Tensor, scale_rule: str) -> NVFP4Tensor:
                scale = power_of_two_global_scale(largest_magnitude(weight))  # refuses NaN and infinity
                with lock:
                    packed, block_scale = qerl_nvfp4.quantize(weight, scale_rule, scale)
                return NVFP4Tensor(packed, block_scale, scale)

            return by_kernel
    return quantize


def _own_stream(device: str) -> AbstractContextManager:
    """A CUDA stream for the calling thread: copies of one worker then run beside another's arithmetic."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if torch.device(device).type == "cuda" else nullcontext()


def quantize_job(
    group: list[TensorInfo], scale_rule: str, device: str, quantize: "Future[Quantize]", budget: Budget
) -> Job:
    note: QuantizedNote = {}
    size = sum(info.end - info.start for info in group)

    def make() -> Iterator[torch.Tensor]:
        on_device = quantize.result()
        budget.acquire(size)
        try:
            with _own_stream(device):
                yield from quantized(on_device)
        finally:
            budget.release(size)

    def quantized(on_device: Quantize) -> Iterator[torch.Tensor]:
        layers, errors = [], []
        for info in group:
            weight = read_tensor(info, device)
            try:
                tensor = on_device(weight, scale_rule)
            except ValueError as error:
                raise ValueError(f"{info.file}: tensor {info.name!r}: {error}") from error
            layers.append(NVFP4Linear.from_nvfp4(tensor))
            errors.append(_error(info.name.removesuffix(".weight"), weight, tensor))
            del weight, tensor
        if len(layers) > 1:
            share_global_scale(layers)  # as after loading, so that the bytes are the same
        note["rows"] = [
            row_of(f"{error['name']}.{name}", parameter)
            for layer, error in zip(layers, errors, strict=True)
            for name, parameter in layer.named_parameters()
        ]
        for layer in layers:
            packed, block_scale, scale = layer.nvfp4
            yield from _on_host(packed)
            yield from _on_host(block_scale.view(torch.float8_e4m3fn))
            yield from _on_host(scale)
        note["layers"] = errors

    return Job(tuple(spec for info in group for spec in packed_specs(info.name, *info.shape)), make, note)


def copy_job(info: TensorInfo, compute_dtype: torch.dtype, budget: Budget, device: str = "cpu") -> Job:
    """Everything that stays dense: float32 becomes the compute dtype, as in `from_pretrained`; other dtypes stay. `device`: for its row of
    the fingerprint."""
    note: QuantizedNote = {}
    stored = headers.torch_dtype(info)
    dtype = compute_dtype if stored.is_floating_point and stored.itemsize > 1 else stored
    size = min(info.end - info.start, _PIECE_BYTES)

    def make() -> Iterator[torch.Tensor]:
        budget.acquire(size)
        try:
            row = Pieces(info.name, info.shape, device)
            for piece in _pieces(info):
                headers.check_finite(info.name, piece, str(info.file))
                kept = piece.to(dtype)
                row.add(kept)
                yield kept
            note["rows"] = [row.row()]
        finally:
            budget.release(size)

    return Job((TensorSpec(info.name, dtype, info.shape),), make, note)


def read_tensor(info: TensorInfo, device: str) -> torch.Tensor:
    """A tensor of a safetensors file, read to `device`."""
    if torch.device(device).type == "cpu":
        tensor = torch.empty(info.shape, dtype=headers.torch_dtype(info))
        with open(info.file, "rb", buffering=0) as file:
            file.seek(info.start)
            _fill(tensor, file, info)
        return tensor
    tensor = torch.empty(info.shape, dtype=headers.torch_dtype(info), device=device)
    start = 0
    for piece in _pieces(info, pinned=True):
        tensor[start : start + len(piece)].copy_(piece)
        start += len(piece)
    return tensor


def _pieces(info: TensorInfo, pinned: bool = False) -> Iterator[torch.Tensor]:
    """A tensor of a safetensors file in slices of its first dimension, each in the place of the one before."""
    if not info.shape or not math.prod(info.shape):
        yield read_tensor(info, "cpu")
        return
    rows = _rows_per_piece((info.end - info.start) // info.shape[0], info.shape[0])
    buffer = torch.empty(rows, *info.shape[1:], dtype=headers.torch_dtype(info), pin_memory=pinned)
    with open(info.file, "rb", buffering=0) as file:
        file.seek(info.start)
        for start in range(0, info.shape[0], rows):
            piece = buffer[: info.shape[0] - start]
            _fill(piece, file, info)
            yield piece


def _fill(tensor: torch.Tensor, file: io.FileIO, info: TensorInfo) -> None:
    """Read a whole tensor (not map it: mapped pages would count as this process's memory)."""
    view = bytes_of(tensor)
    while view:
        count = file.readinto(view)
        if not count:
            raise ValueError(f"{info.file}: ends within tensor {info.name!r}. Download it again.")
        view = view[count:]


def _on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor as a CPU job may yield it: one on a GPU in slices of its first dimension, each in the place of the one before."""
    if tensor.device.type == "cpu":
        yield tensor
        return
    rows = _rows_per_piece(tensor[0].nbytes, len(tensor))
    buffer = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
    for part in tensor.split(rows):
        yield buffer[: len(part)].copy_(part)


def _rows_per_piece(row_bytes: int, rows: int) -> int:
    return min(rows, max(1, _PIECE_BYTES // row_bytes))


def _error(name: str, weight: torch.Tensor, tensor: NVFP4Tensor) -> QuantizedLayer:
    """Error of a layer on evenly spaced rows: relative squared, and the largest."""
    rows = max(1, min(weight.shape[0], _ERROR_SAMPLE // weight.shape[1]))
    step = weight.shape[0] // rows
    sample = weight[::step].float()
    packed, block_scale = tensor.packed[::step].contiguous(), tensor.block_scale[::step].contiguous()
    error = dequantize(packed, block_scale, tensor.global_scale, torch.float32) - sample
    sums = sample.square().sum(dtype=torch.float64), error.square().sum(dtype=torch.float64), error.abs().max().double()
    squared, squared_error, largest = torch.stack(sums).tolist()  # a GPU is waited for once
    return {
        "name": name,
        "shape": list(weight.shape),
        "weights": weight.numel(),
        "nmse": squared_error / squared if squared else 0.0,
        "largest_error": largest,
    }
