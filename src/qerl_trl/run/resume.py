"""Resuming a run: whole checkpoints, the same trajectory, no further steps after a finished run."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy, TrainOutput

from ..checkpoint import fingerprint, seal
from ..checkpoint.records import RunSettings
from ..checkpoint.settings import run_settings
from ..checks import rewards
from ..model import loading, lora
from ..support.distributed import load_to_numbered_cpus, settled_together, share_requests
from . import folder as run_folder
from .exits import Rescue, as_of, goes_on, told_of_exits
from .publishing import PublishingMixin

logger = logging.getLogger(__name__)

#: file in a checkpoint for the reference model that TRL moves (`sync_ref_model`); `Trainer` saves none
REFERENCE_NAME = "reference_model.safetensors"


class RunRecord:
    """Settings of a run for its manifests, and the record of the resumed checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: settings at the start of training, `None` before
        self.settings: RunSettings | None = None
        #: permitted changes of settings, one line each
        self.changed: list[str] = []
        #: record of the resumed checkpoint
        self._then: RunSettings | None = None
        #: name of the checkpoint loaded at the end of training
        self.best: str | None = None
        #: whether this trainer's results are in its output_dir
        self._saved_here = False
        #: seal order of the resumed checkpoint ([`seal.order_of`])
        self._order = 0

    def settle(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, after comparing its settings with this run's."""
        trainer = self._trainer
        resume = run_folder.to_resume(resume_from_checkpoint, trainer.args.output_dir)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if resume is not None and not trainer.is_fsdp_enabled and fingerprint.take_embeddings(model, resume):
            trainer.base_sha256 = fingerprint.base_sha256(model)
        if self.settings is None:  # before the trainer creates an optimizer
            given = {"optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
            trainer.given_optimizers = {
                name: type(each).__qualname__ for name, each in given.items() if each is not None
            }
        self.settings = run_settings(trainer)
        allowed = trainer.args.allow_other_settings
        self.changed = run_folder.settle(trainer.args.output_dir, resume, self.settings, allowed)
        return resume

    def begin(self, resume: str | None) -> TrainerState | None:
        """Call at the start of a training. Returns the state of the resumed checkpoint."""
        trained = self._trainer.state.global_step
        if resume is None and trained:  # Trainer counts from 0 again, and keeps the weights
            self.changed.append(f"weights: trained for {trained} steps by an earlier train() of the same trainer")
        self.best, self._then, self._order = None, None, 0
        if resume is None:
            return None
        self._order, self._then = seal.order_of(resume), cast(RunSettings, seal.recorded_run(resume))
        if (reference := self._moving_reference()) is not None:
            if (file := Path(resume, REFERENCE_NAME)).is_file():
                found = load_file(file)
                for name, parameter in reference.named_parameters():
                    parameter.data.copy_(found[name])
            else:
                logger.warning(
                    "%s has no %s (not saved if sharded), so the reference model is the initial one again.",
                    resume,
                    REFERENCE_NAME,
                )
        return TrainerState.load_from_json(os.path.join(resume, TRAINER_STATE_NAME))

    def new_optimizer(self, done: int, wanted: int) -> None:
        """Refuse a checkpoint without optimizer state, or record that Trainer starts a new optimizer."""
        if not self._trainer.args.allow_other_settings:
            raise ValueError(
                f"{self._trainer._saved} keeps no optimizer state (final save, or save_only_model=True), so training "
                f"cannot resume from step {done} to {wanted}. Name another checkpoint, or set "
                "allow_other_settings=True for a new optimizer."
            )
        self.changed.append(f"optimizer: a new one from step {done} on")

    def now(self) -> RunSettings:
        """Return settings, step and changes; if no step was trained since resuming, from the resumed record."""
        resumed, step = self._trainer._resumed, self._trainer.state.global_step
        if resumed is not None and step == resumed.global_step and self._then:
            settings, changed = self._then.copy(), list(self._then.get("changed", []))
        else:
            settings, changed = (self.settings or run_settings(self._trainer)).copy(), list(self.changed)
            settings["global_step"] = step
        if self.best is not None:
            changed.append(f"weights: those of {self.best} (load_best_model_at_end)")
        if changed:
            settings["changed"] = list(dict.fromkeys(changed))
        return settings

    def _moving_reference(self) -> nn.Module | None:
        trainer = self._trainer
        moves = trainer.ref_model is not None and trainer.args.sync_ref_model
        return trainer.accelerator.unwrap_model(trainer.ref_model) if moves else None

    @contextmanager
    def checkpoint(self, folder: str) -> Iterator[None]:
        """Around the writing of a checkpoint: seal it once whole, then remove older ones. Collective."""
        trainer, args = self._trainer, self._trainer.args
        if args.should_save:
            seal.make_room(folder)
        trainer.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            yield
            reference = self._moving_reference()
            sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            if reference is not None and args.should_save and not sharded:
                tensors = {name: p.detach().cpu().contiguous() for name, p in reference.named_parameters()}
                save_file(tensors, Path(folder, REFERENCE_NAME), {"format": "pt"})
        finally:
            args.save_total_limit = limit
        trainer.accelerator.wait_for_everyone()
        if not args.should_save:
            return
        run_dir, best = os.path.dirname(folder), trainer.state.best_model_checkpoint
        torch.save(args, os.path.join(folder, TRAINING_ARGS_NAME))  # again, with save_total_limit restored
        seal.seal(folder, self.now(), order=seal.next_order(run_dir, self._order))
        seal.replaced(folder)
        seal.rotate(run_dir, limit, keep=[folder] if best is None else [folder, best])

    @contextmanager
    def result(self, folder: str) -> Iterator[None]:
        """Around `save_model`: check that the folder is this run's or empty, and write its manifest afterwards."""
        trainer, own = self._trainer, os.path.abspath(folder) == os.path.abspath(self._trainer.args.output_dir)
        if not own or not self._saved_here:
            resumed = own and trainer._resumed is not None
            run_folder.require_own(folder, self.now(), self.changed, resumed)
        with run_folder.sealing(folder, self.now(), wanted=trainer.args.should_save, since=self._order):
            yield
            if trainer.args.should_save:
                trainer.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
        self._saved_here = self._saved_here or own


#: most requests to stop between two steps: one per event of a step and of an epoch
_EVENTS = 12


class SaveBetweenRollouts:
    """Moves a save to the next step before a new rollout.

    Completions in use are not part of a checkpoint, so a run resumed in the middle of them would draw others: only
    between rollouts does it continue the same trajectory. Matters with `num_iterations > 1` or `steps_per_generation`
    above the gradient accumulation. If evaluations decide about checkpoints (`save_strategy="best"`,
    `load_best_model_at_end`), they move along: the evaluated weights are the saved ones. A stop requested while a save
    waits, waits with it: otherwise the save would be lost.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told = False
        #: a step has ended and is being logged, evaluated and saved
        self.after_step = False
        #: TRL's count of micro-batches at the end of the latest step
        self.updated_at = 0
        self.begin()

    def begin(self) -> None:
        """Call at the start of a training, to drop requests of an earlier one."""
        self._pending: set[str] = set()
        self._stopped = -1, 0  # micro-batches at the first request to stop, and number of requests since

    @contextmanager
    def step_ended(self) -> Iterator[None]:
        """Around the end of a step. Requests of one process's callbacks, before or inside, apply to all processes."""
        self.updated_at, self.after_step = self._trainer._step, True
        try:
            self.agree()
            yield
            self.agree()
        finally:
            self.after_step = False

    def agree(self) -> None:
        """Share requests of one process's callbacks after a step, also during its logging or evaluation. Collective."""
        if self.after_step:
            share_requests(self._trainer.accelerator, self._trainer.control)
            self.hold()

    def put_off(self, folder: str) -> bool:
        """Put off transformers' save on SIGTERM (`enable_jit_checkpoint`) to the step's end; True if in mid-step."""
        control = self._trainer.control
        if not self._trainer.args.enable_jit_checkpoint or not control.should_training_stop or self.after_step:
            return False
        if not seal.recorded_run(folder):
            seal.discard(folder)
        control.should_save = True
        return True

    def hold(self) -> None:
        """Put off a save within a rollout. Call after a step, after all callbacks."""
        args = self._trainer.args
        state, control = self._trainer.state, self._trainer.control
        rollout_every = args.steps_per_generation * self._trainer.num_iterations
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
            if self._stopped[1] > _EVENTS:  # an exhausted stream: no step will end this rollout
                self._give_back()
                return
            self._wait_with("should_training_stop")
        if "should_save" in self._pending and not self._told:
            self._told = True
            logger.warning(
                "The checkpoint due at step %d is written after the next step that ends a rollout (%d steps each): an "
                "exact resume starts between rollouts. Set save_steps to a multiple of %d to save on time.",
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


class SavingMixin(PublishingMixin):
    """Replaces Trainer's saving and resuming (see trainer.py). Put it before TRL's trainer in the bases."""

    rescue: Rescue
    _record: RunRecord
    _saves: SaveBetweenRollouts
    #: state of the resumed checkpoint, `None` for a fresh start
    _resumed: TrainerState | None = None
    #: whole checkpoint of the present weights, if any
    _saved: str | None = None
    #: checkpoint to push, not sealed yet
    _unpushed: str | None = None

    def to_resume(self) -> str | None:
        """Return the checkpoint to resume from: the named one, else the newest whole one in `output_dir`; `None` for
        a fresh start. Raises `ValueError` if it belongs to a run with other settings."""
        return self._record.settle(self.args.resume_from_checkpoint or run_folder.resumable(self.args.output_dir))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`. `True` takes the newest whole checkpoint of `output_dir`; a damaged one is never loaded.
        A finished run returns its final state, without a further step.

        Raises:
            `ValueError`: `output_dir` or the checkpoint belongs to a run with other settings; the model differs from
            its manifest, or has non-finite values; or the processes are not parts of the same run.
        """
        loading.finish(self.accelerator.unwrap_model(self.model))
        if self.args.device.index is not None and self.args.device.type == "cpu":
            load_to_numbered_cpus()
        record = self._record
        resume = settled_together(
            self.accelerator,
            lambda: record.settle(resume_from_checkpoint),
            lambda: record.settings or run_settings(self),
        )
        self._resumed, self._saved = record.begin(resume), resume
        self._saves.begin()
        self._uploads.failed = None
        if self.args.use_vllm:
            self.vllm_generation.begin(resume)
        with told_of_exits(self):
            output: TrainOutput = super().train(resume, *args, **kwargs)
        self._uploads.end()
        return output

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        values: tuple[Any, ...] = super().set_initial_training_values(*args, **kwargs)
        epochs, *others = values
        done, wanted = 0 if self._resumed is None else self._resumed.global_step, others[-1]
        if done >= wanted:
            # the parent would take one more step before its check
            logger.warning(
                "This run has ended: %d of %d steps are done. Nothing is trained. Raise max_steps or num_train_epochs.",
                done,
                wanted,
            )
            epochs = 0
        elif self._resumed is not None and self._saved is not None:
            if not seal.keeps_optimizer(self._saved):
                self._record.new_optimizer(done, wanted)
            self.accelerator.print(goes_on(self.args.output_dir, self._saved, done, wanted, self._resumed.epoch))
        return epochs, *others

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        # one generator draws each epoch's order, at its first index
        for _ in range(int(self._resumed.epoch or 0) if self._resumed is not None else 0):
            next(iter(sampler))
        return sampler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        loaded = self.accelerator.unwrap_model(self.model if model is None else model)
        if not is_peft_model(loaded) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        lora.require_whole(resume_from_checkpoint, loaded, loaded.active_adapter)
        own = os.path.abspath(resume_from_checkpoint) == os.path.abspath(self.args.output_dir)
        if not own:  # the parent would load exports and checkpoints in there as further adapters
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # Trainer loads adapters in subfolders (TRL's "ref", with beta > 0), and then not the trained one next to them
        several = len(loaded.peft_config) > 1 and os.path.isfile(os.path.join(resume_from_checkpoint, PEFT_CONFIG_NAME))
        if own or several:
            loaded.load_adapter(resume_from_checkpoint, loaded.active_adapter, is_trainable=True)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint or ""
        if wrong := seal.problems(best):
            logger.warning(
                "%s is damaged (%s): it is not loaded, and the last step's weights stay.", best, "; ".join(wrong)
            )
            return
        super()._load_best_model()
        self._record.best = os.path.basename(best)

    @run_folder.full_is_named
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        saved = self._saved is not None and os.path.abspath(self._saved) == os.path.abspath(folder)
        if saved and (self.accelerator.num_processes > 1 or not seal.problems(folder)):
            return  # after an error in the rollout: these weights are saved already
        if self._saves.put_off(folder):
            return
        rewards.check_weights(model, self.state.global_step)
        self._check_base(in_the_middle=True)
        self._unpushed = None
        with self._record.checkpoint(folder):
            super()._save_checkpoint(model, trial)
        self._saved = folder
        if self._unpushed is not None:
            super()._push_from_checkpoint(self._unpushed)

    def _check_base(self, in_the_middle: bool = False) -> None:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        model = self.accelerator.unwrap_model(self.model)
        fingerprint.check_base(model, None if sharded else self.base_sha256, in_the_middle)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._unpushed = checkpoint_folder  # pushed after it is sealed

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self._saves.step_ended():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`. During training it restores the random states; otherwise each call draws others."""
        with as_of(None, self.state) if self.is_in_train else nullcontext():
            metrics = super().evaluate(*args, **kwargs)
        self._saves.agree()
        return metrics

    @run_folder.full_is_named
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, push: bool = True) -> None:
        """As `Trainer.save_model`, with a manifest: `qerl-trl merge`, `push` and `eval` refuse a folder changed later.

        Args:
            push (`bool`, *optional*, defaults to `True`):
                Whether a run with `push_to_hub` is then published, as by `Trainer`.
        """
        if _internal_call:  # a checkpoint, gets its manifest when complete
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        rewards.check_weights(self.model, self.state.global_step)
        self._check_base()
        with self._record.result(folder):
            super().save_model(folder, _internal_call=True)
        if push and self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
