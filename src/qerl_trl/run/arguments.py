"""What a trainer was called with, whatever the signature of the trainer that the mixin stands in front of."""

import inspect
from collections.abc import Callable
from typing import Any

from accelerate.utils import DistributedType
from transformers import AutoModelForSequenceClassification

from ..config import QeRLConfig, QeRLRLOOConfig
from ..model.sharding import loaded_everywhere
from ..support.distributed import fsdp_version

#: of `model_init_kwargs`, what belongs to the policy alone
_OF_THE_POLICY = ("config", "quantization_config", "revision", "subfolder")


def by_name(function: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments that `function` would get, each by its name; what goes into its `**kwargs` too.

    Raises:
        `TypeError`: it does not take them.
    """
    signature = inspect.signature(function)
    given = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL and name in given:
            raise TypeError(
                f"{function.__qualname__} takes *{name}, and {len(given[name])} arguments have no name there. Pass them by name."
            )
    return given


def with_reward_models(reward_funcs: Any, args: QeRLConfig | QeRLRLOOConfig) -> Any:
    """`reward_funcs`, and a reward model that is named is loaded as TRL would load it, but for what concerns the policy alone: how that is
    quantized, its configuration and its revision.
    """
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
