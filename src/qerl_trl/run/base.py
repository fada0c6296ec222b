"""Preparation of TRL's trainer: arguments, the model for its `base_format`, adapter, named reward models, engine."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, is_peft_model
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, BitsAndBytesConfig, PretrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checks import environment
from ..config import QeRLArguments, QeRLConfig, QeRLRLOOConfig
from ..memory.of_trainer import plan_trainer
from ..model.loading import begin, loaded_everywhere
from ..model.lora import (
    check_is_lora,
    default_lora_config,
    given_model,
    keep_to_the_decoder,
    name_base,
    register_nvfp4_lora,
)
from ..nvfp4.config import NVFP4Config, pretrained_kwargs, stored_quantization
from ..nvfp4.linear import has_nvfp4, set_compute
from ..publish.gguf import folder_of
from ..rollout.sampling import settle_ends
from ..rollout.supported import check_environment, check_given
from ..support import secrets
from ..support.distributed import fsdp_version, keep_buckets
from . import folder

#: keys of `model_init_kwargs` for the policy alone
_OF_THE_POLICY = ("config", "quantization_config", "revision", "subfolder")
logger = logging.getLogger(__name__)


def before(trainer: type, given: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of our trainer class and return those for TRL's, before anything is loaded."""
    kind: Any = trainer
    model, args = given["model"], given.get("args")
    model = folder_of(model) if isinstance(model, str) else model
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = kind._config_class(f"{name.split('/')[-1]}-{kind._name}")
    if not isinstance(args, QeRLArguments):
        raise TypeError(
            f"{kind.__name__} needs args of type {kind._config_class.__name__}, got {type(args).__name__}. It takes "
            f"the same fields: use {kind._config_class.__name__}(...)."
        )
    args = cast("QeRLConfig | QeRLRLOOConfig", args)
    keep_buckets(args)
    secrets.check_places({**given, **vars(args)})
    environment.check(args)
    check_environment(args)
    check_given(args, given)
    if args.process_index == 0 and args.output_dir is not None:
        folder.lock(args.output_dir)
    model = given_model(model)
    peft_config = adapter_config(model, args, given.get("peft_config"))
    reward_funcs = with_reward_models(given.get("reward_funcs"), args)
    return {**given, "model": model, "args": args, "peft_config": peft_config, "reward_funcs": reward_funcs}


@contextmanager
def own_vllm_generation(trainer: Any) -> Iterator[None]:
    """Make TRL build our `VLLMGeneration` in this block, by rebinding its name in TRL's module: there is no hook."""

    def build(*args: Any, **kwargs: Any) -> Any:
        from ..rollout.generation import QeRLVLLMGeneration

        settle_ends(trainer)
        set_compute(trainer.model, trainer.args.compute)
        kwargs["max_model_length"] = plan_trainer(trainer).max_model_len  # for this run, not the model's largest
        return QeRLVLLMGeneration(*args, trainer=trainer, **kwargs)

    with ExitStack() as stack:
        for cls in type(trainer).__mro__:
            if cls.__module__.startswith("trl.") and "VLLMGeneration" in vars(module := sys.modules[cls.__module__]):
                stack.callback(setattr, module, "VLLMGeneration", vars(module)["VLLMGeneration"])
                vars(module)["VLLMGeneration"] = build
        yield


@contextmanager
def model_init(
    model: str | nn.Module, args: QeRLConfig | QeRLRLOOConfig, quantization_config: QuantizationConfigMixin | None
) -> Iterator[QuantizationConfigMixin | None]:
    """Yield the quantization config for TRL, with `args.model_init_kwargs` completed during loading and then restored:
    `TrainingArguments.to_json_string` cannot serialize a model config or dtype object."""
    with_reference = args.base_format == "full" and args.beta != 0  # TRL loads the model once more
    if not isinstance(model, str):
        _check_instance(model, args.base_format)
        with loaded_everywhere(with_reference):
            yield quantization_config
        return
    begin(model)
    given = args.model_init_kwargs
    assert not isinstance(given, str), "TRL's configs parse JSON when they are built"
    init = dict(given or {})
    if (legacy := init.pop("torch_dtype", None)) is not None:
        init.setdefault("dtype", legacy)  # older name of dtype, which transformers reads too
    hub = _hub_arguments(args)
    if args.base_format != "nvfp4":
        _check_stored(model, args.base_format, hub)
    if args.base_format != "full":
        init.setdefault("dtype", "bfloat16")  # TRL's default is float32
    if init.get("dtype") == "auto":
        init["dtype"] = AutoConfig.from_pretrained(model, **hub).dtype or "bfloat16"
    quantization_config = quantization_config or init.pop("quantization_config", None)
    if quantization_config is None and args.base_format == "nvfp4":
        quantization_config = NVFP4Config(
            scale_rule=args.scale_rule,
            modules_to_not_convert=args.modules_to_not_convert,
            compute_dtype=str(init["dtype"]).removeprefix("torch."),
        )
    elif quantization_config is None and args.base_format == "nf4":
        quantization_config = _nf4_config(init["dtype"])
    if isinstance(quantization_config, NVFP4Config) and "config" not in init:
        # an NVFP4 checkpoint needs a model config, a dense one the quantization config
        loading = pretrained_kwargs(model, quantization_config, **hub)
        quantization_config = loading.pop("quantization_config", None)
        init.update(loading)
    args.model_init_kwargs = init
    try:
        with loaded_everywhere(with_reference):
            yield quantization_config
    finally:
        args.model_init_kwargs = given


def _hub_arguments(args: QeRLConfig | QeRLRLOOConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that locate the model's files (revision, token, ...)."""
    init = args.model_init_kwargs or {}
    assert isinstance(init, dict), "TRL's configs parse JSON when they are built"
    hub: dict[str, Any] = {key: init[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in init}
    return hub | {"trust_remote_code": init.get("trust_remote_code", args.trust_remote_code)}


def source_of(model: str | nn.Module, args: QeRLConfig | QeRLRLOOConfig) -> dict[str, Any]:
    """Return revision and cache folder of a model loaded by name; empty for a given module."""
    if not isinstance(model, str):
        return {}
    hub = _hub_arguments(args)
    return {"revision": hub.get("revision") or "main", "cache_dir": hub.get("cache_dir")}


def adapter_config(
    model: str | nn.Module, args: QeRLConfig | QeRLRLOOConfig, peft_config: PeftConfig | None
) -> PeftConfig | None:
    """Return the checked configuration of the new adapter; `None` if the model has an adapter or needs none."""
    has_adapter = not isinstance(model, str) and is_peft_model(model)
    if args.base_format == "full":
        if peft_config is not None or has_adapter:
            raise ValueError(
                "base_format='full' trains every weight, but an adapter was passed too. Drop peft_config, or choose "
                "base_format='bf16' for LoRA on a bf16 base."
            )
        return None
    if has_adapter:
        name_base(cast(PeftModel, model))
        return peft_config  # TRL refuses the combination with its own message
    if peft_config is None:
        peft_config = default_lora_config()
        logger.info("No peft_config: training LoRA with r=%d on all linear layers.", peft_config.r)
    peft_config = check_is_lora(peft_config)
    if peft_config.target_modules == "all-linear":
        found = AutoConfig.from_pretrained(model, **_hub_arguments(args)) if isinstance(model, str) else model.config
        peft_config = keep_to_the_decoder(peft_config, cast(PretrainedConfig, found))
    return register_nvfp4_lora(peft_config) if args.base_format == "nvfp4" else peft_config


def _check_stored(model: str, base_format: str, hub: dict[str, Any]) -> None:
    """Refuse a quantized checkpoint before loading, except for bitsandbytes' 4-bit weights with nf4."""
    stored, where = stored_quantization(model, **hub)
    if stored is None or (base_format == "nf4" and stored.get("load_in_4bit")):
        return
    method = stored.get("quant_method") or stored.get("producer", {}).get("name") or "an unknown method"
    raise ValueError(
        f"base_format={base_format!r} needs unquantized weights, and {where} says that these are quantized ({method}). "
        "Name the unquantized model, or set base_format='nvfp4' for an NVFP4, 'nf4' for a bitsandbytes checkpoint."
    )


def _check_instance(model: nn.Module, base_format: str) -> None:
    packed = has_nvfp4(model)
    if base_format != "nf4" and packed != (base_format == "nvfp4"):
        raise ValueError(
            f"base_format={base_format!r}, but the {type(model).__name__} passed has {'' if packed else 'no '}NVFP4 "
            f"layers. Set base_format={'nvfp4' if packed else 'bf16'!r}, or pass the model's name."
        )


def _nf4_config(dtype: str | torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )


def by_name(function: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of `function` by name, including its `**kwargs`."""
    signature = inspect.signature(function)
    given = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def with_reward_models(reward_funcs: Any, args: QeRLConfig | QeRLRLOOConfig) -> Any:
    """Load named reward models as TRL would, without the policy's quantization, configuration and revision."""
    several = isinstance(reward_funcs, list)
    functions = reward_funcs if several else [reward_funcs]
    kind = args.distributed_state.distributed_type
    own = args.base_format == "nvfp4" or fsdp_version(args) is not None
    if not own or not any(isinstance(function, str) for function in functions):
        return reward_funcs
    given = args.model_init_kwargs or {}
    assert isinstance(given, dict), "TRL's configs parse JSON when they are built"
    options = {key: value for key, value in given.items() if key not in _OF_THE_POLICY}
    options.setdefault("trust_remote_code", args.trust_remote_code)
    if kind in (DistributedType.MULTI_GPU, DistributedType.DEEPSPEED):
        options["device_map"] = None
    with loaded_everywhere():
        loaded = [
            AutoModelForSequenceClassification.from_pretrained(function, num_labels=1, **options)
            if isinstance(function, str)
            else function
            for function in functions
        ]
    return loaded if several else loaded[0]
