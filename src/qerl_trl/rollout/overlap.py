"""Overlap: while the update of one rollout runs, vLLM samples the next one. One rollout of staleness; off by default (`overlap=0`).

    main thread   put adapter t, noise t+1, ask | score t | update t ............ | wait | put adapter t+1, ask | score t+1 | ...
    engine                                      | sample t+1 (adapter t) ........ |                             | sample t+2 (adapter t+1) ...

- **Who samples.** A request is put together by TRL's own `VLLMGeneration.generate`, in the main thread, with a stand-in for vLLM's `LLM`
  (or TRL's client) that starts the real call in a thread and answers nothing; when the completions are due, TRL's code runs once more and
  its stand-in hands out what came. So every collective operation is in the main thread, on every process alike, and nothing is copied.
- **Two adapters.** The engine's buffers keep the adapter that samples, while the optimizer moves the trainer's; base weights are frozen, and
  norms in the engine are its own. Nothing is written into the engine before the pending rollout has come: whatever else wants the engine (the
  next sync, an evaluation, a checkpoint) waits for it first.
- **Correction.** The loss is that of decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298): with mu the policy that sampled
  (the adapter of one rollout earlier, with its noise, as vLLM scored it), pi_old the trained policy when the rollout is first used, and pi the
  policy in the update, it is the clipped objective in pi / pi_old, weighted by pi_old / mu. This is what TRL computes: its
  `old_per_token_logps` are the trainer's at that moment, its importance ratio is truncated against vLLM's log-probabilities.
- **Rewards** are computed, and completions scored, beside the engine too: nothing of it changes the adapter or the noise. Where that fails, the
  request is waited for and forgotten.
- **Noise** is that of the step in which a rollout is used, as it would be without overlap.
- **Random numbers.** In this process each completion has a seed of its own, from (seed, step, process, place): two threads draw from no
  common generator, and a rollout is a function of its adapter, its noise and its step. On a server it has one from (seed, step, place).
- **Resume.** A checkpoint waits for the pending rollout and stores it, so the same trajectory goes on.
- **Streams.** The engine computes on a CUDA stream of its own, from its start to its end, the trainer on another one of the same priority: our
  kernels for few tokens wait for programs of the same launch, and a stream of higher priority could keep these from ever being started.
"""

import contextlib
import copy
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import gather_object
from torch.utils.data import BatchSampler
from trl.generation.vllm_generation import VLLMGeneration

from ..noise.hooks import NoiseDraw
from .beside import OwnGenerator, Request, short_turns
from .contract import check_contents
from .engine import RolloutError, Seeds
from .generation import NO_NOISE, QeRLVLLMGeneration

logger = logging.getLogger(__name__)

#: in a checkpoint, of each process
_FILE = "qerl_rollout_ahead-{}-of-{}.json"


class _Asks:
    """In the place of vLLM's `LLM`, or of TRL's client: starts the call and answers with no completions.

    Args:
        start: starts the real call.
        nothing: the answer.
    """

    def __init__(self, start: Callable[..., None], nothing: Any) -> None:
        self.start, self.nothing = start, nothing

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.start(*args, **kwargs)
        return self.nothing


class _Answers:
    """The same, and answers with what came."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.request.answer()


@dataclass
class _Rollout:
    """One rollout, asked for or at hand. `step`: in which it is used. `generated`: what TRL's `generate` returns, once it is known. `norms`: bits of
    the norms that it was sampled with, where this process has an engine."""

    step: int
    prompts: list[list[int]]
    draw: NoiseDraw
    effective: float | None = None
    generated: tuple | None = None
    norms: int | None = None
    stored: bool = False
    request: Request | None = None


class OverlappedGeneration(QeRLVLLMGeneration):
    """As [`QeRLVLLMGeneration`]; completions of training are sampled one rollout ahead (see the module)."""

    def __init__(self, *args: Any, trainer: Any, **kwargs: Any) -> None:
        self._next: _Rollout | None = None  # asked for, or at hand
        self._used: _Rollout | None = None  # what is trained on
        self._prompts: Iterator[list] | None = None
        self._training = False
        self._stream: torch.cuda.Stream | None = None
        super().__init__(*args, trainer=trainer, **kwargs)

    def _init_vllm(self) -> None:
        device = self.accelerator.device
        if self.mode == "colocate" and device.type == "cuda":
            # vLLM remembers the stream on which it was built
            self._stream = torch.cuda.Stream(device)
        with self._on_its_stream():
            super()._init_vllm()

    def start(self) -> None:
        with self._on_its_stream():
            super().start()

    def probe_noise(self) -> None:
        with self._on_its_stream():
            super().probe_noise()

    @contextlib.contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """The engine's stream in this thread, after what was started on this thread's own, which then goes on after it."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._stream.device)
        if outside == self._stream:
            yield
            return
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    # ------------------------------------------------------------------ asking

    def ahead(self) -> None:
        """Ask for the rollout after the one that has just come, if there will be one: prompts, weights of this moment, noise of the step in
        which it is used. Returns while it is sampled. Every process calls it, before anything is done with the rollout that has come.

        Raises:
            [`RolloutError`]: the engine does not take the weights or the noise.
        """
        trainer = self.trainer
        step = trainer.state.global_step + _updates(trainer)
        if step >= trainer.state.max_steps:
            return
        if self._prompts is None:
            self._prompts = prompts_ahead(trainer)
        prompts, *_ = trainer._tokenize_prompts(next(self._prompts))
        self._ask(prompts, step, NO_NOISE if trainer.aqn is None else trainer.aqn.draw_of(step))

    def _ask(self, prompts: list[list[int]], step: int, draw: NoiseDraw) -> None:
        aqn = self.trainer.aqn
        effective_now = aqn and aqn.sigma_effective
        with self._on_its_stream(), super()._up_to_date(draw), self._engine_errors():
            self._probe_if_due()
        rollout = _Rollout(step, prompts, draw)
        if aqn is not None and draw.sigma > 0:
            # of the draw that is to come, not of the one in force in the trainer
            rollout.effective, aqn.sigma_effective = aqn.sigma_effective, effective_now
        colocated = self.mode == "colocate"
        nothing: Any = [] if colocated else {key: [] for key in ("prompt_ids", "completion_ids", "logprobs")}

        def start(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            if colocated:
                kwargs["sampling_params"] = self._seeded(kwargs["sampling_params"], len(args[0]), step)
            rollout.request = Request(lambda: generate(*args, **kwargs), self._in_order())

        with self._saying_what_is_saved(), self._engine_errors(), self._seeded_server(step, 1, 0):
            self._ask_trl(prompts, lambda engine: _Asks(functools.partial(start, engine.generate), nothing))
        self._next = rollout

    def _seeded(self, parameters: Any, count: int, step: int) -> list[Any]:
        """vLLM's `SamplingParams` for each of `count` completions."""
        if parameters.seed is not None:  # the user's
            return [parameters] * count
        seeds = Seeds((self.trainer.args.seed, step, self.accelerator.process_index))
        each = [copy.copy(parameters) for _ in range(count)]
        for one, seed in zip(each, seeds.of(count), strict=True):
            one.seed = seed
        return each

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        """For the thread of a request in this process: short turns, and the engine's stream, after all that this thread has started so far."""
        stream = self._stream
        if self.mode != "colocate":
            return contextlib.nullcontext()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

        @contextlib.contextmanager
        def there() -> Iterator[None]:
            if stream is None:
                with short_turns(), OwnGenerator():
                    yield
                return
            torch.cuda.set_device(stream.device)
            with short_turns(), torch.cuda.stream(stream):
                yield
            stream.synchronize()

        return there()

    def _ask_trl(self, prompts: list[list[int]], stand_in: Callable[[Any], Any]) -> tuple:
        """TRL's `generate` with a stand-in for the engine that it calls; on a process without one, as it is."""
        own = {name: getattr(self, name) for name in self.engine.trl_attributes()}
        vars(self).update({name: stand_in(engine) for name, engine in own.items()})
        try:
            return VLLMGeneration.generate(self, prompts, None, self.trainer.num_generations)
        finally:
            vars(self).update(own)

    # ------------------------------------------------------------------ what came

    def _settle(self) -> None:
        """Wait for what was asked for, and look at it. Every process calls it at the same places.

        Raises:
            [`RolloutError`]: it failed; it is not asked for again.
        """
        rollout = self._next
        if rollout is None or rollout.generated is not None:
            return
        self._next = None
        with self._saying_what_is_saved(), self._limited(1), self._engine_errors(), self._on_its_stream():
            generated = self._ask_trl(rollout.prompts, lambda engine: _Answers(_started(rollout)))
            contents = self.engine.contents()
            if contents is not None:
                check_contents(contents, self._put, self._draw)
        rollout.generated, self._next = tuple(generated), rollout

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        if not self.trainer.model.training:
            with super().rollout():
                yield
            return
        self.trainer._last_loaded_step = self.trainer.state.global_step  # TRL would put the weights now
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """In training the completions that were asked for one rollout ago, or, for the first time, asked for now; else as the parent's.

        Raises:
            [`RolloutError`]: the engine failed, took longer than `rollout_timeout`, or was asked with other prompts.
        """
        if not self._training:
            return super().generate(prompts, images, num_generations, profiler)
        aqn, step = self.trainer.aqn, self.trainer.state.global_step
        draw = (aqn and aqn.draw) or NO_NOISE
        stored = self._next if self._next is not None and self._next.stored else None
        # all processes sample anew, or none
        if stored is not None and not all(gather_object([self._fits(stored, prompts, step, draw)])):
            logger.warning(
                "The rollout in the checkpoint has other prompts or noise than this run at step %d, and is sampled anew.",
                step,
            )
            self._next = None
        if self._next is None:
            self._ask(prompts, step, draw)
        assert self._next is not None
        self._settle()
        rollout = self._next
        if not self._fits(rollout, prompts, step, draw):
            with self._saying_what_is_saved():
                raise RolloutError(
                    f"The rollout that was sampled ahead for step {rollout.step} has other prompts or noise than the trainer wants at step {step}. "
                    "With overlap=1 the training data is read twice and must be the same both times: no random transformations, no other sampler. "
                    "Or use overlap=0."
                )
        if rollout.request is not None:
            self.trainer._metrics["train"]["seconds/rollout_ahead"].append(rollout.request.seconds)
        if aqn is not None and draw.sigma > 0 and rollout.effective is not None:
            aqn.sigma_effective = rollout.effective
        self._used, self._next = rollout, None
        assert rollout.generated is not None
        self.sampled_logps = rollout.generated[2] and [[t[0] for t in sequence] for sequence in rollout.generated[2]]
        return rollout.generated

    @staticmethod
    def _fits(rollout: _Rollout, prompts: Sequence[Sequence[int]], step: int, draw: NoiseDraw) -> bool:
        return (rollout.step, rollout.draw, rollout.prompts) == (step, draw, [list(prompt) for prompt in prompts])

    @contextlib.contextmanager
    def _up_to_date(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not self._inside:
            self._settle()
        with self._on_its_stream(), super()._up_to_date(*args, **kwargs):
            yield

    def shutdown(self) -> None:
        if self._next is not None and self._next.request is not None:
            self._next.request.stop()
        self._next = None
        super().shutdown()

    # ------------------------------------------------------------------ checkpoints

    def save_ahead(self, folder: str | Path) -> None:
        """Store the rollout that the step after this checkpoint uses; waits for it. Every process calls it."""
        step = self.trainer.state.global_step
        rollout = self._used
        if rollout is None or rollout.step != step:
            self._settle()
            rollout = self._next
        if rollout is not None and rollout.step == step:
            kept = rollout.prompts, rollout.draw, rollout.effective, rollout.generated, rollout.norms
            content = asdict(_Rollout(step, *kept))
            (Path(folder) / self._file()).write_text(json.dumps(content, default=list))

    def begin(self, checkpoint: str | None) -> None:
        """Also: forget what was asked for, and take up what this checkpoint holds."""
        super().begin(checkpoint)
        self.forget_ahead()
        self._used = self._prompts = None
        file = None if checkpoint is None else Path(checkpoint) / self._file()
        if file is None or not file.is_file():
            if file is not None and any(file.parent.glob(_FILE.format("*", "*"))):
                logger.warning(
                    "The rollout in %s belongs to another number of processes, and is sampled anew.", checkpoint
                )
            return
        found = json.loads(file.read_text())
        found |= {
            "draw": NoiseDraw(*found["draw"]),
            "generated": tuple(found["generated"]),
            "stored": True,
            "request": None,
        }
        self._next = _Rollout(**found)

    def forget_ahead(self) -> None:
        """What was asked for is not wanted any more: wait until the engine has done it, which leaves nothing running, and forget it."""
        rollout, self._next = self._next, None
        if rollout is not None and rollout.request is not None:
            with contextlib.suppress(Exception), self._limited(1):  # of a training that has failed, and said so
                rollout.request.answer()

    def _file(self) -> str:
        return _FILE.format(self.accelerator.process_index, self.accelerator.num_processes)


def _started(rollout: _Rollout) -> Request:
    assert rollout.request is not None, "asked for by _ask"
    return rollout.request


def _updates(trainer: Any) -> int:
    """Optimizer steps of one rollout; `check_options` (arms.py) has seen to it that it is a whole number."""
    return trainer.args.steps_per_generation * trainer.num_iterations // trainer.args.gradient_accumulation_steps


def prompts_ahead(trainer: Any) -> Iterator[list]:
    """The prompts of this process's rollouts, of the one after the present one first, for ever: the trainer's own sampler, which draws the
    same order whoever asks, cut as its data loader cuts it."""
    args, accelerator = trainer.args, trainer.accelerator
    size = trainer._train_batch_size * args.steps_per_generation
    batches = BatchSamplerShard(
        BatchSampler(trainer._get_train_sampler(), size, drop_last=args.dataloader_drop_last),
        accelerator.num_processes,
        accelerator.process_index,
        split_batches=accelerator.split_batches,
        even_batches=accelerator.even_batches,
    )
    repeated = args.steps_per_generation * trainer.num_iterations  # the sampler gives a rollout once per micro-batch
    done = 0 if args.ignore_data_skip else trainer.state.global_step // _updates(trainer) % (len(batches) // repeated)
    passed = done + 1
    while True:
        for rows in itertools.islice(batches, 0, None, repeated):
            if passed:
                passed -= 1
                continue
            yield copy.deepcopy([trainer.train_dataset[row]["prompt"] for row in rows])
