"""Adaptive quantization noise (AQN): Gaussian noise on the norm weights in front of linear layers, as a TRL callback.

The paper (arXiv 2510.11696, Section 3.3) adds Z ~ N(0, sigma^2 I) to RMSNorm weights while completions are sampled,
with a sigma that decays over the run, so that a quantized policy explores more. Four properties hold here:

- **Stateless.** The noise of a norm is a function of (seed, step, generation, name) alone (`generator`). Every rank, a
  vLLM worker and a resumed run compute the same values; nothing is sent or stored.
- **Never written.** `NormNoise` replaces the weight for the duration of one norm forward. The parameter itself is never
  touched: a checkpoint taken at any moment is clean, and there is nothing to restore without noise.
- **In fp32.** bf16 weights near 1 swallow noise below 2e-3 (an intended 5e-4 lands as 3e-5), which is half of the
  paper's schedule. The noisy weight is fp32, the norm's output is cast back, and `aqn/sigma_effective`, the measured
  rms of the added noise, equals `aqn/sigma`.
- **No effect at sigma 0.** The hooks then return at once: bit-identical to a run without the callback.

In the default scope `rollout`, each generation in training makes a new draw and norms are noisy until it ends;
log-probabilities and gradients are clean, as are evaluation and everything outside a training step. With scope `policy`
a draw lasts until the next generation: log-probabilities, loss and gradient belong to the noisy policy.

Amount: `schedules`. Norms: `norms`. Numbers: `generator`. Application: `hooks`. Timing: `AQNCallback`, here.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback, TrainerState
from transformers.utils import logging

from ..nvfp4.linear import decoded_weights
from ..support.names import unwrap
from ..support.phases import evaluation_mode
from .hooks import NoiseDraw, NormNoise
from .norms import find_noisy_norms, multiplier_rms
from .schedules import EntropyTargetSchedule, NoiseSchedule, make_schedule

logger = logging.get_logger(__name__)

#: scope of the noise: "rollout" only while sampling (the paper), "policy" also in log-probabilities and gradients
SCOPES = ("rollout", "policy")
#: unit of sigma: of the norm weights (the paper), or the rms of each norm's multiplier
SCALES = ("absolute", "relative")
#: least share of the noise's KL for which a norm is named at start; groups per step of the search for it
_DOMINANT, _GROUPS = 0.2, 8
#: tokens sampled to measure the noise, after the last ones of a prompt
_NEW_TOKENS, _PROMPT_TOKENS = 32, 192
#: KL in nats per token from which a warning is logged at start
_UNREADABLE = 1.0


class AQNCallback(TrainerCallback):
    """Adaptive quantization noise in any TRL trainer that samples from its policy.

    Alone, with transformers generation, nothing else is needed:

        trainer = GRPOTrainer(..., callbacks=[AQNCallback()])

    It then recognises generation by the forward calls of the model (no gradient, no labels, a cache; an empty cache
    begins a new draw). [`QeRLGRPOTrainer`] instead wraps its rollouts in `with callback.generation(): ...`, also for
    vLLM; noise is never applied twice. (With tools each turn is its own generation;
    `generation()` has one draw for all.)

    The draw of a generation is keyed by (seed, global_step, number of the generation within that step), so a resumed
    run draws the same noise again. The noise is active only between `on_step_begin` and `on_pre_optimizer_step`, and
    never in evaluation mode. With scope `policy`, a PEFT reference policy (beta > 0) is evaluated under the same noise;
    a separate reference model is clean. After an exception the hooks stay on: call `detach()` before further use.

    Logged with every training log line: `aqn/sigma`, `aqn/sigma_effective`, `aqn/share` (median over the norms of sigma
    divided by the rms of the norm's multiplier), and after [`measure`] `aqn/expected_kl`, means over the draws since
    the last line, in `state.log_history`, the progress bar and later callbacks; in `report_to` only after
    `callback.log_first(trainer)`.

    Args:
        schedule: a name in `schedules.SCHEDULES`, with the four following arguments, or a `NoiseSchedule`.
        sigma_start: standard deviation in the first noisy stage.
        sigma_end: standard deviation in the last stage.
        num_stages: stages of the run; stage 0 has no noise.
        entropy_target: nats per token, for schedule "entropy_target"; in scope "rollout" only with a QeRL trainer.
        scope: "rollout" or "policy" (`SCOPES`).
        scale: "absolute", or "relative": sigma times the rms of each norm's weight (of 1 + weight for Gemma).
        target_kl: KL of the noisy from the clean policy at the larger of both sigmas, nats per token. [`measure`]
            multiplies both sigmas by the factor that gives it.
        seed: of the noise; the trainer's `args.seed` by default.
        norms: {canonical name: module} in place of `find_noisy_norms(model)`.

    Attributes:
        explicit: rollouts are wrapped in `generation()` (set by `from_args`), not recognised; allows `use_vllm`.
        engine: vLLM generates; `generation()` leaves the transformers model clean.
        draw: the `NoiseDraw` of the current generation; None outside of one (clean).
        last_draw: of the latest generation in training, ended or not; None before the first.
        kl: KL at `schedule.sigma_max` before training, nats per sampled token; None before [`measure`].
        dominant: norms with more than 20 % of this KL -> their share.

    Raises:
        ValueError: invalid schedule or scope; a trainer with vLLM rollouts; no suitable norm; a second AQNCallback.
        RuntimeError: a rollout or a training step got no noise; the entropy that steers sigma is not logged.
    """

    def __init__(
        self,
        schedule: str | NoiseSchedule = "exponential",
        *,
        sigma_start: float = 1e-2,
        sigma_end: float = 5e-4,
        num_stages: int = 10,
        entropy_target: float | None = None,
        scope: str = "rollout",
        scale: str = "absolute",
        target_kl: float | None = None,
        seed: int | None = None,
        norms: Mapping[str, nn.Module] | None = None,
    ) -> None:
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, sigma_start, sigma_end, num_stages, entropy_target)
        for name, given, allowed in (("scope", scope, SCOPES), ("scale", scale, SCALES)):
            if given not in allowed:
                raise ValueError(f"{name}={given!r} is not one of {', '.join(map(repr, allowed))}.")
        if isinstance(schedule, EntropyTargetSchedule) and scope == "policy":
            schedule = dataclasses.replace(schedule, metric="entropy")  # the trainer's own policy is the noisy one
        self.schedule, self.scope, self.scale, self.seed = schedule, scope, scale, seed
        self.target_kl = target_kl
        self.kl: float | None = None
        self.dominant: dict[str, float] = {}
        self._rms: dict[str, float] = {}
        self.explicit = self.engine = False
        self.draw: NoiseDraw | None = None
        self.last_draw: NoiseDraw | None = None
        self._seed = 0
        self._given_norms = norms
        self._noise: NormNoise | None = None
        self._sampling_model: nn.Module | None = None  # the module that samples by generate()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._state: TrainerState | None = None
        self._in_step = self._entered = False
        self._ran = False  # whether the policy has computed anything since the latest generation began
        self._measured = True
        self._reported: float | None = None
        self._unlogged: list[dict[str, float]] = []
        self._uncached_prefix: torch.Tensor | None = None

    @classmethod
    def from_args(cls, args) -> "AQNCallback":
        """Make the callback of a [`QeRLConfig`], for a trainer that wraps its rollouts in `generation()`."""
        names = (
            "schedule", "sigma_start", "sigma_end", "num_stages", "entropy_target", "scope", "scale", "target_kl",
            "seed",
        )  # fmt: skip
        callback = cls(**{name: vars(args)[f"aqn_{name}"] for name in names})
        callback.explicit, callback.engine = True, args.use_vllm
        return callback

    def attach(self, model: nn.Module, seed: int = 0) -> None:
        """Find the norms of `model`, once per model, and hook them: at the start of training, or earlier."""
        policy = next(m for m in unwrap(model).modules() if isinstance(m, PreTrainedModel) and m.can_generate())
        norms = self._given_norms
        if norms is None:
            known = self._noise if policy is self._sampling_model else None
            norms = known.norms if known is not None else find_noisy_norms(model)
        self.detach()  # always hook again: hooks of ZeRO-3 gather a weight, and must come before ours
        self._noise = NormNoise(norms)
        self._rms = multiplier_rms(norms)
        self._sampling_model = policy
        self._seed = seed if self.seed is None else self.seed
        self._handles = [
            policy.register_forward_pre_hook(self._hook(self._before_forward), with_kwargs=True),
            policy.register_forward_hook(self._hook(self._after_forward), always_call=True),
        ]

    def detach(self) -> None:
        """Remove every hook from the model, at the end of training."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._noise is not None:
            self._noise.remove()
        self._noise = self._sampling_model = None
        self._in_step = self._entered = False
        self.last_draw = self._reported = self.draw = None
        self._measured = True

    @property
    def norms(self) -> tuple[str, ...]:
        """Canonical names of the noisy norms; empty while not attached."""
        return tuple(self._noise.norms) if self._noise is not None else ()

    def values(self) -> dict[str, float]:
        """Return the values to log of the latest draw."""
        found = {"aqn/sigma": self.sigma, "aqn/sigma_effective": self.sigma_effective}
        found["aqn/share"] = self.sigma * statistics.median(self.shares)
        found |= {"aqn/sigma_max": self.schedule.sigma_max} if self.target_kl is not None else {}
        return found if self.kl is None else found | {"aqn/expected_kl": self.expected_kl}

    @property
    def shares(self) -> list[float]:
        """Standard deviation of the noise per sigma and per rms of the multiplier, of each norm."""
        return [1.0 if self.scale == "relative" else 1 / max(rms, 1e-12) for rms in self._rms.values()]

    @property
    def expected_kl(self) -> float:
        """KL of the latest draw, nats per token: the measured one times sigma squared. 0 if unmeasured."""
        return (self.kl or 0.0) * (self.sigma / (self.schedule.sigma_max or 1.0)) ** 2

    @property
    def sigma(self) -> float:
        """Standard deviation of the latest draw; 0 before the first."""
        return self.last_draw.sigma if self.last_draw is not None else 0.0

    @property
    def sigma_effective(self) -> float:
        """Rms of the latest draw's noise in the norm weights; NaN before a noisy norm ran. Assigned for an engine."""
        if self._reported is not None:
            return self._reported
        effective = self._noise.sigma_effective() if self._noise is not None and self.last_draw is not None else 0.0
        return math.nan if effective is None else effective

    @sigma_effective.setter
    def sigma_effective(self, value: float) -> None:
        self._reported = value

    @contextmanager
    def generation(self) -> Iterator[NoiseDraw]:
        """Context manager for one rollout: a new draw in a training step, else (evaluation) a clean one with sigma 0.

        The noise acts on the transformers model, unless `engine` is set: vLLM then applies the draw itself.

        Yields:
            the draw; also `self.draw` while inside.

        Raises:
            RuntimeError: at the end of a transformers rollout, if no noisy norm ran; in the first rollout, which has no
            noise, if the model itself did not run.
        """
        self.explicit, self._ran = True, False
        training = self._training()
        step = self._state.global_step if self._state is not None else 0
        draw = self.draw = self._new_draw() if training else NoiseDraw(0.0, self._seed, step, 0)
        noise = None
        try:
            if training and not self.engine:
                self._attached().enter()
                noise = self._attached()
            yield draw
            noisy = draw.sigma > 0
            ran = noise is None or (noise.landed if noisy else self._ran or not self.schedule.ever_noisy)
            if not ran:
                drawn = f"Noise of sigma {draw.sigma:g} was drawn" if noisy else "Noise is to come"
                raise RuntimeError(
                    f"{drawn} for {len(self.norms)} norms, but none of them ran during the rollout: another model "
                    "generated. Sample from trainer.model, pass aqn=False, or set callback.engine = True and give that "
                    "engine callback.draw."
                )
        finally:
            self.draw = None
            if noise is not None:
                noise.exit()

    @contextmanager
    def noisy(self) -> Iterator[None]:
        """Context manager that applies the latest draw to the transformers model in any mode, for measurements."""
        with self._attached().active():
            yield

    @contextmanager
    def under(self, draw: NoiseDraw) -> Iterator[None]:
        """Context manager that applies `draw` to the transformers model before training, for measurements."""
        noise = self._attached()
        noise.set(draw)
        try:
            with noise.active():
                yield
        finally:
            noise.clear()
            self._reported = None

    @torch.no_grad()
    def measure(self, model: nn.Module, prompts: Sequence[Sequence[int]], temperature: float = 1.0) -> None:
        """Sample a few tokens after prompts (token ids), measure `kl` and `dominant` there, and scale sigma for
        `target_kl`. Before training, on an unsharded model, in every process. Takes about 50 forwards of few tokens.
        """
        device, length = next(model.parameters()).device, min(_PROMPT_TOKENS, *map(len, prompts))
        ids = torch.tensor([prompt[-length:] for prompt in prompts], device=device)
        scales = self._rms if self.scale == "relative" else dict.fromkeys(self._rms, 1.0)

        def forward(pair: torch.Tensor) -> torch.Tensor:
            return model(input_ids=pair, use_cache=False).logits[:, length - 1 : -1] / temperature

        def kl_of(sigma: float, names: Sequence[str], pairs: int) -> float:
            total = 0.0
            for number in range(pairs):  # a draw for each: their effects differ
                with self.under(NoiseDraw(sigma, self._seed, 0, number, {n: scales[n] * (n in names) for n in scales})):
                    rows = zip(forward(ids[2 * number :][:2]), clean[number], sampled[2 * number :], strict=False)
                total += sum(_kl(noisy[own], before[own]) for noisy, before, own in rows)
            return total / int(sampled[: 2 * pairs].sum())

        def dominant(names: Sequence[str], whole: float = 0.0) -> Iterator[tuple[str, float]]:
            step = -(-len(names) // _GROUPS)
            parts = [names[i : i + step] for i in range(0, len(names), step)]
            found = [kl_of(sigma, part, 1) for part in parts]
            whole = whole or sum(found) or 1.0
            for part, share in zip(parts, (each / whole for each in found), strict=True):
                if share > _DOMINANT:
                    yield from [(part[0], share)] if len(part) == 1 else dominant(part, whole)

        with (
            evaluation_mode(model),
            decoded_weights(model),
            torch.compiler.set_stance("force_eager"),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(self._seed)
            own = cast(Any, model).generation_config.eos_token_id
            sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            config = GenerationConfig(**sampling, max_new_tokens=_NEW_TOKENS, eos_token_id=own, pad_token_id=0)
            asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": config}
            ids = cast(Any, model).generate(**asked)  # as TRL does
            ends = torch.tensor(-1 if own is None else own, device=device)
            ended = torch.isin(ids[:, length:], ends).int()
            sampled = ended.cumsum(1) == ended
            clean, sigma = [forward(pair) for pair in ids.split(2)], self.schedule.sigma_max
            kl = kl_of(sigma, self.norms, len(clean))
            below, above = 0.0, math.inf
            for _ in range(12):
                if self.target_kl is None or abs(kl / self.target_kl - 1) < 0.05:
                    break
                below, above = (max(below, sigma), above) if kl < self.target_kl else (below, min(above, sigma))
                sigma *= min(max((self.target_kl / max(kl, 1e-9)) ** 0.5, 0.1), 10.0)
                if not below < sigma < above:  # steeper than its square
                    sigma = (below * above) ** 0.5
                kl = kl_of(sigma, self.norms, len(clean))
            self.dominant = dict(dominant(self.norms))
        # as on the main process: sigma must not differ in the last bit
        sigma, self.kl = broadcast_object_list([sigma, kl])
        self._scale_to(sigma)
        if kl > _UNREADABLE:
            logger.warning(
                f"The noise moves the policy by {kl:.2g} nats per token at sigma {sigma:.3g} ({self.scale}): sampled "
                "text will hardly make sense. Lower aqn_sigma_start, or set aqn_target_kl=0.05."
            )

    def _scale_to(self, sigma: float) -> None:
        """Multiply both sigmas of the schedule so that the larger one is `sigma`."""
        schedule = self.schedule
        if sigma != schedule.sigma_max:
            start, end = (s * (sigma / schedule.sigma_max) for s in (schedule.sigma_start, schedule.sigma_end))
            self.schedule = dataclasses.replace(schedule, sigma_start=start, sigma_end=end)

    def __str__(self) -> str:
        schedule, shares = self.schedule, sorted(self.shares)
        of = [f"{100 * schedule.sigma_max * shares[i]:.2g}" for i in (0, len(shares) // 2, -1)]
        text = (
            f"{schedule.name}, sigma {schedule.sigma_start:.3g} -> {schedule.sigma_end:.3g} in {schedule.num_stages} "
            f"stages, scope {self.scope}, {self.scale}\nat most {of[0]}, {of[1]}, {of[2]} % of a norm's rms (smallest, "
            "median, largest)"
        )
        if self.kl is not None:
            text += f", KL {self.kl:.2g} nats per token"
        return text + "".join(f", {100 * share:.0f} % of it from {name}" for name, share in self.dominant.items())

    def _hook(self, method):
        # a plain function: a deepcopy of the model would copy a bound method with the callback and its modules
        def hook(module, *args):
            return method(*args) if module is self._sampling_model else None

        return hook

    def _before_forward(self, args: tuple, kwargs: dict) -> None:
        self._ran = True
        # generate() always passes `use_cache`; the log-probability forwards of TRL pass labels and no cache
        generates = not torch.is_grad_enabled() and kwargs.get("labels") is None and "use_cache" in kwargs
        if self.explicit or not self._training() or not generates:
            return
        if self._begins_generation(args, kwargs):
            self._new_draw()
        if self.last_draw is not None and self.last_draw.sigma > 0:
            self._attached().enter()
            self._entered = True

    def _after_forward(self, args: tuple, output: Any) -> None:
        if self._entered:
            self._entered = False
            self._attached().exit()

    def _begins_generation(self, args: tuple, kwargs: dict) -> bool:
        cache = kwargs.get("past_key_values")
        if cache is not None:
            return int(cache.get_seq_length()) == 0
        # without a cache each forward gets the whole sequence; it continues the last one if it extends it by one column
        ids = kwargs.get("input_ids", args[0] if args else None)
        before, self._uncached_prefix = self._uncached_prefix, ids
        return before is None or ids is None or not torch.equal(before, ids[:, :-1])

    def _training(self) -> bool:
        return self._in_step and self._sampling_model is not None and self._sampling_model.training

    def _new_draw(self) -> NoiseDraw:
        self._measure()
        assert self._state is not None, "only in a training step"
        step = self._state.global_step
        generation = self.last_draw.generation + 1 if self.last_draw is not None and self.last_draw.step == step else 0
        sigma = self.schedule.sigma(step, self._state.max_steps, self._state.log_history)
        if any(weight.requires_grad for weight in self._attached().weights.values()):  # trained norms
            self._rms = multiplier_rms(self._attached().norms)
        scales = self._rms if self.scale == "relative" else None
        self.last_draw = NoiseDraw(sigma, self._seed, step, generation, scales)
        self._reported, self._measured = None, False
        self._attached().set(self.last_draw)
        self._attached().in_training = self.scope == "policy"
        return self.last_draw

    def _attached(self) -> NormNoise:
        assert self._noise is not None, "attach() comes first"
        return self._noise

    def _measure(self) -> None:
        """Record sigma of the latest draw for the log, once the draw was applied."""
        if not self._measured:
            self._unlogged.append(self.values())
            self._measured = True

    def on_init_end(self, args, state, control, **kwargs):
        self._check_reach(args)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._check_reach(args)
        self._state = state
        self.attach(model, seed=args.seed)
        if self.target_kl is not None:
            found = [entry["aqn/sigma_max"] for entry in state.log_history if "aqn/sigma_max" in entry]
            if not found and self.kl is None:
                raise ValueError(
                    f"aqn_target_kl={self.target_kl} needs a forward before training, which FSDP, DeepSpeed and a "
                    "plain trainer do not make. Set aqn_sigma_start instead, or call callback.measure(model, prompts)."
                )
            if found:  # a resumed run keeps its sigma
                self._scale_to(found[-1])
        logger.info(f"Adaptive quantization noise on {len(self.norms)} norms, scope {self.scope}: {self.schedule}")

    def on_step_begin(self, args, state, control, **kwargs):
        self._state, self._in_step = state, True
        self._attached().in_training = self.scope == "policy" and self.last_draw is not None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # all forwards and backwards of the step are done; other callbacks may sample in on_step_end before ours
        self._in_step = False
        self._attached().in_training = False

    def on_step_end(self, args, state, control, **kwargs):
        if self.last_draw is None:
            raise RuntimeError(
                "A training step ended, and AQNCallback saw no generation by the policy. Use it in a trainer that "
                "samples with transformers' generate() (GRPOTrainer, RLOOTrainer), or use QeRLGRPOTrainer."
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or self.last_draw is None:
            return
        self._measure()
        metric = self.schedule.metric if isinstance(self.schedule, EntropyTargetSchedule) else None
        if metric and metric not in logs and not any(metric in entry for entry in state.log_history):
            raise RuntimeError(
                f"schedule='entropy_target' steers by {metric!r}, which this run does not log: sigma would stay at "
                f"{self.sigma:g}. Use aqn_scope='policy', where the trainer logs the noisy policy's entropy, or "
                "another schedule."
            )
        draws, self._unlogged = self._unlogged or [self.values()], []
        if "aqn/sigma" in logs:  # the trainer logs them
            return
        known = {name: [draw[name] for draw in draws if not math.isnan(draw[name])] for name in draws[0]}
        values = {name: sum(found) / len(found) for name, found in known.items() if found}
        logs.update(values)
        # Trainer put a copy of `logs` into the history before it called us
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)

    def on_train_end(self, args, state, control, **kwargs):
        self.detach()

    def log_first(self, trainer) -> None:
        """Move this callback before the integrations of `report_to`, so that they log its values."""
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def _check_reach(self, args) -> None:
        batching = getattr(args, "use_transformers_continuous_batching", False)
        if batching or (getattr(args, "use_vllm", False) and not self.explicit):
            raise ValueError(
                "AQNCallback affects only rollouts by generate(), and "
                f"{'use_transformers_continuous_batching' if batching else 'use_vllm'}=True bypasses it. Leave that "
                "out, or use QeRLGRPOTrainer (QeRLRLOOTrainer) with use_vllm=True, which carries the noise into vLLM."
            )
        if self.scope == "rollout" and not self.explicit:
            logger.warning_once(
                "AQNCallback with scope='rollout': this trainer treats noisy completions as the clean policy's. Use "
                "QeRLGRPOTrainer, which corrects the update, or scope='policy', which needs no correction."
            )


def _kl(noisy: torch.Tensor, clean: torch.Tensor) -> float:
    """Return the sum over tokens of KL(noisy || clean) of logits (T, V), in nats."""
    of, to = noisy.float().log_softmax(-1), clean.float().log_softmax(-1)
    return (of.exp() * (of - to)).sum().item()
