"""`QeRLConfig`: TRL's `GRPOConfig` plus the fields for a 4-bit base and adaptive quantization noise.

Every field of `GRPOConfig` keeps its name and meaning. Five defaults differ, to follow the paper (arXiv 2510.11696,
Table 4), for safety or a smaller footprint: `learning_rate`, `vllm_importance_sampling_mode`,
`vllm_gpu_memory_utilization`, `hub_private_repo` and `ddp_timeout` (`distributed.patience`).
"""

import copy
import json
import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trl import GRPOConfig, RLOOConfig

from .noise.callback import SCALES, SCOPES
from .noise.schedules import SCHEDULES, make_schedule
from .nvfp4.format import COMPUTES, SCALE_RULES
from .support import secrets
from .support.distributed import fsdp_version, patience
from .support.options import check_options
from .support.trl import OnlineConfig

logger = logging.getLogger(__name__)

BASE_FORMATS = ("nvfp4", "bf16", "nf4", "full")
#: name of `gradient_checkpointing` in newer transformers
_NEWER_NAME = "activation_checkpointing"
#: allowed values of a field
_CHOICES = {
    "base_format": BASE_FORMATS,
    "scale_rule": SCALE_RULES,
    "compute": COMPUTES,
    "aqn_schedule": SCHEDULES,
    "aqn_scope": SCOPES,
    "aqn_scale": SCALES,
    "rollout_probe": ("refuse", "warn", "off"),
}


class Range(NamedTuple):
    """Allowed values of a number: at least `least` (more than it with `above`); integers if `whole`; None if `none`."""

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


def _check_ranges(values: dict[str, Any], table: dict[str, Range], where: str = "") -> None:
    for name, allowed in table.items():
        if name in values and not allowed.holds(values[name]):
            raise ValueError(f"{where}{name}={values[name]!r} is out of range. Pass {allowed}.")


_COUNT, _COUNT_OR_NONE = Range(1), Range(1, none=True)
#: TRL's fields used as divisors (RLOO lacks some)
_COUNTS = {
    "per_device_train_batch_size": _COUNT, "gradient_accumulation_steps": _COUNT, "num_generations": _COUNT,
    "num_iterations": _COUNT, "max_completion_length": _COUNT, "steps_per_generation": _COUNT_OR_NONE,
    "generation_batch_size": _COUNT_OR_NONE, "updates_per_rollout": _COUNT_OR_NONE,
}  # fmt: skip
_RANGES = {
    "rollout_probe_steps": Range(0),
    "zero_advantage_patience": _COUNT,
    "rollout_timeout": Range(0, whole=False, none=True),
    "reward_timeout": Range(0, whole=False, none=True, above=True),
    "rollout_mismatch_threshold": Range(0, whole=False, none=True, above=True),
    "aqn_target_kl": Range(0, whole=False, none=True, above=True),
}
#: fields of `vllm_engine_kwargs` used in the memory plan
_RANGES_OF_AN_ENGINE = {
    "max_num_seqs": _COUNT_OR_NONE,
    "max_num_batched_tokens": _COUNT_OR_NONE,
    "kv_cache_memory_bytes": _COUNT_OR_NONE,
    "gpu_memory_utilization": Range(0, whole=False, none=True, above=True),
}


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(repr=False)  # a generated repr would show hub_token
class QeRLArguments(OnlineConfig):
    r"""
    Fields added by QeRL to a TRL config. Mixed into [`QeRLConfig`] and [`QeRLRLOOConfig`].

    Parameters:
        > Base model

        base_format (`str`, *optional*, defaults to `"nvfp4"`):
            Format of the base weights during training: `"nvfp4"` (frozen, 4-bit, blocks of 16, with an adapter), or a
            control arm: `"bf16"` and `"nf4"` (QLoRA) are frozen with an adapter, `"full"` trains every weight.
        scale_rule (`str`, *optional*, defaults to `"rtn"`):
            Rule for the block scales when bf16 weights are quantized at load: `"rtn"` (the paper), `"four_over_six"`
            or `"neighbor_sweep"`. See [`qerl_trl.nvfp4`].
        modules_to_not_convert (`list[str]`, *optional*):
            Linear layers that stay in bf16, by exact name or pattern. `lm_head` always does.
        compute (`str`, *optional*, defaults to `"w4a16"`):
            Arithmetic of the NVFP4 layers in rollout, prefill and update: `"w4a16"` (16-bit activations), or `"w4a8"`
            (activations and decoded weights rounded to FP8, see [`qerl_trl.nvfp4`]), faster above about 64 sequences,
            and in the whole update, on FP8 hardware (sm_89 and newer). Gradients take the rounding for the identity.

        > Adaptive quantization noise (paper, Section 3.3)

        aqn (`bool`, *optional*, defaults to `True`):
            Whether to add scheduled Gaussian noise to the RMSNorm weights while completions are generated.
        aqn_schedule (`str`, *optional*, defaults to `"exponential"`):
            Decay of sigma from `aqn_sigma_start` to `aqn_sigma_end`: `"exponential"` (the paper), `"linear"`,
            `"cosine"`, `"logarithmic"`, `"constant"`, or `"entropy_target"`, which steers sigma between the two so that
            the entropy of the sampling policy (`rollout/entropy`) follows `aqn_entropy_target`.
        aqn_sigma_start (`float`, *optional*, defaults to `1e-2`):
            Standard deviation of the noise in the first noisy stage (Table 4).
        aqn_sigma_end (`float`, *optional*, defaults to `5e-4`):
            Standard deviation of the noise in the last stage (Table 4).
        aqn_num_stages (`int`, *optional*, defaults to `10`):
            Number of training stages. Stage 0 has no noise.
        aqn_scope (`str`, *optional*, defaults to `"rollout"`):
            `"rollout"`: only the sampling policy is noisy (the paper). `"policy"`: log-probabilities and gradients of a
            batch use the noise of its rollout, for an on-policy update.
        aqn_scale (`str`, *optional*, defaults to `"absolute"`):
            Unit of sigma: `"absolute"` (the paper): of the norm weights (100-fold differences between models).
            `"relative"`: the rms of each norm's weights (of 1 + weight for Gemma); 0.03 is 3 %.
        aqn_target_kl (`float`, *optional*):
            Scale both sigmas at the start so that the larger one moves the policy by this KL, in nats per token,
            measured on sampled tokens. Not with FSDP and DeepSpeed.
        aqn_seed (`int`, *optional*):
            Seed of the noise. Defaults to `seed`.
        aqn_entropy_target (`float`, *optional*):
            Target for `aqn_schedule="entropy_target"`: entropy of the sampling policy, in nats per token.

        > Batch

        updates_per_rollout (`int`, *optional*):
            Optimizer steps per rollout (each completion is used once per `num_iterations`), the same on 1, 2 or 8 GPUs.
            Sets `gradient_accumulation_steps` if `generation_batch_size` is given, else the rollout to that many
            batches of one step. Defaults to `steps_per_generation / gradient_accumulation_steps`, as in TRL.

        > Rollout in vLLM

        share_weights (`bool`, *optional*, defaults to `True`):
            In colocate mode, vLLM reads the trainer's weights instead of a copy (moved to host memory while training by
            `vllm_enable_sleep_mode`). Needs `vllm_tensor_parallel_size=1`; under FSDP 2 every engine has a copy.
        rollout_mismatch_threshold (`float`, *optional*, defaults to `0.1`):
            Warn when the estimated KL divergence between rollout and trainer exceeds this value plus the KL of the
            noise (measured at start), in nats per token; end the run when it exceeds 10 times that in 3 consecutive
            rollouts. A tenth of the value applies to `rollout/logp_gap` and the KL without noise, both ideally zero.
            `None` disables the check.
        rollout_timeout (`float`, *optional*, defaults to `3600`):
            Seconds after which an unfinished rollout with vLLM, tools included, ends the run. 0: no limit.
        rollout_probe (`str`, *optional*, defaults to `"warn"`):
            At start, compare vLLM and the trainer on prompts of the run: without adapter, with a probe adapter, under
            noise. On disagreement `"refuse"` ends the run, `"warn"` (or an undecided result) logs it; `"off"` skips it.
        rollout_probe_steps (`int`, *optional*, defaults to `100`):
            Interval, in steps, of further comparisons without noise, each taking a second or two. 0: at start only.
        vllm_gpu_memory_utilization (`float`, *optional*):
            As in TRL. By default, the KV cache is planned (see `qerl-trl plan`): for all sequences, or the free memory.
            `vllm_max_model_length` defaults to the longest prompt of the data plus `max_completion_length`.
        vllm_engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM` in colocate mode, such as `{"enforce_eager": true}`.
        vllm_batch_invariant (`bool`, *optional*, defaults to `False`):
            Roll out in vLLM's batch-invariant mode (`VLLM_BATCH_INVARIANT=1`), with batch-invariant NVFP4 products: a
            token's log-probability in the engine does not depend on the rest of the batch. Slower. On a GPU, with
            `base_format="nvfp4"`. The trainer's own forward is not affected.

        > Update

        padding_free (`bool`, *optional*):
            Compute the update on a packed row of tokens, a shared prompt once; losses and micro-batches as in TRL. By
            default on if the model and the GPU support it; `True` requires it, `False` pads as TRL does.
        compile_layers (`bool`, *optional*):
            Compile the decoder layers of the trainer's model when training starts (torch.compile). Defaults to `True`
            on a CUDA device. A layer that fails to compile runs uncompiled, with one warning.
        gradient_checkpointing (`bool`, *optional*):
            Recompute activations in the backward pass: `True` in all decoder layers, `False` in none. By default in as
            many as memory demands (shown in the start banner and by `qerl-trl plan`), in all on a CPU, with FSDP and
            with DeepSpeed. Alias in newer transformers: `activation_checkpointing`.
        fused_lora (`bool`, *optional*, defaults to `True`):
            Compute linear layers with a LoRA adapter in a custom backward, layers with a common input (q/k/v, gate/up)
            together: PEFT's values up to rounding. Layers with other adapters use PEFT's path, with one warning.

        > Checkpoints

        allow_other_settings (`bool`, *optional*, defaults to `False`):
            Resume from a checkpoint of a run with other settings, with a warning that lists them. `False` refuses.

        > Publishing

        hub_base_model (`str`, *optional*):
            Hub id of the base, for pushing (`push_to_hub`) an adapter trained on a base in a local folder.

        > Checks

        zero_advantage_patience (`int`, *optional*, defaults to `10`):
            End the run after this many consecutive rollouts with only `None` rewards. Warn once if nothing is learned:
            as many rollouts with zero advantages, or fewer with at least 12 groups.
        reward_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds per batch after which an unfinished reward function ends the run. `None`: no limit.
    """

    base_format: str = _field("nvfp4", "Base weights: 'nvfp4'; as control arms 'bf16', 'nf4' or 'full' (no adapter).")
    scale_rule: str = _field("rtn", "Block scales at quantization: 'rtn', 'four_over_six' or 'neighbor_sweep'.")
    modules_to_not_convert: list[str] | None = _field(None, "Linear layers that stay in bf16.")  # noqa: RUF009
    compute: str = _field(
        "w4a16", "Products of NVFP4 layers: 'w4a16', or 'w4a8' (FP8: many sequences, sm_89 and newer)."
    )
    aqn: bool = _field(True, "Add scheduled noise to the RMSNorm weights during rollouts.")
    aqn_schedule: str = _field("exponential", f"Noise schedule: {', '.join(map(repr, SCHEDULES))}.")
    aqn_sigma_start: float = _field(1e-2, "Standard deviation in the first noisy stage.")
    aqn_sigma_end: float = _field(5e-4, "Standard deviation in the last stage.")
    aqn_num_stages: int = _field(10, "Number of stages; stage 0 has no noise.")
    aqn_scope: str = _field("rollout", "'rollout': only sampling is noisy (the paper); 'policy': the update too.")
    aqn_scale: str = _field("absolute", "Unit of sigma: 'absolute' (the paper) or 'relative' to each norm's rms.")
    aqn_target_kl: float | None = _field(None, "Scale sigma at start to this KL of the noise, in nats per token.")
    aqn_seed: int | None = _field(None, "Seed of the noise. Defaults to `seed`.")
    aqn_entropy_target: float | None = _field(None, "Entropy (nats per token) that 'entropy_target' steers to.")
    updates_per_rollout: int | None = _field(None, "Optimizer steps per rollout, whatever the number of processes.")
    share_weights: bool = _field(True, "Colocated vLLM reads the trainer's weights instead of a second copy.")
    rollout_mismatch_threshold: float | None = _field(
        0.1, "Warn when the rollout/trainer KL per token (nats) exceeds this value; end the run beyond 10 times that."
    )
    rollout_timeout: float | None = _field(3600, "End the run when a rollout with vLLM takes longer, in seconds.")
    rollout_probe: str = _field("warn", "Where vLLM and the trainer disagree at start: 'refuse', 'warn' or 'off'.")
    rollout_probe_steps: int = _field(100, "Compare vLLM and the trainer again every so many steps; 0: at start only.")
    vllm_gpu_memory_utilization: float | None = _field(
        None, "Share of the GPU for vLLM. Default: planned from what is free."
    )
    vllm_engine_kwargs: dict | str | None = _field(  # noqa: RUF009
        None, "Further arguments of a colocated vllm.LLM (JSON)."
    )
    vllm_batch_invariant: bool = _field(False, "Log-probabilities that do not depend on the batch; slower.")
    gradient_checkpointing: bool | None = _field(  # type: ignore[assignment]  # None is a further value
        None, "Recompute activations in the backward pass. Default: in as many layers as memory demands."
    )
    padding_free: bool | None = _field(None, "No padding in the update, shared prompts once. Default: where possible.")
    fused_lora: bool = _field(True, "Compute LoRA layers with their own backward, q/k/v and gate/up together.")
    compile_layers: bool | None = _field(None, "Compile the trainer's decoder layers. Default: on a CUDA device.")
    allow_other_settings: bool = _field(False, "Resume from a checkpoint whose run had other settings.")
    hub_base_model: str | None = _field(None, "Hub id of the base that a pushed adapter names, if `model` is a folder.")
    zero_advantage_patience: int = _field(10, "End the run after this many consecutive rollouts without any reward.")
    reward_timeout: float | None = _field(1800.0, "End the run when a reward function takes longer, in seconds.")

    def __post_init__(self):
        # TRL and transformers get True; `memory/of_trainer.py` then excludes layers
        newer = vars(self).get(_NEWER_NAME)  # takes precedence if both are given, as in transformers
        wanted = self.gradient_checkpointing if newer is None else newer
        self.recompute_as_needed = wanted is None
        self.gradient_checkpointing = self.recompute_as_needed or wanted
        if _NEWER_NAME in vars(self):  # or transformers warns about the older name, even if nobody passed it
            setattr(self, _NEWER_NAME, self.gradient_checkpointing)
        _check_ranges(vars(self), _COUNTS)  # TRL divides by them
        updates = self.updates_per_rollout
        if updates is not None and self.generation_batch_size is None and self.steps_per_generation is None:
            self.steps_per_generation = updates * self.gradient_accumulation_steps
        self.ddp_timeout = patience(self.ddp_timeout, self.rollout_timeout, self.reward_timeout)
        try:
            super().__post_init__()
        except ValueError as error:
            cause = ""
            if isinstance(error, json.JSONDecodeError):  # the message of json names no field
                given = [name for name in self._VALID_DICT_FIELDS if isinstance(vars(self).get(name), str)]
                cause = f". {' or '.join(given)} is not JSON. Pass names and values in JSON."
            elif "bf16/gpu" in str(error):  # transformers' "Your setup doesn't support bf16/gpu"
                cause = (
                    " PyTorch found no CUDA GPU; `qerl-trl doctor` says why. To train on the CPU: use_cpu=True "
                    "(--use_cpu true)."
                )
            raise ValueError(f"{error}{cause}") from error
        if updates is not None:
            self._cut_rollout(updates)
        secrets.check_places(vars(self))
        self.rollout_probe = self.rollout_probe or "off"  # YAML reads off as false
        _check_ranges(vars(self), _RANGES)
        engine = self.vllm_engine_kwargs or {}
        _check_ranges(engine, _RANGES_OF_AN_ENGINE, "vllm_engine_kwargs: ")  # type: ignore[arg-type]
        for name, choices in _CHOICES.items():
            if (value := vars(self)[name]) not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")
        if self.aqn:  # fail on an impossible schedule before the model is loaded
            bounds = self.aqn_sigma_start, self.aqn_sigma_end
            make_schedule(self.aqn_schedule, *bounds, self.aqn_num_stages, self.aqn_entropy_target)
        check_options(self)
        if self.use_transformers_continuous_batching:
            logger.warning(
                "use_transformers_continuous_batching=True casts the model to bf16, its float32 adapter included: "
                "small updates are lost. Use vLLM (use_vllm=True), which is also faster."
            )
        if (repository := vars(self).get("log_completions_hub_repo")) is not None:  # GRPO only
            logger.warning(
                "log_completions_hub_repo=%r uploads completions every two minutes without a check for secrets, and "
                "publicly if that repository is public. Set only log_completions=True to keep them in output_dir.",
                repository,
            )
        self.aqn_seed = self.seed if self.aqn_seed is None else self.aqn_seed
        self.hub_private_repo = True if self.hub_private_repo is None else self.hub_private_repo

    @property
    def place_model_on_device(self) -> bool | None:
        # with a full_eval option, transformers would leave the model on the CPU until after the start of an engine
        cast = self.bf16_full_eval or self.fp16_full_eval
        return True if cast and fsdp_version(self) is None and self.deepspeed_plugin is None else None

    def _cut_rollout(self, updates: int) -> None:
        """Set `gradient_accumulation_steps` for `updates_per_rollout` steps per rollout of `generation_batch_size`."""
        pieces = self.steps_per_generation
        assert pieces is not None, "TRL's config sets it"
        if pieces % updates:
            raise ValueError(
                f"updates_per_rollout={updates} does not divide the {pieces} backward passes of a rollout "
                f"(generation_batch_size={self.generation_batch_size}, "
                f"per_device_train_batch_size={self.per_device_train_batch_size}, {self.world_size} processes). Change "
                "one of them."
            )
        if self.gradient_accumulation_steps not in (1, pieces // updates):
            raise ValueError(
                f"updates_per_rollout={updates} needs gradient_accumulation_steps={pieces // updates} here, and "
                f"{self.gradient_accumulation_steps} was passed. Leave gradient_accumulation_steps out."
            )
        self.gradient_accumulation_steps = pieces // updates

    # Logs, trackers and files are made from it, so secrets are masked: TrainingArguments masks only its own `*_token`
    # fields, not the content of `model_init_kwargs`.

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = super().to_dict()
        if self.recompute_as_needed:
            told |= {name: None for name in ("gradient_checkpointing", _NEWER_NAME) if name in told}
        return secrets.cleaned(told)

    def __str__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}({fields})"

    __repr__ = __str__

    def __getstate__(self) -> dict:
        # Trainer pickles its arguments into training_args.bin
        return secrets.cleaned(vars(self), mask=None)

    def __deepcopy__(self, memo: dict) -> "QeRLArguments":
        copied = object.__new__(type(self))  # a copy in memory keeps its secrets, which pickling removes
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


@dataclass(repr=False)  # a generated repr would show hub_token
class QeRLConfig(QeRLArguments, GRPOConfig):  # type: ignore[misc]  # vllm_gpu_memory_utilization may be None
    r"""
    Configuration of [`QeRLGRPOTrainer`]: [`trl.GRPOConfig`], [`QeRLArguments`] and three other defaults.

    Parameters:
        learning_rate (`float`, *optional*, defaults to `1e-5`):
            The paper's value for LoRA on NVFP4 (Table 4), which uses 5e-6 for LoRA on bf16.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`):
            TRL's default `"sequence_mask"` drops most sequences once the rollout policy is noisy.
        hub_private_repo (`bool`, *optional*, defaults to `True`):
            Pushed repositories are private unless this is set to `False`.
        score_centering_top_k (`int`, *optional*):
            Score centering (arXiv 2609.20807): subtract from each token's gradient its expectation under the sampling
            policy, by vLLM's log-probabilities of this many tokens, 1 to 20. In single turns, with token-level losses.
            Of weighted gradients, 0 if no weight is cut off; `vllm_importance_sampling_correction=False`: unweighted.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]  # noqa: RUF005  (TRL's own form)

    learning_rate: float = _field(1e-5, "The initial learning rate for AdamW.")
    vllm_importance_sampling_mode: str = _field(
        "token_truncate", "How TRL corrects for the rollout/trainer mismatch: see `trl.GRPOConfig`."
    )
    score_centering_top_k: int | None = _field(
        None, "Score centering, by vLLM's log-probabilities of this many tokens."
    )


@dataclass(repr=False)  # a generated repr would show hub_token
class QeRLRLOOConfig(QeRLArguments, RLOOConfig):  # type: ignore[misc]  # as above
    """Configuration of [`QeRLRLOOTrainer`]: every field of [`trl.RLOOConfig`] and those of [`QeRLArguments`]."""

    _VALID_DICT_FIELDS = RLOOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]  # noqa: RUF005  (TRL's own form)

    learning_rate: float = _field(1e-5, "The initial learning rate for AdamW.")
