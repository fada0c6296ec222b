"""Run a task: accuracy before, training, accuracy after, results and the next commands."""

import json
import logging
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from transformers import ProgressCallback, TrainerCallback

from ..checkpoint import seal
from ..checkpoint.fingerprint import base_revision
from ..checkpoint.records import AFTER_NAME, BEFORE_NAME, RESULTS_NAME, Arm, RunResults, hardware, versions
from ..checkpoint.settings import dataset_sha256
from ..publish.hub import HubError
from ..publish.load import recorded_settings
from ..rollout.supported import placed_in_training
from ..run.banner import announce
from ..run.exits import last_whole, told_of_interrupts
from ..run.folder import step_of
from ..support.secrets import redacted_words
from .data import first
from .evaluation import Accuracy, HeldOutAccuracy, Measurement, paired_difference
from .grading import completion_text, in_form
from .task import Task

logger = logging.getLogger(__name__)


class CompactProgress(ProgressCallback):
    """The usual progress bar with a few key numbers instead of a printed dictionary; in a log, a line per rollout."""

    def __init__(self, rewards: list[str]) -> None:
        super().__init__()
        named = {f"rewards/{rewards[0]}/mean": rewards[0].removesuffix("_reward")}
        total = {"reward": "reward"} if len(rewards) > 1 else {}
        self._shown = {**total, **named, "entropy": "entropy", "aqn/sigma": "sigma"}

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._began, self._last = (time.monotonic(), state.global_step), (time.monotonic(), 0.0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or logs is None or "reward" not in logs:
            return
        shown = {short: f"{logs[key]:.3g}" for key, short in self._shown.items() if logs.get(key) is not None}
        now, tokens = time.monotonic(), logs.get("num_tokens", 0.0)
        if self._last[1]:
            shown["tokens/s"] = f"{(tokens - self._last[1]) / (now - self._last[0]):.0f}"
        self._last = now, tokens
        self.training_bar.set_postfix(shown)
        if not sys.stderr.isatty():  # in a log the bar is one long line
            each = (now - self._began[0]) / max(1, state.global_step - self._began[1])
            left = str(timedelta(seconds=round(each * (state.max_steps - state.global_step))))
            figures = ", ".join(f"{name} {value}" for name, value in (shown | {"left": left}).items())
            self.training_bar.write(f"step {state.global_step} of {state.max_steps}: {figures}", file=sys.stderr)


class _Calls(TrainerCallback):
    """Call a function on an event. Under FSDP and DeepSpeed the model has an engine from `on_train_begin` on."""

    def __init__(self, event: str, function: Callable[[], None]) -> None:
        setattr(self, event, lambda *args, **kwargs: function())


def _warn_of_form(texts: list[str], task: Task) -> None:
    """Warn if none of the first completions has an answer in the grader's form."""
    if not any(in_form(text, task.grader, task.answer_format) for text in texts):
        logger.warning(
            "None of the %d completions of the first rollout states an answer %s, which grader=%r reads: all count as "
            "wrong. Ask for it in system_prompt, or change answer_format.",
            len(texts),
            {"marked": "after #### or in a box", "whole": "as all its text", "last": "at its end"}[task.answer_format],
            task.grader,
        )


def _show(texts: list[str], rewards: Mapping[str, Any], step: int) -> None:
    """Print the completions of the lowest and the highest first reward, the middle of long ones left out."""
    order = sorted(range(len(texts)), key=next(iter(rewards.values())).__getitem__)
    for at in (order[0], order[-1]):
        text, values = " ".join(texts[at].split()), ", ".join(f"{name} {all[at]:g}" for name, all in rewards.items())
        shown = text if len(text) <= 300 else f"{text[:150]} [...] {text[-150:]}"
        print(f"Sampled before step {step} ({values}): {shown}")


def train_and_measure(
    trainer: Any, task: Task, eval_problems: int | None = None, eval_batch_size: int = 64
) -> RunResults:
    """Train, measure the accuracy on held-out problems before and after, and write `results.json` to `output_dir`.

    An interrupted run resumes from its last complete checkpoint; a finished one is only evaluated again.

    Args:
        trainer ([`QeRLGRPOTrainer`] or another trainer with [`QeRLMixin`]): made with [`Task.for_trainer`].
        eval_problems: only the first held-out problems. Default: all.
        eval_batch_size: problems per batch, without vLLM.

    Returns:
        The content of `results.json` on the main process; empty on the others.
    """
    args, accelerator = trainer.args, trainer.accelerator
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(CompactProgress(trainer.reward_func_names))
    measurement = Measurement(trainer, task, first(trainer.eval_dataset, eval_problems), eval_batch_size)
    trainer.add_callback(HeldOutAccuracy(measurement))

    announce(trainer)
    resume = trainer.to_resume()  # raises for the folder of another run
    run = _Run(measurement)
    run.measure_before(resume)
    begun = step_of(resume) if resume else 0  # read now: training may delete that checkpoint

    def show_samples() -> None:
        if trainer.state.global_step == begun and accelerator.is_main_process:
            texts = [completion_text(each) for each in trainer._logs["completion"]]
            _show(texts, trainer._logs["rewards"], begun + 1)
            if measurement.graded:
                _warn_of_form(texts, task)

    trainer.add_callback(_Calls("on_pre_optimizer_step", show_samples))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except HubError as error:  # training is complete; the push is repeated below, after the results
        accelerator.print(error)
    trainer.save_model(push=False)
    named = " without --resume_from_checkpoint" if args.resume_from_checkpoint else ""
    with told_of_interrupts(
        lambda: (
            f"The training is over, and saved in {args.output_dir}; its accuracy was being measured. The same "
            f"command{named} measures it without training again."
        )
    ):
        after = measurement.verdicts()
    results: RunResults = {}
    if accelerator.is_main_process:
        trained = trainer.state.global_step > begun
        seconds = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
        results = run.report(after, seconds[-1] if trained else None)
    if args.push_to_hub:  # last: a network error cannot lose the results
        trainer.push_to_hub(dataset_name=task.hub_dataset)
    return results


class _Run:
    """Accuracy before and after a training, and the final report."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement, self.trainer, self.task = measurement, measurement.trainer, measurement.task
        self.way = measurement.measured_by()
        self.how = "greedy" if measurement.graded else f"sampled at temperature {self.trainer.temperature:g}"
        self.before: list[bool] = []

    def measure_before(self, resume: str | None) -> None:
        """Read the accuracy before training from a resumed run, or measure it (under FSDP when training begins)."""
        output_dir, problems = self.trainer.args.output_dir, self.measurement.dataset
        in_training = placed_in_training(self.trainer.accelerator)
        self.before = (read_before(output_dir, problems, self.way) if resume else None) or []
        if in_training and resume and not self.before:
            raise ValueError(
                f"{output_dir} has no {BEFORE_NAME}, the accuracy before training, which FSDP and DeepSpeed only "
                "measure as training begins. Restore the file, resume without them, or start in another output_dir."
            )
        continued = "" if in_training else f" {last_whole(resume)}"  # training prints this itself

        def measure() -> None:
            if not self.before:
                with told_of_interrupts(lambda: f"The accuracy before training was being measured.{continued}"):
                    self.before = self.measurement.verdicts()
                if self.trainer.accelerator.is_main_process:
                    write_verdicts(Path(output_dir, BEFORE_NAME), self.before, problems, self.way)
            before = Accuracy(sum(self.before), len(self.before))
            self.trainer.accelerator.print(f"Held-out accuracy before training, {self.how}: {before}")

        if in_training and not self.before:
            self.trainer.add_callback(_Calls("on_train_begin", measure))
        else:
            measure()

    def report(self, verdicts: list[bool], seconds: float | None) -> RunResults:
        """Write results.json of the saved run, and print the results and the next commands."""
        trainer, args, output_dir = self.trainer, self.trainer.args, Path(self.trainer.args.output_dir)
        settings = recorded_settings(output_dir)  # the trained settings: the results describe them
        before, after = Accuracy(sum(self.before), len(self.before)), Accuracy(sum(verdicts), len(verdicts))
        difference, low, high = paired_difference(self.before, verdicts)
        results: RunResults = {
            "before": before.as_dict(),
            "after": after.as_dict(),
            "difference": {"value": difference, "interval95": [low, high]},
            "train_seconds": seconds,
            "steps": trainer.state.global_step,
            "seed": args.seed,
            "task": self.task.label,
            "dataset": self.task.hub_dataset,
            "split": self.task.held_out_split,
            "decoding": f"{self.how}, noise off",
            "measured_by": self.way,
            "arm": cast(Arm, {name: settings.get(name) for name in Arm.__annotations__}),
            "settings": settings,
            "base": {"sha256": trainer.base_sha256, "revision": base_revision(trainer.model)},
            "device": hardware(args),
            "versions": versions(),
            "command": shlex.join(["accelerate", "launch", *redacted_words(sys.argv)]),
            "log_history": trainer.state.log_history,
        }
        if seconds is None and (output_dir / RESULTS_NAME).is_file():  # trained earlier, only evaluated again
            earlier = json.loads((output_dir / RESULTS_NAME).read_text())
            results["train_seconds"], results["log_history"] = earlier["train_seconds"], earlier["log_history"]
        write_verdicts(output_dir / AFTER_NAME, verdicts, self.measurement.dataset, self.way)
        seal.write_json_atomically(output_dir / RESULTS_NAME, results)
        saved = "model" if args.base_format == "full" else "adapter"
        print(
            f"Held-out accuracy, {self.how}: before {before}\n"
            f"                            after {after}\n"
            f"                       difference {100 * difference:+.1f} points "
            f"[{100 * low:+.1f}, {100 * high:+.1f}] (95 %)\n"
            f"Results: {output_dir / 'results.json'}\n"
            f"The {saved} is in {output_dir}. Publish it, privately:\n"
            f"    {_publishing(saved, output_dir, trainer.model.config._name_or_path, args.base_format)}"
        )
        return results


def _publishing(saved: str, output_dir: Path, base: str, base_format: str) -> str:
    """Return the commands that publish the saved model; a local base is published before its adapter."""
    publish = f"qerl-trl push {saved} {output_dir} <user>/<name>"
    if saved == "model" or not Path(base).is_dir():
        return publish
    publish += " --base-model <user>/<base>"
    if base_format != "nvfp4":
        return publish
    made = f"{output_dir}-base"
    return f"qerl-trl merge {output_dir} {made} --as base\n    qerl-trl push base {made} <user>/<base>\n    {publish}"


# --- measurement before training --------------------------


def write_verdicts(file: Path, verdicts: list[bool], problems: Dataset, way: Mapping[str, Any]) -> None:
    """Save the verdicts on `problems` before or after training, and the settings (`way`) of the measurement."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"correct": verdicts, "problems_sha256": dataset_sha256(problems), "measured_by": dict(way)}
    seal.write_json_atomically(file, content)


def read_before(output_dir: str, problems: Dataset, way: Mapping[str, Any]) -> list[bool] | None:
    """Read the verdicts on `problems` before the training in `output_dir`; `None` if they were not measured.

    Raises:
        `ValueError`: they were measured on other problems or with other settings.
    """
    file = Path(output_dir, BEFORE_NAME)
    if not file.is_file():
        return None
    content = json.loads(file.read_text())
    then = len(content["correct"])
    lines = []
    if then != len(problems):
        lines = [f"{then} problems then, {len(problems)} now: --eval_problems {then}"]
    elif content["problems_sha256"] != dataset_sha256(problems):
        lines = [f"{then} problems both times, but others"]
    for name, was in content["measured_by"].items():
        is_now = json.loads(json.dumps(way.get(name)))
        unread = name.endswith("_sha256") and name in way and None in (was, is_now)  # defined in a Python prompt
        if was != is_now and not unread:
            lines.append(f"{name}: {_shown(was)} then, {_shown(is_now)} now")
    if lines:
        raise ValueError(
            f"The accuracy before training in {file} was measured in another way ({'; '.join(lines)}) than now, so "
            "it cannot be compared. Use the same problems, grader and limits, or choose another output_dir."
        )
    return content["correct"]


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", text)
