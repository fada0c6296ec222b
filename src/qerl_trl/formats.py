"""What lies on disk: the two NVFP4 checkpoint layouts we read, and the one we write.

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
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .nvfp4 import BLOCK_SIZE
from .shards import TensorSpec

#: written into the safetensors metadata of what we save
WRITTEN_BY = {"quantized_by": "qerl-trl"}


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
