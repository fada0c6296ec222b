"""The check at start: vLLM must agree with the trainer without an adapter, with a strong one, and under noise.

The engine completes a few prompts of the run greedily, and the trainer scores the same tokens. All numbers are mean
absolute differences of log-probabilities, in nats:

    clean difference   engine and trainer, adapter off
    rounding           trainer and trainer, in two valid arithmetics: its own, and float32 ([`other_arithmetic`])
    effect             trainer with and without a probe adapter, on tokens sampled without it
    difference         engine and trainer, both with the probe adapter, on tokens sampled by the engine with it

The rules, with the rounding of the same tokens:

    clean difference <= CLEAN * rounding + floor      the same base
    difference       <= CHANGED * rounding            the same adapter

A correct engine differs by 0.3 to 1.9 times the rounding, for any model, adapter and size. The probe adapter has a
random B, scaled to move each adapted layer's output by the same fraction of its size. The fraction is the smallest with

    effect >= ENOUGH * max(clean difference, rounding with the adapter)

or else the one with the largest ratio, below the effects of a chaotic pretrained model (CHAOTIC). It is chosen on the
trainer alone, since a fault enlarges the engine's difference. Below a ratio of CONTRAST the check is undecided, and
the run continues. The trainer's own adapter is restored bit for bit and synced again.

The same rules check noise on the norms (`Probe.noise`). A model without an adapter has the first rule only.

The thresholds were measured on healthy and faulty models: docs/source/rollout.md#the-check-at-start.
"""

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate.utils import gather_object, is_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from trl.data_utils import maybe_apply_chat_template

from ..noise.hooks import NoiseDraw
from ..nvfp4.linear import NVFP4Linear, compute_dtype, decode_into, decoded_weights, linear
from ..support.names import local_tensor, reshard, set_whole
from ..support.phases import evaluation_mode
from .engine import Completion, Contents, Engine, RolloutError, Sampling
from .spec import active_adapter, rollout_layers

logger = logging.getLogger(__name__)
PROMPTS, PROMPT_TOKENS, _NEW_TOKENS = 8, 64, 16
_SAMPLING = Sampling(max_tokens=_NEW_TOKENS, ignore_eos=True)
CLEAN, CHANGED = 3.0, 3.5
#: ratio of effect to rounding: undecided below the first, sufficient at the second
CONTRAST, ENOUGH = 10.0, 25.0
#: effect in nats of a chaotic pretrained model
CHAOTIC = 3.0
#: tolerance in nats: small means scatter, and logits are themselves rounded
FLOOR = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 5e-3}
#: relative change of each layer's output by the probe adapter
FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
#: standard deviations of the probe noise on the norms
SIGMAS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
#: changes the trainer's model by a size, for good or inside the returned context
Change = Callable[[float], contextlib.AbstractContextManager[None] | None]


@dataclass(frozen=True)
class Clean:
    """Engine and trainer with a zero adapter: greedy completions, the trainer's log-probabilities of their tokens
    (prompts, new tokens), clean difference and rounding."""

    completions: list[Completion]
    scored: torch.Tensor
    difference: float
    rounding: float


@dataclass(frozen=True)
class ProbeResult:
    """Measured differences (see the module), in nats. `size`: fraction or sigma; it and the later fields are `None`
    without an adapter or noise, or if no size moved the trainer enough. `rounding_there`: rounding of `difference`."""

    base_difference: float
    rounding: float
    floor: float
    kind: str | None = None
    effect: float | None = None
    size: float | None = None
    difference: float | None = None
    rounding_there: float | None = None

    @property
    def undecided(self) -> bool:
        """Whether no size of the adapter or the noise moved the trainer enough for a verdict."""
        return self.kind is not None and self.size is None

    @property
    def fault(self) -> str | None:
        """Description of the disagreement between engine and trainer, if any."""
        clean, changed = self.limits
        if not self.base_difference <= clean:
            return (
                f"clean log-probabilities differ by {self.base_difference:.3f} nats (at most {clean:.3f}): other "
                "weights or norms"
            )
        if self.difference is None or self.difference <= changed:
            return None
        return (
            f"the {self.kind} acts otherwise: {self.difference:.3f} nats apart (at most {changed:.3f}), with an effect "
            f"of {self.effect:.3f} on the trainer"
        )

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of the clean difference, and of the difference with adapter or noise."""
        return CLEAN * self.rounding + self.floor, CHANGED * max(self.rounding_there or 0.0, self.floor / 4)

    def __str__(self) -> str:
        clean = f"log-probabilities differ by {self.base_difference:.4f} nats (rounding {self.rounding:.4f})"
        if self.kind is None:
            return clean
        if self.undecided:
            return f"{clean}; undecided: no probe {self.kind} moves them enough ({self.effect:.4f})"
        return (
            f"{clean}, by {self.difference:.4f} with {self.kind} {self.size:g}, which moves them by {self.effect:.3f}"
        )


@dataclass(frozen=True)
class Probe:
    """Comparison of an engine and the trainer's model on the same prompts. Every process calls every method;
    collective like a rollout.

    Args:
        prompts: token ids, all of one length ([`prompts_of`]).
        dtype: compute dtype of the engine.
    """

    engine: Engine
    model: nn.Module
    prompts: list[list[int]]
    device: torch.device
    dtype: torch.dtype

    @contextlib.contextmanager
    def _scoring(self) -> Iterator[None]:
        """Set evaluation mode and decoded weights once: a walk through a large model's modules takes half a forward."""
        with torch.no_grad(), evaluation_mode(self.model), decoded_weights(self.model):
            yield

    def adapter(self, sync: Callable[[], None]) -> tuple[ProbeResult, Clean | None]:
        """Compare a started engine with the trainer; `sync` copies the trained weights into the engine. Also returns
        the measurement without an adapter if the current model computes the same: no adapter, or B is zero."""
        with self._scoring():
            layers: list[LoraLayer] = []
            name = ""
            if is_peft_model(self.model):
                layers, name = list(rollout_layers(self.model).values()), active_adapter(self.model)
            ups = [cast(nn.Linear, layer.lora_B[name]).weight for layer in layers]
            saved = [up.detach().clone() for up in ups]
            sizes: list[float] = []
            adapted: float | None = None

            def adapt(fraction: float) -> None:
                nonlocal adapted
                if fraction == adapted:
                    return
                adapted = fraction
                # seeded, and drawn on the model's device: 44 million numbers for rank 32 on 7B
                generator = torch.Generator(self.device).manual_seed(1)
                for up, layer, size in zip(ups, layers, sizes, strict=True):
                    strength = fraction * size / (layer.scaling[name] * up.shape[1] ** 0.5)
                    set_whole(up, torch.randn(up.shape, generator=generator, device=self.device).mul_(strength))

            def sample(fraction: float) -> list[Completion]:
                adapt(fraction)
                sync()
                return self.engine.generate(self.prompts, _SAMPLING)

            try:
                for up in ups:
                    up.zero_()
                sync()
                with _sizes(layers, name) as measured:
                    known = self._clean()
                    sizes += measured() if layers else []
                nothing = not saved or not any(_together(torch._foreach_norm([*map(local_tensor, saved)])))
                as_it_is = known if all(gather_object([nothing])) else None
                result = self._result(known)
                if layers and result.fault is None:
                    result = self._compared("adapter", FRACTIONS, known, sample, adapt)
            finally:
                for up, own in zip(ups, saved, strict=True):
                    up.copy_(own)  # both whole, or both this process's shard
            sync()
            return result, as_it_is

    def noise(
        self,
        put: Callable[[NoiseDraw], None],
        under: Callable[[NoiseDraw], contextlib.AbstractContextManager[None]],
        known: Clean | None = None,
    ) -> ProbeResult:
        """Compare the effect of noise on engine and trainer, with the current adapter. The engine is clean afterwards.

        Args:
            put: sets the noise of a draw on the engine's norms. under: context manager for the trainer's norms.
            known: measurement without noise, on all processes; `None` measures it.
        """

        draw_of = functools.partial(NoiseDraw, seed=0, step=0, generation=0)

        def sample(sigma: float) -> list[Completion]:
            try:
                put(draw_of(sigma))
                return self.engine.generate(self.prompts, _SAMPLING)
            finally:
                put(draw_of(0.0))

        with self._scoring():
            return self._compared("noise", SIGMAS, known or self._clean(), sample, lambda sigma: under(draw_of(sigma)))

    def again(self, then: float | None = None) -> ProbeResult:
        """Check the first rule with the current adapter, without noise, on the same prompts. Changes nothing.
        `then`: rounding at start, measured again if it does not explain the difference."""
        with self._scoring():
            result = self._result(self._clean(then))
            return self._result(self._clean()) if then is not None and result.fault else result

    def _result(self, known: Clean, kind: str | None = None, effect: float | None = None) -> ProbeResult:
        return ProbeResult(known.difference, known.rounding, FLOOR[self.dtype], kind, effect)

    def _clean(self, rounding: float | None = None) -> Clean:
        completions = self.engine.generate(self.prompts, _SAMPLING)
        scored = self._score(completions)
        if rounding is None:
            rounding = mean_difference(scored, self._score(completions, exact=True))
        return Clean(completions, scored, mean_difference(scored, _logps(completions)), rounding)

    def _compared(
        self,
        kind: str,
        sizes: Sequence[float],
        known: Clean,
        sample: Callable[[float], list[Completion]],
        change: Change,
    ) -> ProbeResult:
        """Compare engine and trainer at the smallest of ascending `sizes` with enough effect on the trainer."""
        least = FLOOR[self.dtype] / 4

        def measured() -> Iterator[tuple[float, float, float]]:
            for tried in sizes:
                moved = self._changed(known.completions, change, tried)
                found, rounding = mean_difference(moved, known.scored), max(known.difference, least)
                # the second forward only if the effect suffices for the rounding so far
                if found >= CONTRAST * rounding:
                    exact = self._changed(known.completions, change, tried, exact=True)
                    rounding = max(rounding, mean_difference(moved, exact))
                yield tried, found, rounding

        size, effect = large_enough(measured())
        result = self._result(known, kind, effect)
        if size is None:
            return result
        completions = sample(size)
        changed = self._changed(completions, change, size)
        there = mean_difference(changed, self._changed(completions, change, size, exact=True))
        difference = mean_difference(changed, _logps(completions))
        return replace(result, size=size, difference=difference, rounding_there=there)

    def _changed(self, completions: list[Completion], change: Change, size: float, exact: bool = False) -> torch.Tensor:
        with change(size) or contextlib.nullcontext():
            return self._score(completions, exact)

    def _score(self, completions: list[Completion], exact: bool = False) -> torch.Tensor:
        """Compute the trainer's log-probabilities, (prompts, new tokens). `exact`: use [`other_arithmetic`]."""
        rows = [p + c.tokens for p, c in zip(self.prompts, completions, strict=True)]
        ids = torch.tensor(rows, device=self.device)
        inner: Any = self.model.get_base_model() if is_peft_model(self.model) else self.model  # type: ignore[operator]
        narrow = "logits_to_keep" in inspect.signature(inner.forward).parameters
        last = {"logits_to_keep": _NEW_TOKENS + 1} if narrow else {}
        try:
            with other_arithmetic(self.model, self.dtype) if exact else contextlib.nullcontext():
                output = self.model(input_ids=ids, use_cache=False, **last)
            logits = output.logits[:, -_NEW_TOKENS - 1 : -1].float()
        finally:
            reshard(self.model)
        return logits.log_softmax(-1).gather(-1, ids[:, -_NEW_TOKENS:, None]).squeeze(-1)


def _logps(completions: list[Completion]) -> torch.Tensor:
    """Return the engine's log-probabilities, (prompts, new tokens)."""
    return torch.tensor([completion.logps for completion in completions])


def large_enough(measured: Iterable[tuple[float, float, float]]) -> tuple[float | None, float]:
    """Choose (size, effect) for the comparison from ascending (size, effect, rounding); size `None` if rounding hides
    every effect."""
    best: tuple[float, float | None, float] = (0.0, None, 0.0)
    for size, effect, rounding in measured:
        if effect > CHAOTIC and best[0] >= CONTRAST:
            break
        if effect / rounding > best[0]:
            best = effect / rounding, size, effect
        if best[0] >= ENOUGH:
            break
    ratio, chosen, effect = best
    return (chosen if ratio >= CONTRAST else None), effect


def prompts_of(texts: Sequence[Sequence[int]], vocabulary: int, longest: int) -> list[list[int]]:
    """Return `PROMPTS` prompts of one length (at most `PROMPT_TOKENS`): the run's longest, cut from shortly before they
    differ. Random tokens if the run has too few texts of at least one block of vLLM's cache."""
    longest_first = sorted((list(text) for text in texts), key=len, reverse=True)[:PROMPTS]
    if longest_first:
        common = next(
            (i for i, (first, *rest) in enumerate(zip(*longest_first, strict=False)) if {first} != {first, *rest}), 0
        )
        longest_first = [text[max(0, common - 16) :] for text in longest_first]
    length = min(PROMPT_TOKENS, longest - _NEW_TOKENS, *map(len, longest_first))
    if length < 16 or len(longest_first) < PROMPTS:
        length = min(16, longest - _NEW_TOKENS)
        return torch.randint(0, vocabulary, (PROMPTS, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [text[:length] for text in longest_first]


def run_prompts(trainer: Any, processing_class: Any, max_model_len: int | None) -> list[list[int]]:
    """Return [`prompts_of`] a trainer's data, tokenized without tools and pictures; short on a CPU, for speed."""
    longest = (PROMPT_TOKENS if torch.cuda.is_available() else 16) + _NEW_TOKENS
    longest = min(longest, max_model_len or longest)
    tokens = first_prompts(trainer, processing_class, 64)
    return prompts_of(tokens, trainer.model.config.get_text_config().vocab_size, longest)


def first_prompts(trainer: Any, processing_class: Any, count: int) -> list[list[int]]:
    """Return the first prompts of the run, tokenized without tools; none for a model of text and pictures."""
    rows = itertools.islice(iter(trainer.train_dataset), 0 if trainer._is_vlm else count)
    texts = [maybe_apply_chat_template({"prompt": row["prompt"]}, processing_class)["prompt"] for row in rows]
    return processing_class(texts, add_special_tokens=False)["input_ids"] if texts else []


def report(result: ProbeResult, name: str, mode: str, remedy: str) -> None:
    """Log a result; a fault warns, or raises [`RolloutError`] if `mode` is "refuse"."""
    logger.info("%s: %s", name, result)
    if result.fault is None:
        return
    text = f"{name}: vLLM and the trainer disagree, {result.fault}. {remedy}."
    if mode == "refuse":
        raise RolloutError(f"{text} rollout_probe='warn' trains anyway.")
    logger.warning("%s", text)


def mean_difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest mean over all processes, so that all decide alike: sharded forwards are collective."""
    return torch.tensor(gather_object([(mine - theirs.to(mine.device)).abs().mean().item()])).max().item()


def _together(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the scalars' values, with one device sync."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()


@contextlib.contextmanager
def _sizes(layers: list[LoraLayer], adapter: str) -> Iterator[Callable[[], list[float]]]:
    """Yield a function that returns rms(W x) / rms(A x) of the median token per layer, after a forward inside. The
    median, since some tokens have thousandfold activations; W x without the bias, which dominates some q and k."""
    measured: dict[nn.Module, torch.Tensor] = {}

    def measure(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        bias = cast(nn.Linear, module).bias
        product = output.float() if bias is None else output.float() - bias.float()
        measured[module] = product.square().mean(-1).sqrt().flatten()

    watched = [(layer.base_layer, layer.lora_A[adapter]) for layer in layers]
    handles = [module.register_forward_hook(measure) for pair in watched for module in pair]
    try:
        yield lambda: _together([(measured[base] / measured[down].clamp_min(1e-12)).median() for base, down in watched])
    finally:
        for handle in handles:
            handle.remove()


def check_contents(contents: Contents, put: str | None, draw: NoiseDraw | None) -> None:
    """Raise [`RolloutError`] if the engine lacks the latest sync: weights with fingerprint `put`, noise of `draw`."""
    wrong = []
    if contents.received != put:
        wrong.append(f"it has update {contents.received}, not {put}, so the rollout came from a stale policy")
    sigma, wanted = (0.0 if noise is None else noise.sigma for noise in (contents.draw, draw))
    if (sigma or wanted) and contents.draw != draw:
        left = "noise was left on" if not wanted else "its noise is missing" if not sigma else "the wrong noise"
        wrong.append(f"its norms carry {_noise(contents.draw)} and should carry {_noise(draw)}: {left}")
    if contents.damaged:
        named = ", ".join(contents.damaged[:4])
        wrong.append(f"{len(contents.damaged)} tensors differ from the update ({named}): the copy was incomplete")
    if wrong:
        raise RolloutError(
            f"The engine does not hold what the trainer put there last: {'; '.join(wrong)}. Only the trainer may write "
            "into the engine. If nobody else does, report it."
        )


def _noise(draw: NoiseDraw | None) -> str:
    return (
        f"sigma {draw.sigma:g} of step {draw.step}, generation {draw.generation}" if draw and draw.sigma else "no noise"
    )


#: elements per partial cast of a matrix to float32
_CHUNK = 2**26


class _Cast(TorchFunctionMode):
    """Cast the operands of products and norms and the outputs of embeddings, with autocast (set by Accelerate) off."""

    OPERANDS = (F.linear, F.conv1d, F.layer_norm, F.rms_norm, F.scaled_dot_product_attention, torch.matmul)

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor], device: str):
        super().__init__()
        self.device = device
        self.cast = lambda tensor: cast(tensor) if tensor.is_floating_point() else tensor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch.autocast(self.device, enabled=False):
            if function is F.embedding:
                return self.cast(function(*args, **kwargs))
            if function in self.OPERANDS:
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                # the head in parts of its rows
                if function is F.linear and args[1].numel() > _CHUNK and bias is None:
                    rows = args[1].split(max(1, _CHUNK // args[1].shape[1]))
                    return torch.cat([F.linear(self.cast(args[0]), self.cast(part)) for part in rows], -1)
                args, kwargs = tree_map_only(torch.Tensor, self.cast, (args, kwargs))
            return function(*args, **kwargs)


def _float32_product(layer: NVFP4Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    if layer.compute == "w4a8":
        return linear(args[0].float(), *layer.nvfp4, bias, "reference", layer.compute)
    weight = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=output.device)
    decode_into(weight, *layer.nvfp4)
    return F.linear(args[0].float(), weight.float(), bias)


@contextlib.contextmanager
def other_arithmetic(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute inside with other, equally valid rounding: in float32 for a model in 16 bits or under Accelerate's
    autocast; with autocast if only the engine is in 16 bits; on TF32 operands if neither is."""
    device, mixed = next(model.parameters()).device.type, hasattr(model, "_original_forward")
    if (own := compute_dtype(model)) == torch.float32 and dtype != own and not mixed:
        with torch.autocast(device, dtype):
            yield
        return

    def tf32(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.float().view(torch.int32) & ~0x1FFF).view(torch.float32)

    packed = [module for module in model.modules() if isinstance(module, NVFP4Linear)] if own != torch.float32 else []
    handles = [layer.register_forward_hook(_float32_product) for layer in packed]
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            _Cast(tf32 if own == torch.float32 and not mixed else torch.Tensor.float, device),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()
