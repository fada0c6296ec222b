"""Rebuild the policy of a finished run for export or evaluation: its base in the run's format, and its adapter."""

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import fingerprint, seal
from ..checkpoint import settings as identity
from ..checkpoint.records import is_hub_id
from ..checkpoint.settings import RunSettings
from ..model.loading import begin, finish, from_pretrained, load_config
from ..model.lora import load_adapter
from ..nvfp4.config import NVFP4Config, auto_class_of, quantization_of
from ..nvfp4.headers import require_finite
from ..nvfp4.linear import has_nvfp4
from ..support.trl import OnlineTrainer
from .gguf import folder_of

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"


class TrainedPolicy(NamedTuple):
    """A model to export or evaluate. `gathered`: the adapter's tensors by parameter name, if the model is sharded."""

    model: PeftModel | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    settings: RunSettings
    gathered: dict[str, torch.Tensor] | None = None

    @property
    def transformers_model(self) -> PreTrainedModel:
        """The model with adapter layers inside, without PEFT's wrapper."""
        return cast(PreTrainedModel, self.model.get_base_model()) if isinstance(self.model, PeftModel) else self.model


#: sources of an export: a live trainer, a rebuilt policy, or a bare model without a known run
Exportable = OnlineTrainer | TrainedPolicy | PeftModel | PreTrainedModel


def is_trainer(exported: Exportable) -> TypeGuard[OnlineTrainer]:
    return not isinstance(exported, (TrainedPolicy, torch.nn.Module))


def trained_policy_of(exported: Exportable, tokenizer: PreTrainedTokenizerBase | None = None) -> TrainedPolicy:
    """Return the policy of a trainer, or of a model without a recorded run."""
    if isinstance(exported, TrainedPolicy):
        return exported if tokenizer is None else exported._replace(tokenizer=tokenizer)
    if not is_trainer(exported):
        return TrainedPolicy(cast(PeftModel | PreTrainedModel, exported), tokenizer, {})
    model = exported.accelerator.unwrap_model(exported.model)
    settings = identity.run_settings(exported)
    settings["global_step"] = exported.state.global_step
    return TrainedPolicy(model, tokenizer or cast(PreTrainedTokenizerBase, exported.processing_class), settings)


def load_policy(
    adapter: str | os.PathLike,
    base_model: str | None = None,
    base_format: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    allow_other_base: bool = False,
    trust_remote_code: bool = False,
) -> TrainedPolicy:
    """Build the policy of a checkpoint or adapter folder: its base in the training format, and the adapter.

    A base from the Hub is loaded at the recorded revision, and its fingerprint is compared with the run's.

    Args:
        adapter: folder with adapter_config.json: a checkpoint, a finished run, or the output of `save_adapter`.
        base_model: folder or Hub id; default: from adapter_config.json.
        base_format: "nvfp4" or "bf16"; default: the run's format. Another format makes another model.
        dtype: compute dtype; default: that of the run, else bfloat16.
        allow_other_base: accept a base with other weights than the run's, and record them.
        trust_remote_code: run the base's own code.
    """
    adapter = Path(adapter)
    require_adapter(adapter)
    require_whole(adapter)
    settings = recorded_settings(adapter)
    base_model = folder_of(base_model or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path)
    recorded = settings.get("base_format")
    base_format = base_format or recorded
    if base_format not in ("nvfp4", "bf16"):
        raise ValueError(
            f"base_format={base_format!r} for {adapter}, which records {recorded!r}, cannot be loaded. Pass 'nvfp4' "
            "(--base-format nvfp4) if a QeRL trainer wrote it with its default, else 'bf16'."
        )
    dtype = dtype or settings.get("dtype") or "bfloat16"
    if base_format == "bf16":
        require_format(base_model, "bf16", recorded_revision(settings, base_model), trust_remote_code)
    if recorded in ("nvfp4", "bf16") and base_format != recorded:
        _compare_as_recorded(adapter, settings, base_model, device, allow_other_base, trust_remote_code)
    model = _load_base(adapter, settings, base_model, base_format, dtype, device, allow_other_base, trust_remote_code)
    if (adapter / "generation_config.json").is_file():  # with the run's end tokens
        model.generation_config.eos_token_id = GenerationConfig.from_pretrained(adapter).eos_token_id
    revision = recorded_revision(settings, base_model)
    adapted = load_adapter(model, str(adapter), allow_other_base=True).eval()  # compared above
    adapted.to(torch.device(device))
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    source, at = (adapter, None) if has_tokenizer else (base_model, revision)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=at, trust_remote_code=trust_remote_code)
    found = identity.loaded_by(model)
    settings |= {"model": base_model, "merged_onto": base_format, "dtype": dtype, "auto_class": found}
    settings.pop("base_revision", None)  # a commit of the run's own base
    if (commit := fingerprint.base_revision(model)) is not None:
        settings["base_revision"] = commit
    return TrainedPolicy(adapted, tokenizer, settings)


def _load_base(
    adapter: Path, settings: RunSettings, base: str, form: str, dtype: str, device: str, allowed: bool, code: bool
) -> PreTrainedModel:
    """Load the base at the run's revision, add the tokens of `adapter`, and compare it with the run's record."""
    found: dict[str, Any] = {"revision": recorded_revision(settings, base), "trust_remote_code": code}
    hub = {"device_map": {"": device}, **found}
    if form == "nvfp4":
        config = NVFP4Config(
            scale_rule=settings.get("scale_rule", "rtn"),
            modules_to_not_convert=settings.get("modules_to_not_convert"),
            compute_dtype=dtype,
        )
        model = from_pretrained(base, config, dtype=dtype, **hub)
    else:
        begin(base)
        kind = auto_class_of(AutoConfig.from_pretrained(base, **found))
        model = kind.from_pretrained(base, dtype=dtype, **hub)
        finish(model, revision=hub["revision"] or "main")
    fingerprint.take_embeddings(model, adapter)
    if form == settings.get("base_format"):  # the fingerprint is of the run's format only
        settings |= _compared(settings, model, base, dtype, allowed)
    return model


def check_served_base(adapter: Path, base_model: str) -> str | None:
    """Load a base for vLLM temporarily in the run's format, and compare it with the run's record.

    Returns the Hub revision for vLLM to load, `None` for a folder.
    """
    with safe_open(adapter / ADAPTER_FILE, framework="numpy") as stored:
        if others := [key for key in stored.keys() if ".lora_" not in key]:  # noqa: SIM118
            raise ValueError(
                f"{adapter} has {others[0]}, but vLLM loads LoRA only. Evaluate its merge (qerl-trl merge)."
            )
    settings = recorded_settings(adapter)
    _compare_as_recorded(adapter, settings, base_model)
    return recorded_revision(settings, base_model)


def _compare_as_recorded(
    adapter: Path, settings: RunSettings, base: str, device: str = "cpu", allowed: bool = False, code: bool = False
) -> None:
    """Load a base temporarily in the run's format, and compare it with the run's record."""
    recorded, revision = settings.get("base_format"), recorded_revision(settings, base)
    if recorded == "nvfp4" or (recorded == "bf16" and format_of(base, revision, code) == "bf16"):
        _load_base(adapter, settings, base, recorded, settings.get("dtype") or "bfloat16", device, allowed, code)


def recorded_revision(settings: RunSettings, base_model: str) -> str | None:
    """Return the run's Hub commit for loading `base_model`; `None` for a folder, or for another base."""
    return settings.get("base_revision") if base_model == settings.get("model") and is_hub_id(base_model) else None


def _compared(settings: RunSettings, model: PreTrainedModel, base_model: str, dtype: str, allowed: bool) -> RunSettings:
    """Compare weights and configuration of a loaded base with the run's. Returns the settings to record."""
    then, now = settings.get("base_sha256"), fingerprint.base_sha256(model)
    config = fingerprint.base_config(model)
    lines = identity.config_differences(settings.get("base_config"), config)
    found: RunSettings = {"base_config": config} if lines else {}
    if then is not None and now not in (then, None):
        lines = [f"base_sha256: trained on {then[:12]}, built on {now[:12]}", *lines]
        found["base_sha256"] = now
    if not lines:
        return {}
    if not allowed:
        commit = settings.get("base_revision")
        trained_on = f"{settings.get('model', 'a base')}{f' at revision {commit[:12]}' if commit else ''}"
        raise ValueError(
            f"{base_model} in {dtype} has {'other weights' if 'base_sha256' in found else 'another configuration'} "
            f"than the base that the adapter was trained on, {trained_on} in {settings.get('dtype', dtype)} "
            f"({'; '.join(lines)}). Name the run's own base (--base-model), without --dtype, or take this one: "
            "allow_other_base=True (--allow-other-base)."
        )
    found["changed"] = [*settings.get("changed", []), *lines]
    return found


def require_whole(folder: Path) -> None:
    """Refuse a run or checkpoint folder changed since it was sealed, or with an adapter that is not finite.

    Without a manifest (written by another trainer), warn and check only the values.
    """
    if not (folder / seal.MANIFEST_NAME).is_file():
        logger.warning(
            "%s has no %s, so its files cannot be compared with what the run wrote.", folder, seal.MANIFEST_NAME
        )
    elif wrong := seal.problems(folder) or seal.added(folder):
        raise ValueError(
            f"{folder} is not as the run wrote it: {'; '.join(wrong)}. Name a whole checkpoint (checkpoint-<step>), or "
            f"copy the folder again. If you meant the change, remove {seal.MANIFEST_NAME} there."
        )
    if (folder / ADAPTER_FILE).is_file():
        require_finite(folder / ADAPTER_FILE)


def recorded_settings(folder: Path) -> RunSettings:
    """Return the settings of the run in `folder`: from its manifest, or the newest checkpoint's."""
    found = seal.recorded_settings(folder)
    if not seal.recorded_run(folder) and (newest := seal.last_checkpoint(folder)) is not None:
        found = seal.recorded_run(newest)
    return cast(RunSettings, found)


def recorded_template_kwargs(settings: RunSettings) -> dict[str, Any] | None:
    """Return the run's arguments to its chat template, such as `{"enable_thinking": False}`."""
    return settings.get("options", {}).get("chat_template_kwargs")


def format_of(model: str, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """Return the stored format of a model without an adapter: "nvfp4" or "bf16" (dense)."""
    return "nvfp4" if stored_as(model, revision, trust_remote_code) == "nvfp4" else "bf16"


def stored_as(model: str, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """[`format_of`], with a dense model's dtype: "bfloat16", ...; "dense" if its configuration has none."""
    hub: dict[str, Any] = {} if revision is None else {"revision": revision}
    config = load_config(model, trust_remote_code=trust_remote_code, **hub)
    if quantization_of(config) is not None:
        return "nvfp4"
    dtype = config.dtype or config.get_text_config().dtype
    return "dense" if dtype is None else str(dtype).removeprefix("torch.")


def require_format(model: str, base_format: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """Refuse a model not stored as `base_format`."""
    stored = format_of(model, revision, trust_remote_code)
    if stored == base_format:
        return
    remedy = {
        "nvfp4": f"Quantize it first (qerl-trl quantize {model} <folder>), or merge the run (qerl-trl merge)",
        "bf16": "It has no unquantized weights: name the unquantized model",
    }
    raise ValueError(
        f"base_format={base_format!r}, but {model} is stored as {stored}. "
        f"{remedy.get(base_format, 'Only nvfp4 and bf16 can be measured')}."
    )


def require_adapter(folder: Path) -> None:
    """Refuse a folder without an adapter; the message names its content."""
    if (folder / "adapter_config.json").is_file():
        return
    what, remedy = "no adapter_config.json", "It is a model (merged already?): use it directly (qerl-trl eval, push)"
    if not (folder / "config.json").is_file():
        what, remedy = "neither config.json nor adapter_config.json", "Name a model, a checkpoint or a run's folder"
        if (newest := seal.last_checkpoint(folder)) is not None:
            remedy = f"Its run saved no final model (trainer.save_model()): name its newest checkpoint, {newest}"
    raise ValueError(f"{folder} has {what}. {remedy}.")


def load_any(
    model: str, device: str = "cpu", dtype: str | None = None, trust_remote_code: bool = False
) -> TrainedPolicy:
    """Load a model without adapter, as stored, with its tokenizer. `dtype`: compute dtype; default: as stored."""
    code, model = {"trust_remote_code": trust_remote_code}, folder_of(model)
    config = load_config(model, NVFP4Config(compute_dtype=dtype) if dtype else None, **code)
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if quantization_of(config) is not None:
        options = {"config": config, "dtype": dtype or "bfloat16"}
    loaded = auto_class_of(config).from_pretrained(model, device_map={"": device}, **code, **options).eval()
    finish(loaded, revision="main")
    settings: RunSettings = {"model": model, "base_format": "nvfp4" if has_nvfp4(loaded) else "bf16"}
    return TrainedPolicy(loaded, AutoTokenizer.from_pretrained(model, **code), settings)
