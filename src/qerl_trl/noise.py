"""Adaptive quantization noise (AQN): Gaussian noise on the norm weights that feed linear layers, as a TRL callback.

The paper (arXiv 2510.11696, Section 3.3) adds Z ~ N(0, sigma^2 I) to RMSNorm weights while completions are sampled, with a
sigma that decays over the run, so that a quantized policy explores more. Four properties hold here:

- **Stateless.** The noise of a norm is a function of (seed, step, generation, name), `standard_noise`. Every rank, a vLLM
  worker and a resumed run compute the same values; nothing is sent or stored.
- **Never written.** `NormNoise` replaces the weight for the duration of one norm forward. The parameter itself is never
  touched: a checkpoint taken at any moment is clean, and switching the noise off restores nothing because nothing changed.
- **In fp32.** bf16 weights near 1 swallow noise below 2e-3 (an intended 5e-4 lands as 3e-5), which is half of the paper's
  schedule. The noisy weight is fp32, the norm's output is cast back, and `aqn/sigma_effective`, the rms of what landed in
  the weight that the norm computed with, equals `aqn/sigma`.
- **Exactly nothing at sigma 0.** The hooks then return at once: bit-identical to no callback.

What happens when, in the default scope `rollout`: a generation begins in training -> a new draw -> norms are noisy until it
ends -> log-probabilities and gradients are clean, as are evaluation and everything outside a training step. With scope
`policy` a draw stays in force until the next generation, so that the log-probabilities, the loss and its gradient belong to
the same noisy policy that sampled the batch.
"""

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .norms import canonical_name, find_noisy_norms, unwrap
from .schedules import SCHEDULES, NoiseSchedule, make_schedule

__all__ = [
    "SCHEDULES",
    "SCOPES",
    "AQNCallback",
    "NoiseDraw",
    "NoiseSchedule",
    "NormNoise",
    "canonical_name",
    "find_noisy_norms",
    "make_schedule",
    "standard_noise",
]

logger = logging.get_logger(__name__)

#: where the noise acts: "rollout" only while sampling (the paper), "policy" also in log-probabilities and gradients
SCOPES = ("rollout", "policy")

# norm modules that a NormNoise has hooks on: two of them on one norm would add up
_noisy_modules: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class NoiseDraw(NamedTuple):
    """The key of one draw: all that a worker needs to reproduce the noise of every norm.

    `sigma` is 0 where there is no noise (evaluation, stage 0).
    """

    sigma: float
    seed: int
    step: int
    generation: int


def standard_noise(seed: int, step: int, generation: int, name: str, numel: int) -> torch.Tensor:
    """Unit normal noise of one norm, a pure function of its arguments.

    Generator: the 32-byte blake2b digest of "seed:step:generation:name" seeds numpy's legacy `RandomState` (MT19937, polar
    method). Its stream is the one that numpy promises never to change (NEP 19), and it is computed in double precision on
    the CPU, so neither the torch version nor the device nor the instruction set changes a value; torch.randn keeps none of
    these promises.

    Args:
        seed: of the run.
        step: the trainer's global step at which the draw was made.
        generation: number of the generation within that step, from 0.
        name: canonical name of the norm module (`canonical_name`), for example "model.layers.0.input_layernorm".
        numel: length of the norm weight.

    Returns:
        (numel,) float32 on the CPU.
    """
    digest = hashlib.blake2b(f"{seed}:{step}:{generation}:{name}".encode(), digest_size=32).digest()
    random_state = np.random.RandomState(np.frombuffer(digest, dtype="<u4"))
    return torch.from_numpy(random_state.standard_normal(numel).astype(np.float32))


class NormNoise:
    """Noise on the norms of a live transformers model, through forward hooks.

    `set(draw)` chooses the noise, `with active():` applies it, `held = True` applies it in every forward of a norm that is
    in training mode (and in the recomputation of gradient checkpointing, which happens in the backward pass). During one
    forward of a norm the entry `_parameters["weight"]` is replaced by `weight + sigma * z` in fp32 and put back afterwards,
    also when the forward raises. A trainable norm gets its gradient through the sum. FSDP2, DDP and ZeRO-3 see no change,
    because between forwards the module is what they left there.

    Args:
        norms: {canonical name: module}, from `find_noisy_norms`.

    Raises:
        ValueError: `norms` is empty, or one of them already has the hooks of another NormNoise.
    """

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        if not norms:
            raise ValueError("There is no norm to put noise on. Pass what find_noisy_norms(model) returns.")
        for name, module in norms.items():
            if module in _noisy_modules:
                raise ValueError(
                    f"The norm {name!r} already carries adaptive quantization noise, and two noises would add up. Use one "
                    "AQNCallback a model; call detach() on the one that an interrupted run left behind."
                )
        self.norms = dict(norms)
        self.draw: NoiseDraw | None = None
        self.held = False
        self._depth = 0
        self._noise: dict[str, torch.Tensor] = {}
        self._landed: dict[str, torch.Tensor] = {}
        self._clean: dict[str, tuple[dict[str, nn.Parameter], torch.dtype]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, module in self.norms.items():
            self._install(name, module)

    def set(self, draw: NoiseDraw) -> None:
        """Take the noise of `draw` from now on. With sigma 0 the hooks do nothing at all."""
        if not math.isfinite(draw.sigma) or draw.sigma < 0:
            raise ValueError(f"sigma={draw.sigma} is not a standard deviation. Pass a finite number >= 0.")
        self.draw = draw
        self._landed = {}
        self._noise = {}
        if draw.sigma > 0:
            for name, module in self.norms.items():
                weight = module.weight
                numel = math.prod(getattr(weight, "ds_shape", weight.shape))  # ds_shape: ZeRO-3
                unit = standard_noise(draw.seed, draw.step, draw.generation, name, numel)
                self._noise[name] = (unit * draw.sigma).to(weight.device)

    def clear(self) -> None:
        """Forget the draw: clean from now on."""
        self.draw, self._noise, self._landed, self.held = None, {}, {}, False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Every norm forward inside is noisy, in training mode or not. May be nested."""
        self.enter()
        try:
            yield
        finally:
            self.exit()

    def enter(self) -> None:
        """Begin what `active` does, for callers that cannot use `with`."""
        self._depth += 1

    def exit(self) -> None:
        """End what `enter` began."""
        assert self._depth > 0, "exit() without enter()"
        self._depth -= 1

    @property
    def landed(self) -> int:
        """Number of norms that ran with the noise of the current draw."""
        return len(self._landed)

    def sigma_effective(self) -> float | None:
        """Rms of what the current draw really added to the weights that norms computed with; None if none ran noisy yet.

        Measured in the first noisy forward of each norm, on the weight used there. Equals sigma up to the sampling error
        of the noise itself, 1/sqrt(2 n) over n values.
        """
        if self.draw is not None and self.draw.sigma == 0:
            return 0.0
        if not self._landed:
            return None
        device = next(iter(self._landed.values())).device
        total = sum(value.to(device) for value in self._landed.values())
        count = sum(self._noise[name].numel() for name in self._landed)
        return math.sqrt(float(total) / count)

    def remove(self) -> None:
        """Take the hooks off. The model is then exactly as it was before."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self.norms.values():
            _noisy_modules.discard(module)

    def _install(self, name: str, module: nn.Module) -> None:
        def before(running: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            # a deepcopy of the model shares this closure and must stay clean
            if running is module and self._noise and (self._depth or (self.held and module.training)):
                return self._swap_in(name, module, args, kwargs)
            return None

        def after(running: nn.Module, args: tuple, output: Any) -> Any:
            if running is module and name in self._clean:
                return self._swap_out(name, module, output)
            return None

        # FSDP2 may shard the norm itself: its hooks gather before ours run and must reshard only after we put the clean
        # parameter back, hence prepend on the way out. always_call: gradient checkpointing stops its recomputation with an
        # exception in the middle of a forward.
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))
        _noisy_modules.add(module)

    def _swap_in(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        clean = module._parameters["weight"]
        noise = self._noise[name]
        if noise.device != clean.device:
            noise = self._noise[name] = noise.to(clean.device)
        dtype = torch.promote_types(clean.dtype, torch.float32)
        noisy = clean.to(dtype) + noise.to(dtype)
        if name not in self._landed:
            self._landed[name] = (noisy.detach() - clean.detach().to(dtype)).square().sum()
        hidden = args[0] if args else next(iter(kwargs.values()))
        replaced = {"weight": clean}
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and clean.dtype != dtype:
            # torch's fused kernels want input, weight and bias in one dtype (they compute in fp32 inside anyhow)
            if (bias := module._parameters.get("bias")) is not None:
                replaced["bias"] = bias
                module._parameters["bias"] = bias.to(dtype)
            args = (args[0].to(dtype), *args[1:]) if args else args
            kwargs = kwargs if args else {key: value.to(dtype) for key, value in kwargs.items()}
        self._clean[name] = (replaced, hidden.dtype)
        module._parameters["weight"] = noisy
        return args, kwargs

    def _swap_out(self, name: str, module: nn.Module, output: Any) -> Any:
        replaced, dtype = self._clean.pop(name)
        for key, parameter in replaced.items():
            module._parameters[key] = parameter
        # noise changes values, never dtypes: a norm whose own weight is fp32 may well return fp32 for a bf16 input
        if isinstance(output, torch.Tensor) and replaced["weight"].dtype not in (torch.float32, torch.float64):
            return output.to(dtype)
        return output


class AQNCallback(TrainerCallback):
    """Adaptive quantization noise in any TRL trainer that samples from its policy.

    Alone, with transformers generation, nothing else is needed:

        trainer = GRPOTrainer(..., callbacks=[AQNCallback()])

    It then recognises generation by the forward calls of the model (no gradient, no labels, a cache; an empty cache begins
    a new draw). [`QeRLGRPOTrainer`] instead brackets its rollouts with `with callback.generation(): ...`, which also serves
    vLLM; noise is never applied twice.

    The draw of a generation is keyed by (seed, global_step, number of the generation within that step), so a run resumed
    from a checkpoint draws the same noise again. The noise is active only between `on_step_begin` and `on_step_end`, and
    never in evaluation mode. With scope `policy`, a PEFT reference policy (beta > 0) is evaluated under the same noise, so
    that its KL measures the adapter; a separate reference model is clean.

    Logged with every training log line: `aqn/sigma` and `aqn/sigma_effective`, means over the draws since the last line.
    They reach `state.log_history`, the progress bar and callbacks that were added later. Trainer calls the integrations of
    `report_to` before any callback passed by the user, so these see the values only after `callback.log_first(trainer)`.

    Args:
        schedule: a name of `SCHEDULES` or a `NoiseSchedule`; the four following arguments belong to a name.
        sigma_start: standard deviation in the first noisy stage.
        sigma_end: standard deviation in the last stage.
        num_stages: stages of the run; stage 0 has no noise.
        entropy_target: nats a token, for schedule "entropy_target".
        scope: "rollout" or "policy" (`SCOPES`).
        seed: of the noise; the trainer's `args.seed` by default.
        norms: {canonical name: module} instead of what `find_noisy_norms(model)` finds.

    Attributes:
        driven: True when a trainer calls `generation()`; recognition by forward calls is then off. A trainer that drives
            sets it before its own `super().__init__`, so that `use_vllm` is accepted.
        draw: the `NoiseDraw` of the generation in progress; None outside of one.

    Raises:
        ValueError: impossible schedule or scope; a trainer whose rollouts the callback alone cannot reach (vLLM); a model
            without a norm to put noise on; a second AQNCallback.
        RuntimeError: the model was swapped during training; a rollout or a whole training step went by without noise.
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
        seed: int | None = None,
        norms: Mapping[str, nn.Module] | None = None,
    ) -> None:
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, sigma_start, sigma_end, num_stages, entropy_target)
        elif not isinstance(schedule, NoiseSchedule):
            raise ValueError(f"schedule={schedule!r} is neither a name ({', '.join(SCHEDULES)}) nor a NoiseSchedule.")
        if scope not in SCOPES:
            raise ValueError(f"scope={scope!r} is not one of {', '.join(map(repr, SCOPES))}.")
        self.schedule = schedule
        self.scope = scope
        self.seed = seed
        self.driven = False
        self.draw: NoiseDraw | None = None
        self._given_norms = norms
        self._noise: NormNoise | None = None
        self._model: nn.Module | None = None  # as the trainer knows it
        self._policy: nn.Module | None = None  # the module whose generate() samples
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._state = None
        self._in_step = False
        self._entered = False
        self._last: NoiseDraw | None = None
        self._measured = True
        self._unlogged: list[tuple[float, float | None]] = []
        self._uncached_prefix: torch.Tensor | None = None

    # ------------------------------------------------------------------ life on a model

    def attach(self, model: nn.Module, seed: int = 0) -> None:
        """Find the norms of `model` and hook them. Called at the start of training; harmless to call again."""
        self.detach()
        policy = next((module for module in unwrap(model).modules() if isinstance(module, GenerationMixin)), None)
        if policy is None:
            raise ValueError(
                f"{type(model).__name__} contains no transformers model that can generate, so there is no rollout to put "
                "noise on. Pass a causal language model of transformers, bare or in PEFT."
            )
        self._noise = NormNoise(self._given_norms if self._given_norms is not None else find_noisy_norms(model))
        self._model, self._policy = model, policy
        if self.seed is None:
            self.seed = seed
        self._handles = [
            policy.register_forward_pre_hook(self._hook(self._before_forward), with_kwargs=True),
            policy.register_forward_hook(self._hook(self._after_forward), always_call=True),
        ]

    def detach(self) -> None:
        """Take every hook off the model. Called at the end of training."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._noise is not None:
            self._noise.remove()
        self._noise = self._model = self._policy = None
        self._in_step = self._entered = False
        self._last, self.draw = None, None

    @property
    def norms(self) -> tuple[str, ...]:
        """Canonical names of the norms that carry the noise; empty while not attached."""
        return tuple(self._noise.norms) if self._noise is not None else ()

    # ------------------------------------------------------------------ driver 1: the trainer says when

    @contextmanager
    def generation(self, on_model: bool = True) -> Iterator[NoiseDraw]:
        """One rollout: a new draw if this is a training step, a clean one (sigma 0) in evaluation or outside a step.

        Args:
            on_model: apply the noise to the transformers model inside the context. False when another engine (vLLM)
                generates and applies the yielded draw itself.

        Yields:
            the draw; also `self.draw` while inside.

        Raises:
            RuntimeError: with `on_model`, the rollout ended and no noisy norm had run.
        """
        self.driven = True
        if not self._training():
            step = self._state.global_step if self._state is not None else 0
            self.draw = NoiseDraw(0.0, self.seed or 0, step, 0)
            on_model = False
        else:
            self.draw = self._new_draw()
        try:
            if on_model and self.draw.sigma > 0:
                with self._noise.active():
                    yield self.draw
                if not self._noise.landed:
                    raise RuntimeError(
                        f"Noise of sigma {self.draw.sigma:g} was drawn for {len(self.norms)} norms, but none of them ran "
                        "during the rollout: another model or engine generated. Use generation(on_model=False) and hand "
                        "the draw to that engine."
                    )
            else:
                yield self.draw
        finally:
            self.draw = None

    def metrics(self) -> dict[str, float]:
        """`aqn/sigma` and, once the noise acted on the transformers model, `aqn/sigma_effective` of the latest draw."""
        if self._last is None:
            return {}
        metrics = {"aqn/sigma": self._last.sigma}
        if (effective := self._noise.sigma_effective()) is not None:
            metrics["aqn/sigma_effective"] = effective
        return metrics

    # ------------------------------------------------------------------ driver 2: recognised by forward calls

    def _hook(self, method):
        # a plain function: deepcopy of the model copies bound methods and, with them, the callback and its modules
        def hook(module, *args):
            return method(*args) if module is self._policy else None

        return hook

    def _before_forward(self, args: tuple, kwargs: dict) -> None:
        if self.driven or not self._training() or not self._is_generation(args, kwargs):
            return
        if self._begins_generation(args, kwargs):
            self._new_draw()
        if self._last is not None and self._last.sigma > 0:
            self._noise.enter()
            self._entered = True

    def _after_forward(self, args: tuple, output: Any) -> None:
        if self._entered:
            self._entered = False
            self._noise.exit()

    @staticmethod
    def _is_generation(args: tuple, kwargs: dict) -> bool:
        # generate() always passes `use_cache`; the log-probability forwards of TRL pass labels and no cache
        return not torch.is_grad_enabled() and kwargs.get("labels") is None and "use_cache" in kwargs

    def _begins_generation(self, args: tuple, kwargs: dict) -> bool:
        cache = kwargs.get("past_key_values")
        if cache is not None:
            return int(cache.get_seq_length()) == 0
        # without a cache each forward gets the whole sequence; it continues the last one if it extends it by one column
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        before, self._uncached_prefix = self._uncached_prefix, ids
        return before is None or before.shape != ids[:, :-1].shape or not torch.equal(before, ids[:, :-1])

    # ------------------------------------------------------------------ draws

    def _training(self) -> bool:
        return self._in_step and self._policy is not None and self._policy.training

    def _new_draw(self) -> NoiseDraw:
        self._measure()
        step, total = self._state.global_step, self._state.max_steps
        generation = self._last.generation + 1 if self._last is not None and self._last.step == step else 0
        sigma = self.schedule.sigma(step, total, self._state.log_history)
        self._last = NoiseDraw(sigma, self.seed, step, generation)
        self._measured = False
        self._noise.set(self._last)
        self._noise.held = self.scope == "policy"
        return self._last

    def _measure(self) -> None:
        """Remember the latest draw for the log, once it has acted."""
        if not self._measured:
            self._unlogged.append((self._last.sigma, self._noise.sigma_effective()))
            self._measured = True

    # ------------------------------------------------------------------ trainer events

    def on_init_end(self, args, state, control, **kwargs):
        self._check_reach(args)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._check_reach(args)
        self._state = state
        self.attach(model, seed=args.seed)
        if (
            self.schedule.name == "entropy_target"
            and args.save_strategy == "steps"
            and state.save_steps % state.logging_steps
        ):
            logger.warning(
                f"schedule='entropy_target' follows the logged entropy, and save_steps={state.save_steps} is not a multiple "
                f"of logging_steps={state.logging_steps}: a run resumed from such a checkpoint logs other averages and "
                "will not repeat this one bit for bit. Make save_steps a multiple of logging_steps."
            )
        logger.info(f"Adaptive quantization noise on {len(self.norms)} norms, scope {self.scope}: {self.schedule}")

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if model is not self._model:
            raise RuntimeError(
                f"AQNCallback is attached to one {type(self._model).__name__} and the trainer now trains another "
                f"{type(model).__name__}. Use a callback of its own for each trainer, and do not replace the model "
                "during training."
            )
        self._state = state
        self._in_step = True
        self._noise.held = self.scope == "policy" and self._last is not None

    def on_step_end(self, args, state, control, **kwargs):
        self._in_step = False
        self._noise.held = False
        if self._last is None:
            raise RuntimeError(
                "A training step went by and AQNCallback saw no generation by the policy, so no noise would ever act. It "
                "belongs in a trainer that samples from its model with transformers generation (GRPOTrainer, RLOOTrainer); "
                "with another engine use QeRLGRPOTrainer."
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or "aqn/sigma" in logs or self._last is None:
            return
        self._measure()
        sigmas, effectives = zip(*self._unlogged, strict=True) if self._unlogged else ((self._last.sigma,), (None,))
        values = {"aqn/sigma": sum(sigmas) / len(sigmas)}
        if effectives := [value for value in effectives if value is not None]:
            values["aqn/sigma_effective"] = sum(effectives) / len(effectives)
        self._unlogged = []
        logs.update(values)
        # Trainer put a copy of `logs` into the history before it called us
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)

    def on_train_end(self, args, state, control, **kwargs):
        self.detach()

    def log_first(self, trainer) -> None:
        """Move this callback before the integrations of `report_to`, so that W&B, TensorBoard and others log its values.

        Trainer calls callbacks in a fixed order: its own, those of `report_to`, the user's, the progress bar.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            raise ValueError("This AQNCallback is not a callback of that trainer. Pass it as callbacks=[...] first.")
        callbacks.remove(self)
        callbacks.insert(0, self)

    def _check_reach(self, args) -> None:
        if getattr(args, "use_transformers_continuous_batching", False):
            raise ValueError(
                "AQNCallback cannot be used with use_transformers_continuous_batching=True: its rollouts bypass the model's "
                "generate(). Use the default transformers generation, or QeRLGRPOTrainer with use_vllm=True."
            )
        if getattr(args, "use_vllm", False) and not self.driven:
            raise ValueError(
                "AQNCallback alone reaches only rollouts by transformers, and use_vllm=True generates in another engine: the "
                "noise would silently do nothing. Use QeRLGRPOTrainer (or QeRLRLOOTrainer), which carries the noise into "
                "vLLM, or set use_vllm=False."
            )
