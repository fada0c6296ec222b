"""Quantize a folder: dense safetensors in, NVFP4 (compressed-tensors) out, without building the model.

The model class is instantiated on the meta device to find the linear layers that stay dense, by the rules of
`from_pretrained`. Then each weight is read, quantized and written to its final place; q/k/v and gate/up together,
because they share a global scale. Layers run in parallel within a memory budget. A killed run continues with the
missing shards.

On a CUDA device the arithmetic runs there (with the same bytes); reading and writing stay the bottleneck.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoint import fingerprint, records, seal
from ..checkpoint.fingerprint import Pieces, row_of
from ..model import loading
from ..nvfp4 import checkpoints, headers
from ..nvfp4.architectures import DECODER
from ..nvfp4.checkpoints import TensorSpec, packed_specs
from ..nvfp4.config import NVFP4Config, auto_class_of, quantization_of
from ..nvfp4.format import NVFP4Tensor, dequantize, largest_magnitude, power_of_two_global_scale, quantize
from ..nvfp4.fused import share_global_scale
from ..nvfp4.headers import TensorInfo, check_finite, torch_dtype
from ..nvfp4.linear import PACKED, NVFP4Linear
from ..rollout.sampling import end_tokens, save_generation_config, stored
from ..support.files import hub_commit, named_in_errors
from . import write
from .gguf import folder_of
from .write import Job

if TYPE_CHECKING:  # imports PEFT, which is not needed here
    from ..checkpoint.settings import RunSettings

REPORT_NAME = "quantization_report.json"
#: memory for tensors being processed, besides two of the largest
_SLACK_BYTES = 400_000_000
#: files of a model repository besides weights; no executable code
_COPIED_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_NOT_COPIED = (
    "config.json", headers.INDEX_NAME, seal.MANIFEST_NAME, REPORT_NAME, "hf_quant_config.json", records.FACTS_NAME,
    # of a training run
    "trainer_state.json", "adapter_config.json", "all_results.json", "train_results.json", "eval_results.json",
    records.RESULTS_NAME, records.BEFORE_NAME, records.AFTER_NAME,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Result of `quantize_folder`. `nmse`: squared error over squared weight, on sampled rows."""

    layers: list[records.QuantizedLayer]
    weights: int
    source_bytes: int
    written_bytes: int
    skipped: list[str]

    @property
    def nmse(self) -> float:
        """Relative squared error over all layers, weighted by size."""
        return sum(layer["nmse"] * layer["weights"] for layer in self.layers) / max(self.weights, 1)

    def figures(self) -> records.Quantization:
        """Sizes and errors for a card and the command's output."""
        worst = max(self.layers, key=lambda layer: layer["nmse"])
        return {
            "weights": self.weights, "layers": len(self.layers), "nmse": self.nmse, "worst_layer": worst["name"],
            "worst_nmse": worst["nmse"], "source_bytes": self.source_bytes, "written_bytes": self.written_bytes,
        }  # fmt: skip


def quantize_folder(
    model: str | os.PathLike,
    destination: str | os.PathLike,
    scale_rule: str = "rtn",
    modules_to_not_convert: list[str] | None = None,
    device: str = "cpu",
    workers: int | None = None,
    max_shard_bytes: int = write.MAX_SHARD_BYTES,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    card: Callable[[Path, records.Export], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quantized:
    """Write `model`'s weights as NVFP4 into the folder `destination`.

    Args:
        model: folder, or Hub id (downloaded into the Hub's cache).
        scale_rule, modules_to_not_convert: as in `NVFP4Config`.
        device: "cpu" or "cuda[:i]".
        workers: number of threads, each with one layer; default: one on a small CPU, else one per core, at most 8.
        card: called with the unfinished folder and the manifest's description, to add a README.
        progress: called with (bytes written since the last call, bytes in total).

    Memory for tensors: on a CPU two of the largest + 0.4 GB; with a GPU that much there, and 16 MB per worker here.
    """
    model = folder_of(model)
    folder = _local(model, trust_remote_code)
    write.require_apart(folder, destination)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if quantization_of(config) is not None:
        method = config.quantization_config.get("quant_method")
        raise ValueError(f"{model} is quantized already ({method}). Use it unchanged, or quantize the original model.")
    dtype = "float16" if str(config.dtype) in ("float16", "torch.float16") else "bfloat16"
    nvfp4_config = NVFP4Config(scale_rule, modules_to_not_convert, dtype)
    loading.begin(folder)
    tensors, converted, parameters, loaded_as = _matched(folder, config, nvfp4_config, trust_remote_code)
    settings: RunSettings = {"model": records.public_name(str(model)), "scale_rule": scale_rule, "base_format": "nvfp4"}
    settings["auto_class"] = auto_class_of(config).__name__
    if (revision := hub_commit(folder)) is not None:
        settings["base_revision"] = revision
    export: records.Export = {
        "kind": "nvfp4_base",
        "settings": settings,
        "skip": sorted(modules_to_not_convert or ()),
        "source_sha256": _fingerprint(folder, tensors),
        "source_bytes": sum(info.nbytes for info in tensors.values()),
        "max_shard_bytes": max_shard_bytes,
        "exported_with": records.versions(),
    }
    finished = seal.recorded_run(destination)
    known: records.Export = {**export, "settings": settings.copy()}
    if "base_sha256" in finished.get("settings", {}):  # computed below
        known["settings"]["base_sha256"] = finished["settings"]["base_sha256"]
    if not write.is_complete(destination, known):
        entries = write.code_of(config)
        if records.is_hub_id(str(model)):
            config.auto_map = write.naming_repository(entries, str(model))
        elif entries:
            write.warn_of_code(entries, destination)
        with write.staging(destination, export, overwrite, resumable=True) as partial:
            report = progress or (lambda *_: None)
            written = _write(partial, tensors, converted, nvfp4_config, device, workers, max_shard_bytes, report)
            layers = [layer | {"name": loaded_as.get(layer["name"], layer["name"])} for layer in written[0]]
            layers.sort(key=lambda layer: layer["name"])  # named as in --skip
            content = {"layers": layers, "not_quantized": nvfp4_config.dense_linears or []}
            seal.write_json_atomically(partial / REPORT_NAME, content)
            loading.finish()
            found = {row.name: row for row in (_as_loaded(row, loaded_as) for row in written[1])}
            if parameters and parameters <= found.keys():  # the sealed record is completed from the written files
                settings["base_sha256"] = fingerprint.sha256_of(found[name] for name in parameters)
            _copy_beside(folder, partial, str(model), config)
            write.leave_code_out(config)
            config.quantization_config = nvfp4_config.to_dict()
            config.save_pretrained(partial)
            if card is not None:
                card(partial, export)
    return summary(Path(destination), export["source_bytes"])


def _local(model: str | os.PathLike, with_code: bool) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder
    patterns = ["*.safetensors", *_COPIED_PATTERNS, *(["*.py"] if with_code else [])]
    with named_in_errors(model):
        return Path(snapshot_download(str(model), allow_patterns=patterns))


def _matched(
    folder: Path, config: PretrainedConfig, nvfp4_config: NVFP4Config, trust_remote_code: bool
) -> tuple[dict[str, TensorInfo], dict[str, nn.Linear], set[str], dict[str, str]]:
    """Return (tensors, linears to quantize by stored name, parameter names once loaded if known, renamed modules)."""
    tensors = headers.read_folder(folder)
    headers.check_inside(folder, {info.file for info in tensors.values()})
    with torch.device("meta"):
        model = auto_class_of(config).from_config(config, trust_remote_code=trust_remote_code)
    linears = nvfp4_config.linears_to_quantize(model)
    stored = _stored_names(model, tensors)
    converted = {stored.get(name, name): layer for name, layer in linears.items()}
    headers.check_dense_headers(tensors, converted)
    wrong = [
        name
        for name, layer in converted.items()
        if f"{name}.weight" not in tensors or tensors[f"{name}.weight"].shape != tuple(layer.weight.shape)
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} linear layers of {type(model).__name__} have no tensor of their shape in {folder}, e.g. "
            f"{wrong[0]}.weight {tuple(converted[wrong[0]].weight.shape)}. Load the model with from_pretrained(..., "
            "quantization_config=NVFP4Config()), then call save_pretrained."
        )
    dense = {name for name, _ in model.named_parameters()} - {f"{name}.weight" for name in linears}
    packed = {f"{name}.{part}" for name in linears for part in PACKED}
    # another class would name its parameters differently in training
    as_loaded = config.architectures in (None, [type(model).__name__])
    loaded_as = {name: module for module, name in stored.items()}
    return tensors, converted, dense | packed if as_loaded else set(), loaded_as


def _stored_names(model: PreTrainedModel, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the stored names of modules that transformers renames at load, as in Gemma 3 and Mistral 3."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if name in tensors or module in found:
            continue
        reverted = revert_weight_conversion(model, {name: parameter.detach()})
        for there, tensor in reverted.items() if len(reverted) == 1 else ():
            if tensor.shape == parameter.shape and there in tensors and there.endswith(f".{own}"):
                found[module] = there.removesuffix(f".{own}")
    return found


def _as_loaded(row: fingerprint.FingerprintRow, modules: Mapping[str, str]) -> fingerprint.FingerprintRow:
    module, dot, own = row.name.rpartition(".")
    return row._replace(name=f"{modules.get(module, module)}{dot}{own}")


def _fingerprint(folder: Path, tensors: dict[str, TensorInfo]) -> str:
    """Hash a checkpoint's identity: names, sizes and times of all files read or copied, without reading weights."""
    digest = hashlib.sha256("".join(f"{name} {info.dtype} {info.shape}" for name, info in tensors.items()).encode())
    for file in sorted({*(info.file for info in tensors.values()), folder / "config.json", *_beside(folder)}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


# --- the work ---------------------------------------------------------------------------------------------------------


def _write(
    folder: Path,
    tensors: dict[str, TensorInfo],
    converted: dict[str, nn.Linear],
    config: NVFP4Config,
    device: str,
    workers: int | None,
    max_shard_bytes: int,
    progress: Callable[[int, int], None],
) -> tuple[list[records.QuantizedLayer], list[fingerprint.FingerprintRow]]:
    """Quantize and write all tensors; returns (errors of the layers, fingerprint rows of all tensors)."""
    budget = Budget(2 * max(info.nbytes for info in tensors.values()) + _SLACK_BYTES)
    quantize = quantizer_for(torch.device(device), config.scale_rule)
    jobs = [
        quantize_job(group, config.scale_rule, device, quantize, budget)
        if group[0].name.removesuffix(".weight") in converted
        else copy_job(group[0], config.torch_dtype, budget, device)
        for group in _groups(tensors, converted)
    ]
    total = sum(job.nbytes for job in jobs)
    if workers is None:
        cores = os.cpu_count() or 1  # on a small CPU more threads mostly wait for the interpreter lock
        workers = 1 if torch.device(device).type == "cpu" and cores <= 2 else min(cores, 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one core per worker: parallel layers scale better than a parallel layer
    try:
        about = dict(checkpoints.WRITTEN_BY, scale_rule=config.scale_rule)
        written = write.write_shards(folder, jobs, about, max_shard_bytes, workers, lambda size: progress(size, total))
    finally:
        torch.set_num_threads(threads)
    notes = cast(list[records.QuantizedNote], written)  # of the jobs above
    layers = [layer for note in notes for layer in note.get("layers", [])]
    return layers, [fingerprint.FingerprintRow(*row) for note in notes for row in note.get("rows", [])]


def _groups(tensors: dict[str, TensorInfo], converted: dict[str, nn.Linear]) -> list[list[TensorInfo]]:
    """Group tensors in file order; the members of a fused group together, at the place of the first."""
    groups: dict[tuple[str, Any], list[TensorInfo]] = {}
    for info in tensors.values():
        parent, _, child = info.name.removesuffix(".weight").rpartition(".")
        group = next((g for g in DECODER.groups if child in g), None)
        whole = group is not None and all(f"{parent}.{other}" in converted for other in group)
        fused = whole and info.name.endswith(".weight")
        groups.setdefault((parent, group) if fused else (info.name, None), []).append(info)
    return list(groups.values())


def _beside(folder: Path) -> list[Path]:
    """Return the files to copy unchanged."""
    files = {file.name: file for pattern in _COPIED_PATTERNS for file in folder.glob(pattern)}
    # measured on the model before quantization
    measured = {name for name, file in files.items() if file.match(records.EVALUATIONS)}
    left = {*_NOT_COPIED, *measured}
    return [file for name, file in sorted(files.items()) if name not in left and not name.endswith(".index.json")]


def _copy_beside(folder: Path, destination: Path, model: str, config: PretrainedConfig) -> None:
    headers.check_inside(folder, files := _beside(folder))
    for file in files:
        shutil.copyfile(file, destination / file.name)
    own = destination / "tokenizer_config.json"
    content = json.loads(own.read_text()) if own.is_file() else {}
    if records.is_hub_id(model) and isinstance(content.get("auto_map"), dict):
        named = {**content, "auto_map": write.naming_repository(content["auto_map"], model)}
        seal.write_json_atomically(own, named)
    if (folder / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # without the model's own code
        known = stored(folder, config)
        if set(end_tokens(known, tokenizer)) > set(end_tokens(known, None)):  # otherwise the file stays unchanged
            save_generation_config(destination, known, tokenizer)


def summary(folder: Path, source_bytes: int) -> Quantized:
    """Read the result from a written folder."""
    content = json.loads((folder / REPORT_NAME).read_text())
    return Quantized(
        layers=content["layers"],
        weights=sum(layer["weights"] for layer in content["layers"]),
        source_bytes=source_bytes,
        written_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        skipped=content["not_quantized"],
    )


# --- one job per tensor -----------------------------------------------------------------------------------------------

#: (matrix, scale rule) -> quantized matrix
Quantize = Callable[[torch.Tensor, str], NVFP4Tensor]
#: number of weights for measuring a layer's error, in evenly spaced rows
_ERROR_SAMPLE = 1 << 16
#: bytes of a dense tensor copied at once
_PIECE_BYTES = 1 << 24


class Budget:
    """Limit on the bytes processed at a time; a single job may always run, whatever its size."""

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
    """Return the quantizer for `device`: the reference, or a kernel if it saves more than its compilation takes."""
    if device.type == "cuda" and scale_rule != "rtn":
        import qerl_nvfp4

        if qerl_nvfp4.is_available(device):
            lock = threading.Lock()  # Triton's launcher is not thread-safe; launching is short

            def by_kernel(weight: torch.Tensor, scale_rule: str) -> NVFP4Tensor:
                scale = power_of_two_global_scale(largest_magnitude(weight))  # refuses NaN and infinity
                with lock:
                    packed, block_scale = qerl_nvfp4.quantize(weight, scale_rule, scale)
                return NVFP4Tensor(packed, block_scale, scale)

            return by_kernel
    return quantize


def quantize_job(group: list[TensorInfo], scale_rule: str, device: str, quantize: Quantize, budget: Budget) -> Job:
    """Quantize the weights of a fused group, with one global scale, and note errors and fingerprint rows."""
    note: records.QuantizedNote = {}
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
            share_global_scale(layers)  # loading does this too: same bytes
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
    """Copy a dense tensor; float32 becomes the compute dtype. `device`: for its row of the fingerprint."""
    note: records.QuantizedNote = {}
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


def _error(name: str, weight: torch.Tensor, tensor: NVFP4Tensor) -> records.QuantizedLayer:
    """Measure a layer's error on evenly spaced rows: relative squared, and the largest."""
    rows = max(1, min(weight.shape[0], _ERROR_SAMPLE // weight.shape[1]))
    step = weight.shape[0] // rows
    sample = weight[::step].float()
    packed, block_scale = tensor.packed[::step].contiguous(), tensor.block_scale[::step].contiguous()
    error = dequantize(packed, block_scale, tensor.global_scale, torch.float32) - sample
    sums = sample.square().sum(dtype=torch.float64), error.square().sum(dtype=torch.float64), error.abs().max().double()
    squared, squared_error, largest = torch.stack(sums).tolist()  # one GPU sync
    return {
        "name": name,
        "shape": list(weight.shape),
        "weights": weight.numel(),
        "nmse": squared_error / squared if squared else 0.0,
        "largest_error": largest,
    }
