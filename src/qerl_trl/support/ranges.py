"""The ranges of a configuration's numbers, as a table."""

from typing import Any, NamedTuple


class Range(NamedTuple):
    """`least`: the smallest value; with `above` only what is larger. `none`: whether None leaves the number out."""

    least: float
    whole: bool = True
    none: bool = False
    above: bool = False

    def __str__(self) -> str:
        number = f"{'an integer' if self.whole else 'a number'} {'>' if self.above else '>='} {self.least:g}"
        return number + ", or None" * self.none

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.none
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return value > self.least if self.above else value >= self.least  # NaN is neither


#: of TRL's fields, by which its configuration divides
_COUNTS = {
    "per_device_train_batch_size": Range(1),
    "gradient_accumulation_steps": Range(1),
    "num_generations": Range(1),
    "num_iterations": Range(1),
    "max_completion_length": Range(1),
    "steps_per_generation": Range(1, none=True),
    "generation_batch_size": Range(1, none=True),
    "updates_per_rollout": Range(1, none=True),
}
_FIELDS = {
    "aqn_sigma_start": Range(0, whole=False),
    "aqn_sigma_end": Range(0, whole=False),
    "rollout_probe_steps": Range(0),
    "zero_advantage_patience": Range(1),
    "rollout_timeout": Range(0, whole=False, none=True),
    "reward_timeout": Range(0, whole=False, none=True, above=True),
    "rollout_mismatch_threshold": Range(0, whole=False, none=True, above=True),
}
#: of `vllm_engine_kwargs`, by which memory is planned
_OF_AN_ENGINE = {
    "max_num_seqs": Range(1, none=True),
    "max_num_batched_tokens": Range(1, none=True),
    "kv_cache_memory_bytes": Range(1, none=True),
    "gpu_memory_utilization": Range(0, whole=False, none=True, above=True),
}
_MAPPINGS = (
    "vllm_engine_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "model_init_kwargs",
    "lr_scheduler_kwargs",
    "gradient_checkpointing_kwargs",
)


def check_counts(args: Any) -> None:
    """Before TRL computes with them.

    Raises:
        `ValueError`: a number outside of its range.
    """
    _check({name: getattr(args, name) for name in _COUNTS if hasattr(args, name)}, _COUNTS)  # RLOO has not all of them


def check(args: Any) -> None:
    """
    Raises:
        `ValueError`: a number outside of its range, or what should be names and values is not.
    """
    for name in _MAPPINGS:
        if not isinstance(value := getattr(args, name, None) or {}, dict):
            raise ValueError(f"{name}={value!r} is not a mapping. Pass names and values.")
    _check(vars(args), _FIELDS)
    _check(args.vllm_engine_kwargs or {}, _OF_AN_ENGINE, "vllm_engine_kwargs: ")


def _check(values: dict[str, Any], table: dict[str, Range], where: str = "") -> None:
    for name, allowed in table.items():
        if name in values and not allowed.holds(values[name]):
            raise ValueError(f"{where}{name}={values[name]!r} is out of range. Pass {allowed}.")
