"""The policy of a finished run, rebuilt for export or evaluation: its base in the format it was trained on, and its adapter."""

import os
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import checkpoint, identity
from ..identity import RunSettings
from ..lora import load_adapter
from ..nvfp4.config import NVFP4Config, from_pretrained, load_config
from ..upstream import OnlineTrainer
from . import staging


class TrainedPolicy(NamedTuple):
    """What is exported or evaluated. `model` has an adapter or none; `settings` describes its run, as far as known."""

    model: PeftModel | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    settings: RunSettings

    @property
    def transformers_model(self) -> PreTrainedModel:
        """The model with adapter layers inside, without PEFT's wrapper."""
        return cast(PreTrainedModel, self.model.get_base_model()) if isinstance(self.model, PeftModel) else self.model


#: what an export takes: a live trainer, a rebuilt policy, or a bare model, of whose run nothing is known
Exportable = OnlineTrainer | TrainedPolicy | PeftModel | PreTrainedModel


def is_trainer(exported: Exportable) -> TypeGuard[OnlineTrainer]:
    return hasattr(exported, "accelerator")


def trained_policy_of(exported: Exportable, tokenizer: PreTrainedTokenizerBase | None = None) -> TrainedPolicy:
    if isinstance(exported, TrainedPolicy):
        return exported
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
) -> TrainedPolicy:
    """Build the policy of a checkpoint or adapter folder: its base in the format it was trained on, and the adapter.

    Args:
        adapter: folder with adapter_config.json: a checkpoint, a finished run, or what `save_adapter` wrote.
        base_model: folder or Hub id; default: what adapter_config.json says.
        base_format: "nvfp4" or "bf16"; default: what the run recorded. Another one than the run's makes another model.
        dtype: compute dtype; default: the run's, else bfloat16.

    Raises:
        `ValueError`: no adapter there, or nothing says what base it was trained on.
    """
    adapter = Path(adapter)
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} has no adapter_config.json. Name a checkpoint folder or the run's output folder.")
    if (adapter / checkpoint.MANIFEST_NAME).is_file():
        checkpoint.verify(adapter)
    settings = recorded_settings(adapter)
    base_model = base_model or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    recorded = settings.get("base_format")
    base_format = base_format or recorded
    if base_format is None:
        raise ValueError(
            f"Nothing in {adapter} says which base the adapter was trained on. Pass base_format='nvfp4' (--base-format nvfp4) if it was "
            "trained by a QeRL trainer with its default, or 'bf16'."
        )
    if base_format not in ("nvfp4", "bf16"):
        raise ValueError(
            f"base_format={base_format!r} cannot be exported; only adapters on 'nvfp4' and 'bf16' bases can."
        )
    dtype = dtype or settings.get("dtype") or "bfloat16"
    if base_format == "nvfp4":
        config = NVFP4Config(
            scale_rule=settings.get("scale_rule", "rtn"),
            modules_to_not_convert=settings.get("modules_to_not_convert"),
            compute_dtype=dtype,
        )
        model = from_pretrained(base_model, config, dtype=getattr(torch, dtype), device_map={"": device})
    else:
        model = AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype, device_map={"": device})
    adapted = load_adapter(model, str(adapter)).eval()
    adapted.to(torch.device(device))
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter if has_tokenizer else base_model)
    settings |= {"model": base_model, "merged_onto": base_format, "dtype": dtype}
    return TrainedPolicy(adapted, tokenizer, settings)


def recorded_settings(folder: Path) -> RunSettings:
    """What the run in `folder` recorded about itself: the manifest of a checkpoint or export, or of the newest checkpoint inside."""
    found = staging.manifest_run(folder)
    if "settings" in found:  # an export
        return cast(RunSettings, found["settings"])
    if not found and (newest := checkpoint.last_checkpoint(folder)) is not None:
        found = staging.manifest_run(newest)
    return cast(RunSettings, found)


def load_any(model: str, device: str = "cpu", dtype: str | None = None) -> TrainedPolicy:
    """A model without an adapter, dense or NVFP4, with its tokenizer. `dtype`: compute dtype; default: as stored."""
    wanted = NVFP4Config(compute_dtype=dtype) if dtype else None
    config = load_config(model, wanted)
    packed = getattr(config, "quantization_config", None) is not None
    options: dict[str, Any]
    options = {"config": config, "dtype": getattr(torch, dtype or "bfloat16")} if packed else {"dtype": dtype or "auto"}
    loaded = AutoModelForCausalLM.from_pretrained(model, device_map={"": device}, **options).eval()
    return TrainedPolicy(loaded, AutoTokenizer.from_pretrained(model), {"model": model})
