"""The truth check at start: the engine must compute what the trainer computes, without the adapter and with one that matters.

Greedy completions of a few random prompts come from the engine, and the trainer scores the same tokens. All numbers are mean absolute
differences of log-probabilities, in nats:

    clean difference   engine and trainer, adapter off                  what two implementations of one model differ by
    rounding           trainer and trainer, adapter off, where every linear layer's output is moved by half a unit in the last place
    effect             trainer with and without the probe adapter
    difference         engine and trainer, probe adapter on

The check passes if

    clean difference <= CLEAN * rounding + floor                                         the same base
    difference       <= ADAPTED * max(clean difference, rounding) + floor                the same adapter

**The first bound** has to hold for any model and depth, so it is no constant: a model of many layers, or with sharp logits, amplifies
rounding, and `rounding` measures by how much. An honest engine rounds as often as the trainer, elsewhere, and stays near one times
`rounding`. Weights in bf16 instead of NVFP4 (or with another scale rule) move each layer's output by 5 to 10 %, which is 10 to 25 times
half a unit of bf16 (0.4 %). Finer differences of the weights are the handshake's to find (handshake.py), which compares bytes.

**The second bound** is tight because the probe adapter is made to measure. B is random, scaled layer by layer so that each adapted layer's
output moves by the same fraction of its own size; the smallest fraction is taken whose effect is at least CONTRAST times the bound (or
the largest, where log-probabilities move no further and LEAST_CONTRAST must do). An
adapter that is lost, halved, doubled, lost in half of the layers, lost in all MLPs or exchanged between k and v leaves a good part of the
effect as a difference (tests/rollout/test_probe.py injects each). The trainer's own adapter is restored bit for bit and synced again.

**The noise** is checked the same way (`probe_noise`), where there is any: one draw on the engine's norms and on the trainer's, of the smallest
sigma whose effect is at least CONTRAST times the bound. A norm that the engine computes without it, or in other arithmetic, leaves a
good part of the effect.

A model that is trained without an adapter is left alone: the first bound only. That its weights arrive is checked at every sync, bit for
bit on two layers (vllm/state.py).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import gather_object, is_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from ..evaluation_mode import evaluation_mode
from ..names import local_tensor, reshard, set_whole
from ..noise.hooks import NoiseDraw
from ..nvfp4.linear import decoded_weights
from .adapter import active_adapter, linear_layers, rollout_layers
from .effect import compared, logps_of, mean_difference
from .engine import Completion, Engine, RolloutError, Sampling

R = TypeVar("R")

#: a few tokens of several prompts rather than many of a few: what is compared is as much, in fewer steps of the engine. Keys and values of what is
#: generated begin vLLM's second block of 16
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 8, 16, 4
_SAMPLING = Sampling(max_tokens=_NEW_TOKENS, ignore_eos=True)
CLEAN, ADAPTED, CONTRAST, LEAST_CONTRAST = 4.0, 4.0, 10.0, 3.0
#: a unit in the last place of numbers in [1, 2); for float32 that of TF32, which matrix products and attention on a GPU may use
UNIT = {torch.float32: 2**-10, torch.float16: 2**-10, torch.bfloat16: 2**-7}
#: nats that are never called a disagreement: small means of 32 values scatter, and logits are themselves rounded
FLOOR = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
#: by how much the probe adapter moves each layer's output, relative to its size
_FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
#: standard deviations of the noise that is tried on the norms
_SIGMAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class Clean:
    """What engine and trainer computed with an adapter that adds nothing: greedy completions, the trainer's log-probabilities of their tokens
    (prompts, new tokens), the clean difference and the rounding."""

    completions: list[Completion]
    scored: torch.Tensor
    difference: float
    rounding: float


@dataclass(frozen=True)
class ProbeResult:
    """Mean absolute differences of log-probabilities in nats (see the module), the share of greedy tokens that the probe adapter
    changed, and the fraction of a layer's output by which it moved it; the last three None for a model without an adapter."""

    difference: float
    base_difference: float
    rounding: float
    effect: float | None = None
    changed: float | None = None
    fraction: float | None = None

    def __str__(self) -> str:
        clean = (
            f"log-probabilities differ from the trainer's by {self.base_difference:.4f} nats without adapter (rounding alone moves "
            f"the trainer's own by {self.rounding:.4f})"
        )
        if self.effect is None:
            return clean
        return (
            f"{clean} and by {self.difference:.4f} with a probe adapter, which moves them by "
            f"{self.effect:.3f} and changed {self.changed:.0%} of the greedy tokens"
        )


@dataclass(frozen=True)
class NoiseProbeResult:
    """Mean absolute differences of log-probabilities in nats: engine and trainer under one draw, trainer with and without it."""

    difference: float
    effect: float
    sigma: float

    def __str__(self) -> str:
        return (
            f"under noise of sigma {self.sigma:g}, which moves the trainer's log-probabilities by {self.effect:.3f} nats, vLLM's differ from "
            f"them by {self.difference:.4f}"
        )


def _scoring(function: Callable[..., R]) -> Callable[..., R]:
    """Inside, the trainer's model, the second argument, is in evaluation mode and decodes its weights; once, not in every forward: a walk through the
    modules of a large model takes as long as half a forward of a few tokens."""

    @functools.wraps(function)
    def scoring(engine: Engine, model: nn.Module, *args: Any) -> R:
        with torch.no_grad(), evaluation_mode(model), decoded_weights(model):
            return function(engine, model, *args)

    return scoring


@_scoring
def probe(
    engine: Engine, model: nn.Module, device: torch.device, dtype: torch.dtype, sync: Callable[[], None]
) -> tuple[ProbeResult, Clean | None]:
    """Run the check on a started engine. Every process calls it; it is collective in the same places as a rollout.

    Args:
        dtype: what the engine computes in.
        sync: puts what is trained into the engine.

    Returns:
        The result, and what was measured without the adapter where that is the model as it is: it has none, or B is zero.

    Raises:
        [`RolloutError`]: engine and trainer disagree, or the adapter does not reach the engine.
    """
    prompts = _prompts(model, torch.Generator().manual_seed(0))
    layers: list[LoraLayer] = []
    adapter = ""
    if is_peft_model(model):
        layers, adapter = list(rollout_layers(model).values()), active_adapter(model)
    ups = [cast(nn.Linear, layer.lora_B[adapter]).weight for layer in layers]
    saved = [up.detach().clone() for up in ups]

    score = partial(_trainer_logps, model, device, prompts)
    try:
        for up in ups:
            up.zero_()
        sync()
        base = engine.generate(prompts, _SAMPLING)
        with _sizes(layers, adapter) as sizes:
            clean, rounding, bound = _rounding(model, dtype, score, base)
        base_difference = mean_difference(clean, logps_of(base))
        if not base_difference <= bound:
            raise RolloutError(
                f"vLLM and the trainer disagree without any adapter: their log-probabilities differ by {base_difference:.4f} nats. At "
                f"most {bound:.4f} is expected, since rounding alone moves the trainer's by {rounding:.4f}. They do not compute the "
                "same model: other weights, other norms, an adapter that stays in the engine, or an architecture that vLLM computes in "
                "another way."
            )
        nothing = not saved or not any(_together(torch._foreach_norm([*map(local_tensor, saved)])))
        as_it_is = Clean(base, clean, base_difference, rounding) if all(gather_object([nothing])) else None
        if not layers:
            return ProbeResult(base_difference, base_difference, rounding), as_it_is
        tolerance = ADAPTED * max(base_difference, rounding) + FLOOR[dtype]
        sized = sizes()

        adapted: float | None = None

        def adapt(fraction: float) -> None:
            nonlocal adapted
            if fraction == adapted:
                return
            adapted = fraction
            # the same numbers each time, drawn where the model is: 44 million for rank 32 on 7B, half a second and more on the processor
            generator = torch.Generator(device).manual_seed(1)
            for up, layer, size in zip(ups, layers, sized, strict=True):
                strength = fraction * size / (layer.scaling[adapter] * up.shape[1] ** 0.5)
                set_whole(up, torch.randn(up.shape, generator=generator, device=device).mul_(strength))

        def sample(fraction: float) -> list[Completion]:
            adapt(fraction)
            sync()
            return engine.generate(prompts, _SAMPLING)

        def score_with(fraction: float, *sampled: list[Completion]) -> torch.Tensor:
            adapt(fraction)
            return score(*sampled)

        enough = CONTRAST * tolerance
        completions, difference, effect, fraction = compared(_FRACTIONS, sample, score_with, base, clean, enough)
        changed = sum(
            x != y for a, b in zip(completions, base, strict=True) for x, y in zip(a.tokens, b.tokens, strict=True)
        ) / (_PROMPTS * _NEW_TOKENS)
        result = ProbeResult(difference, base_difference, rounding, effect, changed, fraction)
        if not difference <= tolerance:
            for up in ups:
                up.zero_()
            if mean_difference(score(completions), logps_of(completions)) <= tolerance:
                raise RolloutError(
                    f"The adapter does not reach the engine: {result}, and vLLM's are those of the model without adapter. This is a "
                    "bug or an unsupported architecture: please report it with the model's name. Until then train with use_vllm=False."
                )
            raise RolloutError(
                f"vLLM and the trainer disagree: {result}. At most {tolerance:.4f} is expected, and without adapter they agree, so "
                "part of the adapter is lost, misplaced or scaled in another way. Train with use_vllm=False, and please report it with the model's name."
            )
        if not effect >= LEAST_CONTRAST * tolerance:
            raise RolloutError(
                f"The probe cannot tell a right engine from a wrong one: {result}. An adapter of {fraction:.0%} of each layer's output "
                "hardly moves this model's log-probabilities. Check that the model's weights are loaded; use_vllm=False skips the check."
            )
    except BaseException:
        _copy(ups, saved)
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # an engine that failed may fail again
            sync()
        raise
    _copy(ups, saved)
    sync()
    return result, as_it_is


@_scoring
def probe_noise(
    engine: Engine,
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    put: Callable[[NoiseDraw], None],
    under: Callable[[NoiseDraw], contextlib.AbstractContextManager[None]],
    known: Clean | None = None,
) -> NoiseProbeResult:
    """Whether noise changes what the engine computes as it changes the trainer's model. The adapter stays as it is. The engine is clean
    afterwards.

    Args:
        put: puts the noise of a draw on the engine's norms; sigma 0 takes it away.
        under: inside, the trainer's model computes with the noise of a draw.
        known: what was measured of engine and model as they are, on all processes; `None` measures it.

    Raises:
        [`RolloutError`]: it does not.
    """
    prompts = _prompts(model, torch.Generator().manual_seed(0))

    def score(*sampled: list[Completion], draw: NoiseDraw | None = None) -> torch.Tensor:
        with contextlib.nullcontext() if draw is None else under(draw):
            return _trainer_logps(model, device, prompts, *sampled)

    if known is None:
        base = engine.generate(prompts, _SAMPLING)
        clean, rounding, _ = _rounding(model, dtype, score, base)
        known = Clean(base, clean, mean_difference(clean, logps_of(base)), rounding)
    base, clean, base_difference, rounding = known.completions, known.scored, known.difference, known.rounding
    tolerance = ADAPTED * max(base_difference, rounding) + FLOOR[dtype]

    def draw_of(sigma: float) -> NoiseDraw:
        return NoiseDraw(sigma, seed=0, step=0, generation=0)

    def sample(sigma: float) -> list[Completion]:
        draw = draw_of(sigma)
        try:
            put(draw)
            return engine.generate(prompts, _SAMPLING)
        finally:
            put(draw._replace(sigma=0.0))

    def score_with(sigma: float, *sampled: list[Completion]) -> torch.Tensor:
        return score(*sampled, draw=draw_of(sigma))

    enough = CONTRAST * tolerance
    completions, difference, effect, sigma = compared(_SIGMAS, sample, score_with, base, clean, enough)
    draw = draw_of(sigma)
    result = NoiseProbeResult(difference, effect, sigma)
    if not result.difference <= tolerance:  # under noise a rounding may matter more
        _, rounding, _ = _rounding(model, dtype, partial(score, draw=draw), completions)
        tolerance = max(tolerance, ADAPTED * rounding + FLOOR[dtype])
    if not result.difference <= tolerance:
        lost = mean_difference(score(completions), logps_of(completions)) <= tolerance
        what = "vLLM's are those of the model without noise" if lost else "part of it is lost, or acts in another way"
        raise RolloutError(
            f"The noise does not act in the engine as in the trainer: {result}, and at most {tolerance:.4f} is expected; {what}. Train without "
            "noise (aqn=False), or with use_vllm=False, and please report it with the model's name."
        )
    if not effect >= LEAST_CONTRAST * tolerance:
        raise RolloutError(
            f"The probe cannot tell whether noise acts in the engine: {result}. Noise of sigma {sigma:g} on its norms hardly moves this model. "
            "Check that the model's weights are loaded; aqn=False trains without noise."
        )
    return result


@_scoring
def probe_again(
    engine: Engine, model: nn.Module, device: torch.device, dtype: torch.dtype, rounding_then: float = 0.0
) -> float:
    """Whether engine and trainer still agree, with the adapter as it is now and noise off: whole models, on the tokens of the start.

    The first bound of the module; `rounding` is that of the model as it is now. Nothing is changed, in the engine or in the trainer.

    Args:
        rounding_then: `rounding` at start. What differs by no more, a quarter of the bound of then, is not compared with that of now, whose
            measurement is as long as everything else here.

    Returns:
        Mean absolute difference of log-probabilities, in nats.

    Raises:
        [`RolloutError`]: they have drifted apart.
    """
    prompts = _prompts(model, torch.Generator().manual_seed(0))
    score = partial(_trainer_logps, model, device, prompts)
    completions = engine.generate(prompts, _SAMPLING)
    difference = mean_difference(score(completions), logps_of(completions))
    if difference <= rounding_then:
        return difference
    _, rounding, bound = _rounding(model, dtype, score, completions)
    if not difference <= bound:
        raise RolloutError(
            f"vLLM and the trainer have drifted apart: on fixed tokens, without noise, their log-probabilities differ by {difference:.4f} "
            f"nats, and at most {bound:.4f} is expected, since rounding alone moves the trainer's by {rounding:.4f}. At the start they "
            "agreed. Weights or caches of the engine changed behind the trainer's back (sleep and wake, another user of the engine), or the "
            "trainer trains something that never reaches it. Resume from the last checkpoint: a new engine starts in agreement; "
            "vllm_enable_sleep_mode=False if it happens again."
        )
    return difference


def _rounding(
    model: nn.Module,
    dtype: torch.dtype,
    score: Callable[..., torch.Tensor],
    completions: list[Completion],
) -> tuple[torch.Tensor, float, float]:
    """What the trainer scores, `rounding` of the module's docstring for it, and the first bound that follows. In one forward, of every sequence twice:
    at these lengths it takes as long as one of half of them."""
    with _rounded_once_more(model, dtype, of_half=True):
        scored, moved = score(completions, completions).chunk(2)
    rounding = mean_difference(scored, moved)
    return scored, rounding, CLEAN * rounding + FLOOR[dtype]


def _together(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Their values, with one wait for the device."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)  # both whole, or both this process's part


def _prompts(model: nn.Module, generator: torch.Generator) -> list[list[int]]:
    vocab = cast(PreTrainedModel, model).config.get_text_config().vocab_size  # PeftModel passes it on
    return torch.randint(0, vocab, (_PROMPTS, _PROMPT_TOKENS), generator=generator).tolist()


def _trainer_logps(
    model: nn.Module, device: torch.device, prompts: list[list[int]], *sampled: list[Completion]
) -> torch.Tensor:
    """The trainer's log-probabilities of completions of these prompts, of one list after the other: (lists x prompts, new tokens)."""
    rows = [p + c.tokens for completions in sampled for p, c in zip(prompts, completions, strict=True)]
    ids = torch.tensor(rows, device=device)
    try:
        logits = model(input_ids=ids, use_cache=False).logits[:, _PROMPT_TOKENS - 1 : -1].float()
    finally:
        reshard(model)
    return logits.log_softmax(-1).gather(-1, ids[:, _PROMPT_TOKENS:, None]).squeeze(-1)


@contextlib.contextmanager
def _sizes(layers: list[LoraLayer], adapter: str) -> Iterator[Callable[[], list[float]]]:
    """Hooks; the function given tells, per layer, the rms of its output over the rms of A x, after a forward inside."""
    measured: dict[nn.Module, torch.Tensor] = {}

    def measure(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        measured[module] = output.float().square().mean().sqrt()

    watched = [(layer.base_layer, layer.lora_A[adapter]) for layer in layers]
    handles = [module.register_forward_hook(measure) for pair in watched for module in pair]
    try:
        yield lambda: _together([measured[base] / measured[down].clamp_min(1e-12) for base, down in watched])
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _rounded_once_more(model: nn.Module, dtype: torch.dtype, of_half: bool = False) -> Iterator[None]:
    """Every linear layer's output inside is moved at random by a standard deviation of half a unit in the last place of `dtype`; that of the second
    half of the batch alone with `of_half`."""
    half = UNIT[dtype] / 2
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(1)
        kept, moved = output.chunk(2) if of_half else (output[:0], output)
        noise = torch.randn(moved.shape, generator=generators[output.device], device=output.device)
        return torch.cat([kept, (moved.float() * (1 + half * noise)).to(output.dtype)])

    handles = [layer.register_forward_hook(move) for layer in linear_layers(model).values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
