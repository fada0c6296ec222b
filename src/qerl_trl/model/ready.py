"""An adapter that comes ready: on a base that its own configuration may not name (`PeftModel.from_pretrained(another_base, adapter)`), or loaded
by transformers (`AutoModelForCausalLM.from_pretrained(adapter)`), without PEFT's own model around it.
"""

import copy
import logging
import os
from pathlib import Path
from typing import Any, cast

from peft import PeftModel, PeftModelForCausalLM
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

from .lora import check_is_lora

logger = logging.getLogger(__name__)


def given_model(model: Any) -> Any:
    """A trainer's `model`, the path of a folder expanded, and a `PeftModel` where transformers loaded or added the adapter.

    Raises:
        `ValueError`: the folder has an adapter only, or what transformers loaded is not one LoRA adapter that acts.
    """
    if not isinstance(model, str):
        own = isinstance(model, PeftModel) or not getattr(model, "_hf_peft_config_loaded", False)
        return model if own else _as_peft_model(model)
    folder = Path(model).expanduser()
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{model} is an adapter's folder, not a model's. To train it further, load its base and pass "
            "model=qerl_trl.load_adapter(base, folder, is_trainable=True)."
        )
    return os.path.expanduser(model)


def _as_peft_model(model: Any) -> PeftModel:
    active = model.active_adapters()
    disabled = any(isinstance(module, BaseTunerLayer) and module.disable_adapters for module in model.modules())
    if disabled or len(active) != 1:
        raise ValueError(
            f"The model's adapters ({', '.join(model.peft_config)}) are {'disabled' if disabled else 'active together'}; one is "
            "trained. Call model.enable_adapters() and model.set_adapter(name), or model.delete_adapter(names) for a new one."
        )
    config = copy.copy(check_is_lora(model.peft_config[active[0]]))
    lost = [name for name in ("use_dora", "modules_to_save", "trainable_token_indices") if getattr(config, name)]
    if lost:
        raise ValueError(
            f"The model's adapter has {', '.join(lost)}, which transformers does not load. Load the adapter with "
            "PeftModel.from_pretrained(base, folder, is_trainable=True)."
        )
    if others := sorted(set(model.peft_config) - set(active)):
        logger.warning("The adapter %r is trained. The model's other adapters are removed: %s.", *active, others)
    state = get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=False)
    model.delete_adapter(list(model.peft_config))
    vars(model).pop("_weight_conversions", None)  # of the adapter's file, by which a merge would be named
    # PiSSA and others changed the base when the adapter was loaded, and must not do it again
    initialized, config.init_lora_weights, config.inference_mode = config.init_lora_weights, True, False
    peft_model = PeftModelForCausalLM(model, config)
    config.init_lora_weights = initialized
    set_peft_model_state_dict(model, state)
    return peft_model


def name_base(model: PeftModel) -> None:
    """Let the configuration of the adapter name the base that it lies on; a warning where it named another one."""
    config = model.peft_config[model.active_adapter]
    named, found = config.base_model_name_or_path, cast(Any, model.config)._name_or_path
    if not found or named == found:
        return
    if named:
        logger.warning(
            "The adapter was made for %s, and it lies on %s. What this run writes names %s.", named, found, found
        )
    config.base_model_name_or_path, config.revision = found, None
