"""Two NVFP4 checkpoint layouts for reading, the first of them for writing.

    layout               compressed-tensors                        ModelOpt
                         (`nvfp4-pack-quantized`, llm-compressor)  (NVIDIA TensorRT Model Optimizer)
    codes                X.weight_packed        U8 (N, K/2)        X.weight          U8 (N, K/2)
    block scales         X.weight_scale         F8_E4M3 (N, K/16)  X.weight_scale    F8_E4M3 (N, K/16)
    global scale         X.weight_global_scale  F32 (1,), divides  X.weight_scale_2  F32 (), multiplies
    activation scales    X.input_global_scale   ignored            X.input_scale     ignored

Codes and block scales are the same bytes in both, and in memory. Only the global scale changes: ModelOpt's is the
reciprocal.

**Weight-only reading of W4A4 checkpoints.** ModelOpt's "NVFP4" and compressed-tensors' "NVFP4" preset also quantize
activations at run time. Their weights are ordinary NVFP4 weights, read without the activation (and KV cache) scales.
Refused are quantized activations without quantized weights, weights for transformed activations (rotations, AWQ
pre-scales, SVDQuant), and mixed precision, except NVFP4 with FP8 layers by ModelOpt: the NVFP4 layers stay packed, and
the FP8 layers become dense (`format.dequantize_fp8`).

Only this file reads quantization configurations (`parse_quantization_config`) and decides which layers are quantized
(`Selection.is_quantized`), by their names in transformers: for the trainer's quantizer, the offline quantizer and the
engine (`rollout/vllm/quantization.py`).
"""

import dataclasses
import fnmatch
import logging
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .architectures import DECODER, dense_by_default
from .format import BLOCK_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

#: our quantization method: in transformers (in memory only, never on disk) and in vLLM
METHOD = "qerl_nvfp4"
#: added to the safetensors metadata of saved files
WRITTEN_BY = {"quantized_by": "qerl-trl"}


class TensorSpec(NamedTuple):
    """A tensor to write: name, dtype, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of one checkpoint layout. `divides`: the stored global scale divides, as in memory, or multiplies."""

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


# --- choice of layers -------------------------------------------------------------------------------------------------


def name_matches(name: str, entry: str) -> bool:
    """True if an entry of `modules_to_not_convert` (or of a checkpoint's ignore list) matches a module name.

    "lm_head", "down_proj", "model.layers.1"   whole dotted components, anywhere: the last hits model.layers.1.mlp and
                                               not model.layers.11.mlp
    "*.mlp.down_proj", "model.layers.[0-3].*"  shell pattern, over the whole name
    "re:.*layers\\.(0|1)\\..*"                   regular expression, matched from the start, as in compressed-tensors
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if {"*", "?", "["} & {*entry}:
        return fnmatch.fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."


def matches_any(name: str, entries: Iterable[str]) -> bool:
    return any(map(partial(name_matches, name), entries))


def pattern_of(names: Iterable[str]) -> str:
    """Return one regular expression that matches what any entry of `names` matches, as in `name_matches`."""
    return rf"(?:.*\.)?(?:{'|'.join(map(re.escape, names))})(?:\..*)?"


def check_entries(entries: Iterable[str], where: str) -> tuple[str, ...]:
    """Return a list of names as a tuple. Raises `ValueError` for a string, which is a sequence of letters."""
    if isinstance(entries, str):
        raise ValueError(f"{where}={entries!r} must be a list of names. Pass [{entries!r}].")
    return tuple(entries)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The NVFP4 layers of a model: the linear layers matched by `targets` and not by `ignore`.

    Args:
        layout: layout of the weights on disk, a key of `LAYOUTS`; None: dense, quantized while loading.
        ignore: entries as in `name_matches`.
        targets: compressed-tensors' notation: the class name "Linear", or entries as in `name_matches`.
        fp8: entries as in `name_matches`, for layers in FP8 on disk (`format.dequantize_fp8`), dense in memory.
    """

    layout: str | None = None
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    fp8: tuple[str, ...] = ()

    def is_fp8(self, name: str) -> bool:
        """True if the linear layer `name` is FP8 on disk."""
        return bool(self.fp8) and matches_any(name, self.fp8) and not matches_any(name, self.ignore)

    def without(self, entries: Iterable[str]) -> "Selection":
        """Return a copy with more entries on the ignore list."""
        return dataclasses.replace(self, ignore=(*self.ignore, *entries))

    def is_quantized(self, name: str, columns: int) -> bool:
        """True if the linear layer `name` with `columns` input features is NVFP4. Never true for output heads, nor for
        `columns` that are no multiple of the block size.
        """
        if name in DECODER.heads or matches_any(name, self.ignore) or self.is_fp8(name):
            return False
        targeted = "Linear" in self.targets or matches_any(name, self.targets)
        return targeted and columns % BLOCK_SIZE == 0


def linears_to_quantize(
    model: "PreTrainedModel", selection: Selection
) -> tuple[dict[str, nn.Linear], dict[str, nn.Linear]]:
    """Return (linear layers to quantize to NVFP4, dense linear layers) of a transformers model, by name.

    Dense, besides the exclusions of `selection`: the output head, linears with a tied weight, layers kept in float32 by
    the model's class, subclasses of `nn.Linear`, widths that are no multiple of the block, and, in a dense checkpoint,
    `architectures.dense_by_default`.

    Raises:
        `ValueError`: no layer is left to quantize, or the model has experts that are not excluded by name.
    """
    quantized, dense = divided(model, selection)
    if not quantized:
        raise ValueError(
            f"no nn.Linear of {type(model).__name__} is left to quantize "
            f"(modules_to_not_convert={list(selection.ignore)}). Load it without NVFP4Config, or skip less."
        )
    experts = [name for name in expert_tensors(model) if not matches_any(name, selection.ignore)]
    if experts:
        raise ValueError(
            f"{type(model).__name__} has experts (e.g. {experts[0]!r}), which qerl_trl neither quantizes nor reads "
            "packed. Start from the unquantized model, with NVFP4Config(modules_to_not_convert=['experts']) and "
            "use_vllm=False."
        )
    return quantized, dense


def divided(model: "PreTrainedModel", selection: Selection) -> tuple[dict[str, nn.Linear], dict[str, nn.Linear]]:
    """Do as `linears_to_quantize`, for any model and without raising."""
    head = model.get_output_embeddings()
    kept = [name for name, module in model.named_modules() if head is not None and module is head]
    kept += [name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair]
    chosen = selection.without([*kept, *(model._keep_in_fp32_modules or ())])
    if selection.layout is None:
        text = model.config.get_text_config(decoder=True)
        chosen = chosen.without(dense_by_default(text.model_type))
    quantized: dict[str, nn.Linear] = {}
    dense: dict[str, nn.Linear] = {}
    odd: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            plain = type(module) is nn.Linear and chosen.is_quantized(name, module.in_features)
            (quantized if plain else dense)[name] = module
            if module.in_features % BLOCK_SIZE and chosen.is_quantized(name, BLOCK_SIZE):
                odd.append(name)
    if odd:
        logger.info(
            "%d linear layers stay dense: their width is no multiple of %d (%s ...)", len(odd), BLOCK_SIZE, odd[0]
        )
    return quantized, dense


def expert_tensors(model: nn.Module) -> list[str]:
    """Return the names of parameters that have the weights of all experts of a layer."""
    return [name for name, parameter in model.named_parameters() if parameter.ndim == 3 and "expert" in name]


# --- configurations ---------------------------------------------------------------------------------------------------


#: ModelOpt's names of plain NVFP4 weights
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_START_DENSE = "Start from the unquantized model; it is quantized while loading."


def parse_quantization_config(config: Mapping[str, Any], where: str) -> Selection:
    """Read the `quantization_config` of a checkpoint (or ModelOpt's hf_quant_config.json). `where` names it in errors.

    Raises `ValueError` for anything but plain NVFP4 weights: other methods and formats, mixed precision, transformed or
    activation-only quantization.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _parse_compressed_tensors(config, where)
    if method == "modelopt" or "quant_algo" in config or "quantization" in config:
        return _parse_modelopt(config.get("quantization", config), where)
    raise ValueError(
        f"{where}: quant_method={method!r} is not an NVFP4 checkpoint (compressed-tensors 'nvfp4-pack-quantized' or "
        f"ModelOpt 'NVFP4'). {_START_DENSE}"
    )


def _parse_compressed_tensors(config: Mapping[str, Any], where: str) -> Selection:
    groups, transform = config.get("config_groups") or {}, config.get("transform_config")
    wanted = {"num_bits": 4, "type": "float", "group_size": BLOCK_SIZE, "strategy": "tensor_group", "symmetric": True}
    targets: list[str] = []
    for name, group in groups.items():
        weights = {"symmetric": True} | (group.get("weights") or {})
        found, form = {key: weights.get(key) for key in wanted}, group.get("format") or config.get("format")
        if form != "nvfp4-pack-quantized" or found != wanted or transform:
            raise ValueError(
                f"{where}: config group {name!r} has format={form!r} and {found}, transform_config={transform}. "
                f"qerl_trl reads 'nvfp4-pack-quantized' with {wanted} in all groups, untransformed. {_START_DENSE}"
            )
        targets += group.get("targets") or ["Linear"]
    _tell_of_activations(groups, where)
    return Selection(
        "compressed-tensors", check_entries(config.get("ignore") or (), f"{where}: ignore"), tuple(targets)
    )


def _parse_modelopt(config: Mapping[str, Any], where: str) -> Selection:
    """Read ModelOpt's configuration, AutoQuantize included: `quantized_layers` names algorithms, the rest is dense."""
    mixed = config.get("quant_algo") == "MIXED_PRECISION"
    layers = (config.get("quantized_layers") or {}) if mixed else {"Linear": config}
    fp8 = tuple(name for name, layer in layers.items() if mixed and layer.get("quant_algo") == "FP8")
    groups = {} if mixed else config.get("config_groups") or {}
    parts = layers | {name: {"quant_algo": "NVFP4", **(group.get("weights") or {})} for name, group in groups.items()}
    for name, part in parts.items():
        algorithm, bits, size = part.get("quant_algo"), part.get("num_bits", 4), part.get("group_size") or BLOCK_SIZE
        plain = name in fp8 or (algorithm in _MODELOPT_NVFP4 and bits == 4 and size == BLOCK_SIZE)
        if not plain or name in DECODER.heads:
            raise ValueError(
                f"{where}: {name!r} has quant_algo={algorithm!r} (num_bits={bits}, group_size={size}). qerl_trl reads "
                f"'NVFP4', 'W4A16_NVFP4' and 'MIXED_PRECISION' of these and 'FP8', with a dense head. {_START_DENSE}"
            )
    _tell_of_activations(groups, where)
    named = [target for group in groups.values() for target in group.get("targets") or ["Linear"]]
    ignore = check_entries(config.get("exclude_modules") or config.get("ignore") or (), f"{where}: ignore")
    return Selection("modelopt", ignore, tuple(named or (name for name in layers if name not in fp8)), fp8)


def _tell_of_activations(groups: Mapping[str, Mapping[str, Any]], where: str) -> None:
    if any(group.get("input_activations") for group in groups.values()):
        logger.warning(
            "%s also describes 4-bit activations (W4A4). Only its weights are read (W4A16); serve the result as "
            "W4A16 too, or take a weight-only checkpoint.",
            where,
        )


def compressed_tensors_config(ignore: Iterable[str]) -> dict[str, Any]:
    """Make the `quantization_config` to save: compressed-tensors NVFP4A16 on every Linear except `ignore`."""
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
    """List the tensors of a packed matrix (N, K), named as in compressed-tensors; `name` ends in ".weight"."""
    return (
        TensorSpec(f"{name}_packed", torch.uint8, (rows, columns // 2)),
        TensorSpec(f"{name}_scale", torch.float8_e4m3fn, (rows, columns // BLOCK_SIZE)),
        TensorSpec(f"{name}_global_scale", torch.float32, (1,)),
    )
