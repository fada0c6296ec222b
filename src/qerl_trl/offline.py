"""Quantize a folder: dense safetensors checkpoint in, NVFP4 checkpoint (compressed-tensors layout) out, without building the model.

The model class is instantiated on the meta device only, to learn which tensors are linear layers and which of them stay dense: the same
rules as `from_pretrained(..., quantization_config=NVFP4Config())`. Then each weight is read, quantized and written to its final place on
its own; q/k/v and gate/up are done together, since they share a global scale. Several are worked on at a time, within a budget of memory.
A killed run continues with the shards that are missing.

On a CUDA device the arithmetic runs there (the same bytes come out); reading and writing stay the bottleneck. What passes between file and
GPU, and what is only copied, does so in pieces through small buffers, so that little host memory is ever touched for the first time.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from . import checkpoint, formats, headers, nvfp4, report, shards
from .formats import packed_specs
from .fused import FUSED_GROUPS, share_global_scale
from .headers import TensorInfo
from .linear import NVFP4Linear
from .nvfp4 import NVFP4Tensor
from .policy import public_name
from .quantizer import NVFP4Config, NVFP4HfQuantizer
from .shards import Job, TensorSpec

Quantize = Callable[[torch.Tensor, str], NVFP4Tensor]

REPORT_NAME = "quantization_report.json"
#: weights of a layer on which its error is measured: evenly spaced rows
_ERROR_SAMPLE = 1 << 16
#: memory for tensors in work, beyond two of the largest
_SLACK_BYTES = 400_000_000
#: what passes through a buffer at a time
_PIECE_BYTES = 1 << 24
#: what a model repository holds beside weights, and nothing that a reader would execute
_COPIED_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_NOT_COPIED = ("config.json", shards.INDEX_NAME, checkpoint.MANIFEST_NAME, REPORT_NAME, "hf_quant_config.json")


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What a finished `quantize_folder` reports: error and size. `nmse` is the squared error over the squared weight, on sampled rows."""

    layers: list[dict[str, Any]]
    weights: int
    source_bytes: int
    written_bytes: int
    skipped: list[str]

    @property
    def nmse(self) -> float:
        """Over all layers, weighted by their size."""
        return sum(layer["nmse"] * layer["weights"] for layer in self.layers) / max(self.weights, 1)


def quantize_folder(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    scale_rule: str = "rtn",
    modules_to_not_convert: list[str] | None = None,
    device: str = "cpu",
    workers: int | None = None,
    max_shard_bytes: int = shards.MAX_SHARD_BYTES,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    card: Callable[[Path, dict], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quantized:
    """Write `source`'s weights as NVFP4 into the folder `destination`.

    Args:
        source: folder, or Hub id (downloaded into the Hub's cache).
        scale_rule, modules_to_not_convert: as in `NVFP4Config`.
        device: "cpu" or "cuda[:i]".
        workers: layers worked on at a time, as threads; default: one on a small CPU, else one a core, at most 8.
        card: called with the unfinished folder and the manifest's description, to add a README.
        progress: called with (bytes written since the last call, bytes in total).

    Memory for tensors: on a CPU two of the largest + 0.4 GB; with a GPU that much there, and 16 MB a worker on the host.

    Raises:
        `ValueError`: no safetensors, names that do not fit the architecture, MoE experts, a NaN in a weight, an existing destination.
    """
    folder = _local(source)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config.get("quant_method")
        raise ValueError(
            f"{source} is quantized already ({method}). It can be used as it is; quantize the original model."
        )
    nvfp4_config = NVFP4Config(scale_rule, modules_to_not_convert, compute_dtype=_dtype_name(config))
    tensors, converted = _plan(folder, config, nvfp4_config, trust_remote_code)
    quantize = _start(device, scale_rule)
    run = {
        "kind": "nvfp4_base",
        "settings": {"model": public_name(str(source)), "scale_rule": scale_rule, "base_format": "nvfp4"},
        "skip": sorted(modules_to_not_convert or ()),
        "source_sha256": _fingerprint(folder, tensors),
        "source_bytes": sum(info.end - info.start for info in tensors.values()),
        "max_shard_bytes": max_shard_bytes,
        "exported_with": report.versions(),
    }
    if not shards.is_complete(destination, run):
        with shards.staging(destination, run, overwrite) as partial:
            notes = _write(
                partial,
                tensors,
                converted,
                nvfp4_config,
                device,
                quantize,
                workers,
                max_shard_bytes,
                progress or (lambda *_: None),
            )
            skipped = nvfp4_config._dense_linears or []
            checkpoint.write_json_atomically(
                partial / REPORT_NAME,
                {"layers": sorted(notes, key=lambda note: note["name"]), "not_quantized": skipped},
            )
            _copy_beside(folder, partial)
            config.quantization_config = nvfp4_config.to_dict()
            config.save_pretrained(partial)
            if card is not None:
                card(partial, run)
    return _summary(Path(destination), tensors)


def _local(source: str | os.PathLike) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).count("/") != 1:
        raise ValueError(f"{source} is neither a folder here nor a Hub id (user/name).")
    patterns = ["*.safetensors", *_COPIED_PATTERNS]
    return Path(snapshot_download(str(source), allow_patterns=patterns))


def _dtype_name(config: PretrainedConfig) -> str:
    name = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "bfloat16"


def _plan(
    folder: Path, config: PretrainedConfig, nvfp4_config: NVFP4Config, trust_remote_code: bool
) -> tuple[dict[str, TensorInfo], dict[str, nn.Linear]]:
    """(tensors of the checkpoint, linear layers to quantize), checked against each other."""
    index = folder / shards.INDEX_NAME
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}" if missing else "has no *.safetensors file"
        raise ValueError(f"{folder} {what}. Download it again, or convert it to safetensors (save_pretrained).")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    quantizer = NVFP4HfQuantizer(nvfp4_config, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model, checkpoint_files=[str(file) for file in files])
    tensors, converted = quantizer._headers, quantizer._converted
    absent = [name for name in converted if f"{name}.weight" not in tensors]
    if absent:
        raise ValueError(
            f"{len(absent)} linear layers of {type(model).__name__} have no tensor in {folder}, e.g. {absent[0]}.weight: the checkpoint's "
            "names differ from the model's. Load it with from_pretrained(..., quantization_config=NVFP4Config()) and save_pretrained it."
        )
    for name, layer in converted.items():
        info = tensors[f"{name}.weight"]
        if info.shape != tuple(layer.weight.shape):
            raise ValueError(f"{info.file}: {info.name} is {info.shape}, config.json says {tuple(layer.weight.shape)}.")
    return tensors, converted


def _fingerprint(folder: Path, tensors: dict[str, TensorInfo]) -> str:
    """Identity of a source: its configuration, tensor table, and its files' sizes and times; weights are not read for it."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, info in sorted(tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.start}".encode())
    for file in sorted({info.file for info in tensors.values()}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


# --- the work ---------------------------------------------------------------------------------------------------------------------


class _Budget:
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


def _write(
    folder: Path,
    tensors: dict[str, TensorInfo],
    converted: dict[str, nn.Linear],
    config: NVFP4Config,
    device: str,
    quantize: "Future[Quantize]",
    workers: int | None,
    max_shard_bytes: int,
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    largest = max(info.end - info.start for info in tensors.values())
    budget = _Budget(2 * largest + _SLACK_BYTES)
    jobs = [
        _quantize_job(group, config.scale_rule, device, quantize, budget)
        if group[0].name.removesuffix(".weight") in converted
        else _copy_job(group[0], config.torch_dtype, budget)
        for group in _groups(tensors, converted)
    ]
    total = sum(job.nbytes for job in jobs)
    if workers is None:
        # on a CPU one thread keeps a core busy with small tensor operations; more of them mostly wait for each other's interpreter lock
        workers = (
            1 if torch.device(device).type == "cpu" and (os.cpu_count() or 1) <= 2 else min(os.cpu_count() or 1, 8)
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one core a worker: layers in parallel scale better than the pieces of a layer
    try:
        notes = shards.write_shards(
            folder,
            jobs,
            dict(formats.WRITTEN_BY, scale_rule=config.scale_rule),
            max_shard_bytes,
            workers,
            lambda size: progress(size, total),
        )
    finally:
        torch.set_num_threads(threads)
    return [layer for note in notes for layer in note["layers"]]


def _groups(tensors: dict[str, TensorInfo], converted: dict[str, nn.Linear]) -> list[list[TensorInfo]]:
    """Tensors in file order; the members of a fused group together, at the place of the first."""
    groups: dict[tuple[str, Any], list[TensorInfo]] = {}
    for info in tensors.values():
        parent, _, child = info.name.removesuffix(".weight").rpartition(".")
        group = next((g for g in FUSED_GROUPS if child in g), None)
        whole = group is not None and all(f"{parent}.{other}" in converted for other in group)
        fused = whole and info.name.endswith(".weight")
        groups.setdefault((parent, group) if fused else (info.name, None), []).append(info)
    return list(groups.values())


def _start(device: str, scale_rule: str) -> "Future[Quantize]":
    """Begin to make ready what quantizes on `device`: on a GPU that takes half a second or more (CUDA's start, for some rules the
    kernel's compilation), in which the largest dense tensors are copied."""

    def prepare() -> Quantize:
        quantize = _quantizer_for(torch.device(device), scale_rule)
        if torch.device(device).type == "cuda":
            sample = torch.ones(256, 256, dtype=torch.bfloat16, device=device)
            _error("", sample, quantize(sample, scale_rule))
        return quantize

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

            def quantize(weight: torch.Tensor, scale_rule: str) -> NVFP4Tensor:
                scale = nvfp4.power_of_two_global_scale(nvfp4.largest_magnitude(weight))  # refuses NaN and infinity
                with lock:
                    return NVFP4Tensor(*qerl_nvfp4.quantize(weight, scale_rule, scale), scale)

            return quantize
    return nvfp4.quantize


def _own_stream(device: str):
    """A CUDA stream for the calling thread: copies of one worker then run beside another's arithmetic."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if torch.device(device).type == "cuda" else nullcontext()


def _quantize_job(
    group: list[TensorInfo], scale_rule: str, device: str, quantize: "Future[Quantize]", budget: _Budget
) -> Job:
    note: dict[str, Any] = {}
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
        layers, reports = [], []
        for info in group:
            weight = _read(info, device)
            try:
                tensor = on_device(weight, scale_rule)
            except ValueError as error:
                raise ValueError(f"{info.file}: tensor {info.name!r}: {error}") from error
            layers.append(NVFP4Linear.from_nvfp4(tensor))
            reports.append(_error(info.name.removesuffix(".weight"), weight, tensor))
            del weight, tensor
        if len(layers) > 1:
            share_global_scale(layers)  # as after loading, so that the bytes are the same
        for layer in layers:
            packed, block_scale, scale = layer.nvfp4
            yield from _on_host(packed)
            yield from _on_host(block_scale.view(torch.float8_e4m3fn))
            yield from _on_host(scale)
        note["layers"] = reports

    return Job(tuple(spec for info in group for spec in packed_specs(info.name, *info.shape)), make, note)


def _copy_job(info: TensorInfo, compute_dtype: torch.dtype, budget: _Budget) -> Job:
    """Everything that stays dense: float32 becomes the compute dtype, as in `from_pretrained`; other dtypes stay."""
    stored = headers.torch_dtype(info)
    dtype = compute_dtype if stored.is_floating_point and stored.itemsize > 1 else stored
    size = min(info.end - info.start, _PIECE_BYTES)

    def make() -> Iterator[torch.Tensor]:
        budget.acquire(size)
        try:
            for piece in _pieces(info):
                yield piece.to(dtype)
        finally:
            budget.release(size)

    return Job((TensorSpec(info.name, dtype, info.shape),), make)


def _read(info: TensorInfo, device: str) -> torch.Tensor:
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
        yield _read(info, "cpu")
        return
    rows = _rows_of_a_piece((info.end - info.start) // info.shape[0], info.shape[0])
    buffer = torch.empty(rows, *info.shape[1:], dtype=headers.torch_dtype(info), pin_memory=pinned)
    with open(info.file, "rb", buffering=0) as file:
        file.seek(info.start)
        for start in range(0, info.shape[0], rows):
            piece = buffer[: info.shape[0] - start]
            _fill(piece, file, info)
            yield piece


def _fill(tensor: torch.Tensor, file: BinaryIO, info: TensorInfo) -> None:
    """Read a whole tensor (not map it: mapped pages would count as this process's memory)."""
    view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
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
    rows = _rows_of_a_piece(tensor[0].nbytes, len(tensor))
    buffer = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
    for part in tensor.split(rows):
        yield buffer[: len(part)].copy_(part)


def _rows_of_a_piece(row_bytes: int, rows: int) -> int:
    return min(rows, max(1, _PIECE_BYTES // row_bytes))


def _error(name: str, weight: torch.Tensor, tensor: NVFP4Tensor) -> dict[str, Any]:
    """Error of a layer on evenly spaced rows: relative squared, and the largest."""
    rows = max(1, min(weight.shape[0], _ERROR_SAMPLE // weight.shape[1]))
    step = weight.shape[0] // rows
    sample = weight[::step].float()
    packed, block_scale = tensor.packed[::step].contiguous(), tensor.block_scale[::step].contiguous()
    error = nvfp4.dequantize(packed, block_scale, tensor.global_scale, torch.float32) - sample
    sums = sample.square().sum(dtype=torch.float64), error.square().sum(dtype=torch.float64), error.abs().max().double()
    squared, squared_error, largest = torch.stack(sums).tolist()  # a GPU is waited for once
    return {
        "name": name,
        "shape": list(weight.shape),
        "weights": weight.numel(),
        "nmse": squared_error / squared if squared else 0.0,
        "largest_error": largest,
    }


def _copy_beside(source: Path, destination: Path) -> None:
    for pattern in _COPIED_PATTERNS:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, destination / file.name)


def _summary(folder: Path, tensors: dict[str, TensorInfo]) -> Quantized:
    content = json.loads((folder / REPORT_NAME).read_text())
    return Quantized(
        layers=content["layers"],
        weights=sum(layer["weights"] for layer in content["layers"]),
        source_bytes=sum(info.end - info.start for info in tensors.values()),
        written_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        skipped=content["not_quantized"],
    )
