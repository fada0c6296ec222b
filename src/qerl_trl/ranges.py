"""Numbers of a configuration, and the ranges outside of which no run can be made of them."""

import json
from pathlib import Path
from typing import Any

#: how many there are of something, with whether None leaves it out; TRL divides by them before anything else
_COUNTS = {
    "per_device_train_batch_size": False,
    "gradient_accumulation_steps": False,
    "num_generations": False,
    "num_iterations": False,
    "max_completion_length": False,
    "steps_per_generation": True,
    "generation_batch_size": True,
}
#: of `vllm_engine_kwargs`, what memory is planned with, and an example of every option that is names and values
_OF_AN_ENGINE = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization")
_MAPPINGS = {
    "vllm_engine_kwargs": '{"max_num_seqs": 64}',
    "generation_kwargs": '{"top_k": 20}',
    "chat_template_kwargs": '{"enable_thinking": false}',
    "model_init_kwargs": '{"attn_implementation": "sdpa"}',
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
}


def check_counts(args: Any) -> None:
    """Before TRL computes with them.

    Raises:
        `ValueError`: a number leaves nothing to do, or is none.
    """
    for name, optional in _COUNTS.items():
        value = getattr(args, name, 1)  # RLOO has not all of them
        if value is None and optional:
            continue
        if isinstance(value, str) or value is None:
            raise ValueError(f"{name}={value!r} is no number. Pass an integer >= 1, without quotes.")
        if value < 1:
            raise ValueError(f"{name}={value} leaves nothing to train on. Pass an integer >= 1.")


def check(args: Any) -> None:
    """
    Raises:
        `ValueError`: a number leaves nothing to do, or is none; or what should be names and values is not.
    """
    for name, example in _MAPPINGS.items():
        if not isinstance(value := getattr(args, name, None) or {}, dict):
            raise ValueError(f"{name}={value!r} is no mapping. Pass names and values, such as {example}")
    for name, value in (getattr(args, "vllm_engine_kwargs", None) or {}).items():
        if name not in _OF_AN_ENGINE or value is None:
            continue
        if not isinstance(value, int | float):
            raise ValueError(f"vllm_engine_kwargs has {name}={value!r}, which is no number. Write it without quotes.")
        if value <= 0:
            raise ValueError(f"vllm_engine_kwargs has {name}={value}, with which no engine runs. Pass a number > 0.")
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
    """In place of the error of an option that should be a mapping in JSON, or a file that holds one, which names neither."""
    given = {name: value for name in args._VALID_DICT_FIELDS if isinstance(value := getattr(args, name, None), str)}
    for name, value in given.items():
        if value == error.doc:
            example = _MAPPINGS.get(name, '{"name": "value"}')
            return ValueError(
                f"{name}={value!r} is no mapping ({error}). Pass names and values in JSON, such as {example}"
            )
    files = [
        f"{name}={value!r}"
        for name, value in given.items()
        if Path(value).expanduser().is_file() and Path(value).expanduser().read_text(errors="replace") == error.doc
    ]
    which = " or ".join(files or given) or "a configuration"
    return ValueError(f"{which} names a file that is no JSON ({error}). Mend that file, or leave the option out.")
