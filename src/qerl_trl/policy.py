"""The policy of a finished run, rebuilt for export or evaluation: its base in the format it was trained on, and its adapter."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import checkpoint, shards
from .lora import load_adapter
from .quantizer import NVFP4Config, from_pretrained, load_config

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


class Source(NamedTuple):
    """A policy to export. `model` is a `PeftModel` or a plain model; `settings` describes the run, as far as known."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    settings: dict[str, Any]

    @property
    def inner(self) -> PreTrainedModel:
        """The transformers model, with adapter layers inside."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model


def source_of(trainer_or_model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> Source:
    """Wrap a trainer, a model or a `Source`."""
    if isinstance(trainer_or_model, Source):
        return trainer_or_model
    if hasattr(trainer_or_model, "accelerator"):
        trainer = trainer_or_model
        model = trainer.accelerator.unwrap_model(trainer.model)
        settings = {**trainer._run_settings(), "global_step": trainer.state.global_step}
        return Source(model, tokenizer or trainer.processing_class, settings)
    return Source(trainer_or_model, tokenizer, {})


def load_policy(
    adapter: str | os.PathLike,
    base_model: str | None = None,
    base_format: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
) -> Source:
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
    settings = run_settings(adapter)
    base_model = base_model or PeftConfig.from_pretrained(adapter).base_model_name_or_path
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
    policy = load_adapter(model, str(adapter)).eval()
    policy.to(torch.device(device))
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter if has_tokenizer else base_model)
    settings = {**settings, "model": base_model, "merged_onto": base_format, "dtype": dtype}
    return Source(policy, tokenizer, settings)


def run_settings(folder: Path) -> dict[str, Any]:
    """What the run in `folder` recorded about itself: the manifest of a checkpoint or export, or of the newest checkpoint inside."""
    found = shards.manifest_run(folder)
    if "settings" in found:  # an export
        return found["settings"]
    if not found and (newest := checkpoint.last_checkpoint(folder)) is not None:
        found = shards.manifest_run(newest)
    return found


def load_any(model: str, device: str = "cpu", dtype: str | None = None) -> Source:
    """A model without an adapter, dense or NVFP4, with its tokenizer. `dtype`: compute dtype; default: as stored."""
    wanted = NVFP4Config(compute_dtype=dtype) if dtype else None
    config = load_config(model, wanted)
    packed = getattr(config, "quantization_config", None) is not None
    options = {"config": config, "dtype": getattr(torch, dtype or "bfloat16")} if packed else {"dtype": dtype or "auto"}
    loaded = AutoModelForCausalLM.from_pretrained(model, device_map={"": device}, **options).eval()
    return Source(loaded, AutoTokenizer.from_pretrained(model), {"model": model})


def public_name(model: str) -> str:
    """A Hub id (or any other name) as it is; a path shortened to its last part: it is private, and nobody else has the folder."""
    return Path(model).name if os.path.exists(model) or os.path.isabs(model) else model


def is_hub_id(model: str) -> bool:
    """Whether `model` names a Hub repository (`user/name`) and not a folder here."""
    return bool(_HUB_ID.match(model)) and not os.path.isdir(model)
