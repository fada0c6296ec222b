"""Turn a policy into the dense model to publish, tensor by tensor: names as on disk, weights merged or rounded.

[`entries_of`] lists the tensors; an entry is computed by its `value()`, and the model itself is not modified.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoint import fingerprint
from ..checkpoint.records import RequantizedNote, Survived
from ..checkpoint.settings import RunSettings
from ..nvfp4.architectures import DECODER
from ..nvfp4.checkpoints import TensorSpec, packed_specs
from ..nvfp4.format import dequantize, largest_magnitude, power_of_two_global_scale, quantize
from ..nvfp4.linear import NVFP4Linear
from ..support.names import is_sharded
from .load import TrainedPolicy
from .write import Job


def _base_layer(layer: nn.Module) -> NVFP4Linear | nn.Linear:
    return cast("NVFP4Linear | nn.Linear", layer.get_base_layer() if isinstance(layer, LoraLinear) else layer)


def dense_weight(layer: nn.Module) -> torch.Tensor:
    """Return a float32 copy of a layer's base weight, without its adapter."""
    base = _base_layer(layer)
    return base.dequantize(torch.float32) if isinstance(base, NVFP4Linear) else base.weight.detach().float().clone()


@contextmanager
def _dense_base(layer: LoraLinear) -> Iterator[nn.Linear]:
    """Lend a LoRA layer a dense float32 copy of its base layer; restored bit for bit afterwards."""
    base = _base_layer(layer)
    with torch.device("meta"):
        dense = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
    dense.weight = nn.Parameter(dense_weight(layer), requires_grad=False)
    if base.bias is not None:
        dense.bias = nn.Parameter(base.bias.detach().float().clone(), requires_grad=False)
    merged, caches = list(layer.merged_adapters), dict(layer._caches)
    layer.base_layer = dense
    try:
        yield dense
    finally:
        layer.base_layer = base
        layer.merged_adapters[:] = merged
        layer._caches = caches


def check_base(policy: TrainedPolicy) -> None:
    """Refuse a base changed since the run began: its changes would be merged twice."""
    adapted = isinstance(policy.model, PeftModel)
    fingerprint.check_base(policy.model, recorded_base(policy.settings) if adapted else None)


def recorded_base(settings: RunSettings) -> str | None:
    """Return the recorded fingerprint of the run's base, if the policy uses the base in the run's format."""
    same_form = settings.get("merged_onto") in (None, settings.get("base_format"))
    return settings.get("base_sha256") if same_form else None


@torch.no_grad()
def merged_layer(layer: LoraLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight (N, K) and bias of a LoRA layer, its active adapters merged by PEFT's own code in float32."""
    with _dense_base(layer) as dense:
        LoraLinear.merge(layer)
        return dense.weight.data, None if dense.bias is None else dense.bias.data


class Entry(NamedTuple):
    """A tensor to publish, before conversion: name, shape, original dtype, and a function for its value."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], torch.Tensor]
    layer: nn.Module | None = None  # the LoRA or NVFP4 layer with this weight


@torch.no_grad()
def entries_of(policy: TrainedPolicy, with_adapter: bool) -> list[Entry]:
    """List every tensor of the dense model, in the model's order; NVFP4 and LoRA weights are computed on demand."""
    model = policy.transformers_model
    owners: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            if isinstance(module, TrainableTokensLayer) and name.rpartition(".")[0] in owners:
                continue
            if not isinstance(module, (LoraLinear, ModulesToSaveWrapper, TrainableTokensWrapper)):
                raise ValueError(
                    f"{name} carries a {type(module).__name__}, which cannot be merged here: only LoRA on linear "
                    "layers, trained tokens and whole trained modules (modules_to_save) can. Save the adapter "
                    "instead."
                )
            owners[name] = module
        elif isinstance(module, NVFP4Linear) and name.rpartition(".")[0] not in owners:
            owners[name] = module
    state = model.state_dict()
    if is_sharded(model) or any(tensor.is_meta for tensor in state.values()):
        raise RuntimeError(
            "The model is sharded or offloaded, so this process has only a part. Save a checkpoint, and export "
            "from its folder: qerl-trl merge <checkpoint> <folder>."
        )
    entries: list[Entry] = []
    seen: set[tuple] = set()
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    for key, tensor in state.items():
        parts = key.split(".")  # shortest prefix: an adapter wins over the packed layer inside it
        owner = next((p for n in range(1, len(parts)) if (p := ".".join(parts[:n])) in owners), None)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        # a base has the original of a module in modules_to_save, possibly tied
        if owner is None or (isinstance(owners[owner], ModulesToSaveWrapper) and not with_adapter):
            if place in seen:  # a tied tensor is written once, under its first name
                # a trained copy tied by PEFT (ensure_weight_tying) is not part of a base
                if ".modules_to_save." not in key and key.replace(".original_module.", ".") not in tied:
                    raise ValueError(
                        f"{key} is in the same memory as another tensor, and transformers does not tie it again when "
                        "it loads: it would be missing. Give it memory of its own (clone it), or publish the adapter."
                    )
                continue
            seen.add(place)
        if owner is None:
            entries.append(Entry(key, tuple(tensor.shape), tensor.dtype, tensor.detach))
            continue
        entries += _layer_entries(owner, owners[owner], key.removeprefix(f"{owner}."), tensor, with_adapter)
    renamed = _disk_names(model, entries)
    return [entry._replace(name=renamed[entry.name]) for entry in entries]


def _layer_entries(
    name: str, module: nn.Module, rest: str, tensor: torch.Tensor, with_adapter: bool
) -> Iterator[Entry]:
    if isinstance(module, ModulesToSaveWrapper):
        wanted = f"modules_to_save.{module.active_adapters[0]}." if with_adapter else "original_module."
        if rest.startswith(wanted):
            leaf = rest.removeprefix(wanted)
            yield Entry(f"{name}.{leaf}", tuple(tensor.shape), tensor.dtype, tensor.detach)
        return
    if isinstance(module, TrainableTokensWrapper):
        rows = module.token_adapter
        if rest == "token_adapter.base_layer.weight" and rows.tied_adapter is None:  # a tied head is the embedding
            value = partial(rows.get_merged_weights, module.active_adapters if with_adapter else [])
            yield Entry(f"{name}.weight", tuple(tensor.shape), tensor.dtype, value)
        return
    lora = module if isinstance(module, LoraLinear) else None
    rest = rest.removeprefix("base_layer.") if lora is not None else rest
    base = _base_layer(module)
    merge = with_adapter and lora is not None and bool(lora.active_adapters)
    dtype = base.compute_dtype if isinstance(base, NVFP4Linear) else tensor.dtype
    if rest in ("weight", "weight_packed"):

        def weight() -> torch.Tensor:
            if merge and lora is not None:
                return merged_layer(lora)[0]
            return base.dequantize(torch.float32) if isinstance(base, NVFP4Linear) else base.weight.detach()

        yield Entry(f"{name}.weight", (base.out_features, base.in_features), dtype, weight, module)
    elif rest == "bias":

        def bias() -> torch.Tensor:
            merged = merged_layer(lora)[1] if merge and lora is not None else None
            return tensor if merged is None else merged

        yield Entry(f"{name}.bias", tuple(tensor.shape), dtype, bias)


def _disk_names(model: PreTrainedModel, entries: Iterable[Entry]) -> dict[str, str]:
    """Map in-memory names to this architecture's checkpoint names."""
    names = {}
    for entry in entries:
        stand_in = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        reverted = revert_weight_conversion(model, {entry.name: stand_in})
        if len(reverted) != 1 or next(iter(reverted.values())).shape != stand_in.shape:
            raise ValueError(
                f"{type(model).__name__} has {entry.name} in another form in memory than on disk, so it cannot be "
                "exported tensor by tensor. Publish the adapter, or use PEFT's merge_and_unload and save_pretrained."
            )
        names[entry.name] = next(iter(reverted))
    return names


def nvfp4_layer(entry: Entry) -> NVFP4Linear | None:
    """Return the packed layer with this weight, under an adapter or not; `None` for a dense tensor."""
    layer = None if entry.layer is None else _base_layer(entry.layer)
    return layer if isinstance(layer, NVFP4Linear) else None


# --- one job per tensor -----------------------------------------------------------------------------------------------


def cast_job(entry: Entry, dtype: torch.dtype) -> Job:
    dtype = dtype if entry.dtype.is_floating_point else entry.dtype
    return Job((TensorSpec(entry.name, dtype, entry.shape),), lambda: [entry.value().to(dtype)])


def merged_job(entry: Entry, dtype: torch.dtype) -> Job:
    """[`cast_job`], with a note of the share of the adapter's change kept by rounding to `dtype`."""
    job = cast_job(entry, dtype)
    if not isinstance(entry.layer, LoraLinear) or dtype == torch.float32:
        return job
    note: RequantizedNote = {"layers": [entry.name]}

    def make() -> list[torch.Tensor]:
        merged = entry.value()
        written = merged.to(dtype)
        _compare(note, written.float(), merged, dense_weight(cast(nn.Module, entry.layer)))
        return [written]

    return job._replace(make=make, note=note)


def lossless_dtype(entry: Entry) -> torch.dtype:
    """Return bfloat16 for a bf16 tensor loaded in float32 by a float32 run, else its own dtype."""
    if entry.dtype != torch.float32:
        return entry.dtype
    value = entry.value()
    return torch.bfloat16 if torch.equal(value.to(torch.bfloat16).to(torch.float32), value) else torch.float32


def packed_job(entry: Entry) -> Job:
    packed, block_scale, global_scale = cast(NVFP4Linear, nvfp4_layer(entry)).nvfp4
    return Job(
        packed_specs(entry.name, *entry.shape), lambda: [packed, block_scale.view(torch.float8_e4m3fn), global_scale]
    )


def fused_entries(entries: list[Entry]) -> list[list[Entry]]:
    """Group the entries of layers fused by vLLM (q/k/v, gate/up): they must share one global scale."""
    groups: dict[tuple[str, int], list[Entry]] = {}
    for position, entry in enumerate(entries):
        parent, _, child = entry.name.removesuffix(".weight").rpartition(".")
        index = next((i for i, group in enumerate(DECODER.groups) if child in group), None)
        groups.setdefault((parent, index) if index is not None else (entry.name, position), []).append(entry)
    return list(groups.values())


def requantize_job(group: list[Entry], scale_rule: str) -> Job:
    """Round the merged weights of a fused group to NVFP4, with one global scale, and note the surviving change."""
    note: RequantizedNote = {}

    def make() -> Iterator[torch.Tensor]:
        amax = torch.stack([largest_magnitude(entry.value()) for entry in group]).amax()  # merging twice saves memory
        shared = power_of_two_global_scale(amax)
        note["layers"] = [entry.name for entry in group]
        for entry in group:
            merged = entry.value()
            packed, block_scale, global_scale = quantize(merged, scale_rule, shared)
            written = dequantize(packed, block_scale, global_scale, torch.float32)
            _compare(note, written, merged, dense_weight(cast(nn.Module, entry.layer)))
            yield from (packed, block_scale.view(torch.float8_e4m3fn), global_scale)

    specs = tuple(spec for entry in group for spec in packed_specs(entry.name, *entry.shape))
    return Job(specs, make, note)


def _compare(note: RequantizedNote, written: torch.Tensor, merged: torch.Tensor, base: torch.Tensor) -> None:
    """Add a layer to the sums of `note`. Works in place: all three are copies."""
    written, wanted = written.sub_(base), merged.sub_(base)
    note["kept"] = note.get("kept", 0.0) + _dot(written, wanted)
    note["change"] = note.get("change", 0.0) + _dot(wanted, wanted)
    written.sub_(wanted)
    note["error"] = note.get("error", 0.0) + _dot(written, written)


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a * b).sum(dtype=torch.float64).item()


def survived_of(notes: list[RequantizedNote]) -> Survived:
    change = sum(note["change"] for note in notes)
    if change == 0:  # an untrained adapter: refused, as if nothing survived
        return {"kept_fraction": 0.0, "error_ratio": 0.0}
    kept, error = sum(note["kept"] for note in notes), sum(note["error"] for note in notes)
    return {"kept_fraction": kept / change, "error_ratio": (error / change) ** 0.5}
