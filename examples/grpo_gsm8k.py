"""GRPO on GSM8K with a 4-bit base, LoRA and adaptive quantization noise.

    accelerate launch examples/grpo_gsm8k.py                                           # picks the default below
    accelerate launch examples/grpo_gsm8k.py --config examples/configs/qwen2.5-7b.yaml
    accelerate launch examples/grpo_gsm8k.py --base_format bf16 --aqn false --output_dir runs/bf16     # a control arm, in its own folder
    qerl-trl arms qwen2.5-7b --arms nvfp4 bf16 --seeds 1 2 3 --output_dir runs/arms    # arms x seeds, and the paired table

Without --config: Qwen2.5-3B-Instruct on openai/gsm8k if there is a GPU, otherwise the embedded default, a tiny model that
`examples/assets/pretrain.py` trained from scratch, on generated problems in GSM8K's format. Any option of `QeRLConfig`
and of TRL's `ModelConfig` may follow. Started again with the same output_dir, it resumes from the last whole checkpoint; a finished
run is measured again and no longer trained.
"""

import functools
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.base_identity import base_revision
from qerl_trl.checkpoint import write_json_atomically
from qerl_trl.publish.hub import HubError
from qerl_trl.publish.run import recorded_settings
from qerl_trl.redaction import check_places
from qerl_trl.report import banner, device_name, versions
from qerl_trl.run_folder import step_of
from qerl_trl.tasks.evaluation import Accuracy, grade, paired_difference
from qerl_trl.tasks.held_out import HeldOutAccuracy, held_out_completions
from qerl_trl.tasks.plots import plot_curves
from qerl_trl.tasks.results import RESULTS_NAME, arm_of, read_before, write_before
from qerl_trl.tasks.rewards import as_prompts, correctness, format_reward

HERE = Path(__file__).resolve().parent


@dataclass
class ScriptArguments:
    """Data, rewards and evaluation of this script; everything else is `QeRLConfig` and `ModelConfig`."""

    dataset_name: str = field(
        default="openai/gsm8k", metadata={"help": "Hub dataset, or a folder with train.jsonl and test.jsonl."}
    )
    dataset_config: str | None = field(default="main", metadata={"help": "Configuration of a Hub dataset."})
    system_prompt: str | None = field(default=None, metadata={"help": "System message put before every question."})
    format_reward_weight: float = field(
        default=0.1, metadata={"help": "Weight of the format reward; correctness has 1."}
    )
    grader: str = field(
        default="auto",
        metadata={"help": "How answers are compared: 'auto', 'exact', 'numeric', 'math' or file.py:function."},
    )
    eval_problems: int | None = field(default=None, metadata={"help": "Held-out problems to grade (default: all)."})
    eval_batch_size: int = field(default=64, metadata={"help": "Problems at a time in the evaluation without vLLM."})


class CompactProgress(ProgressCallback):
    """The usual bar with the few numbers one watches, instead of a printed dictionary every step."""

    _SHOWN = {"rewards/correctness_reward/mean": "correct", "entropy": "entropy", "aqn/sigma": "sigma"}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            shown = {short: f"{logs[key]:.3g}" for key, short in self._SHOWN.items() if logs.get(key) is not None}
            self.training_bar.set_postfix(shown)


def choose_config(argv: list[str]) -> list[str]:
    """Add the default --config for this machine, and say which and why."""
    if any(arg == "--config" or arg.startswith("--config=") for arg in argv):
        return argv
    if torch.cuda.is_available():
        name, why = "qwen2.5-3b.yaml", "a GPU was found, so the default is Qwen2.5-3B-Instruct on openai/gsm8k"
    else:
        name, why = "embedded.yaml", "no GPU was found, so the default is the embedded tiny model and problems"
    config = HERE / "configs" / name
    if os.environ.get("RANK", "0") == "0":
        print(
            f"Using {config.relative_to(HERE.parent)}: {why}. Choose another with --config examples/configs/<name>.yaml."
        )
    return [*argv, "--config", str(config)]


def data_folder(name: str) -> Path | None:
    """The local folder that `dataset_name` means, seen from here or from the repository; `None` for a Hub dataset."""
    return next((path for path in (Path(name), HERE.parent / name) if path.is_dir()), None)


def load_problems(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Training and held-out problems with a `prompt` and an `answer` column."""
    folder = data_folder(script.dataset_name)
    if folder is not None:
        files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
        data = load_dataset("json", data_files=files)
    else:
        data = load_dataset(script.dataset_name, script.dataset_config)
    train, test = (as_prompts(data[split], script.system_prompt) for split in ("train", "test"))
    if script.eval_problems is not None:
        test = test.select(range(min(script.eval_problems, len(test))))
    return train, test


def main(script: ScriptArguments, args: QeRLConfig, model_args: ModelConfig) -> None:
    check_places(vars(script) | vars(model_args))
    model = model_args.model_name_or_path
    if (HERE.parent / model).is_dir():  # the embedded model, from any working directory
        model = str(HERE.parent / model)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        **({"attn_implementation": model_args.attn_implementation} if model_args.attn_implementation else {}),
        **(args.model_init_kwargs or {}),
    }
    args.reward_weights = args.reward_weights or [1.0, script.format_reward_weight]
    train, test = load_problems(script)
    tokenizer = AutoTokenizer.from_pretrained(
        model,
        revision=model_args.model_revision,
        padding_side="left",
        trust_remote_code=args.trust_remote_code,
    )
    trainer = QeRLGRPOTrainer(
        model=model,
        reward_funcs=[correctness(script.grader), format_reward],
        args=args,
        train_dataset=train,
        eval_dataset=test,  # with eval_strategy: sampled rewards, and the greedy accuracy that the callback below adds
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args) if args.base_format != "full" else None,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(CompactProgress)
    graded = functools.partial(grade, grader=script.grader)
    trainer.add_callback(HeldOutAccuracy(trainer, test, graded, script.eval_batch_size))
    main_process = trainer.accelerator.is_main_process
    trainer.accelerator.print(banner(trainer))

    def held_out() -> list[bool]:
        return graded(held_out_completions(trainer, test, batch_size=script.eval_batch_size), test)

    output_dir = Path(args.output_dir)
    resume = trainer.to_resume()  # refuses a folder that belongs to another run
    before = None
    if resume:
        trainer.accelerator.print(f"Resuming from {resume}.")
        before = read_before(output_dir, test)
    if before is None:
        before = held_out()
        if main_process:
            write_before(output_dir, before, test)
    trainer.accelerator.print(f"Held-out accuracy before training, greedy: {Accuracy(sum(before), len(before))}")

    begun = step_of(resume) if resume else 0  # now: training may remove that checkpoint
    try:
        trainer.train(resume_from_checkpoint=resume)
    except HubError as error:  # the training itself is whole; it is pushed again below, once the results are written
        trainer.accelerator.print(error)
    trainer.save_model(push=False)
    after = held_out()
    if main_process:
        # a local folder has no name that a card could link to
        dataset = None if data_folder(script.dataset_name) else script.dataset_name
        trained = trainer.state.global_step > begun
        seconds = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
        report(trainer, before, after, seconds[-1] if trained else None, output_dir, dataset)
    if args.push_to_hub:  # last: whatever the network does, the results are written
        trainer.push_to_hub(dataset_name=script.dataset_name)


def report(
    trainer: QeRLGRPOTrainer,
    before: list[bool],
    after: list[bool],
    seconds: float | None,
    output_dir: Path,
    dataset: str | None,
) -> None:
    """Write results.json and curves.png of the run that was saved to `output_dir`, and say what came out and what to do with it."""
    args = trainer.args
    settings = recorded_settings(output_dir)  # of what was trained, which is what the figures are about
    difference, low, high = paired_difference(before, after)
    results = {
        "before": Accuracy(sum(before), len(before)).as_dict(),
        "after": Accuracy(sum(after), len(after)).as_dict(),
        "difference": {"value": difference, "interval95": [low, high]},
        "train_seconds": seconds,
        "steps": trainer.state.global_step,
        "seed": args.seed,
        "task": "math word problems",
        "dataset": dataset,
        "split": "test",
        "decoding": "greedy, noise off",
        "arm": arm_of(settings),
        "settings": settings,
        "base": {"sha256": trainer.base_sha256, "revision": base_revision(trainer.model)},
        "device": device_name(args.device),
        "versions": versions(),
        "command": " ".join(["accelerate launch", *sys.argv]),
        "log_history": trainer.state.log_history,
    }
    if seconds is None and (output_dir / RESULTS_NAME).is_file():  # trained before, only measured again now
        earlier = json.loads((output_dir / RESULTS_NAME).read_text())
        results |= {name: earlier[name] for name in ("train_seconds", "log_history")}
    write_json_atomically(output_dir / RESULTS_NAME, results)
    plot_curves(trainer.state.log_history, output_dir / "curves.png", title=output_dir.name)
    if args.base_format == "full":
        saved, publish = "model", f"qerl-trl push model {output_dir} <user>/<name>"
    else:
        saved, publish = "adapter", f"qerl-trl push adapter {output_dir} <user>/<name>"
        if Path(trainer.model.config._name_or_path).is_dir():
            publish += " --base-model <the base's name on the Hub>"
    print(
        f"Held-out accuracy, greedy: before {Accuracy(sum(before), len(before))}\n"
        f"                            after {Accuracy(sum(after), len(after))}\n"
        f"                       difference {100 * difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] (95 %)\n"
        f"Curves: {output_dir / 'curves.png'}   figures: {output_dir / 'results.json'}\n"
        f"The {saved} is in {output_dir}. Publish it, privately:\n"
        f"    {publish}"
    )


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, QeRLConfig, ModelConfig))
    main(*parser.parse_args_and_config(choose_config(sys.argv[1:])))
