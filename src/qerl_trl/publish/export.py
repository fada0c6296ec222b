"""Exports of a run, loadable without this package: adapter, merged model, NVFP4 base, NVFP4 merge.

    save_adapter        LoRA as plain PEFT (adapter_model.safetensors, adapter_config.json), with the tokenizer
    save_merged         dense model in bf16: the trained policy, up to one rounding of each weight
    save_base           the frozen NVFP4 base, unchanged, in compressed-tensors' layout
    save_merged_nvfp4   the merge rounded to 4 bits again: refused if next to nothing of the change survives

The source is a live trainer (rank 0 writes, the others wait) or a policy built by [`load.load_policy`] from a
checkpoint or adapter folder. The model itself is not modified. For a model sharded by FSDP 2, the adapter
is gathered; rank 0 loads the base again on the CPU and compares it with the trained one.

**Which base?** An adapter learned on the quantized base corrects its rounding too. Merged into the dequantized NVFP4
base it is the trained policy; merged into the original bf16 base it is another model. `load_policy(...,
base_format="bf16")` builds the latter, and `distance.logit_distance` measures the difference.
"""

import copy
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..checkpoint import fingerprint, seal
from ..checkpoint import settings as identity
from ..checkpoint.fingerprint import is_trained
from ..checkpoint.records import Export, Kind, Measured, RequantizedNote, public_name, versions
from ..checkpoint.settings import RunSettings
from ..nvfp4 import checkpoints
from ..nvfp4.config import NVFP4Config
from ..nvfp4.headers import require_finite
from ..nvfp4.linear import has_nvfp4
from ..rollout.sampling import save_generation_config
from ..support.names import full_tensor, is_sharded, reshard
from . import load, merge
from . import write as writer
from .write import Job

logger = logging.getLogger(__name__)

#: function that adds a README to an unfinished export
WriteCard = Callable[[Path, Export], None]
#: least share of the adapter's change kept by an NVFP4 merge
MIN_KEPT_FRACTION = 0.25
ADAPTER_FILES = (load.ADAPTER_FILE, "adapter_config.json")


def save_adapter(
    exported: load.Exportable,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
    card: WriteCard | None = None,
) -> Export:
    """Save the adapter as plain PEFT with the tokenizer, naming `base_model`. Returns the manifest's record."""

    def write(policy: load.TrainedPolicy) -> Export:
        if not isinstance(policy.model, PeftModel):
            raise ValueError(
                "This model has no adapter to save. After a run with base_format='full', export the folder that "
                "save_model() wrote."
            )
        export = _describe(policy, "adapter", folder)
        export["base_model"] = base_model
        with _staged(folder, export, overwrite, policy.tokenizer, card) as partial:
            policy.model.save_pretrained(str(partial), state_dict=policy.gathered)
            require_finite(partial / load.ADAPTER_FILE)
            save_generation_config(partial, policy.transformers_model, policy.tokenizer)
            (partial / "README.md").unlink(missing_ok=True)  # PEFT's empty template
            _name_base(partial, policy.settings, base_model)
        return export

    return _on_rank_zero(exported, tokenizer, write, adapter_only=True)


def copy_adapter(run: Path, folder: str | os.PathLike, card: WriteCard | None = None) -> Export:
    """Export the adapter in a run's folder from its files alone, without loading the base."""
    load.require_adapter(run)
    load.require_whole(run)
    export = _record("adapter", load.recorded_settings(run))
    with _staged(folder, export, True, None, card) as partial:
        ends = (file.name for file in run.glob("generation_config.json"))
        for name in (*ADAPTER_FILES, *ends, *seal.tokenizer_files(run)):
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(run / name, partial / name)
        _name_base(partial, load.recorded_settings(run), None)
    return export


def _name_base(folder: Path, settings: RunSettings, base_model: str | None) -> None:
    """Name `base_model` in adapter_config.json, or the run's own base at its loaded revision."""
    config = folder / "adapter_config.json"
    content = json.loads(config.read_text())
    before = content.copy()
    if base_model is not None and base_model != content.get("base_model_name_or_path"):
        content["base_model_name_or_path"], content["revision"] = base_model, None
    if (commit := load.recorded_revision(settings, content.get("base_model_name_or_path") or "")) is not None:
        content["revision"] = commit
    if content != before:
        seal.write_json_atomically(config, content)


def save_merged(
    exported: load.Exportable,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    overwrite: bool = False,
    max_shard_bytes: int = writer.MAX_SHARD_BYTES,
    measured: Measured | None = None,
    card: WriteCard | None = None,
    progress: Callable[[int], None] | None = None,
) -> Export:
    """Save the dense model: base and adapter merged in float32, each weight rounded once to `dtype`.

    `measured`: its distance to the trained policy, for the record and the card. The returned record has `survived`, as
    in [`save_merged_nvfp4`].
    """
    written_as = getattr(torch, dtype) if isinstance(dtype, str) else dtype

    def write(policy: load.TrainedPolicy) -> Export:
        kind: Kind = "merged"
        trained_on, onto = policy.settings.get("base_format"), policy.settings.get("merged_onto")
        if onto is not None and trained_on is not None and onto != trained_on:
            kind = "merged_other_base"
        export = _describe(policy, kind, folder)
        export["dtype"] = str(written_as).removeprefix("torch.")
        if measured is not None:
            export["measured"] = measured
        jobs = [merge.merged_job(entry, written_as) for entry in merge.entries_of(policy, with_adapter=True)]
        with _staged(folder, export, overwrite, policy.tokenizer, card) as partial:
            notes = writer.write_shards(partial, jobs, checkpoints.WRITTEN_BY, max_shard_bytes, progress=progress)
            if changed := [note for note in cast(list[RequantizedNote], notes) if note["change"]]:
                export["survived"] = merge.survived_of(changed)
            _save_config(partial, policy, written_as, None, jobs)
        return export

    return _on_rank_zero(exported, tokenizer, write)


def save_base(
    exported: load.Exportable,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = writer.MAX_SHARD_BYTES,
    card: WriteCard | None = None,
    progress: Callable[[int], None] | None = None,
) -> Export:
    """Save the frozen NVFP4 base without the adapter, byte for byte as trained on, in compressed-tensors' layout."""

    def write(policy: load.TrainedPolicy) -> Export:
        quantizer = _require_nvfp4(policy)
        export = _describe(policy, "nvfp4_base", folder)
        jobs, dtypes = [], {torch.bfloat16}
        for entry in merge.entries_of(policy, with_adapter=False):
            if merge.nvfp4_layer(entry) is not None:
                jobs.append(merge.packed_job(entry))
            else:
                dtypes.add(merge.lossless_dtype(entry))
                jobs.append(merge.cast_job(entry, merge.lossless_dtype(entry)))
        with _staged(folder, export, overwrite, policy.tokenizer, card) as partial:
            writer.write_shards(partial, jobs, checkpoints.WRITTEN_BY, max_shard_bytes, progress=progress)
            dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else quantizer.torch_dtype
            _save_config(partial, policy, dtype, quantizer.to_dict(), jobs)
        return export

    return _on_rank_zero(exported, tokenizer, write)


def save_merged_nvfp4(
    exported: load.Exportable,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    scale_rule: str = "rtn",
    force: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = writer.MAX_SHARD_BYTES,
    card: WriteCard | None = None,
    progress: Callable[[int], None] | None = None,
    notify: Callable[[str], None] = print,
) -> Export:
    """Save the merge rounded to NVFP4 again. `notify` and the record get the surviving part of the change.

    With D the adapter's change and C the change of the written weights, both against the dequantized base:
    `kept_fraction` = <C, D> / <D, D>, `error_ratio` = |C - D| / |D|, over all quantized layers.

    Raises:
        `ValueError`: less than `MIN_KEPT_FRACTION` survived, unless `force`. Nothing is published then.
    """

    def write(policy: load.TrainedPolicy) -> Export:
        quantizer = _require_nvfp4(policy)
        export = _describe(policy, "nvfp4_merged", folder)
        export["requantized_with"] = scale_rule
        entries = merge.entries_of(policy, with_adapter=True)
        packed = [entry for entry in entries if merge.nvfp4_layer(entry) is not None]
        jobs = [merge.cast_job(entry, torch.bfloat16) for entry in entries if merge.nvfp4_layer(entry) is None]
        jobs += [merge.requantize_job(group, scale_rule) for group in merge.fused_entries(packed)]
        # the sealed record is completed below, with the surviving part
        with _staged(folder, export, overwrite, policy.tokenizer, card) as partial:
            notes = writer.write_shards(partial, jobs, checkpoints.WRITTEN_BY, max_shard_bytes, progress=progress)
            survived = merge.survived_of(cast(list[RequantizedNote], notes))
            kept, error = survived["kept_fraction"], survived["error_ratio"]
            notify(f"Re-quantizing kept {kept:.3f} of the adapter's change (error {error:.2f} of its size).")
            if kept < MIN_KEPT_FRACTION and not force:
                raise ValueError(
                    f"Only {kept:.3f} of the adapter's change survives rounding to 4 bits: this would publish the "
                    "base under another name. Publish the adapter or the bf16 merge, or force it (force=True, "
                    "--force)."
                )
            export["survived"] = survived
            _save_config(partial, policy, torch.bfloat16, quantizer.to_dict(), jobs)
        return export

    return _on_rank_zero(exported, tokenizer, write)


def _on_rank_zero(
    exported: load.Exportable,
    tokenizer: PreTrainedTokenizerBase | None,
    write: Callable[[load.TrainedPolicy], Export],
    adapter_only: bool = False,
) -> Export:
    """Run `write` in the main process; the others wait, and fail if it failed."""
    policy = load.trained_policy_of(exported, tokenizer)
    if not load.is_trainer(exported):
        return write(policy)
    sharded = is_sharded(policy.model)
    if sharded:
        reshard(policy.model)
        trained = ((name, p) for name, p in policy.model.named_parameters() if is_trained(name))
        policy = policy._replace(gathered={name: full_tensor(p).cpu() for name, p in trained})  # collective
    written: list[Any] = [None]
    try:
        if exported.accelerator.is_main_process:
            with _loaded_again(policy) if sharded and not adapter_only else nullcontext(policy) as whole:
                written = [write(whole)]
    finally:
        broadcast_object_list(written)
    assert written[0] is not None, "rank 0 could not write this export; see its error"
    return written[0]


@contextmanager
def _loaded_again(policy: load.TrainedPolicy) -> Iterator[load.TrainedPolicy]:
    """Rebuild a sharded policy on this process's CPU: load its base again, compare it, and add the adapter."""
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder, "adapter")
        save_adapter(policy, adapter)
        yield load.load_policy(adapter)._replace(tokenizer=policy.tokenizer)


@contextmanager
def _staged(
    folder: str | os.PathLike,
    export: Export,
    overwrite: bool,
    tokenizer: PreTrainedTokenizerBase | None,
    card: WriteCard | None,
) -> Iterator[Path]:
    """Yield an unfinished folder to fill; then add tokenizer and card, and seal it as `folder`."""
    with writer.staging(folder, export, overwrite) as partial:
        yield partial
        _save_tokenizer(partial, tokenizer)
        if card is not None:
            card(partial, export)


#: test text: the saved tokenizer must give the same tokens
_TEXT = "Tom has 12 apples and gives 7 away.\n#### 5 <|im_start|>user\n\\frac{1}{2} = 0.5"


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    # AutoTokenizer chooses a class by the model's type and can silently read custom tokenizers wrong
    own = "auto_map" in tokenizer.init_kwargs
    again = (type(tokenizer) if own else AutoTokenizer).from_pretrained(folder)
    if again(_TEXT)["input_ids"] != tokenizer(_TEXT)["input_ids"]:
        raise RuntimeError(
            f"The saved tokenizer reads back as {type(again).__name__} and encodes differently from the "
            f"{type(tokenizer).__name__} in use. Set tokenizer_class in tokenizer_config.json so that AutoTokenizer "
            "agrees."
        )


def _require_nvfp4(policy: load.TrainedPolicy) -> NVFP4Config:
    if not has_nvfp4(policy.transformers_model):
        raise ValueError(
            "The base of this model is not NVFP4, so there are no 4-bit weights to save. Use qerl-trl quantize "
            "<model> <folder>."
        )
    return cast(Any, policy.transformers_model).hf_quantizer.quantization_config


def _save_config(
    folder: Path, policy: load.TrainedPolicy, dtype: torch.dtype, quantization: dict[str, Any] | None, jobs: list[Job]
) -> None:
    model = policy.transformers_model
    names = {spec.name for job in jobs for spec in job.specs}
    config = copy.deepcopy(model.config)
    config.quantization_config = quantization
    if quantization is None:
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    writer.leave_code_out(config)
    if "lm_head.weight" in names and getattr(config, "tie_word_embeddings", False):  # trained, so untied
        config.tie_word_embeddings = False
    config.save_pretrained(folder)
    save_generation_config(folder, model, policy.tokenizer)


def _describe(policy: load.TrainedPolicy, kind: Kind, folder: str | os.PathLike) -> Export:
    """Make an export's record: with the run's settings, otherwise the model's."""
    settings, model = policy.settings.copy(), policy.model
    adapter = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
    if kind != "nvfp4_base" and isinstance(adapter, LoraConfig) and "lora" not in settings:
        settings["lora"] = identity.lora_settings(adapter)
    if policy.tokenizer is not None:
        settings |= cast(RunSettings, identity.recorded_of_written(policy.tokenizer, policy.settings))
    if kind != "adapter":
        merge.check_base(policy)
        if merge.recorded_base(settings) is None:
            settings["base_sha256"] = cast(str, fingerprint.base_sha256(policy.transformers_model))
            settings["base_config"] = fingerprint.base_config(policy.transformers_model)
    export = _record(kind, settings)
    if kind != "adapter" and (code := writer.code_of(policy.transformers_model.config)):
        export["auto_map"] = code
        writer.warn_of_code(code, folder)
    return export


def _record(kind: Kind, settings: RunSettings) -> Export:
    if settings.get("model"):
        settings["model"] = public_name(settings["model"])
    return {"kind": kind, "settings": settings, "exported_with": versions()}
