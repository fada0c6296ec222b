"""What leaves a run, always loadable without this package: adapter, merged model, NVFP4 base, NVFP4 merge.

    save_adapter        LoRA as plain PEFT (adapter_model.safetensors, adapter_config.json), tokenizer beside it
    save_merged         dense model in bf16: the policy that was trained, up to one rounding of each weight
    save_base           the frozen NVFP4 base as it is, in compressed-tensors' layout
    save_merged_nvfp4   the merge rounded to 4 bits again. Most small changes do not survive that: it says how much did, and refuses when
                        next to nothing did

The source is a trainer (under DDP: rank 0 writes, everybody waits) or a model from [`load_policy`], which builds the policy of a
checkpoint or adapter folder. Weights are merged, converted and written tensor by tensor; the model itself is not touched.

**Which base?** An adapter learned on the quantized base, and corrects its rounding too. Merged into the dequantized NVFP4 base it is the
policy that was trained; merged into the original bf16 base it is another model, of which nothing was ever sampled. `load_policy(...,
base_format="bf16")` builds that one, `logit_distance` measures how far it is.
"""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from . import checkpoint, formats, nvfp4, report, shards
from .distance import logit_distance, logits_of, prompt_batches
from .fused import FUSED_GROUPS
from .linear import NVFP4Linear, has_nvfp4
from .policy import (
    Source,
    is_hub_id,
    load_any,
    load_policy,
    public_name,
    run_settings,
    source_of,
)
from .quantizer import NVFP4Config
from .shards import Job, TensorSpec

__all__ = [
    "Source",
    "copy_adapter",
    "is_hub_id",
    "load_any",
    "load_policy",
    "logit_distance",
    "logits_of",
    "merged_layer",
    "prompt_batches",
    "public_name",
    "run_settings",
    "save_adapter",
    "save_base",
    "save_merged",
    "save_merged_nvfp4",
    "source_of",
]

#: an NVFP4 merge that keeps less than this share of the adapter's change is refused
MIN_KEPT_FRACTION = 0.25
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


# --- the adapter's change, layer by layer -----------------------------------------------------------------------------------------


@contextmanager
def _dense_base(layer: LoraLinear) -> Iterator[nn.Linear]:
    """Lend a LoRA layer a dense float32 copy of its base layer; afterwards everything is as it was, bit for bit."""
    base = layer.base_layer
    with torch.device("meta"):
        dense = nn.Linear(layer.in_features, layer.out_features, bias=base.bias is not None)
    weight = base.dequantize(torch.float32) if isinstance(base, NVFP4Linear) else base.weight.detach().float().clone()
    dense.weight = nn.Parameter(weight, requires_grad=False)
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


@torch.no_grad()
def merged_layer(layer: LoraLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (N, K) and bias of a LoRA layer with its active adapters merged by PEFT's own code, in float32."""
    if layer.merged:
        raise RuntimeError("The adapter is merged into the model already. Call unmerge_adapter() first, then export.")
    with _dense_base(layer) as dense:
        LoraLinear.merge(layer)
        return dense.weight.data, None if dense.bias is None else dense.bias.data


class _Entry(NamedTuple):
    """A published tensor before conversion: its name, shape, original dtype, and how to get its value."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], torch.Tensor]
    layer: nn.Module | None = None  # the LoRA or NVFP4 layer whose weight this is


@torch.no_grad()
def _entries(source: Source, with_adapter: bool) -> list[_Entry]:
    """Every tensor of the dense model, in the model's order; weights of NVFP4 and LoRA layers are computed when asked for."""
    model = source.inner
    owners: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            if not isinstance(module, (LoraLinear, ModulesToSaveWrapper)):
                raise ValueError(
                    f"{name} carries a {type(module).__name__}, which cannot be merged here: only LoRA on linear layers and whole trained "
                    "modules (modules_to_save) can. Save the adapter instead."
                )
            owners[name] = module
        elif isinstance(module, NVFP4Linear) and name.rpartition(".")[0] not in owners:
            owners[name] = module
    entries: list[_Entry] = []
    seen: set[tuple] = set()
    for key, tensor in model.state_dict().items():
        if tensor.is_meta or tensor.numel() == 0 or hasattr(tensor, "device_mesh") or hasattr(tensor, "ds_id"):
            raise RuntimeError(
                f"{key} is sharded or offloaded, this process does not hold it whole. Save a checkpoint, and export from its folder: "
                "qerl-trl merge <checkpoint> <folder>."
            )
        owner = next((prefix for prefix in _prefixes(key) if prefix in owners), None)
        if owner is None:
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if place not in seen:  # a tied tensor is written once, under its first name
                seen.add(place)
                entries.append(_Entry(key, tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor))
            continue
        entries += _layer_entries(owner, owners[owner], key.removeprefix(f"{owner}."), tensor, with_adapter)
    renamed = _disk_names(model, entries)
    return [entry._replace(name=renamed[entry.name]) for entry in entries]


def _prefixes(key: str) -> Iterator[str]:
    """Dotted prefixes of a tensor's name, the shortest first: an adapter wins over the packed layer inside it."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def _layer_entries(
    name: str, module: nn.Module, rest: str, tensor: torch.Tensor, with_adapter: bool
) -> Iterator[_Entry]:
    if isinstance(module, ModulesToSaveWrapper):
        wanted = f"modules_to_save.{module.active_adapters[0]}." if with_adapter else "original_module."
        if rest.startswith(wanted):
            leaf = rest.removeprefix(wanted)
            yield _Entry(f"{name}.{leaf}", tuple(tensor.shape), tensor.dtype, lambda: tensor)
        return
    rest = rest.removeprefix("base_layer.") if isinstance(module, LoraLinear) else rest
    base = module.get_base_layer() if isinstance(module, LoraLinear) else module
    merge = with_adapter and isinstance(module, LoraLinear) and bool(module.active_adapters)
    dtype = getattr(base, "compute_dtype", tensor.dtype)
    if rest in ("weight", "weight_packed"):

        def weight() -> torch.Tensor:
            if merge:
                return merged_layer(module)[0]
            return base.dequantize(torch.float32) if isinstance(base, NVFP4Linear) else base.weight.detach()

        yield _Entry(f"{name}.weight", (base.out_features, base.in_features), dtype, weight, module)
    elif rest == "bias":
        yield _Entry(f"{name}.bias", tuple(tensor.shape), dtype, lambda: merged_layer(module)[1] if merge else tensor)


def _disk_names(model: PreTrainedModel, entries: Iterable[_Entry]) -> dict[str, str]:
    """In-memory names -> the names that checkpoints of this architecture use."""
    names = {}
    for entry in entries:
        stand_in = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        reverted = revert_weight_conversion(model, {entry.name: stand_in})
        if len(reverted) != 1 or next(iter(reverted.values())).shape != stand_in.shape:
            raise ValueError(
                f"{type(model).__name__} keeps {entry.name} in another form in memory than on disk, which a tensor-by-tensor export cannot "
                "undo. Publish the adapter, or merge with PEFT (merge_and_unload) and save_pretrained, which needs the whole dense model."
            )
        names[entry.name] = next(iter(reverted))
    return names


# --- saving -----------------------------------------------------------------------------------------------------------------------


def save_adapter(
    source: Any,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
    card: Callable[[Path, dict], None] | None = None,
) -> dict[str, Any]:
    """(a) The adapter as plain PEFT, with the tokenizer. `base_model` replaces the name of the base in adapter_config.json.

    `card`: called with the unfinished folder and the export's description, to add a README. Returns the manifest's description of the export.
    """

    def write(policy: Source) -> dict[str, Any]:
        if not isinstance(policy.model, PeftModel):
            raise ValueError(
                "This model has no adapter to save. For a run with base_format='full', save_pretrained it."
            )
        run = {**_describe(policy, "adapter"), "base_model": base_model}
        if shards.is_complete(folder, run):
            return run
        with shards.staging(folder, run, overwrite) as partial:
            policy.model.save_pretrained(partial)
            (partial / "README.md").unlink(missing_ok=True)  # PEFT's empty template
            if base_model is not None:
                config = partial / "adapter_config.json"
                content = {**json.loads(config.read_text()), "base_model_name_or_path": base_model}
                checkpoint.write_json_atomically(config, content)
            _save_tokenizer(partial, policy.tokenizer)
            if card is not None:
                card(partial, run)
        return run

    return _on_rank_zero(source, tokenizer, write)


def save_merged(
    source: Any,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    max_shard_bytes: int = shards.MAX_SHARD_BYTES,
    extra: dict[str, Any] | None = None,
    card: Callable[[Path, dict], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """(b), (c) The dense model: base and adapter merged in float32, each weight rounded once to `dtype`.

    On an NVFP4 base that is the policy that was trained. `extra` is recorded in the manifest (measured distances).
    """

    def write(policy: Source) -> dict[str, Any]:
        kind = "merged"
        trained_on, onto = policy.settings.get("base_format"), policy.settings.get("merged_onto")
        if onto is not None and trained_on is not None and onto != trained_on:
            kind = "merged_other_base"
        run = {**_describe(policy, kind), "dtype": str(dtype).removeprefix("torch."), **(extra or {})}
        if shards.is_complete(folder, run):
            return run
        entries = _entries(policy, with_adapter=True)
        jobs = [_cast_job(entry, dtype) for entry in entries]
        with shards.staging(folder, run, overwrite) as partial:
            shards.write_shards(partial, jobs, formats.WRITTEN_BY, max_shard_bytes, progress=progress)
            _save_config(partial, policy, dtype, None, {job.specs[0].name for job in jobs})
            _save_tokenizer(partial, policy.tokenizer)
            if card is not None:
                card(partial, run)
        return run

    return _on_rank_zero(source, tokenizer, write)


def save_base(
    source: Any,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = shards.MAX_SHARD_BYTES,
    card: Callable[[Path, dict], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """(d) The frozen NVFP4 base, without the adapter, byte for byte as it was trained on, in compressed-tensors' layout."""

    def write(policy: Source) -> dict[str, Any]:
        quantizer = _require_nvfp4(policy)
        run = _describe(policy, "nvfp4_base", with_adapter=False)
        if shards.is_complete(folder, run):
            return run
        jobs, dtypes = [], {torch.bfloat16}
        for entry in _entries(policy, with_adapter=False):
            if _nvfp4_layer(entry) is not None:
                jobs.append(_packed_job(entry))
            else:
                dtypes.add(_lossless_dtype(entry))
                jobs.append(_cast_job(entry, _lossless_dtype(entry)))
        names = {spec.name for job in jobs for spec in job.specs}
        with shards.staging(folder, run, overwrite) as partial:
            shards.write_shards(partial, jobs, dict(formats.WRITTEN_BY), max_shard_bytes, progress=progress)
            dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else quantizer.torch_dtype
            _save_config(partial, policy, dtype, quantizer.to_dict(), names)
            _save_tokenizer(partial, policy.tokenizer)
            if card is not None:
                card(partial, run)
        return run

    return _on_rank_zero(source, tokenizer, write)


def save_merged_nvfp4(
    source: Any,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    scale_rule: str = "rtn",
    force: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = shards.MAX_SHARD_BYTES,
    card: Callable[[Path, dict], None] | None = None,
    progress: Callable[[int], None] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """(e) The merge rounded to NVFP4 again. Returns the description with `kept_fraction`, and says it.

    With D the adapter's change and C the change of the weights that are written, both against the dequantized base:
    `kept_fraction` = <C, D> / <D, D>, `error_ratio` = |C - D| / |D|, over all quantized layers.

    Raises:
        `ValueError`: less than `MIN_KEPT_FRACTION` survived, unless `force`. Nothing is published then.
    """

    def write(policy: Source) -> dict[str, Any]:
        quantizer = _require_nvfp4(policy)
        run = {**_describe(policy, "nvfp4_merged"), "requantized_with": scale_rule, "force": force}
        done = shards.manifest_run(folder)
        if done and shards.is_complete(folder, {**run, "survived": done.get("survived")}):
            return done
        entries = _entries(policy, with_adapter=True)
        packed = [entry for entry in entries if _nvfp4_layer(entry) is not None]
        jobs = [_cast_job(entry, torch.bfloat16) for entry in entries if _nvfp4_layer(entry) is None]
        jobs += [_requantize_job(group, scale_rule) for group in _fused(packed)]
        names = {spec.name for job in jobs for spec in job.specs}
        survived: dict[str, float] = {}
        result = dict(run)  # what is sealed: completed below, once it is known how much survived
        with shards.staging(folder, result, overwrite) as partial:
            notes = shards.write_shards(partial, jobs, dict(formats.WRITTEN_BY), max_shard_bytes, progress=progress)
            survived.update(_survived(notes))
            say(
                f"Re-quantizing kept {survived['kept_fraction']:.3f} of the adapter's change (error {survived['error_ratio']:.2f} of its "
                "size)."
            )
            if survived["kept_fraction"] < MIN_KEPT_FRACTION and not force:
                raise ValueError(
                    f"Only {survived['kept_fraction']:.3f} of the adapter's change survives rounding to 4 bits: this would publish the base "
                    "under another name. Publish the adapter or the bf16 merge, or force it (force=True, --force)."
                )
            result["survived"] = survived
            _save_config(partial, policy, torch.bfloat16, quantizer.to_dict(), names)
            _save_tokenizer(partial, policy.tokenizer)
            if card is not None:
                card(partial, result)
        return result

    return _on_rank_zero(source, tokenizer, write)


def _on_rank_zero(
    source: Any, tokenizer: PreTrainedTokenizerBase | None, write: Callable[[Source], dict[str, Any]]
) -> dict[str, Any]:
    """Run `write` in the main process; the others wait, and fail if it failed."""
    policy = source_of(source, tokenizer)
    if not hasattr(source, "accelerator"):
        return write(policy)
    result: list[dict[str, Any] | None] = [None]
    try:
        if source.accelerator.is_main_process:
            result[0] = write(policy)
    finally:
        broadcast_object_list(result)
    if result[0] is None:
        raise RuntimeError("The export failed in the main process; its error says why.")
    return result[0]


# --- jobs -------------------------------------------------------------------------------------------------------------------------


def _cast_job(entry: _Entry, dtype: torch.dtype) -> Job:
    dtype = dtype if entry.dtype.is_floating_point else entry.dtype
    return Job((TensorSpec(entry.name, dtype, entry.shape),), lambda: [entry.value().to(dtype)])


def _lossless_dtype(entry: _Entry) -> torch.dtype:
    """bfloat16 for a tensor that is only held in float32 (a run with float32 compute loads a bf16 base so), else its own dtype."""
    if entry.dtype != torch.float32:
        return entry.dtype
    value = entry.value()
    return torch.bfloat16 if torch.equal(value.to(torch.bfloat16).to(torch.float32), value) else torch.float32


def _nvfp4_layer(entry: _Entry) -> NVFP4Linear | None:
    layer = entry.layer.get_base_layer() if isinstance(entry.layer, LoraLinear) else entry.layer
    return layer if isinstance(layer, NVFP4Linear) else None


def _packed_job(entry: _Entry) -> Job:
    layer = _nvfp4_layer(entry)
    packed, block_scale, global_scale = layer.nvfp4
    return Job(
        formats.packed_specs(entry.name, *entry.shape),
        lambda: [packed, block_scale.view(torch.float8_e4m3fn), global_scale],
    )


def _fused(entries: list[_Entry]) -> list[list[_Entry]]:
    """Group the entries whose layers vLLM fuses (q/k/v, gate/up): they must share one global scale."""
    groups: dict[tuple[str, int], list[_Entry]] = {}
    for position, entry in enumerate(entries):
        parent, _, child = entry.name.removesuffix(".weight").rpartition(".")
        index = next((i for i, group in enumerate(FUSED_GROUPS) if child in group), None)
        groups.setdefault((parent, index) if index is not None else (entry.name, position), []).append(entry)
    return list(groups.values())


def _requantize_job(group: list[_Entry], scale_rule: str) -> Job:
    note: dict[str, Any] = {}

    def make() -> Iterator[torch.Tensor]:
        amax = torch.stack([entry.value().abs().amax() for entry in group]).amax()  # twice merged rather than all kept
        shared = nvfp4.power_of_two_global_scale(amax)
        note.update(layers=[entry.name for entry in group], kept=0.0, change=0.0, error=0.0)
        for entry in group:
            merged = entry.value()
            packed, block_scale, global_scale = nvfp4.quantize(merged, scale_rule, shared)
            base = _nvfp4_layer(entry).dequantize(torch.float32)
            written = nvfp4.dequantize(packed, block_scale, global_scale, torch.float32).sub_(base)
            wanted = merged.sub_(base)
            note["kept"] += _dot(written, wanted)
            note["change"] += _dot(wanted, wanted)
            note["error"] += _dot(written - wanted, written - wanted)
            yield from (packed, block_scale.view(torch.float8_e4m3fn), global_scale)

    specs = tuple(spec for entry in group for spec in formats.packed_specs(entry.name, *entry.shape))
    return Job(specs, make, note)


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a * b).sum(dtype=torch.float64).item()


def _survived(notes: list[dict[str, Any]]) -> dict[str, float]:
    change = sum(note["change"] for note in notes)
    if change == 0:
        raise ValueError("The adapter changes no quantized weight (is it untrained?): there is nothing to merge.")
    kept, error = sum(note["kept"] for note in notes), sum(note["error"] for note in notes)
    return {"kept_fraction": kept / change, "error_ratio": (error / change) ** 0.5}


# --- everything beside the weights ------------------------------------------------------------------------------------------------


def _require_nvfp4(source: Source) -> NVFP4Config:
    quantizer = getattr(source.inner, "hf_quantizer", None)
    if quantizer is None or not has_nvfp4(source.inner):
        raise ValueError(
            "The base of this model is not NVFP4, so there are no 4-bit weights to save. Quantize a folder instead: qerl-trl quantize "
            "<model> <folder>."
        )
    return quantizer.quantization_config


def _save_config(
    folder: Path, source: Source, dtype: torch.dtype, quantization: dict[str, Any] | None, names: set[str]
) -> None:
    model = source.inner
    config = copy.deepcopy(model.config)
    config.quantization_config = quantization
    if quantization is None:
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    if getattr(config, "tie_word_embeddings", False) and "lm_head.weight" in names:
        config.tie_word_embeddings = False  # the embedding or the head was trained: they differ now
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


_PROBE = "Tom has 12 apples and gives 7 away.\n#### 5 <|im_start|>user\n\\frac{1}{2} = 0.5"


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    # AutoTokenizer chooses a class by the model's type and can silently read custom tokenizers wrong
    again = AutoTokenizer.from_pretrained(folder)
    if again(_PROBE)["input_ids"] != tokenizer(_PROBE)["input_ids"]:
        raise RuntimeError(
            f"The saved tokenizer reads back as {type(again).__name__} and encodes differently from the {type(tokenizer).__name__} in use: "
            "models published with it would see other tokens. Set tokenizer_class in tokenizer_config.json so that AutoTokenizer agrees."
        )


def _describe(source: Source, kind: str, with_adapter: bool = True) -> dict[str, Any]:
    """What is exported from what, without a path of this machine."""
    settings = dict(source.settings)
    if settings.get("model"):
        settings["model"] = public_name(settings["model"])
    described = {"kind": kind, "settings": settings, "exported_with": report.versions()}
    described["weights_sha256"] = _fingerprint(source, with_adapter)
    return described


@torch.no_grad()
def _fingerprint(source: Source, with_adapter: bool) -> str:
    """SHA-256 of what training changed (of a small packed sample for a base)."""
    digest = hashlib.sha256()
    for name, parameter in source.model.named_parameters():
        trained = "lora_" in name or "modules_to_save" in name
        if trained == with_adapter and (with_adapter or name.endswith(("weight_packed", "weight_scale"))):
            data = parameter.detach() if with_adapter else parameter.detach()[:64]
            digest.update(name.encode())
            digest.update(data.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def copy_adapter(
    run: Path, folder: str | os.PathLike, card: Callable[[Path, dict], None] | None = None
) -> dict[str, Any]:
    """(a) The adapter of a run's folder as an export, from its files alone: the base is not loaded."""
    run = Path(run)
    missing = [name for name in ADAPTER_FILES if not (run / name).is_file()]
    if missing:
        raise ValueError(f"{run} has no {' and no '.join(missing)}: it is not the folder of a run with an adapter.")
    settings = run_settings(run)
    if settings.get("model"):
        settings["model"] = public_name(settings["model"])
    described = {
        "kind": "adapter",
        "settings": settings,
        "exported_with": report.versions(),
        "weights_sha256": hashlib.sha256((run / ADAPTER_FILES[0]).read_bytes()).hexdigest(),
    }
    if not shards.is_complete(folder, described):
        with shards.staging(folder, described, overwrite=True) as partial:
            for name in (*ADAPTER_FILES, *_TOKENIZER_FILES):
                if (run / name).is_file():
                    shutil.copyfile(run / name, partial / name)
            if card is not None:
                card(partial, described)
    return described


_TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja vocab.json
    merges.txt tokenizer.model""".split()
