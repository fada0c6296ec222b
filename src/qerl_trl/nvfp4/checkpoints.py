"""What lies on disk: the two NVFP4 checkpoint layouts we read, and the one we write.

    layout               compressed-tensors                        ModelOpt
                         (`nvfp4-pack-quantized`, llm-compressor)  (NVIDIA TensorRT Model Optimizer)
    codes                X.weight_packed        U8 (N, K/2)        X.weight          U8 (N, K/2)
    block scales         X.weight_scale         F8_E4M3 (N, K/16)  X.weight_scale    F8_E4M3 (N, K/16)
    global scale         X.weight_global_scale  F32 (1,), divides  X.weight_scale_2  F32 (), multiplies
    activation scales    X.input_global_scale   ignored            X.input_scale     ignored

Codes and block scales are the same bytes in both, and in ours. Only the global scale changes: ModelOpt's is the
reciprocal.

**Weight-only reading of W4A4 checkpoints.** ModelOpt's "NVFP4" and compressed-tensors' "NVFP4" preset also quantize
activations at run time. Their weights are ordinary NVFP4 weights, so they are read, and the activation (and KV cache)
scales are ignored. Refused is what *cannot* be read that way: configurations that quantize activations only, weights
that make sense only after the activations were transformed (rotations, AWQ pre-scales, SVDQuant), sparse weights, and
mixed precision but for ModelOpt's of NVFP4 and FP8 layers: there the NVFP4 layers stay packed and the FP8 layers are
read as dense ones (`format.dequantize_fp8`).

This file is the only reader of quantization configurations (`parse_quantization_config`) and the only judge of which
layer is quantized (`Selection.is_quantized`): the trainer's quantizer, the offline quantizer and the engine
(`rollout/vllm/quantization.py`) call it, on the names that the layers have in transformers.
"""

import dataclasses
import fnmatch
import logging
import math
import re
from collections.abc import Iterable, Mapping
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
#: written into the safetensors metadata of what we save
WRITTEN_BY = {"quantized_by": "qerl-trl"}


class TensorSpec(NamedTuple):
    """A tensor that will be written: name, dtype, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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


# --- which layer is quantized -----------------------------------------------------------------------------------------


def name_matches(name: str, entry: str) -> bool:
    """Whether a module name is meant by an entry of `modules_to_not_convert` (or of a checkpoint's ignore list).

    "lm_head", "down_proj", "model.layers.1"   whole dotted components, anywhere: the last hits model.layers.1.mlp and
                                               not model.layers.11.mlp
    "*.mlp.down_proj", "model.layers.[0-3].*"  shell pattern, over the whole name
    "re:.*layers\\.(0|1)\\..*"                   regular expression, matched from the start, as in compressed-tensors
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if any(character in entry for character in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."


def matches_any(name: str, entries: Iterable[str]) -> bool:
    return any(name_matches(name, entry) for entry in entries)


def pattern_of(names: Iterable[str]) -> str:
    """One regular expression for the whole name of every module that `names` mean, as in `name_matches`."""
    return rf"(?:.*\.)?(?:{'|'.join(map(re.escape, names))})(?:\..*)?"


def check_entries(entries: Any, where: str) -> tuple[str, ...]:
    """The entries of a list of names, as a tuple. Raises `ValueError` for what `name_matches` cannot compare."""
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise ValueError(f"{where}={entries!r} must be a list of names, e.g. ['down_proj'].")
    entries = tuple(entries)
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ValueError(
                f"{where}: {entry!r} is not the name of a module. Give names, shell patterns, or 're:' patterns."
            )
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise ValueError(f"{where}: {entry!r} is not a regular expression: {error}. Correct it.") from error
    return entries


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which linear layers of a model are NVFP4: those that `targets` means, but for those that `ignore` means.

    Args:
        layout: how their weights lie on disk, a key of `LAYOUTS`; None: dense, they are quantized while they are
            loaded.
        ignore: entries as in `name_matches`.
        targets: compressed-tensors' notation: the class name "Linear", or entries as in `name_matches`.
        fp8: entries as in `name_matches`, of layers that lie there as FP8 (`format.dequantize_fp8`) and are dense here.
    """

    layout: str | None = None
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    fp8: tuple[str, ...] = ()

    def is_fp8(self, name: str) -> bool:
        """Whether the linear layer `name` lies there as FP8."""
        return bool(self.fp8) and matches_any(name, self.fp8) and not matches_any(name, self.ignore)

    def without(self, entries: Iterable[str]) -> "Selection":
        """The same, with more entries on the ignore list."""
        return dataclasses.replace(self, ignore=(*self.ignore, *entries))

    def is_quantized(self, name: str, columns: int) -> bool:
        """Whether the linear layer `name` with `columns` input features is NVFP4. Output heads never are, nor, where we
        choose, are rows that do not divide into blocks.
        """
        if name in DECODER.heads or matches_any(name, self.ignore) or self.is_fp8(name):
            return False
        if not any(target == "Linear" or name_matches(name, target) for target in self.targets):
            return False
        if columns % BLOCK_SIZE and self.layout is not None:
            raise ValueError(
                f"{name}: in_features={columns} is not a multiple of {BLOCK_SIZE}, the NVFP4 block, so the checkpoint "
                "cannot hold it packed. If it is dense there, its quantization config should ignore it: "
                f"NVFP4Config(modules_to_not_convert=[{name!r}]), or the engine's option ignore."
            )
        return columns % BLOCK_SIZE == 0


def linears_to_quantize(
    model: "PreTrainedModel", selection: Selection
) -> tuple[dict[str, nn.Linear], dict[str, nn.Linear]]:
    """(linear layers that become NVFP4, linear layers that stay dense) of a transformers model, by name.

    Besides what `selection` leaves out, dense stay the output head, linears whose weight is tied, what the model's
    class keeps in float32, subclasses of `nn.Linear`, and, where the checkpoint is dense, what
    `architectures.dense_by_default` names and widths that are no multiple of the block (with a warning).
    """
    quantized, dense = divided(model, selection)
    if not quantized:
        raise ValueError(
            f"no nn.Linear of {type(model).__name__} is left to quantize "
            f"(modules_to_not_convert={list(selection.ignore)}). Load it without NVFP4Config, or skip less."
        )
    _refuse_experts(model, selection)
    return quantized, dense


def divided(model: "PreTrainedModel", selection: Selection) -> tuple[dict[str, nn.Linear], dict[str, nn.Linear]]:
    """As `linears_to_quantize`, of any model: also of one that cannot be quantized."""
    head = model.get_output_embeddings()
    kept = [name for name, module in model.named_modules() if head is not None and module is head]
    kept += [name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair]
    chosen = selection.without([*kept, *(model._keep_in_fp32_modules or ())])
    if selection.layout is None:
        text = model.config.get_text_config(decoder=True)
        chosen = chosen.without(dense_by_default(text.model_type))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plain = {name: module for name, module in linears.items() if type(module) is nn.Linear}
    quantized = {name: module for name, module in plain.items() if chosen.is_quantized(name, module.in_features)}
    odd = [
        f"{name} ({module.in_features} columns)"
        for name, module in plain.items()
        if module.in_features % BLOCK_SIZE and name not in DECODER.heads and not matches_any(name, chosen.ignore)
    ]
    if odd:
        logger.warning(
            "%d linear layers stay dense, because their width is no multiple of %d, the NVFP4 block: %s.",
            len(odd),
            BLOCK_SIZE,
            ", ".join(odd[:3]) + (", ..." if len(odd) > 3 else ""),
        )
    return quantized, {name: module for name, module in linears.items() if name not in quantized}


_EXPERTS_DENSE = (
    "NVFP4Config(modules_to_not_convert=['experts']). Then they keep their memory, rollouts need use_vllm=False, and "
    "most of these models can be published as an adapter only: merging them and saving their base are refused (the "
    "page 'Which models work' says for which)."
)


def expert_tensors(model: nn.Module) -> list[str]:
    """Names of the parameters in which a model has the weights of all experts of a layer."""
    return [name for name, parameter in model.named_parameters() if parameter.ndim == 3 and "expert" in name]


def _refuse_experts(model: nn.Module, selection: Selection) -> None:
    experts = [name for name in expert_tensors(model) if not matches_any(name, selection.ignore)]
    if not experts:
        return
    what = f"{len(experts)} mixture-of-experts tensors, e.g. {experts[0]!r}, hold most of {type(model).__name__}'s weights "
    what += "and "
    if selection.layout is None:
        raise ValueError(
            f"{what}cannot be quantized by qerl_trl yet: transformers stores them as 3-D parameters, not as linears. "
            f"To leave them dense, name them: {_EXPERTS_DENSE}"
        )
    raise ValueError(
        f"{what}are packed in this checkpoint, which qerl_trl does not read yet: it reads packed linears. Start from "
        f"the unquantized model, with its experts left dense: {_EXPERTS_DENSE}"
    )


# --- configurations ---------------------------------------------------------------------------------------------------


def parse_quantization_config(config: Mapping[str, Any], where: str) -> Selection:
    """Read the `quantization_config` of a checkpoint (or ModelOpt's hf_quant_config.json). `where` names it in errors.

    Raises `ValueError` for everything that is not plain NVFP4 weights: other methods and formats, mixed precision,
    transformed, sparse or activation-only quantization.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _parse_compressed_tensors(config, where)
    if method == "modelopt" or "quant_algo" in config or "quantization" in config:
        return _parse_modelopt(config, where)
    raise _unread(
        where,
        f"quant_method={method!r} is not an NVFP4 checkpoint (compressed-tensors 'nvfp4-pack-quantized' or ModelOpt "
        "'NVFP4')",
    )


def _unread(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}. Start from the unquantized model; it is quantized while loading.")


def _parse_compressed_tensors(config: Mapping[str, Any], where: str) -> Selection:
    groups = _mapping(config.get("config_groups"), f"{where}: config_groups")
    if not groups:
        raise _unread(where, "no config_groups: nothing says how the weights are stored")
    for name, plain in (("quantization_status", (None, "compressed")), ("transform_config", (None, {}))):
        if config.get(name) not in plain:
            raise _unread(where, f"{name}={config[name]!r}: the weights are not packed, or are rotated")
    if _mapping(config.get("sparsity_config"), f"{where}: sparsity_config").get("format") not in (None, "dense"):
        raise _unread(where, f"sparsity_config={config['sparsity_config']!r}: the weights are stored sparse")
    targets: list[str] = []
    for name, group in groups.items():
        group, weights = _group(name, group, where)
        layout = group.get("format") or config.get("format")
        found = tuple(weights.get(key) for key in ("num_bits", "type", "group_size", "strategy"))
        wanted = (4, "float", BLOCK_SIZE, "tensor_group")
        if layout != "nvfp4-pack-quantized" or found != wanted or not weights.get("symmetric", True):
            what = "mixed precision is not supported" if len(groups) > 1 else "this is not NVFP4"
            raise _unread(
                where,
                f"config group {name!r} has format={layout!r} and (num_bits, type, group_size, strategy)={found}, "
                f"symmetric={weights.get('symmetric', True)}; {what}: every group has to be 'nvfp4-pack-quantized' "
                f"with {wanted}",
            )
        targets += check_entries(group.get("targets") or ["Linear"], f"{where}: config group {name!r}: targets")
    ignore = check_entries(config.get("ignore") or (), f"{where}: ignore")
    return Selection("compressed-tensors", ignore, tuple(targets))


def _group(name: str, group: Any, where: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(a config group, its weights)."""
    group = _mapping(group, f"{where}: config group {name!r}")
    weights = _mapping(group.get("weights"), f"{where}: config group {name!r}: weights")
    if not weights and group.get("input_activations"):
        raise _unread(where, f"config group {name!r} quantizes activations only: there are no NVFP4 weights to read")
    _tell_of_activations(group, where)
    return group, weights


def _parse_modelopt(config: Mapping[str, Any], where: str) -> Selection:
    inner = _mapping(config.get("quantization", config), f"{where}: quantization")
    algorithm = inner.get("quant_algo")
    ignore = check_entries(inner.get("exclude_modules") or inner.get("ignore") or (), f"{where}: ignore")
    if algorithm == "MIXED_PRECISION":
        return _parse_modelopt_mixed(inner, ignore, where)
    if algorithm not in _MODELOPT_NVFP4:
        raise _unread(
            where,
            f"ModelOpt quant_algo={algorithm!r} is not plain NVFP4 weights; qerl_trl reads 'NVFP4', 'W4A16_NVFP4', "
            "and 'MIXED_PRECISION' of these and 'FP8'",
        )
    if inner.get("group_size") not in (None, BLOCK_SIZE):
        raise _unread(where, f"group_size={inner['group_size']}; NVFP4 blocks have {BLOCK_SIZE} weights")
    targets: list[str] = []
    for name, group in _mapping(inner.get("config_groups"), f"{where}: config_groups").items():
        group, weights = _group(name, group, where)
        if weights.get("num_bits", 4) != 4 or weights.get("group_size", BLOCK_SIZE) != BLOCK_SIZE:
            raise _unread(where, f"config group {name!r} has weights={weights}: mixed precision is not supported")
        targets += check_entries(group.get("targets") or ["Linear"], f"{where}: config group {name!r}: targets")
    return Selection("modelopt", ignore, tuple(targets or ["Linear"]))


def packed_head(name: str, kind: str) -> str:
    """What is said of an output head `name` that lies there as `kind`."""
    return (
        f"the output head {name!r} is {kind}; qerl_trl reads dense heads only, because log-probabilities are computed "
        "from their weight. Take a checkpoint that leaves it dense, or start from the unquantized model."
    )


#: ModelOpt's names of what is read as it is
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def _parse_modelopt_mixed(inner: Mapping[str, Any], ignore: tuple[str, ...], where: str) -> Selection:
    """ModelOpt's AutoQuantize: `quantized_layers` has each layer's algorithm; other layers are dense."""
    layers = _mapping(inner.get("quantized_layers"), f"{where}: quantized_layers")
    names: dict[str, list[str]] = {"NVFP4": [], "FP8": []}
    for name, layer in layers.items():
        layer = _mapping(layer, f"{where}: quantized_layers: {name!r}")
        algorithm = str(layer.get("quant_algo")).upper()
        packed = algorithm in _MODELOPT_NVFP4 and layer.get("group_size", BLOCK_SIZE) == BLOCK_SIZE
        if not packed and algorithm != "FP8":
            raise _unread(where, f"mixed precision with {name!r} as {dict(layer)}; qerl_trl reads NVFP4 and FP8 layers")
        names["NVFP4" if packed else "FP8"].append(name)
        if name in DECODER.heads:
            raise ValueError(f"{where}: {packed_head(name, algorithm)}")
    if not names["NVFP4"]:
        raise _unread(where, f"mixed precision, and none of its {len(layers)} quantized_layers is NVFP4")
    targets, fp8 = (check_entries(names[kind], f"{where}: quantized_layers") for kind in ("NVFP4", "FP8"))
    if fp8:
        logger.warning(
            "%s: %d layers are FP8 and are read as dense ones, exactly, in two bytes per weight.", where, len(fp8)
        )
    return Selection("modelopt", ignore, targets, fp8)


def _tell_of_activations(group: Mapping[str, Any], where: str) -> None:
    if group.get("input_activations"):
        logger.warning(
            "%s also describes 4-bit activations (W4A4). Only its weights are read (W4A16); serve the result as "
            "W4A16 too, or take a weight-only checkpoint.",
            where,
        )


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    """`value` if it is an object of JSON, an empty one for null."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r}, not an object. The configuration is damaged; download it again.")
    return value


def compressed_tensors_config(ignore: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` that we save: compressed-tensors NVFP4A16 on every Linear but `ignore`."""
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
    """The tensors of a packed matrix (N, K), named as in compressed-tensors; `name` ends in ".weight"."""
    return (
        TensorSpec(f"{name}_packed", torch.uint8, (rows, columns // 2)),
        TensorSpec(f"{name}_scale", torch.float8_e4m3fn, (rows, columns // BLOCK_SIZE)),
        TensorSpec(f"{name}_global_scale", torch.float32, (1,)),
    )
