"""LoRA on a frozen NVFP4 base, through unmodified PEFT.

`NVFP4Linear` is an `nn.Linear`, so `target_modules="all-linear"`, rsLoRA, DoRA and adapter files work as usual, and an
adapter trained here loads in plain PEFT. Only the merge is ours (`LoraConfig._register_custom_module`, not stored in
`adapter_config.json`): it makes the layer dense, because a delta rounded to 4 bits would mostly be lost. Adapters and
trainable norms are float32: next to weights around 1, an AdamW step of 1e-5 is far below half a unit in the last place
of bf16 (2^-9).
"""

import copy
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from peft import LoraConfig, PeftConfig, PeftModel, PeftModelForCausalLM
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import (
    SAFETENSORS_WEIGHTS_NAME,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig

from ..checkpoint import seal
from ..checkpoint.fingerprint import base_sha256, take_embeddings
from ..nvfp4.architectures import ATTENTION, has_experts, unadapted_by_default
from ..nvfp4.checkpoints import pattern_of
from ..nvfp4.headers import require_finite
from ..nvfp4.linear import NVFP4Linear, has_nvfp4
from ..support.files import hub_commit

logger = logging.getLogger(__name__)

#: `init_lora_weights` values with an unchanged base weight
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")


class NVFP4LoraLinear(LoraLinear):
    """`lora.Linear` on a packed layer. Merging swaps in a dense base layer, unmerging restores the packed one.

    The merged weight is `dequantize(W) + scaling * B @ A` (DoRA: its own formula), computed in float32 and rounded once
    to the base's compute dtype. It costs the memory of a dense layer.
    """

    _packed_base: NVFP4Linear | None = None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        packed = self.base_layer
        if not isinstance(packed, NVFP4Linear):  # a second adapter on a merged layer
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        self.base_layer = packed.to_dense(torch.float32)
        merged_before = len(self.merged_adapters)
        try:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        finally:
            if len(self.merged_adapters) == merged_before:  # nothing to merge, or PEFT refused
                self.base_layer = packed
        if self.base_layer is not packed:
            self.base_layer.to(packed.compute_dtype)
            # not a registered submodule, which would put the packed bytes into the merged model's state dict
            object.__setattr__(self, "_packed_base", packed)

    def unmerge(self) -> None:
        if self._packed_base is None:
            super().unmerge()  # warns that nothing is merged
            return
        super().unmerge()  # clears PEFT's bookkeeping; its dense weight, with rounding errors, is dropped below
        self.base_layer = self._packed_base
        object.__setattr__(self, "_packed_base", None)


def default_lora_config() -> LoraConfig:
    """Return the default adapter: rank 32 as in the paper, alpha = 2 r, on every linear layer of the decoder."""
    return LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")


def settle_model_config(model_config: Any, said: Collection[str], base_format: str) -> None:
    """Set defaults for unset fields of TRL's `ModelConfig`: bf16, and an adapter if any `lora_*` is set.

    Args:
        said: field names set by a recipe or the command line.
    """
    model_config.model_name_or_path = os.path.expanduser(model_config.model_name_or_path or "") or None
    if base_format == "full":
        return
    if "dtype" not in said:
        model_config.dtype = "bfloat16"
    if "use_peft" in said or not any(name.startswith(("lora_", "use_rslora", "use_dora")) for name in said):
        return
    own = default_lora_config()
    model_config.use_peft = True
    defaults = {"lora_r": own.r, "lora_dropout": own.lora_dropout, "lora_target_modules": own.target_modules}
    for name, value in defaults.items():
        if name not in said:
            setattr(model_config, name, value)
    if "lora_alpha" not in said:
        model_config.lora_alpha = 2 * model_config.lora_r


def keep_to_the_decoder(config: LoraConfig, model_config: PretrainedConfig) -> LoraConfig:
    """Restrict "all-linear" to the text decoder: towers for pictures and sound, routers and small gates get no adapter
    (`architectures.unadapted_by_default`). Explicit targets or exclusions are respected.
    """
    if config.target_modules != "all-linear" or config.exclude_modules is not None:
        return config
    names = unadapted_by_default(model_config)
    if not names:
        return config
    config = copy.copy(config)
    if has_experts(model_config):  # PEFT would adapt experts and routers too, as bare parameters
        logger.warning(
            "This model is a mixture of experts: only its attention gets an adapter, not experts and routers. "
            "Name target_modules to choose yourself."
        )
        config.target_modules = list(ATTENTION)
    else:
        config.exclude_modules = pattern_of(names)
    return config


def check_is_lora(config: PeftConfig) -> LoraConfig:
    """Return `config`; raise `ValueError` for methods other than LoRA and for an adapter on the head."""
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"peft_config is a {type(config).__name__}. Rollout, export and noise are built for LoRA on linear layers; "
            "what other methods train, the rollout never sees. Pass a LoraConfig."
        )
    targets = config.target_modules
    targets = [targets] if isinstance(targets, str) else list(targets or [])
    if any(target.split(".")[-1] == "lm_head" for target in targets):
        raise ValueError(
            f"target_modules={targets} names lm_head. TRL computes log-probabilities from lm_head.weight, so an "
            'adapter there would never be trained. Remove it, or use target_modules="all-linear".'
        )
    return config


def changes_base(model: nn.Module) -> bool:
    """True if an adapter changes the base weights: initialized from a part of them (PiSSA), or with trained biases."""
    configs = getattr(model, "peft_config", {}).values()
    return any(config.bias != "none" or config.init_lora_weights not in _PLAIN_INITS for config in configs)


def register_nvfp4_lora(config: PeftConfig) -> LoraConfig:
    """Validate `config` for a frozen 4-bit base and return a copy with the NVFP4 layer registered."""
    config = check_is_lora(config)
    init = config.init_lora_weights
    if init not in _PLAIN_INITS or config.target_parameters:
        raise ValueError(
            f"init_lora_weights={init!r} or target_parameters={config.target_parameters} needs the base's "
            "full-precision weights, but these are packed. Name linear modules in target_modules, and set "
            f"init_lora_weights to one of {_PLAIN_INITS}."
        )
    config = copy.copy(config)
    config._register_custom_module({NVFP4Linear: NVFP4LoraLinear})
    return config


def load_adapter(
    model: nn.Module,
    adapter: str,
    adapter_name: str = "default",
    is_trainable: bool = False,
    allow_other_base: bool = False,
    **kwargs,
) -> PeftModel:
    """Load an adapter as `PeftModel.from_pretrained` does, but on an NVFP4 base and with a merge that works.

    Args:
        model: transformers model with [`NVFP4Linear`] layers.
        adapter: folder or Hub id of a PEFT LoRA adapter.
        adapter_name, is_trainable, kwargs: as in `PeftModel.from_pretrained`.
        allow_other_base: accept weights other than those recorded by the run, in the folder or next to the published
            adapter. A model in another format than the run's base is not compared.

    Raises:
        `ValueError`: `model` has other weights; the adapter changed since it was sealed, or its file lacks tensors, for
            which PEFT would use random numbers and zeros.
    """
    hub: dict[str, Any] = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in kwargs}
    if (folder := _folder_of(str(adapter), hub)) is not None:
        _check_sealed(str(adapter), folder)
    config = (register_nvfp4_lora if has_nvfp4(model) else check_is_lora)(PeftConfig.from_pretrained(adapter, **hub))
    if folder is not None:
        take_embeddings(model, folder)
        if not allow_other_base:
            _check_base(model, str(adapter), folder)
    config.inference_mode = not is_trainable
    loaded = PeftModel.from_pretrained(
        model, adapter, adapter_name=adapter_name, is_trainable=is_trainable, config=config, **kwargs
    )
    if folder is not None:
        require_whole(folder, loaded, adapter_name)
    if is_trainable and folder is not None:  # checked above, or allowed: record the base of this training
        trained, name = loaded.peft_config[adapter_name], loaded.config.name_or_path
        if name and name != trained.base_model_name_or_path:
            trained.base_model_name_or_path, trained.revision = name, None
    return loaded


def _folder_of(adapter: str, hub: dict[str, Any]) -> Path | None:
    """Return an adapter's local folder, or that of its files in the Hub's cache; `None` without a manifest there."""
    if os.path.isdir(adapter):
        return Path(adapter, hub.get("subfolder") or "")
    try:
        for name in (SAFETENSORS_WEIGHTS_NAME, seal.MANIFEST_NAME):
            file = hf_hub_download(adapter, name, **hub)
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        logger.info("No %s of %s (%s).", seal.MANIFEST_NAME, adapter, type(error).__name__)
        return None
    return Path(file).parent


def require_whole(folder: str | os.PathLike, model: PeftModel, adapter_name: str) -> None:
    """Raise `ValueError` if adapter tensors are missing, which PEFT ignores silently, or are not finite."""
    if not (file := Path(folder, SAFETENSORS_WEIGHTS_NAME)).is_file():
        return
    require_finite(file)
    with safe_open(file, framework="numpy") as stored:
        found = set(stored.keys())
    wanted = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    if missing := sorted(set(wanted) - found):
        raise ValueError(
            f"{file} lacks {len(missing)} of {len(wanted)} tensors of its adapter, e.g. {missing[0]}: they would "
            "start from random numbers and zeros. Name a whole checkpoint, or copy the file again."
        )


def _check_sealed(adapter: str, folder: Path) -> None:
    if not (folder / seal.MANIFEST_NAME).is_file():
        return
    partial = hub_commit(folder) is not None
    wrong = seal.problems(folder, partial=partial)
    if not wrong and os.path.isdir(adapter):
        wrong = seal.added(folder)
    if wrong:
        raise ValueError(
            f"{adapter} differs from its manifest: {'; '.join(wrong)}. Copy or download it again. If you meant the "
            f"change, remove {seal.MANIFEST_NAME} there: it is loaded unverified then."
        )


def _check_base(model: nn.Module, adapter: str, folder: Path) -> None:
    run = seal.recorded_run(folder)
    settings = run.get("settings", run)  # record of an export, or of a run
    then = settings.get("base_sha256")
    if then is None or has_nvfp4(model) != (settings.get("base_format") == "nvfp4"):
        return
    if (now := base_sha256(model)) not in (None, then):
        raise ValueError(
            f"{adapter} was trained on a base with other weights, {settings.get('model', 'unknown')} in "
            f"{settings.get('dtype', 'unknown')} (fingerprint {then[:12]}, this model's {now[:12]}). Load the run's "
            "own base, or accept this one: allow_other_base=True."
        )


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the LoRA layers of `model` by module path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def check_adapter(model: PeftModel) -> None:
    """Refuse an adapter that cannot train, or on embeddings tied to the head; warn about 16-bit parameters."""
    for config in model.peft_config.values():
        check_is_lora(config)
    layers = adapted_layers(model)
    scaled = any(any(layer.scaling.values()) for layer in layers.values())  # lora_alpha is not 0
    if not scaled or not any("lora_" in name and p.requires_grad for name, p in model.named_parameters()):
        raise ValueError(
            f"The model has {len(layers)} LoRA layers and none of their parameters requires a gradient, or lora_alpha "
            "is 0. Check target_modules, and pass is_trainable=True where the adapter is loaded."
        )
    base: Any = model.get_base_model()
    if isinstance(base.get_input_embeddings(), LoraLayer) and base.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            "The adapter's targets match the embeddings, and the output head is tied to them: the adapter would act at "
            "the input only, a merge on both. Leave the embeddings out of target_modules."
        )
    warn_of_low_precision(model)


def warn_of_low_precision(model: nn.Module) -> None:
    """Warn about trainable tensors in 16 bits, adapter or whole model: rounding loses most AdamW steps."""
    narrow = (torch.bfloat16, torch.float16)
    low = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad and p.dtype in narrow]
    if low and not getattr(model, "is_loaded_in_4bit", False):  # TRL itself casts bitsandbytes adapters to bf16
        logger.warning(
            "%d trainable tensors are %s (first: %s). Small AdamW steps are lost to rounding there; keep trained "
            "tensors in float32 (dtype=float32; bf16=True still computes in bf16).",
            len(low),
            low[0][1],
            low[0][0],
        )


def warn_of_dropout(model: nn.Module) -> None:
    """Warn about dropout in the model: only the update applies it, so the ratio to the rollout is never 1.

    An adapter's `lora_dropout` (0.05 in TRL's scripts) is small in comparison and the user's choice.
    """
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    fields = {n: v for n, v in vars(config).items() if "drop" in n and isinstance(v, float) and v > 0}
    rates: set[float] = set()
    for module in model.modules() if fields else ():
        if isinstance(module, nn.Dropout):
            rates.add(module.p)
        # attention modules have the rate as a plain number
        rates |= {value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)}
    if fields := {name: rate for name, rate in fields.items() if rate in rates}:
        logger.warning(
            "The update drops activations (%s) and the rollout does not, so the two policies differ by chance at "
            "every step. Set model_init_kwargs=%s, unless you want the dropout.",
            ", ".join(f"{name}={value:g}" for name, value in fields.items()),
            dict.fromkeys(fields, 0.0),
        )


@torch.no_grad()
def prepare_trainable(model: nn.Module) -> list[str]:
    """Keep trainable norms and `trainable_token_indices` in float32; a norm's output keeps its input's dtype.

    PEFT copies them in the base's bf16, too coarse for small steps. A float32 weight makes the norm's output float32,
    and generation runs outside autocast, so a forward hook casts back.

    Returns:
        The names of the prepared norms.
    """
    prepared = []
    for name, wrapper in model.named_modules():
        if isinstance(wrapper, TrainableTokensWrapper):
            wrapper.token_adapter.trainable_tokens_delta.to(torch.float32)
            if getattr(wrapper.original_module, "bias", None) is None:
                wrapper.register_parameter("bias", None)  # TRL reads the head's bias, missing on the wrapper
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for adapter, module in wrapper.modules_to_save.items():
            weight = module._parameters.get("weight")
            if weight is None or weight.ndim != 1 or not weight.requires_grad:
                continue
            module.to(torch.float32)
            module.register_forward_hook(_cast_output_to_input_dtype)
            prepared.append(f"{name}.{adapter}")
    return prepared


def _cast_output_to_input_dtype(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output.to(args[0].dtype)


# --- an existing adapter ----------------------------------------------------------------------------------------------


def given_model(model: Any) -> Any:
    """Return `model`: a path with `~` expanded, or a `PeftModel` if transformers loaded or added the adapter."""
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
            f"The model's adapters ({', '.join(model.peft_config)}) are "
            f"{'disabled' if disabled else 'active together'}, but training needs one active. Call "
            "model.enable_adapters() and model.set_adapter(name), or model.delete_adapter(names) for a new one."
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
    vars(model).pop("_weight_conversions", None)  # from the adapter's file; a merge would use its names
    # PiSSA and others changed the base when the adapter was loaded, and must not change it twice
    initialized, config.init_lora_weights, config.inference_mode = config.init_lora_weights, True, False
    peft_model = PeftModelForCausalLM(model, config)
    config.init_lora_weights = initialized
    set_peft_model_state_dict(model, state)
    return peft_model


def name_base(model: PeftModel) -> None:
    """Record the model's own base in the adapter's configuration; warn if another base was recorded."""
    config = model.peft_config[model.active_adapter]
    named, found = config.base_model_name_or_path, cast(Any, model.config)._name_or_path
    if not found or named == found:
        return
    if named:
        logger.warning(
            "The adapter was made for the base %s, but is on %s. This run records %s as its base.", named, found, found
        )
    config.base_model_name_or_path, config.revision = found, None
