"""What lies on disk: the two NVFP4 checkpoint layouts we read, the one we write, and the checks before a byte is trusted.

    layout               compressed-tensors                        ModelOpt
                         (`nvfp4-pack-quantized`, llm-compressor)  (NVIDIA TensorRT Model Optimizer)
    codes                X.weight_packed        U8 (N, K/2)        X.weight          U8 (N, K/2)
    block scales         X.weight_scale         F8_E4M3 (N, K/16)  X.weight_scale    F8_E4M3 (N, K/16)
    global scale         X.weight_global_scale  F32 (1,), divides  X.weight_scale_2  F32 (), multiplies
    activation scales    X.input_global_scale   ignored            X.input_scale     ignored

Codes and block scales are the same bytes in both, and in ours. Only the global scale changes: ModelOpt's is the reciprocal.

**Weight-only reading of W4A4 checkpoints.** ModelOpt's "NVFP4" and compressed-tensors' "NVFP4" preset also quantize activations at run
time. Their weights are ordinary NVFP4 weights, so they are read, and the activation (and KV cache) scales are ignored. Refused is what
*cannot* be read that way: configurations that quantize activations only, weights that make sense only after the activations were
transformed (rotations, AWQ pre-scales, SVDQuant), and mixed precision.

**Validation.** `check_headers` reads the safetensors headers (names, dtypes, shapes, file sizes) and `check_values` all scales, in
pieces, with plain file reads: nothing is mapped or kept. Every problem is a `ValueError` naming file and tensor. A block scale of zero is
accepted only where all 16 codes are zero too: there it loses nothing.
"""

import dataclasses
import fnmatch
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .nvfp4 import BLOCK_SIZE
from .shards import TensorSpec

#: written into the safetensors metadata of what we save
WRITTEN_BY = {"quantized_by": "qerl-trl"}
_READ_BYTES = 1 << 22
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DENSE_DTYPES = ("BF16", "F16", "F32")
#: scales of activations and of the KV cache: a W4A16 reader needs none of them
_IGNORED_SUFFIXES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of one checkpoint layout. `divides`: whether the stored global scale divides (ours) or multiplies."""

    name: str
    packed: str
    block_scale: str
    global_scale: str
    divides: bool

    @property
    def tensors(self) -> tuple[str, str, str]:
        return self.packed, self.block_scale, self.global_scale


LAYOUTS = {
    "compressed-tensors": Layout("compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", True),
    "modelopt": Layout("modelopt", "weight", "weight_scale", "weight_scale_2", False),
}


class TensorInfo(NamedTuple):
    """One tensor of a safetensors file: where it is and what it claims to be. `start`, `end`: bytes from the file's beginning."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Source(NamedTuple):
    """What a checkpoint's `quantization_config` says: the layout, which modules it leaves alone, which it quantizes."""

    layout: str
    ignore: tuple[str, ...]
    targets: tuple[str, ...]


# --- names ------------------------------------------------------------------------------------------------------------------------


def name_matches(name: str, entry: str) -> bool:
    """Whether a module name is meant by an entry of `modules_to_not_convert` (or of a checkpoint's ignore list).

    "lm_head", "down_proj", "model.layers.1"   whole dotted components, anywhere: the last hits model.layers.1.mlp.up_proj and
                                               not model.layers.11.mlp.up_proj
    "*.mlp.down_proj", "model.layers.[0-3].*"  shell pattern, over the whole name
    "re:.*layers\\.(0|1)\\..*"                   regular expression, matched from the start (compressed-tensors' notation)
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if any(character in entry for character in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."


def matches_any(name: str, entries: Iterable[str]) -> bool:
    return any(name_matches(name, entry) for entry in entries)


# --- configurations ---------------------------------------------------------------------------------------------------------------


def parse_quantization_config(config: Mapping[str, Any], where: str) -> Source:
    """Read the `quantization_config` of a checkpoint (or ModelOpt's hf_quant_config.json). `where` names it in errors.

    Raises `ValueError` for everything that is not plain NVFP4 weights: other methods and formats, mixed precision, transformed or
    activation-only quantization.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _parse_compressed_tensors(config, where)
    if method == "modelopt" or "quant_algo" in config or "quantization" in config:
        return _parse_modelopt(config, where)
    raise ValueError(
        f"{where}: quant_method={method!r} is not an NVFP4 checkpoint that qerl_trl reads (compressed-tensors "
        "'nvfp4-pack-quantized' or ModelOpt 'NVFP4'). Start from the unquantized model; it is quantized while loading."
    )


def _parse_compressed_tensors(config: Mapping[str, Any], where: str) -> Source:
    groups = config.get("config_groups") or {}
    if not groups:
        raise ValueError(f"{where}: compressed-tensors with no config_groups: nothing says how the weights are stored.")
    status = config.get("quantization_status")
    if status not in (None, "compressed"):
        raise ValueError(
            f"{where}: quantization_status={status!r}, the weights are not packed. Save the model compressed."
        )
    if config.get("transform_config"):
        raise ValueError(
            f"{where}: transform_config={config['transform_config']!r}: these weights are rotated and need the same rotation of the "
            "activations, which qerl_trl does not apply. Use a checkpoint without transforms."
        )
    targets: list[str] = []
    for name, group in groups.items():
        weights, layout = group.get("weights"), group.get("format") or config.get("format")
        if not weights:
            raise ValueError(
                f"{where}: config group {name!r} quantizes activations only: there are no NVFP4 weights to read."
            )
        found = tuple(weights.get(key) for key in ("num_bits", "type", "group_size", "strategy"))
        wanted = (4, "float", BLOCK_SIZE, "tensor_group")
        if layout != "nvfp4-pack-quantized" or found != wanted or not weights.get("symmetric", True):
            what = "mixed precision is not supported" if len(groups) > 1 else "this is not NVFP4"
            raise ValueError(
                f"{where}: config group {name!r} has format={layout!r} and (num_bits, type, group_size, strategy)={found}, symmetric="
                f"{weights.get('symmetric', True)}; {what}: qerl_trl needs every group to be 'nvfp4-pack-quantized' with {wanted}. "
                "Start from the unquantized model; it is quantized while loading."
            )
        targets += group.get("targets") or ["Linear"]
    return Source("compressed-tensors", tuple(config.get("ignore") or ()), tuple(targets))


def _parse_modelopt(config: Mapping[str, Any], where: str) -> Source:
    inner = config.get("quantization", config)
    algorithm = inner.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        mixed = (
            "mixed precision"
            if algorithm == "MIXED_PRECISION" or "quantized_layers" in inner
            else "not plain NVFP4 weights"
        )
        raise ValueError(
            f"{where}: ModelOpt quant_algo={algorithm!r} is {mixed}; qerl_trl reads 'NVFP4' and 'W4A16_NVFP4'. "
            "Start from the unquantized model; it is quantized while loading."
        )
    if inner.get("group_size") not in (None, BLOCK_SIZE):
        raise ValueError(f"{where}: group_size={inner['group_size']}; NVFP4 blocks have {BLOCK_SIZE} weights.")
    for name, group in (inner.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        if weights.get("num_bits", 4) != 4 or weights.get("group_size", BLOCK_SIZE) != BLOCK_SIZE:
            raise ValueError(f"{where}: config group {name!r} has weights={weights}: mixed precision is not supported.")
    ignore = inner.get("exclude_modules") or inner.get("ignore") or ()
    return Source("modelopt", tuple(ignore), ("Linear",))


def compressed_tensors_config(ignore: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for what we save: compressed-tensors NVFP4A16 on every Linear but `ignore`."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK_SIZE,
        "strategy": "tensor_group",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def packed_specs(name: str, rows: int, columns: int) -> tuple[TensorSpec, ...]:
    """The three tensors we write for a packed matrix (N, K) as compressed-tensors names them; `name` ends in ".weight"."""
    return (
        TensorSpec(f"{name}_packed", torch.uint8, (rows, columns // 2)),
        TensorSpec(f"{name}_scale", torch.float8_e4m3fn, (rows, columns // BLOCK_SIZE)),
        TensorSpec(f"{name}_global_scale", torch.float32, (1,)),
    )


# --- headers ----------------------------------------------------------------------------------------------------------------------


def read_headers(files: Iterable[str | Path]) -> dict[str, TensorInfo]:
    """Tensor name -> `TensorInfo` of one or several safetensors files. Reads the headers only.

    Raises `ValueError` for pickle files, damaged or truncated files, and a tensor that two files hold.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in map(Path, files):
        for info in _read_header(file):
            if info.name in tensors:
                raise ValueError(
                    f"{file}: tensor {info.name!r} is also in {tensors[info.name].file.name}. Delete the stale shard."
                )
            tensors[info.name] = info
    return tensors


def written_by_us(file: str | Path) -> bool:
    """Whether a safetensors file says that qerl-trl wrote it."""
    return _header_json(Path(file))[0].get("__metadata__", {}).get("quantized_by") == WRITTEN_BY["quantized_by"]


def _header_json(file: Path) -> tuple[dict[str, Any], int]:
    """(the JSON header, where the data begins)."""
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file}: pickled weights can run code when they are opened and cannot be checked first. Convert the checkpoint to "
            "safetensors (load it once with plain transformers and save_pretrained it)."
        )
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{file}: not a whole safetensors file ({size} bytes, header length {length}). Download it again."
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file}: the safetensors header is not JSON ({error}). Download it again.") from error
    return header, 8 + length


def _read_header(file: Path) -> Iterator[TensorInfo]:
    header, data_start = _header_json(file)
    size = file.stat().st_size
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        info = TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + end)
        if info.end > size or start > end:
            raise ValueError(
                f"{file}: tensor {name!r} should end at byte {info.end}, the file has {size}: it is cut off. Download it again."
            )
        if info.dtype in _DTYPES and end - start != math.prod(info.shape) * _DTYPES[info.dtype].itemsize:
            raise ValueError(
                f"{file}: tensor {name!r} of shape {list(info.shape)} {info.dtype} has {end - start} bytes."
            )
        yield info


def check_dense_headers(tensors: Mapping[str, TensorInfo], modules: Mapping[str, torch.nn.Linear]) -> None:
    """Check the headers of an unquantized checkpoint for the modules that are going to be quantized."""
    problems = []
    for name in modules:
        info = tensors.get(f"{name}.weight")
        if info is None:
            if f"{name}.weight_packed" in tensors:
                file = tensors[f"{name}.weight_packed"].file
                problems.append(
                    f"{file}: {name!r} is packed already, but config.json has no quantization_config. Restore config.json."
                )
        elif info.dtype not in _DENSE_DTYPES:
            problems.append(
                f"{info.file}: tensor {info.name!r} is {info.dtype}; quantizing needs one of {', '.join(_DENSE_DTYPES)}. "
                "Use the unquantized checkpoint."
            )
    _raise(problems)


def check_headers(
    tensors: Mapping[str, TensorInfo],
    layout: Layout,
    modules: Mapping[str, torch.nn.Linear],
    dense: Iterable[str],
    ignored: Iterable[str] = (),
) -> dict[str, dict[str, TensorInfo]]:
    """Check the headers of an NVFP4 checkpoint against the model: names, dtypes and shapes, missing and extra tensors.

    Args:
        tensors: from `read_headers`.
        modules: the model's linears that the configuration says are quantized, by name.
        dense: names of the linears that it says are not.
        ignored: regular expressions for tensors that the model's class does not want (draft layers and the like).

    Returns, for each packed module of the *checkpoint*, its tensors by their last name component.
    """
    ignored = [re.compile(pattern) for pattern in ignored]
    wanted_tensors = {name: info for name, info in tensors.items() if not any(p.search(name) for p in ignored)}
    packed = packed_modules(wanted_tensors, layout)
    problems: list[str] = []
    for name, parts in packed.items():
        problems += _check_module(name, parts, layout)
    for name, parts in packed.items():
        info = parts.get(layout.packed, next(iter(parts.values())))
        if name not in modules and name not in dense:
            problems.append(
                f"{info.file}: tensor {info.name!r} belongs to no linear of the model: config.json is another model's."
            )
        elif name in dense:
            problems.append(
                f"{info.file}: tensor {info.name!r} is packed NVFP4, but the configuration (its ignore list, or modules_to_not_convert) "
                "says that this module is not quantized. It cannot be turned back into the original; remove it from the list."
            )
    file = next(iter(tensors.values())).file if tensors else Path("checkpoint")
    for name, module in modules.items():
        if name not in packed:
            found = tensors.get(f"{name}.weight")
            there = f"; it holds {found.name!r} as {found.dtype}" if found else ""
            problems.append(
                f"{found.file if found else file.parent}: tensor '{name}.{layout.packed}' is missing{there}. Complete the checkpoint, or "
                "put the module on the ignore list of its quantization_config."
            )
            continue
        info = packed[name].get(layout.packed)
        wanted = (module.out_features, module.in_features // 2)
        if info is not None and info.shape != wanted:
            problems.append(f"{info.file}: tensor {info.name!r} has shape {info.shape}, the model needs {wanted}.")
    _raise(problems)
    return packed


def packed_modules(tensors: Mapping[str, TensorInfo], layout: Layout) -> dict[str, dict[str, TensorInfo]]:
    """Modules with at least one NVFP4 tensor -> their tensors by last name component."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = info
    marks = [part for part in layout.tensors if part != "weight"]
    return {name: parts for name, parts in modules.items() if any(mark in parts for mark in marks)}


def _check_module(name: str, parts: Mapping[str, TensorInfo], layout: Layout) -> list[str]:
    problems = []
    file = next(iter(parts.values())).file
    for part in layout.tensors:
        if part not in parts:
            problems.append(
                f"{file}: tensor '{name}.{part}' is missing. The checkpoint is incomplete; download or export it again."
            )
    for part, info in parts.items():
        if part not in (*layout.tensors, "bias", *_IGNORED_SUFFIXES):
            problems.append(
                f"{info.file}: unexpected tensor {info.name!r} beside NVFP4 weights: qerl_trl would ignore it, and it may change what the "
                "weights mean (AWQ pre-scales, zero points). Use a plain NVFP4 checkpoint."
            )
    if problems:
        return problems
    packed, scale, global_scale = (parts[part] for part in layout.tensors)
    for info, dtype in ((packed, "U8"), (scale, "F8_E4M3"), (global_scale, "F32")):
        if info.dtype != dtype:
            problems.append(f"{info.file}: tensor {info.name!r} is {info.dtype}, NVFP4 has {dtype} there.")
    if len(packed.shape) != 2 or (2 * packed.shape[-1]) % BLOCK_SIZE:
        problems.append(
            f"{packed.file}: tensor {packed.name!r} has shape {packed.shape}: two codes a byte, so K = {2 * packed.shape[-1]} is not a "
            f"multiple of {BLOCK_SIZE}."
        )
    elif scale.shape != (packed.shape[0], 2 * packed.shape[1] // BLOCK_SIZE):
        wanted = (packed.shape[0], 2 * packed.shape[1] // BLOCK_SIZE)
        problems.append(f"{scale.file}: tensor {scale.name!r} has shape {scale.shape}, {wanted} belongs to its weight.")
    if math.prod(global_scale.shape) != 1:
        problems.append(
            f"{global_scale.file}: tensor {global_scale.name!r} has shape {global_scale.shape}, it must be one number."
        )
    return problems


# --- values -----------------------------------------------------------------------------------------------------------------------


def check_values(packed: Mapping[str, Mapping[str, TensorInfo]], layout: Layout) -> None:
    """Check every scale of every packed module (from `check_headers`): NaN, zero, negative, reciprocal global scale."""
    problems: list[str] = []
    trusted = {file: written_by_us(file) for file in {parts[layout.packed].file for parts in packed.values()}}
    for parts in packed.values():
        problems += _check_global_scale(parts[layout.global_scale], layout, trusted[parts[layout.packed].file])
        problems += _check_block_scales(parts[layout.block_scale], parts[layout.packed])
    _raise(problems)


def _check_global_scale(info: TensorInfo, layout: Layout, trusted: bool) -> list[str]:
    value = struct.unpack("<f", _read(info, 0, 4))[0]
    label = f"{info.file}: tensor {info.name!r} is {value:g}"
    if not math.isfinite(value) or value <= 0:
        return [f"{label}; a global scale is a positive finite number. Download or export the checkpoint again."]
    divisor = value if layout.divides else 1 / value
    if divisor < 1 and not trusted:
        # 2688 / largest weight: below 1 only for weights above 2688, which no model has; the reciprocal is below 1 for every real one
        convention = "divides (2688 / amax)" if layout.divides else "multiplies (amax / 2688)"
        return [
            f"{label}, but in the {layout.name} layout it {convention}: weights up to {2688 / divisor:.3g} would follow. It looks like the "
            "reciprocal, written with the other layout's convention. Fix the exporter, or invert it."
        ]
    return []


def _check_block_scales(info: TensorInfo, packed: TensorInfo) -> list[str]:
    """One message for each kind of problem, with the number of bad scales and the place of the first."""
    counts = {"NaN": 0, "negative": 0, "zero (the block's weights are not)": 0}
    first: dict[str, int] = {}
    size = info.end - info.start
    for offset in range(0, size, _READ_BYTES):
        scale = torch.frombuffer(bytearray(_read(info, offset, min(_READ_BYTES, size - offset))), dtype=torch.uint8)
        zero = scale == 0
        if bool(zero.any()):
            codes = torch.frombuffer(bytearray(_read(packed, offset * 8, scale.numel() * 8)), dtype=torch.uint8)
            zero &= ((codes.view(-1, 8) & 0x77) != 0).any(-1)
        bad = {"NaN": (scale & 0x7F) == 0x7F, "negative": scale >= 0x80, "zero (the block's weights are not)": zero}
        bad["negative"] &= ~bad["NaN"]
        for kind, mask in bad.items():
            number = int(mask.sum())
            if number and not counts[kind]:
                first[kind] = offset + int(mask.nonzero()[0])
            counts[kind] += number
    columns = info.shape[1]
    return [
        f"{info.file}: tensor {info.name!r} has {number} block scales that are {kind}, the first at row {first[kind] // columns}, block "
        f"{first[kind] % columns}. Download or quantize the checkpoint again."
        for kind, number in counts.items()
        if number
    ]


def _read(info: TensorInfo, offset: int, size: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.start + offset)
        return stream.read(size)


def _raise(problems: list[str]) -> None:
    if problems:
        shown, more = problems[:8], len(problems) - 8
        raise ValueError("\n".join(shown) + (f"\n... and {more} more problems" if more > 0 else ""))


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor of a checked header."""
    return _DTYPES[info.dtype]
