"""How each tensor of a quantized folder is made: read from the dense checkpoint in slices, quantized or copied, and its error measured."""

import threading
from collections.abc import Callable, Iterator

import torch

from ..checkpoint.fingerprint import Pieces, row_of
from ..checkpoint.records import QuantizedLayer, QuantizedNote
from ..nvfp4.checkpoints import TensorSpec, packed_specs
from ..nvfp4.format import NVFP4Tensor, dequantize, largest_magnitude, power_of_two_global_scale, quantize
from ..nvfp4.fused import share_global_scale
from ..nvfp4.headers import TensorInfo, check_finite, torch_dtype
from ..nvfp4.linear import NVFP4Linear
from .write import Job

#: quantizes a matrix by a scale rule
Quantize = Callable[[torch.Tensor, str], NVFP4Tensor]
#: weights of a layer on which its error is measured: evenly spaced rows
_ERROR_SAMPLE = 1 << 16
#: of a dense tensor, copied at a time
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


def quantizer_for(device: torch.device, scale_rule: str) -> Quantize:
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


def quantize_job(group: list[TensorInfo], scale_rule: str, device: str, quantize: Quantize, budget: Budget) -> Job:
    note: QuantizedNote = {}
    size = sum(info.nbytes for info in group)

    def make() -> Iterator[torch.Tensor]:
        budget.acquire(size)
        try:
            yield from quantized()
        finally:
            budget.release(size)

    def quantized() -> Iterator[torch.Tensor]:
        layers, errors = [], []
        for info in group:
            weight = next(info.pieces(info.nbytes)).to(device)
            try:
                tensor = quantize(weight, scale_rule)
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
            yield from (packed.cpu(), block_scale.view(torch.float8_e4m3fn).cpu(), scale.cpu())
        note["layers"] = errors

    return Job(tuple(spec for info in group for spec in packed_specs(info.name, *info.shape)), make, note)


def copy_job(info: TensorInfo, compute_dtype: torch.dtype, budget: Budget, device: str = "cpu") -> Job:
    """Everything that stays dense: float32 becomes the compute dtype, as in `from_pretrained`; other dtypes stay. `device`: for its row of
    the fingerprint."""
    note: QuantizedNote = {}
    stored = torch_dtype(info)
    dtype = compute_dtype if stored.is_floating_point and stored.itemsize > 1 else stored
    size = min(info.nbytes, _PIECE_BYTES)

    def make() -> Iterator[torch.Tensor]:
        budget.acquire(size)
        try:
            row = Pieces(info.name, info.shape, device)
            for piece in info.pieces(_PIECE_BYTES):
                check_finite(info.name, piece, str(info.file))
                kept = piece.to(dtype)
                row.add(kept)
                yield kept
            note["rows"] = [row.row()]
        finally:
            budget.release(size)

    return Job((TensorSpec(info.name, dtype, info.shape),), make, note)


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
