"""Numbers of a configuration, and the ranges outside of which no run can be made of them."""

import json
from typing import Any

#: of `vllm_engine_kwargs`, what memory is planned with
_OF_AN_ENGINE = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization")
_MAPPING = "Pass names and values, such as {'max_num_seqs': 64}."


def check(args: Any) -> None:
    """
    Raises:
        `ValueError`: a number leaves nothing to do, or is none.
    """
    for name in ("per_device_train_batch_size", "max_completion_length"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise ValueError(f"{name}={value} leaves nothing to train on. Pass an integer >= 1.")
    engine = getattr(args, "vllm_engine_kwargs", None) or {}
    if not isinstance(engine, dict):
        raise ValueError(f"vllm_engine_kwargs={engine!r} is no mapping. {_MAPPING}")
    for name, value in engine.items():
        if name in _OF_AN_ENGINE and not isinstance(value, int | float | None):
            raise ValueError(f"vllm_engine_kwargs has {name}={value!r}, which is no number. Write it without quotes.")
    for name, least, off in (
        ("rollout_probe_steps", 0, ", or 0 for at the start only"),
        ("zero_advantage_patience", 1, ""),
    ):
        value = getattr(args, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r} is not a number of steps. Pass an integer >= 1{off}.")
    if args.rollout_timeout is not None and not args.rollout_timeout >= 0:
        raise ValueError(
            f"rollout_timeout={args.rollout_timeout} is not a time. Pass seconds > 0, or None or 0 for no limit."
        )
    if args.reward_timeout is not None and not args.reward_timeout > 0:
        raise ValueError(f"reward_timeout={args.reward_timeout} is not a time. Pass seconds > 0, or None for no limit.")
    if args.rollout_mismatch_threshold is not None and not args.rollout_mismatch_threshold > 0:
        raise ValueError(
            f"rollout_mismatch_threshold={args.rollout_mismatch_threshold} is not a KL. Pass nats per token > 0, or None for no limit."
        )


def no_mapping(args: Any, error: json.JSONDecodeError) -> ValueError:
    """In place of the error of an option that should be a mapping, or one in JSON, which does not name it."""
    name = next((name for name in args._VALID_DICT_FIELDS if getattr(args, name, None) == error.doc), "an option")
    return ValueError(f"{name}={error.doc!r} is no mapping ({error}). {_MAPPING}")
