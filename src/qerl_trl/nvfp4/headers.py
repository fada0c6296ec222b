"""What the safetensors files of a checkpoint hold, and the checks before a byte of it is trusted.

`read_headers` reads the safetensors headers (what safetensors' own parser refuses is refused), `check_headers` compares them with the model (names, dtypes, shapes, file sizes), and
`check_values` reads all scales, in pieces, with plain file reads: nothing is mapped or kept. Every problem is a `ValueError` naming file
and tensor. A block scale of zero is accepted only where all 16 codes are zero too: there it loses nothing.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .architectures import DECODER
from .format import BLOCK_SIZE
from .layouts import WRITTEN_BY, Layout, packed_head

_READ_BYTES = 1 << 22
#: safetensors' names of dtypes; it has a few more, which torch has not
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_DENSE_DTYPES = ("BF16", "F16", "F32")
#: scales of activations and of the KV cache: a W4A16 reader needs none of them
IGNORED_SUFFIXES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")


class TensorInfo(NamedTuple):
    """One tensor of a safetensors file: where it is and what it claims to be. `start`, `end`: bytes from the file's beginning."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


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
    metadata = _header_json(Path(file))[0].get("__metadata__") or {}
    return metadata.get("quantized_by") == WRITTEN_BY["quantized_by"]


def _header_json(file: Path) -> tuple[dict[str, Any], int]:
    """(the JSON header, where the data begins)."""
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file}: pickled weights can run code when they are opened and cannot be checked first. Convert the checkpoint to "
            "safetensors (load it once with plain transformers and save_pretrained it)."
        )
    try:
        with safe_open(file, framework="numpy"):
            pass  # opening checks it: sizes, JSON, dtypes, and that the tensors fill the file without gap or overlap
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.is_file() else 0
        raise ValueError(
            f"{file} ({size} bytes) is not a whole safetensors file: {error}. It is cut off or damaged; download it again."
        ) from error
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        return json.loads(stream.read(length)), 8 + length


def _read_header(file: Path) -> Iterator[TensorInfo]:
    header, data_start = _header_json(file)
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + end)


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
        elif f"{name}.weight_scale" in tensors:  # ModelOpt's; transformers knows no such method and asks us to quantize
            _raise(
                [
                    f"{info.file}: {name!r} and others are quantized already ({info.dtype}, with weight_scale), and NVFP4Config is for "
                    "unquantized weights. Read them as they are: from_pretrained(model, **qerl_trl.pretrained_kwargs(model))."
                ]
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
    other: Iterable[str] = (),
) -> dict[str, dict[str, TensorInfo]]:
    """Check the headers of an NVFP4 checkpoint against the model: names, dtypes and shapes, missing and extra tensors.

    Args:
        tensors: from `read_headers`.
        modules: the model's linears that the configuration says are quantized, by name.
        dense: names of the linears that it says are not.
        ignored: regular expressions for tensors that the model's class does not want (draft layers and the like).
        other: modules that are stored in another format, and checked elsewhere.

    Returns, for each packed module of the *checkpoint*, its tensors by their last name component.
    """
    patterns = [re.compile(pattern) for pattern in ignored]
    wanted_tensors = {name: info for name, info in tensors.items() if not any(p.search(name) for p in patterns)}
    elsewhere = set(other)
    packed = {name: parts for name, parts in packed_modules(wanted_tensors, layout).items() if name not in elsewhere}
    problems: list[str] = []
    for name, parts in packed.items():
        problems += _check_module(name, parts, layout)
    for name, parts in packed.items():
        info = parts.get(layout.packed, next(iter(parts.values())))
        if name not in modules and name not in dense:
            problems.append(
                f"{info.file}: tensor {info.name!r} belongs to no linear of the model: config.json is another model's."
            )
        elif name in DECODER.heads:
            problems.append(f"{info.file}: tensor {info.name!r}: {packed_head(name, 'NVFP4')}")
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
        stored = packed[name].get(layout.packed)
        wanted = (module.out_features, module.in_features // 2)
        if stored is not None and stored.shape != wanted:
            problems.append(
                f"{stored.file}: tensor {stored.name!r} has shape {stored.shape}, the model needs {wanted}."
            )
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
        if part not in (*layout.tensors, "bias", *IGNORED_SUFFIXES):
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
    value = read_number(info)
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


def require_finite(file: Path) -> None:
    """Refuse a safetensors file with a floating tensor that is not finite throughout. Reads all of it, in pieces."""
    for info in read_headers([file]).values():
        dtype = torch_dtype(info)
        if not dtype.is_floating_point:
            continue
        size = info.end - info.start
        for offset in range(0, size, _READ_BYTES):
            piece = torch.frombuffer(bytearray(_read(info, offset, min(_READ_BYTES, size - offset))), dtype=dtype)
            check_finite(info.name, piece, str(file))


def check_finite_module(module: torch.nn.Module, where: Callable[[str], str] | None = None) -> None:
    """Refuse a model with a floating parameter that is not finite throughout. `where`: a tensor's name -> what holds it.

    What this process does not have whole (sharded, offloaded) is left out.
    """
    for name, tensor in module.named_parameters():
        if not (tensor.is_meta or hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")):
            check_finite(name, tensor.detach(), where(name) if where else type(module).__name__)


def check_finite(name: str, tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor with a value that is no finite number. `where` it lies goes into the message."""
    if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
        number = int((~torch.isfinite(tensor.float())).sum())
        raise ValueError(
            f"{where}: tensor {name!r} has {number} of {tensor.numel()} values that are NaN or infinite: nothing can be computed with it. "
            "Download, export or train it again."
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """In one pass, at the speed of memory and without a copy where a dtype has the operators for it."""
    if tensor.dtype == torch.float8_e4m3fn:  # has NaN and no infinity
        return int(tensor.view(torch.uint8).bitwise_and(0x7F).max()) < 0x7F
    extremes = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)  # NaN, where there is one
    return all(math.isfinite(value.item()) for value in extremes)


def read_number(info: TensorInfo) -> float:
    """The first number of a float32 tensor."""
    return struct.unpack("<f", _read(info, 0, 4))[0]


def _read(info: TensorInfo, offset: int, size: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.start + offset)
        return stream.read(size)


def _raise(problems: list[str]) -> None:
    if problems:
        shown, more = problems[:8], len(problems) - 8
        raise ValueError("\n".join(shown) + (f"\n... and {more} more problems" if more > 0 else ""))


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor of a checked header.

    Raises:
        `ValueError`: torch has none.
    """
    if info.dtype not in DTYPES:
        raise ValueError(
            f"{info.file}: tensor {info.name!r} is {info.dtype}, which torch cannot read. Convert the checkpoint to bfloat16."
        )
    return DTYPES[info.dtype]
