"""All processes of a run are parts of one: they begin alike, and turn off together.

Each process starts from its own copy of script, arguments, data and packages, and collectives do not ask whether these are the same: with other
data, or another seed, groups would be made of completions of different prompts; with another learning rate each process would train an adapter of
its own; with another batch size a collective fails in words of its own. So what identifies the run is compared when training begins, and after
each step what comes next. A few kilobytes once, six numbers per step.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from . import alike, checkpoint, identity, redaction, run_folder
from .evaluation_mode import as_it_was
from .processes import together
from .upstream import OnlineTrainer

logger = logging.getLogger(__name__)

#: of the settings that a run records, what may differ between processes: names of what is known by its content, what is compared apart, and what
#: another one says too
_OF_A_PROCESS = {
    "model",
    "base_revision",
    "settings_sha256",
}
#: arguments without a say in the trajectory that decide which collectives come, and with what sizes
_IN_STEP = re.compile(
    r"(eval|save|logging)_(strategy|steps)|logging_first_step|eval_on_start|eval_delay|load_best_model_at_end|metric_for_best_model|save_only_model"
    r"|save_on_each_node|per_device_eval_batch_size|num_generations_eval|generation_batch_size|push_to_hub|hub_strategy|use_vllm|vllm_mode"
    r"|vllm_tensor_parallel_size|rollout_probe(?:_steps)?|dataloader_drop_last|ddp_.*"
)
_CALLED = {
    "dataset_sha256": "training data",
    "tokenizer_content_sha256": "tokenizer or chat template",
    "written": "source of",
    "options": "",
}
_ZEROS = (
    "With fsdp_cpu_ram_efficient_loading, from_pretrained reads the weights of a reward model in the first process of a machine alone: name the model instead "
    "of passing it (reward_funcs='org/model'), or load it with FSDP_CPU_RAM_EFFICIENT_LOADING=false in the environment. "
)
_SAME_FOLDER = "output_dir has to be on a file system that all machines of the run see"
#: names of what a callback may ask for
_TURNS = {
    "should_training_stop": "the training to end",
    "should_epoch_stop": "the epoch to end",
    "should_save": "a checkpoint",
    "should_evaluate": "an evaluation",
    "should_log": "a log",
}
#: seconds that a file of another machine may take to be seen
_SEEN = 10.0


class InStepMixin(OnlineTrainer):
    """See the module docstring. To be mixed in before TRL's trainer."""

    #: holds saves back until a rollout has been used (saving.py)
    _saves: Any
    #: whether a step has ended and is being logged, evaluated and saved, whose callbacks may ask for more
    _after_step = False

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._after_step = True
        try:
            self._agree()
            super()._maybe_log_save_evaluate(*args, **kwargs)
            self._agree()  # `on_save`
        finally:
            self._after_step = False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`; what a callback of one process asks for when a step is logged, all do."""
        super().log(logs, start_time)
        if start_time is not None:  # the trainer's own, of all processes: a callback of one may log for itself
            self._agree()

    @together
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`, in all processes."""
        metrics = super().evaluate(*args, **kwargs)
        self._agree()
        return metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`, which casts the model for good where `bf16_full_eval` or `fp16_full_eval` is set."""
        cast = not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval)
        with as_it_was(self.model) if cast else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def _agree(self) -> None:
        if self._after_step:
            turn_off_together(self)
            self._saves.hold()


# --- when training begins -----------------------------------------------------------------------------------------------------------


def settled_together(trainer: OnlineTrainer, settle: Callable[[], str | None]) -> str | None:
    """What `settle()` gives: the checkpoint that this process goes on from. Collective.

    Raises:
        `ValueError`: it refuses, here or in another process; or the processes are not parts of the same run. Says what differs, and where.
    """
    if trainer.accelerator.num_processes == 1:
        return settle()
    resume, refusal = None, None
    try:
        resume = settle()
    except ValueError as error:
        refusal = error
    settings = identity.run_settings(trainer)
    own = {
        "refused": None if refusal is None else redaction.redact(str(refusal)),
        "run": _identified(trainer, settings),
        "from": _where(resume),
        "lock": None,
    }
    every = gather_object([own])
    refused = [rank for rank, record in enumerate(every) if record["refused"] is not None]
    if len(refused) == len(every):
        assert refusal is not None
        raise refusal
    differ = alike.lines([record["run"] for record in every], _CALLED)
    if refused:
        others = [rank for rank in range(len(every)) if rank not in refused]
        differ.insert(0, f"process {refused[0]} refuses: {every[refused[0]]['refused']} Process {others[0]} goes on")
    if (starts := alike.apart([record["from"] for record in every])) is not None:
        differ.insert(0, f"the state that they go on from: {starts}. {_SAME_FOLDER}, with the same checkpoints")
    if differ:
        zeros = any(line.startswith("source of") for line in differ) and trainer.is_fsdp_enabled
        raise ValueError(
            f"The {len(every)} processes of this run are not parts of the same one, so nothing was trained. What differs: {'; '.join(differ)}. "
            f"{_ZEROS if zeros else ''}Start "
            "all of them with the same script, arguments, data, model and package versions. None needs a seed of its own: each draws other numbers "
            "from the same one."
        ) from refusal
    _warn(trainer, every)
    return resume


def _identified(trainer: OnlineTrainer, recorded: identity.RunSettings) -> dict[str, Any]:
    """What is to be the same in all processes, as JSON."""
    settings = {name: value for name, value in recorded.items() if name not in _OF_A_PROCESS}
    given = vars(trainer.args)
    in_step = {name: str(given[name]) for name in given if _IN_STEP.fullmatch(name) and given[name] is not None}
    sizes = {
        "rows of training data": _rows(trainer.train_dataset),
        "rows of evaluation data": _rows(trainer.eval_dataset),
    }
    return {**settings, **in_step, **sizes}


def _rows(dataset: Any) -> Any:
    if isinstance(dataset, dict):
        return {str(name): _rows(each) for name, each in dataset.items()}
    return len(dataset) if hasattr(dataset, "__len__") else None


def _where(resume: str | None) -> str:
    """A state to go on from, by its content: the folder may have another name on another machine."""
    if resume is None:
        return "the beginning"
    sealed = (
        checkpoint.read_manifest(resume).get("sha256") if Path(resume, checkpoint.MANIFEST_NAME).is_file() else None
    )
    return f"step {run_folder.step_of(resume)}, {Path(resume).name}" + (f", sealed as {sealed[:12]}" if sealed else "")


def _warn(trainer: OnlineTrainer, every: list[dict[str, Any]]) -> None:
    """In the main process, of what differs and may be meant."""
    if not trainer.accelerator.is_main_process:
        return
    held = every[0]["lock"]
    elsewhere = [rank for rank, record in enumerate(every) if record["lock"] != held]
    resumable = checkpoint.can_go_on(trainer.args) and not trainer.args.save_on_each_node
    if held and elsewhere and resumable:
        logger.warning(
            "output_dir=%s of process %s is another folder than that of process 0: checkpoints there would not have the random state of each process, "
            "and are refused when they are written. %s.",
            trainer.args.output_dir,
            ", ".join(map(str, elsewhere)),
            _SAME_FOLDER,
        )


# --- when a checkpoint is written -----------------------------------------------------------------------------------------------------


def require_random_states(trainer: OnlineTrainer, folder: str | os.PathLike) -> None:
    """Before a checkpoint is sealed: the random state of every process is in it, without which nobody goes on bit for bit.

    Raises:
        `RuntimeError`: of some it is not.
    """
    ranks = trainer.accelerator.num_processes
    if ranks == 1 or trainer.args.save_only_model or trainer.args.save_on_each_node:
        return
    wanted, until = [Path(folder, f"rng_state_{rank}.pth") for rank in range(ranks)], time.monotonic() + _SEEN
    while (missing := [path.name for path in wanted if not path.is_file()]) and time.monotonic() < until:
        time.sleep(0.5)
    if missing:
        raise RuntimeError(
            f"{folder} has no {', no '.join(missing)}: what these processes have written is somewhere else, so a run that goes on from there would not "
            f"be the same one. It is not sealed. {_SAME_FOLDER}; or, for a run that will not be resumed, set save_only_model=True."
        )


# --- after each step ------------------------------------------------------------------------------------------------------------------


def turn_off_together(trainer: OnlineTrainer) -> None:
    """What a callback of one process asked for after this step, all do: otherwise one would end, save or evaluate, and the others wait for it in the
    next collective. Collective: six numbers per process.

    Raises:
        `RuntimeError`: the processes are not at the same step.
    """
    if trainer.accelerator.num_processes == 1:
        return
    control, step = trainer.control, trainer.state.global_step
    own = torch.tensor([[step, *(int(getattr(control, name)) for name in _TURNS)]], device=trainer.accelerator.device)
    steps, *asked = trainer.accelerator.gather(own).T.tolist()
    if (said := alike.apart(steps)) is not None:
        raise RuntimeError(
            f"The processes of this run are not at the same step: {said}. They were given other data, or a callback of one of them left steps out."
        )
    for (name, what), by in zip(_TURNS.items(), asked, strict=True):
        if any(by) and not all(by):
            setattr(control, name, True)
            if trainer.accelerator.is_main_process:
                who = ", ".join(str(rank) for rank, value in enumerate(by) if value)
                logger.warning("Process %s asked for %s at step %d, so all processes do it.", who, what, step)
