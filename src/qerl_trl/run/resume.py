"""What a run leaves behind, and how it goes on from there: whole checkpoints, the same trajectory, a finished run that stays finished."""

import logging
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from accelerate.utils import is_peft_model
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy, TrainOutput

from ..checkpoint import fingerprint, seal
from ..checkpoint.fingerprint import base_sha256, take_embeddings
from ..checkpoint.records import RunSettings
from ..checkpoint.settings import run_settings
from ..checks import rewards
from ..model import loading, lora
from ..publish.mixin import PublishingMixin
from ..rollout.engine import RolloutError
from ..support.distributed import load_to_numbered_cpus, settled_together, share_requests
from ..support.trl import OnlineTrainer
from . import disk, reference
from . import folder as run_folder
from .exits import goes_on, told_of_exits

logger = logging.getLogger(__name__)


class SavingMixin(PublishingMixin):
    """Saving and resuming in the parent's place. To be mixed in before TRL's trainer; what differs, and why, stands in trainer.py."""

    #: the state that this training goes on from, `None` for a fresh start
    _resumed: TrainerState | None = None
    #: what the run recorded of itself there
    _recorded_then: RunSettings | None = None
    #: whole checkpoint of the weights as they are, where there is one
    _saved: str | None = None
    #: checkpoint that the parent wants to push, not sealed yet
    _unpushed: str | None = None
    #: settings when the training began, `None` before
    _settings: RunSettings | None = None
    #: settings that were allowed to change on the way
    _changed: tuple[str, ...] = ()
    #: whether a step has ended and is being logged, evaluated and saved
    _after_step: bool = False
    #: whether a batch is being made, or judged
    _in_batch: bool = False
    #: TRL's count of micro-batches when the latest step had ended
    _updated_at: int = 0
    #: a step after which no micro-batch of the next one had begun when a rollout did, and that moment
    _between: "tuple[int, _Moment] | None" = None
    #: whether the error in the making of that batch was raised in every process
    _all_failed: bool = False
    #: name of the checkpoint whose weights were loaded at the end of training
    _best: str | None = None
    #: whether this trainer's results are in its folder
    _saved_here: bool = False
    #: of what the run goes on from ([`checkpoint.order_of`])
    _order: int = 0

    def note_what_was_taken(self) -> None:
        """Once, when the parent's constructor has run."""
        self._saves, self.given_optimizers = SaveBetweenRollouts(self), {}

    def to_resume(self) -> str | None:
        """The checkpoint to resume from: what the arguments name, else the newest whole one in `output_dir`; `None` for a fresh start. Raises
        `ValueError` if it belongs to a run with other settings."""
        return self._settled(self.args.resume_from_checkpoint or run_folder.resumable(self._output_dir()))

    def _settled(self, resume_from_checkpoint: str | bool | None) -> str | None:
        resume = run_folder.to_resume(resume_from_checkpoint, self._output_dir())
        model = self.accelerator.unwrap_model(self.model)
        if resume is not None and not self.is_fsdp_enabled and take_embeddings(model, resume):
            self.base_sha256 = base_sha256(model)
        allowed = self.args.allow_other_settings
        if self._settings is None:  # the trainer has not made its own yet
            given = {name: getattr(self, name) for name in ("optimizer", "lr_scheduler")}
            self.given_optimizers = {name: type(each).__qualname__ for name, each in given.items() if each is not None}
        self._settings = run_settings(self)
        self._changed = tuple(run_folder.settle(self._output_dir(), resume, self._settings, allowed))
        return resume

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`. `True` takes the newest whole checkpoint of `output_dir`; a damaged one is never loaded. A run that has
        ended already comes back as it ended, after no further step.

        Raises:
            `ValueError`: `output_dir` or the checkpoint belongs to a run with other settings; the model is not as it was
                sealed, or has values that are not finite; or the processes are not parts of the same run.
        """
        loading.finish(self.accelerator.unwrap_model(self.model))
        if self.args.device.index is not None and self.args.device.type == "cpu":
            load_to_numbered_cpus()
        trained_before = self.state.global_step
        resume = settled_together(
            self.accelerator, lambda: self._settled(resume_from_checkpoint), lambda: cast(RunSettings, self._settings)
        )
        if resume is None and trained_before:  # the parent counts from 0 again, with the weights as they are
            line = f"weights: trained for {trained_before} steps by an earlier train() of the same trainer"
            logger.warning(
                "This training starts from trained weights (%s). Build a new trainer for a fresh start.", line
            )
            self._changed = (*self._changed, line)
        self._resumed, self._saved, self._best = None, resume, None
        self._saves.begin()
        self._order = 0 if resume is None else seal.order_of(resume)
        if resume is not None:
            self._resumed = TrainerState.load_from_json(os.path.join(resume, TRAINER_STATE_NAME))
            self._recorded_then = cast(RunSettings, seal.recorded_run(resume))
            reference.load(self, resume)
        if self.args.use_vllm:
            self.vllm_generation.begin(resume)
        with told_of_exits(self):
            return super().train(resume, *args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        values: tuple[Any, ...] = super().set_initial_training_values(*args, **kwargs)
        epochs, *others = values
        done, wanted = 0 if self._resumed is None else self._resumed.global_step, others[-1]
        if done >= wanted:
            # the parent would take one step more before it looks
            logger.warning("This run has ended: %d steps are done, %d are wanted. Nothing is trained.", done, wanted)
            epochs = 0
        elif self._saved is not None and not seal.keeps_optimizer(self._saved):
            # the parent would begin with an empty optimizer and the first learning rate, without a word
            if not self.args.allow_other_settings:
                raise ValueError(
                    f"{self._saved} keeps no optimizer state (a run's end, or save_only_model=True), so its {done} steps cannot go on to {wanted}. Name a "
                    "checkpoint that has one, choose another output_dir, or set allow_other_settings=True for a new optimizer."
                )
            line = f"optimizer: a new one from step {done} on"
            logger.warning("Going on from %s as allowed: %s.", self._saved, line)
            self._changed = (*self._changed, line)
        if self._resumed is not None and self._saved is not None and done < wanted:
            self.accelerator.print(goes_on(self._output_dir(), self._saved, done, wanted, self._resumed.epoch))
        return epochs, *others

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        # each epoch's order is drawn from one generator, when its first index is asked for
        for _ in range(int(self._resumed.epoch or 0) if self._resumed is not None else 0):
            next(iter(sampler))
        return sampler

    def _is_run_folder(self, path: str) -> bool:
        return os.path.abspath(path) == os.path.abspath(self._output_dir())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        loaded = self.accelerator.unwrap_model(self.model if model is None else model)
        if is_peft_model(loaded) and not self.is_fsdp_enabled:
            lora.require_whole(resume_from_checkpoint, loaded, loaded.active_adapter)
        if self._is_run_folder(resume_from_checkpoint) and is_peft_model(loaded) and not self.is_fsdp_enabled:
            # the parent would take exports and checkpoints in there for further adapters
            loaded.load_adapter(resume_from_checkpoint, loaded.active_adapter, is_trainable=True)
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        beside = os.path.isfile(os.path.join(resume_from_checkpoint, PEFT_CONFIG_NAME))
        if is_peft_model(loaded) and len(loaded.peft_config) > 1 and beside and not self.is_fsdp_enabled:
            # Trainer loads the adapters in subfolders (TRL's "ref", with a PeftModel and beta > 0) and then forgets the one
            # beside them, which is the trained one
            loaded.load_adapter(resume_from_checkpoint, loaded.active_adapter, is_trainable=True)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint or ""
        if wrong := seal.problems(best):
            logger.warning("%s is damaged (%s). The weights stay those of the last step.", best, "; ".join(wrong))
            return
        super()._load_best_model()
        self._best = os.path.basename(best)

    @disk.full_is_named
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        saved = self._saved is not None and os.path.abspath(self._saved) == os.path.abspath(folder)
        if saved and (self.accelerator.num_processes > 1 or not seal.problems(folder)):
            return  # after an error in the rollout: the weights are still those of this checkpoint
        if self.args.enable_jit_checkpoint and self.control.should_training_stop and not self._after_step:
            # transformers' own on SIGTERM, at any moment of a step: it waits for the end of the rollout, as every save does
            if not seal.recorded_run(folder):
                seal.discard(folder)
            self.control.should_save = True
            return
        rewards.check_weights(model, self.state.global_step)
        fingerprint.check(self, in_the_middle=True)
        if self.args.should_save:
            seal.make_room(folder)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # rotate only once the new one is sealed
        self._unpushed = None
        try:
            super()._save_checkpoint(model, trial)
            reference.save(self, folder)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # again: the limit was cleared when it was written
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
            seal.seal(folder, self._recorded(), order=seal.next_order(run_dir, self._order))
            seal.replaced(folder)
            best = self.state.best_model_checkpoint
            seal.rotate(run_dir, limit, keep=[folder] if best is None else [folder, best])
        self._saved = folder
        if self._unpushed is not None:
            super()._push_from_checkpoint(self._unpushed)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._updated_at, self._after_step = self._step, True
        try:
            self._agree()
            super()._maybe_log_save_evaluate(*args, **kwargs)
            self._agree()  # what was asked for when the step was logged, evaluated or saved
        finally:
            self._after_step = False

    def _agree(self) -> None:
        share_requests(self)
        self._saves.hold()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`. The training goes on with the random numbers that it would have had: whether, when and how often is evaluated, and
        whether a checkpoint was written before or after, is no part of its trajectory. Outside of a training each call draws other completions."""
        with _as_of(None, self.state) if self.is_in_train else nullcontext():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def rescued(self, made: bool = False) -> Iterator[None]:
        """Around the making of a batch, rollout and rewards. Where it lies between two updates, or its step began with another rollout, and it fails,
        the step that has ended is saved as it was, and the same command goes on from there.

        Args:
            made: whether the batch was made before, and is judged now.
        """
        self._in_batch, self._all_failed = True, False
        if not made and self.model.training and self._step == self._updated_at:
            self._between = self.state.global_step, _Moment.now(self.state)
        try:
            yield
        except Exception as error:
            if not isinstance(error, RolloutError):  # which says so itself
                error.add_note(self.rescue())
            raise
        finally:
            self._in_batch = False

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around what fails in all processes or in none: they can save together."""
        try:
            yield
        except Exception:
            self._all_failed = True
            raise

    def rescue(self) -> str:
        """Save a checkpoint of the step that has ended, where that is safe; says what to resume from. Where one of several processes fails
        by itself, the others wait elsewhere, and a save would hang; where the step of a rollout has begun with the completions of one before the
        last update (`steps_per_generation` is no multiple of the accumulation), no checkpoint could hold these."""
        step = self.state.global_step
        resume = "resume from the last checkpoint (resume_from_checkpoint=True) once the cause is gone"
        wanted = getattr(self.args, "save_strategy", "no") != "no" and step > 0 and self.model.training
        moment = None
        if self._in_batch:
            between, moment = self._between or (None, None)
            wanted = wanted and between == step
        if wanted and (self.accelerator.num_processes == 1 or self._all_failed):
            try:
                with _as_of(moment, self.state):
                    self._save_checkpoint(self.model, None)
                self.accelerator.wait_for_everyone()  # who leaves first would end the one that seals
            except Exception as error:  # a full disk is also a RuntimeError of torch; the Hub has errors of its own
                return f"Saving step {step} failed too ({type(error).__name__}: {error}); {resume}."
            return f"Step {step} is saved; {resume}."
        return f"The trainer's own state is intact; {resume}."

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._unpushed = checkpoint_folder  # the parent would push it before it is sealed

    @disk.full_is_named
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, push: bool = True) -> None:
        """As `Trainer.save_model`, sealed: `qerl-trl merge`, `push` and `eval` read what was written here, or refuse it.

        Args:
            push (`bool`, *optional*, defaults to `True`):
                Whether a run with `push_to_hub` is published at the end of it, as `Trainer` does.
        """
        if _internal_call:  # a checkpoint, sealed when it is complete
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self._output_dir()
        rewards.check_weights(self.model, self.state.global_step)
        fingerprint.check(self)
        if not (own := self._is_run_folder(folder)) or (self._resumed is None and not self._saved_here):
            run_folder.require_own(folder, self._recorded(), self._changed)
        elif not self._saved_here:
            run_folder.require_no_export(folder, self._recorded(), self._changed)
        with run_folder.sealing(folder, self._recorded(), wanted=self.args.should_save, since=self._order):
            super().save_model(folder, _internal_call=True)
            if self.args.should_save:
                self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
        self._saved_here = self._saved_here or own
        if push and self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _recorded(self) -> RunSettings:
        """What a seal says of the run: its settings, its step, and what was changed on the way. Where no step was trained since it was
        resumed, what was said then: the weights are those of that run."""
        if self._resumed is not None and self.state.global_step == self._resumed.global_step and self._recorded_then:
            settings, changed = self._recorded_then.copy(), list(self._recorded_then.get("changed", []))
        else:
            settings, changed = (self._settings or run_settings(self)).copy(), list(self._changed)
            settings["global_step"] = self.state.global_step
        if (
            self._best is not None
            and (line := f"weights: those of {self._best} (load_best_model_at_end)") not in changed
        ):
            changed.append(line)
        if changed:
            settings["changed"] = changed
        return settings


class _Moment(NamedTuple):
    """What the making of a batch changes: random states, and the count of tokens."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None
    tokens: int

    @classmethod
    def now(cls, state: TrainerState) -> "_Moment":
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        tokens = state.num_input_tokens_seen
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda, tokens)

    def restore(self, state: TrainerState) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        state.num_input_tokens_seen = self.tokens


@contextmanager
def _as_of(moment: _Moment | None, state: TrainerState) -> Iterator[None]:
    """What is saved inside is of that moment."""
    now = _Moment.now(state)
    (moment or now).restore(state)
    try:
        yield
    finally:
        now.restore(state)


#: more often than this nobody can ask for an end between two steps: a callback may in each event of a step and of an epoch
_EVENTS = 12


class SaveBetweenRollouts:
    """Moves a save to the next step after which a new rollout begins.

    Completions in use are not part of a checkpoint, so a run resumed in the middle of them would draw others: only between
    rollouts does it continue the same trajectory. Matters with `num_iterations > 1` or `steps_per_generation` above the
    gradient accumulation. Where evaluations decide about checkpoints (`save_strategy="best"`, `load_best_model_at_end`), they
    move along: the weights that were evaluated are the weights that are saved. An end of the training that is asked for while
    a save waits, waits with it: otherwise what was to be saved would be lost.
    """

    def __init__(self, trainer: OnlineTrainer) -> None:
        self._trainer = trainer
        self._told = False
        self.begin()

    def begin(self) -> None:
        """At the start of a training, for which nothing waits that was asked for in one before."""
        self._pending: set[str] = set()
        self._stopped = -1, 0  # batches made when an end was asked for, and how many times it was since

    def hold(self) -> None:
        """After a step, when all callbacks have asked for what they want."""
        args: Any = self._trainer.args
        state, control = self._trainer.state, self._trainer.control
        rollout_every = args.steps_per_generation * getattr(args, "num_iterations", 1)
        moved = ["should_save"]
        if args.save_strategy == SaveStrategy.BEST or args.load_best_model_at_end:
            moved.append("should_evaluate")
        if self._trainer._step % rollout_every == 0 or state.global_step >= state.max_steps:
            self._give_back()
            return
        for name in moved:
            self._wait_with(name)
        if "should_save" in self._pending and control.should_training_stop:
            batches, times = self._stopped
            self._stopped = self._trainer._step, times + 1 if batches == self._trainer._step else 1
            if self._stopped[1] > _EVENTS:  # a stream that has run out: no step will end this rollout
                self._give_back()
                return
            self._wait_with("should_training_stop")
            if batches != self._trainer._step:
                logger.warning(
                    "The training was to end at step %d, where a checkpoint waits for the rollout to be used. It ends with that checkpoint, after the next "
                    "step that ends a rollout.",
                    state.global_step,
                )
        if "should_save" in self._pending and not self._told:
            self._told = True
            logger.warning(
                "The checkpoint due at step %d is written after the next step that ends a rollout: one rollout is used for %d steps here, and a "
                "run goes on as it was only between rollouts. With save_steps a multiple of %d every save falls there.",
                state.global_step,
                every := rollout_every // math.gcd(rollout_every, args.gradient_accumulation_steps),
                every,
            )

    def _give_back(self) -> None:
        for name in self._pending:
            setattr(self._trainer.control, name, True)
        self._pending.clear()

    def _wait_with(self, name: str) -> None:
        control = self._trainer.control
        if getattr(control, name):
            setattr(control, name, False)
            self._pending.add(name)
