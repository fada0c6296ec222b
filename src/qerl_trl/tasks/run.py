"""A run of a task from its first to its last measurement: accuracy before, training, accuracy after, results, what to do with it."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from ..checkpoint import seal
from ..checkpoint.fingerprint import base_revision
from ..checkpoint.records import BEFORE_NAME, RESULTS_NAME, RunResults
from ..publish.hub import HubError
from ..publish.load import recorded_settings
from ..rollout.supported import placed_in_training
from ..run.banner import announce, hardware, versions
from ..run.exits import last_whole, told_of_interrupts
from ..run.folder import step_of
from ..support.secrets import redacted_words
from .data import first
from .evaluation import Accuracy, paired_difference
from .grading import in_form
from .held_out import HeldOutAccuracy, held_out_verdicts, measured_by
from .results import arm_of, read_before, write_before
from .rewards import completion_text
from .task import Task

logger = logging.getLogger(__name__)


class CompactProgress(ProgressCallback):
    """The usual bar with the few numbers one watches, instead of a printed dictionary every step; in a log a line for each."""

    _SHOWN = {"entropy": "entropy", "aqn/sigma": "sigma"}

    def __init__(self, reward: str) -> None:
        super().__init__()
        self._shown = {f"rewards/{reward}/mean": reward.removesuffix("_reward"), **self._SHOWN}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and logs is not None:
            shown = {short: f"{logs[key]:.3g}" for key, short in self._shown.items() if logs.get(key) is not None}
            self.training_bar.set_postfix(shown)
            if shown and not sys.stderr.isatty():  # a log: the bar is one long line there
                figures = ", ".join(f"{name} {value}" for name, value in shown.items())
                self.training_bar.write(f"step {state.global_step} of {state.max_steps}: {figures}", file=sys.stderr)


class _Calls(TrainerCallback):
    """Calls a function at an event: at `on_train_begin` the model is where it is trained and has an engine, under FSDP and DeepSpeed not sooner
    (rollout/supported.py)."""

    def __init__(self, event: str, function: Callable[[], None]) -> None:
        setattr(self, event, lambda *args, **kwargs: function())


def _warn_of_form(trainer: Any, task: Task) -> None:
    """Say after the first step that none of its completions states an answer in the grader's form."""
    if trainer.state.global_step != 1 or not trainer.accelerator.is_main_process:
        return
    texts, whole = [completion_text(each) for each in trainer._logs["completion"]], task.answer_format == "whole"
    if not any(in_form(text, task.grader, whole) for text in texts):
        form = "as all of its text" if whole else "after #### or in \\boxed{}"
        logger.warning(
            "None of the %d completions of the first rollout states an answer %s, which grader=%r reads: all count as wrong. Ask for it in "
            "system_prompt, or change answer_format.",
            len(texts),
            form,
            task.grader,
        )


def train_and_measure(
    trainer: Any, task: Task, eval_problems: int | None = None, eval_batch_size: int = 64
) -> RunResults:
    """Train, with the accuracy on held-out problems before and after, which is written to `results.json` in the output folder.

    Started again with the same folder, it resumes from the last whole checkpoint; a finished run is measured again and no longer trained.

    Args:
        trainer ([`QeRLGRPOTrainer`] or another trainer with our mixin): made with [`Task.for_trainer`], its evaluation data the held-out ones.
        eval_problems: only the first held-out problems. Default: all.
        eval_batch_size: problems at a time, without vLLM.

    Returns:
        what `results.json` says, on the main process; empty on the others.
    """
    args, tell = trainer.args, trainer.accelerator.print
    test = first(trainer.eval_dataset, eval_problems)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(CompactProgress(trainer.reward_func_names[0]))

    def held_out() -> list[bool]:
        return held_out_verdicts(trainer, task, test, eval_batch_size)

    trainer.add_callback(HeldOutAccuracy(trainer, test, measure=held_out))
    if task.graded(test):
        trainer.add_callback(_Calls("on_step_end", lambda: _warn_of_form(trainer, task)))
    main_process = trainer.accelerator.is_main_process
    announce(trainer)
    how = "greedy" if task.graded(test) else f"sampled at temperature {trainer.temperature:g}"

    output_dir = Path(args.output_dir)
    resume = trainer.to_resume()  # refuses a folder that belongs to another run
    way = measured_by(trainer, task, test)
    before = (read_before(output_dir, test, way) if resume else None) or []

    in_training = placed_in_training(trainer.accelerator)
    goes_on = "" if in_training else f" {last_whole(resume)}"  # which a training says by itself

    def measure_before() -> None:
        if not before:
            with told_of_interrupts(f"The accuracy before training was being measured.{goes_on}"):
                before.extend(held_out())
            if main_process:
                write_before(output_dir, before, test, way)
        tell(f"Held-out accuracy before training, {how}: {Accuracy(sum(before), len(before))}")

    if before or not in_training:
        measure_before()
    elif resume:
        raise ValueError(
            f"{output_dir} has no {BEFORE_NAME}, the accuracy before training. Under FSDP and DeepSpeed it can only be measured as training begins, and this "
            "run goes on from a trained adapter. Put the file back, go on without either of them, or begin anew in another output_dir."
        )
    else:
        trainer.add_callback(_Calls("on_train_begin", measure_before))

    begun = step_of(resume) if resume else 0  # now: training may remove that checkpoint
    try:
        trainer.train(resume_from_checkpoint=resume)
    except HubError as error:  # the training itself is whole; it is pushed again below, once the results are written
        tell(error)
    trainer.save_model(push=False)
    named = " without --resume_from_checkpoint" if args.resume_from_checkpoint else ""
    with told_of_interrupts(
        f"The training is over, and saved in {output_dir}. The accuracy after it was being measured: the same command{named} measures it, and trains no "
        "more."
    ):
        after = held_out()
    results: RunResults = {}
    if main_process:
        trained = trainer.state.global_step > begun
        seconds = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
        results = _report(trainer, task, before, after, how, way, seconds[-1] if trained else None)
    if args.push_to_hub:  # last: whatever the network does, the results are written
        trainer.push_to_hub(dataset_name=task.hub_dataset)
    return results


def _report(
    trainer: Any,
    task: Task,
    before: list[bool],
    after: list[bool],
    how: str,
    way: dict[str, Any],
    seconds: float | None,
) -> RunResults:
    """Write results.json of the run that was saved, and say what came out and what to do with it."""
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    settings = recorded_settings(output_dir)  # of what was trained, which is what the figures are about
    difference, low, high = paired_difference(before, after)
    results: RunResults = {
        "before": Accuracy(sum(before), len(before)).as_dict(),
        "after": Accuracy(sum(after), len(after)).as_dict(),
        "difference": {"value": difference, "interval95": [low, high]},
        "train_seconds": seconds,
        "steps": trainer.state.global_step,
        "seed": args.seed,
        "task": task.label,
        "dataset": task.hub_dataset,
        "split": task.held_out_split,
        "decoding": f"{how}, noise off",
        "measured_by": way,
        "arm": arm_of(settings),
        "settings": settings,
        "base": {"sha256": trainer.base_sha256, "revision": base_revision(trainer.model)},
        "device": hardware(args),
        "versions": versions(),
        "command": " ".join(["accelerate launch", *redacted_words(sys.argv)]),
        "log_history": trainer.state.log_history,
    }
    if seconds is None and (output_dir / RESULTS_NAME).is_file():  # trained before, only measured again now
        earlier = json.loads((output_dir / RESULTS_NAME).read_text())
        results["train_seconds"], results["log_history"] = earlier["train_seconds"], earlier["log_history"]
    seal.write_json_atomically(output_dir / RESULTS_NAME, results)
    if args.base_format == "full":
        saved, publish = "model", f"qerl-trl push model {output_dir} <user>/<name>"
    else:
        saved, publish = "adapter", f"qerl-trl push adapter {output_dir} <user>/<name>"
        if Path(trainer.model.config._name_or_path).is_dir():  # which nobody else has
            publish += " --base-model <user>/<base>"
            if args.base_format == "nvfp4":
                base = f"{output_dir}-base"
                publish = f"qerl-trl merge {output_dir} {base} --as base\n    qerl-trl push base {base} <user>/<base>\n    {publish}"
    print(
        f"Held-out accuracy, {how}: before {Accuracy(sum(before), len(before))}\n"
        f"                            after {Accuracy(sum(after), len(after))}\n"
        f"                       difference {100 * difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] (95 %)\n"
        f"Results: {output_dir / 'results.json'}\n"
        f"The {saved} is in {output_dir}. Publish it, privately:\n"
        f"    {publish}"
    )
    return results
