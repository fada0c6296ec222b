"""When checkpoints are taken: between two rollouts, where a resumed run continues the same trajectory."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from .upstream import OnlineTrainer


class SaveBetweenRollouts(TrainerCallback):
    """Moves a save to the next step after which a new rollout begins.

    Completions in use are not part of a checkpoint, so a run resumed in the middle of them would draw others: only between
    rollouts does it continue the same trajectory. Matters with `num_iterations > 1` or `steps_per_generation` above the
    gradient accumulation. Where evaluations decide about checkpoints (`save_strategy="best"`, `load_best_model_at_end`), they
    move along: the weights that were evaluated are the weights that are saved.
    """

    def __init__(self, trainer: OnlineTrainer) -> None:
        self._trainer = trainer
        self._pending: set[str] = set()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        rollout_every = args.steps_per_generation * getattr(args, "num_iterations", 1)
        moved = ["should_save"]
        if args.save_strategy == SaveStrategy.BEST or args.load_best_model_at_end:
            moved.append("should_evaluate")
        if self._trainer._step % rollout_every == 0 or state.global_step >= state.max_steps:
            for name in self._pending:
                setattr(control, name, True)
            self._pending.clear()
            return control
        for name in moved:
            if getattr(control, name):
                setattr(control, name, False)
                self._pending.add(name)
        return control
