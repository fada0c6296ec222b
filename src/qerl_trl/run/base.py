"""What a trainer loads for its `base_format`: the arguments for transformers, the adapter, and the check of a model that comes ready."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import QeRLConfig, QeRLRLOOConfig
from ..model.loading import begin, loaded_everywhere, name_base, pretrained_kwargs
from ..model.lora import check_is_lora, default_lora_config, keep_to_the_decoder, register_nvfp4_lora
from ..nvfp4.config import NVFP4Config, stored_quantization
from ..nvfp4.linear import has_nvfp4

logger = logging.getLogger(__name__)


@contextmanager
def model_init(
    model: str | nn.Module,
    args: QeRLConfig | QeRLRLOOConfig,
    quantization_config: QuantizationConfigMixin | None,
) -> Iterator[QuantizationConfigMixin | None]:
    """Yield the quantization config for TRL, with `args.model_init_kwargs` completed for the time of loading.

    Restored afterwards: a model config or dtype object in there would not survive `TrainingArguments.to_json_string`.
    """
    if args.base_format == "nf4" and args.device.type == "cpu":
        _check_bitsandbytes_on_cpu()
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
        init.setdefault("dtype", legacy)  # its older name, as transformers reads it
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
        # what an NVFP4 checkpoint needs is a model config, what a dense one needs is the quantization config
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
    """Where and how files of the model are found, for `from_pretrained` of its configuration."""
    init = args.model_init_kwargs or {}
    assert isinstance(init, dict), "TRL's configs parse JSON when they are built"
    hub: dict[str, Any] = {key: init[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in init}
    return hub | {"trust_remote_code": init.get("trust_remote_code", args.trust_remote_code)}


def source_of(model: str | nn.Module, args: QeRLConfig | QeRLRLOOConfig) -> dict[str, Any]:
    """Of which revision, in which cache, a trainer loaded the model that it got by name; nothing is known of one that came ready."""
    if not isinstance(model, str):
        return {}
    hub = _hub_arguments(args)
    return {"revision": hub.get("revision") or "main", "cache_dir": hub.get("cache_dir")}


def adapter_config(
    model: str | nn.Module, args: QeRLConfig | QeRLRLOOConfig, peft_config: PeftConfig | None
) -> PeftConfig | None:
    """The adapter that training needs, checked; `None` where the model brings its own or none is wanted."""
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
    """Refuse a checkpoint that is quantized already, but for bitsandbytes' 4-bit weights in the arm that has such: before it is loaded."""
    stored, where = stored_quantization(model, **hub)
    if stored is None or (base_format == "nf4" and stored.get("load_in_4bit")):
        return
    method = stored.get("quant_method") or stored.get("producer", {}).get("name") or "an unknown method"
    raise ValueError(
        f"base_format={base_format!r} needs unquantized weights, and {where} says that these are quantized ({method}). Name the unquantized model, or "
        "set base_format='nvfp4' for an NVFP4 checkpoint, 'nf4' for one of bitsandbytes."
    )


def _check_instance(model: nn.Module, base_format: str) -> None:
    packed = has_nvfp4(model)
    if base_format != "nf4" and packed != (base_format == "nvfp4"):
        raise ValueError(
            f"base_format={base_format!r}, but the {type(model).__name__} passed has {'' if packed else 'no '}NVFP4 layers. Set "
            f"base_format={'nvfp4' if packed else 'bf16'!r}, or load it with{'out' if packed else ' quantization_config='}"
            f"{' NVFP4Config' if packed else 'NVFP4Config()'}."
        )


def _check_bitsandbytes_on_cpu() -> None:
    """Refuse releases (0.49 and newer) that repack the weights for AVX512-BF16 at the first evaluation, after which they have no gradient."""
    try:
        from bitsandbytes import functional
    except ImportError:
        return  # transformers says what to install
    if getattr(functional, "has_avx512bf16", bool)():
        raise RuntimeError(
            "base_format='nf4' on this CPU: bitsandbytes repacks the weights for AVX512-BF16, and they have no gradient afterwards. "
            "Install an older one (pip install 'bitsandbytes<0.49'), train on a GPU, or choose another base_format."
        )


def _nf4_config(dtype: str | torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )
