"""Compare a checkpoint's safetensors files with the model.

safetensors itself refuses damaged files. [`read_headers`] lists the tensors; [`check_dense_headers`] and
[`check_headers`] compare names, dtypes and shapes with the model before loading, [`check_scales`] and [`check_finite`]
check values.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..support.files import leads_to
from ..support.names import is_part
from .architectures import DECODER
from .checkpoints import Layout
from .format import BLOCK_SIZE

#: safetensors' dtype names -> torch dtypes
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
#: scales of activations and of the KV cache, unused by a W4A16 reader
IGNORED_SUFFIXES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")
#: a smaller divisor implies weights above 170,000, far from any real model
_SMALLEST_DIVISOR = 1 / 64
_PIECE_BYTES = 1 << 22


class TensorInfo(NamedTuple):
    """One tensor of a safetensors file: name, file and position, safetensors' dtype name, and shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self).itemsize

    def pieces(self, size: int) -> Iterator[torch.Tensor]:
        """Yield slices of about `size` bytes along the first dimension, mapped from the file."""
        with safe_open(self.file, framework="pt") as stored:
            if not self.nbytes or not self.shape:
                yield stored.get_tensor(self.name)
                return
            rows = max(1, size * self.shape[0] // self.nbytes)
            for start in range(0, self.shape[0], rows):
                yield stored.get_slice(self.name)[start : start + rows]


def read_headers(files: Iterable[str | Path]) -> dict[str, TensorInfo]:
    """Read tensor name -> `TensorInfo` from the headers of safetensors files. Raises `ValueError` for damaged files."""
    tensors: dict[str, TensorInfo] = {}
    for file in map(Path, files):
        if file.suffix != ".safetensors":
            raise ValueError(
                f"{file}: pickled weights can run code when they are opened. Convert the checkpoint to safetensors "
                "(load it with plain transformers, and call save_pretrained)."
            )
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    part = stored.get_slice(name)
                    tensors[name] = TensorInfo(name, file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size if file.is_file() else 0
            raise ValueError(
                f"{file} ({size} bytes) is not a whole safetensors file: {error}. It is cut off or damaged; download "
                "it again."
            ) from error
    return tensors


# --- names, dtypes, shapes --------------------------------------------------------------------------------------------


def check_dense_headers(tensors: Mapping[str, TensorInfo], modules: Iterable[str]) -> None:
    """Raise `ValueError` if a module to quantize is packed on disk: transformers drops a ModelOpt configuration."""
    for name in modules:
        if packed := tensors.get(f"{name}.weight_packed") or tensors.get(f"{name}.weight_scale"):
            raise ValueError(
                f"{packed.file}: {name!r} is quantized already, and NVFP4Config is for unquantized weights. Load it "
                "with **qerl_trl.pretrained_kwargs(model); config.json needs its quantization_config."
            )


def check_headers(
    tensors: Mapping[str, TensorInfo],
    layout: Layout,
    modules: Mapping[str, torch.nn.Linear],
    dense: Iterable[str],
    ignored: Iterable[str] = (),
    fp8: Mapping[str, torch.nn.Linear] | None = None,
) -> dict[str, dict[str, TensorInfo]]:
    """Check the headers of an NVFP4 checkpoint against the model: names, dtypes and shapes, missing and extra tensors.

    Args:
        tensors: from `read_headers`.
        modules: the model's NVFP4 linears according to the configuration, by name.
        dense: names of its dense linears.
        ignored: regular expressions for tensors that the model's class ignores (draft layers and the like).
        fp8: the model's FP8 linears according to the configuration, by name.

    Returns, for each NVFP4 or FP8 module of the *checkpoint*, its tensors by their last name component.
    """
    patterns, fp8 = [re.compile(pattern) for pattern in ignored], fp8 or {}
    wanted_tensors = {name: info for name, info in tensors.items() if not any(p.search(name) for p in patterns)}
    parts = by_module(wanted_tensors)
    problems: list[str] = []
    for name in packed_modules(wanted_tensors, layout):
        file = next(iter(parts[name].values())).file
        if name in DECODER.heads:
            problems.append(
                f"{file}: the output head {name!r} is NVFP4; log-probabilities need it dense. Take a checkpoint that "
                "leaves it dense, or start from the unquantized model."
            )
        elif name in modules or name in fp8:
            continue
        elif name in dense:
            problems.append(
                f"{file}: {name!r} is packed NVFP4, but the configuration (its ignore list, or "
                "modules_to_not_convert) says that this module is not quantized. Remove it from the list."
            )
        else:
            problems.append(f"{file}: {name!r} belongs to no linear of the model: config.json is another model's.")
    for name in dense:
        weight = parts.get(name, {}).get("weight")
        if weight is not None and weight.dtype == "F8_E4M3" and name not in fp8:
            problems.append(
                f"{weight.file}: {weight.name!r} is FP8, but the configuration says that this "
                "module is not quantized. Name it in the configuration."
            )
    for name, linear in {**modules, **fp8}.items():
        rows, columns = linear.out_features, linear.in_features
        if name in fp8:
            wanted = {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", ())}
        else:
            shapes = (rows, columns // 2), (rows, columns // BLOCK_SIZE), ()
            wanted = dict(zip(layout.tensors, zip(("U8", "F8_E4M3", "F32"), shapes, strict=True), strict=True))
        problems += _check_parts(name, parts.get(name, {}), wanted)
    if problems:
        more = f"\n... and {len(problems) - 8} more problems" if len(problems) > 8 else ""
        raise ValueError("\n".join(problems[:8]) + more)
    return {name: parts[name] for name in (*modules, *fp8)}


def by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Group tensors: module -> its tensors by last name component."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = info
    return modules


def packed_modules(tensors: Mapping[str, TensorInfo], layout: Layout) -> list[str]:
    """Return the modules with at least one tensor that only NVFP4 layers of this layout have."""
    marks = {part for part in (layout.packed, layout.global_scale) if part != "weight"}
    return [name for name, parts in by_module(tensors).items() if marks & parts.keys()]


def _check_parts(
    name: str, parts: Mapping[str, TensorInfo], wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[str]:
    """List the problems of a quantized layer. `wanted`: dtype and shape by last name component; `()`: one number."""
    problems = []
    file = next((info.file for info in parts.values()), "checkpoint")
    there = ", ".join(f"{info.name!r} as {info.dtype}" for info in parts.values()) or "nothing of this layer"
    for part, (dtype, shape) in wanted.items():
        info = parts.get(part)
        if info is None:
            problems.append(
                f"{file}: tensor '{name}.{part}' is missing; it holds {there}. Download or export the checkpoint "
                "again, or put the module on the ignore list of its quantization_config."
            )
        elif info.dtype != dtype or (info.shape != shape if shape else math.prod(info.shape) != 1):
            problems.append(
                f"{info.file}: tensor {info.name!r} is {info.dtype} {info.shape}; {dtype} {shape or 'of one number'} "
                "belongs there. Download or export the checkpoint again."
            )
    for part, info in parts.items():
        if part not in (*wanted, "bias", *IGNORED_SUFFIXES):
            problems.append(
                f"{info.file}: unexpected tensor {info.name!r} beside quantized weights may change what the weights "
                "mean (AWQ pre-scales, zero points). Use a plain NVFP4 checkpoint."
            )
    return problems


# --- values -----------------------------------------------------------------------------------------------------------


def check_scales(name: str, block_scale: torch.Tensor, global_scale: torch.Tensor, layout: Layout, where: str) -> None:
    """Raise `ValueError` for NaN block scales, or an invalid or reciprocal global scale, of a packed layer."""
    check_finite(f"{name}.{layout.block_scale}", block_scale, where)
    value = global_scale.item()
    positive = math.isfinite(value) and value > 0
    if not positive or (value if layout.divides else 1 / value) < _SMALLEST_DIVISOR:
        what = "looks like the reciprocal of a global scale" if positive else "is no positive finite number"
        formula = "divides (2688 / amax)" if layout.divides else "multiplies (amax / 2688)"
        raise ValueError(
            f"{where}: tensor '{name}.{layout.global_scale}' is {value:g}, which {what}: in the {layout.name} layout "
            f"it {formula}. Download or export the checkpoint again, or fix its exporter."
        )


def require_finite(file: Path) -> None:
    """Raise `ValueError` if a safetensors file has NaN or infinity. Reads the whole file, in pieces."""
    for info in read_headers([file]).values():
        if torch_dtype(info).is_floating_point:
            for piece in info.pieces(_PIECE_BYTES):
                check_finite(info.name, piece, str(file))


def check_finite_module(module: torch.nn.Module, where: Callable[[str], str] | None = None) -> None:
    """Raise `ValueError` if a parameter of a model is not finite. `where`: a tensor's name -> its file.

    Tensors not whole in this process (sharded, offloaded) are skipped.
    """
    for name, tensor in module.named_parameters():
        if not (tensor.is_meta or is_part(tensor)):
            check_finite(name, tensor.detach(), where(name) if where else type(module).__name__)


def check_finite(name: str, tensor: torch.Tensor, where: str) -> None:
    """Raise `ValueError` if a value of a tensor is not finite. `where`: its file, for the message."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # one pass at memory speed, without a copy if the dtype has the operators
    if tensor.dtype == torch.float8_e4m3fn:  # has NaN but no infinity
        finite = int(tensor.view(torch.uint8).bitwise_and(0x7F).max()) < 0x7F
    else:
        low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)  # NaN if any is
        finite = math.isfinite(low.item()) and math.isfinite(high.item())
    if not finite:
        number = int((~torch.isfinite(tensor.float())).sum())
        raise ValueError(
            f"{where}: tensor {name!r} has {number} of {tensor.numel()} values that are NaN or infinite: nothing can "
            "be computed with it. Download, export or train it again."
        )


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """Return a tensor's dtype in torch."""
    return DTYPES[info.dtype]


# --- the files of a folder --------------------------------------------------------------------------------------------

INDEX_NAME = "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """Read the tensors of the checkpoint in `folder`, by name, from the index and the files' headers."""
    files = weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}" if missing else "has no *.safetensors file"
        raise ValueError(f"{folder} {what}. Download it again, or convert it to safetensors (save_pretrained).")
    return read_headers(files)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads: a single one, those in the index, or all."""
    index, whole = folder / INDEX_NAME, folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def check_inside(folder: str | Path, files: Iterable[str | Path]) -> None:
    """Raise `ValueError` for files outside of `folder`, symbolic links followed."""
    for file in files:
        if (place := leads_to(file, folder)) is not None:
            raise ValueError(
                f"{file} leads out of {folder}, to {place}: an index or a symbolic link in a checkpoint must not name "
                "other files of this machine. Name the folder that holds the files themselves, or copy them here."
            )
