"""Schedules of sigma, the standard deviation of adaptive quantization noise, over a run.

The paper (arXiv 2510.11696, Section 3.3) cuts training into K equal stages. Stage 0 has no noise, as quantization alone
perturbs the policy. From stage 1 on

    sigma(k) = sigma_start * (sigma_end / sigma_start) ** ((k - 1) / (K - 1))

The formula leaves open whether the silent stage is one of the K. Read with k = 1..K it makes K + 1 stages; read with k
= 0..K-1 it never reaches sigma_end (1e-2 -> 5e-4 in 10 stages would end at 7.0e-4). The released code settles it: K
stages in all, the silent one included, and the last one at sigma_end. Implemented here:

    stage k = step * K // total_steps, progress u = (k - 1) / (K - 2), sigma = shape(u), shape(0), shape(1) = start, end

so `exponential` reproduces the released script number for number, from the first to the last value in the paper's
tables. The paper only names the other shapes, without formulas; see each class.

A schedule is a pure function of step, run length and logged history: a resumed run follows the same curve.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class NoiseSchedule:
    """Base of the schedules in `SCHEDULES`: `num_stages` equal stages, the first without noise.

    Args:
        sigma_start: standard deviation in the first noisy stage.
        sigma_end: standard deviation in the last stage.
        num_stages: stages of the run, the silent stage 0 included; at least 2.

    Raises:
        ValueError: a sigma is negative, infinite or not a number; fewer than 2 stages.
    """

    sigma_start: float = 1e-2
    sigma_end: float = 5e-4
    num_stages: int = 10

    name: ClassVar[str]

    def __post_init__(self) -> None:
        sigmas = self.sigma_start, self.sigma_end
        deviations = all(isinstance(s, int | float) and math.isfinite(s) and s >= 0 for s in sigmas)
        if not deviations or not isinstance(self.num_stages, int) or self.num_stages < 2:
            raise ValueError(
                f"sigma_start={self.sigma_start!r}, sigma_end={self.sigma_end!r}, num_stages={self.num_stages!r} is no "
                "noise schedule. Pass finite sigmas >= 0 and an integer >= 2 of stages: stage 0 has no noise."
            )

    @property
    def sigma_max(self) -> float:
        """Larger one of both sigmas."""
        return max(self.sigma_start, self.sigma_end)

    @property
    def ever_noisy(self) -> bool:
        """Whether any stage has noise."""
        return self.sigma_max > 0

    def stage(self, step: int, total_steps: int) -> int:
        """Return the stage of optimizer step `step` (from 0) in a run of `total_steps`; later ones in the last."""
        return min(step * self.num_stages // total_steps, self.num_stages - 1)

    def sigma(self, step: int, total_steps: int, log_history: Sequence[Mapping[str, Any]] = ()) -> float:
        """Return the standard deviation of the noise at optimizer step `step` of `total_steps`.

        Args:
            step: the trainer's `global_step`, from 0.
            total_steps: the trainer's `max_steps`.
            log_history: the trainer's `state.log_history`; only `entropy_target` reads it.
        """
        stage = self.stage(step, total_steps)
        if stage == 0:
            return 0.0
        return self.shape((stage - 1) / max(self.num_stages - 2, 1))

    def shape(self, progress: float) -> float:
        """Return sigma at `progress` through the noisy stages, from 0 (sigma_start) to 1 (sigma_end)."""
        return self.sigma_start


class ExponentialSchedule(NoiseSchedule):
    """Schedule of the QeRL paper: sigma_start * (sigma_end / sigma_start) ** u, with progress u from 0 to 1."""

    name = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_start > 0 and self.sigma_end == 0:
            raise ValueError(
                f"sigma_end=0 cannot be reached from sigma_start={self.sigma_start} by exponential decay. Pass a small "
                "positive sigma_end (the paper: 5e-4), or schedule='linear' or 'cosine'."
            )

    def shape(self, progress: float) -> float:
        if self.sigma_start == 0:
            return 0.0
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** progress


class LinearSchedule(NoiseSchedule):
    """Linear schedule: sigma_start + (sigma_end - sigma_start) * u."""

    name = "linear"

    def shape(self, progress: float) -> float:
        return self.sigma_start + (self.sigma_end - self.sigma_start) * progress


class CosineSchedule(NoiseSchedule):
    """Half a cosine: sigma_end + (sigma_start - sigma_end) * (1 + cos(pi u)) / 2."""

    name = "cosine"

    def shape(self, progress: float) -> float:
        return self.sigma_end + (self.sigma_start - self.sigma_end) * (1 + math.cos(math.pi * progress)) / 2


class LogarithmicSchedule(NoiseSchedule):
    """Linear in the logarithm of the stage k = 1..n: sigma_start + (sigma_end - sigma_start) * ln(k) / ln(n)."""

    name = "logarithmic"

    def shape(self, progress: float) -> float:
        stages = self.num_stages - 1
        if stages == 1:
            return self.sigma_start
        share = math.log1p(progress * (stages - 1)) / math.log(stages)
        return self.sigma_start + (self.sigma_end - self.sigma_start) * share


class ConstantSchedule(NoiseSchedule):
    """Constant sigma_start at every step, without a silent stage; ignores sigma_end and num_stages."""

    name = "constant"

    @property
    def sigma_max(self) -> float:
        return self.sigma_start

    def sigma(self, step: int, total_steps: int, log_history: Sequence[Mapping[str, Any]] = ()) -> float:
        return self.sigma_start


@dataclass(frozen=True)
class EntropyTargetSchedule(NoiseSchedule):
    """Steers sigma towards a sampling policy of entropy `target`: an integral controller on ln(sigma).

    Starts at the geometric mean of sigma_start and sigma_end and, for each logged entropy H of the sampling policy,

        ln(sigma) += gain * clip((target - H) / target, -1, 1),   clipped to ln of [sigma_end, sigma_start]

    Clipped excess is dropped, so sigma turns back at once (no wind-up). The state is recomputed from the trainer's
    `log_history`, part of every checkpoint: a resumed run has the same sigma, exactly if checkpoints fall on log steps.

    Args:
        target: entropy to keep, nats per token, as the trainer logs `metric`.
        gain: change of ln(sigma) per log line at 100 % error.
        metric: log key of H, of the noisy policy (`rollout/entropy`; `entropy` in scope "policy").

    Raises:
        ValueError: the target is not positive, or a sigma is 0, which has no logarithm.
    """

    target: float | None = None
    gain: float = 0.3
    metric: str = "rollout/entropy"

    name: ClassVar[str] = "entropy_target"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = self.target is not None and math.isfinite(self.target) and self.target > 0
        if not positive or 0 in (self.sigma_start, self.sigma_end):
            raise ValueError(
                f"entropy_target={self.target} with sigma_start={self.sigma_start}, sigma_end={self.sigma_end} cannot "
                "be steered to. Pass nats per token > 0, such as a run's `entropy` without noise, and sigmas > 0."
            )

    def sigma(self, step: int, total_steps: int, log_history: Sequence[Mapping[str, Any]] = ()) -> float:
        low, high = sorted((math.log(self.sigma_start), math.log(self.sigma_end)))
        log_sigma = (low + high) / 2
        for entry in log_history:
            entropy = entry.get(self.metric)
            if entropy is None or not math.isfinite(entropy) or entry.get("step", 0) > step:
                continue
            error = min(max((self.target - entropy) / self.target, -1.0), 1.0)
            log_sigma = min(max(log_sigma + self.gain * error, low), high)
        low, high = sorted((self.sigma_start, self.sigma_end))
        return min(max(math.exp(log_sigma), low), high)  # exp(log(x)) may be one bit above x


_CLASSES = (
    ExponentialSchedule, LinearSchedule, CosineSchedule, LogarithmicSchedule, ConstantSchedule, EntropyTargetSchedule,
)  # fmt: skip
#: schedule name -> class
SCHEDULES: dict[str, type[NoiseSchedule]] = {cls.name: cls for cls in _CLASSES}


def make_schedule(
    name: str,
    sigma_start: float = 1e-2,
    sigma_end: float = 5e-4,
    num_stages: int = 10,
    entropy_target: float | None = None,
) -> NoiseSchedule:
    """Make the schedule called `name`.

    Raises:
        KeyError: unknown name.
        ValueError: invalid values, or an `entropy_target` that the named schedule ignores.
    """
    if name == EntropyTargetSchedule.name:
        return EntropyTargetSchedule(sigma_start, sigma_end, num_stages, target=entropy_target)
    if entropy_target is not None:
        raise ValueError(
            f"entropy_target={entropy_target} is not used by schedule={name!r}. Pass schedule='entropy_target', or "
            "leave it out."
        )
    return SCHEDULES[name](sigma_start, sigma_end, num_stages)
