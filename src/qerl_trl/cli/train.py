"""Training commands: `train` (one run) and `arms` (arms x seeds); shared options, notes and progress bars."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..support.recipes import accelerate_file, config_file, documented_options, examples_folder, task_file

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the destination, once all is written.")]
BaseModel = Annotated[str | None, typer.Option(help="Folder or Hub id of the base. Default: what the adapter says.")]
BaseFormat = Annotated[
    Literal["nvfp4", "bf16"] | None, typer.Option(help="The base's format. Default: what the run recorded.")
]
AllowOtherBase = Annotated[bool, typer.Option("--allow-other-base", help="Accept a base with other weights.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code from the repository.")]

#: for a merge
WrittenDtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="Dtype written by --as bf16, not the compute dtype. Default: bfloat16."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:<i>.")]
NumProcesses = Annotated[int | None, typer.Option(help="GPUs of a run. Default: 1, or --accelerate-config's.")]
AccelerateConfig = Annotated[str | None, typer.Option(help="YAML file or shipped name: fsdp2_2, zero2_4...")]
DatasetName = Annotated[str | None, typer.Option("--dataset", help="Training data to name in the card.")]


def note(text: str) -> None:
    print(text, file=sys.stderr)


def print_result(content: Mapping[str, Any], as_json: bool, lines: list[str]) -> None:
    print(json.dumps(content, indent=1) if as_json else "\n".join(lines))


@contextmanager
def progress_bar(description: str) -> Iterator[Any]:
    """Show a progress bar in bytes, in a log every 30 s. Yields its update: (bytes since the last call, total)."""
    from tqdm import tqdm

    every = 0.1 if sys.stderr.isatty() else 30.0
    with tqdm(desc=description, unit="B", unit_scale=True, mininterval=every, miniters=1, delay=every) as bar:

        def update(size: int, total: int | None = None) -> None:
            bar.total = total or bar.total
            bar.update(size)

        yield update


# --- train and arms ------------------------------------------------------------

#: file in a finished run's folder, with its command
STARTED_NAME = "arm.json"
_VARIED = ("output_dir", "seed", "data_seed", "base_format", "aqn", "resume_from_checkpoint", "hub_model_id")


def train(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option(help="YAML file of a run, or a shipped one's name. Default: by machine.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="YAML file of a task, or a shipped one's name. Default: the configuration's.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Your problems, in place of a task: a .jsonl file...")] = None,
    reward: Annotated[str | None, typer.Option(help="Your reward for --data: file.py:function.")] = None,
    num_processes: NumProcesses = None,
    accelerate_config: AccelerateConfig = None,
) -> None:
    """Train with examples/grpo_gsm8k.py. Further options are fields of QeRLConfig, TRL's ModelConfig and a task."""
    arguments = list(context.args)
    if (task and data) or (reward and not data):
        raise ValueError("--reward is for the problems of --data, and --data replaces --task. Pass --data FILE alone.")
    if data is not None:
        files = [word.rpartition(":")[0] or word for word in (data, reward or "")]
        missing = [file for file in files if file.endswith((".py", ".jsonl", ".csv")) and not Path(file).is_file()]
        if missing:
            raise ValueError(f"{missing[0]}: there is no such file in {Path().resolve()}.")
        task = "own"
        arguments += ["--dataset_name", data, *(["--reward_funcs", reward] if reward else ["--grader", "auto"])]
    if task is not None:
        arguments += ["--task", str(task_file(task))]
    if config is not None:
        arguments += ["--config", str(config_file(config))]
    command = example_command(arguments, num_processes, accelerate_config)
    sys.stdout.flush()
    os.execv(command[0], command)  # exec: the run gets this process's signals and sets its exit code


def example_command(
    arguments: list[str], num_processes: int | None = None, accelerate_config: str | None = None
) -> list[str]:
    """Build the command line of a training with the example script."""
    launcher = [sys.executable]
    if accelerate_config is not None or (num_processes or 1) > 1:
        launcher += ["-m", "accelerate.commands.launch"]
    if accelerate_config is not None:
        launcher += ["--config_file", str(accelerate_file(accelerate_config))]
    if num_processes is not None and len(launcher) > 1:
        launcher += ["--num_processes", str(num_processes)]
    return [*launcher, str(examples_folder() / "grpo_gsm8k.py"), *arguments]


class TrainCommand(TyperCommand):
    """Lists QeRL's options by group below its own."""

    def format_epilog(self, ctx, formatter) -> None:
        for group, rows in documented_options().items():
            with formatter.section(group):
                formatter.write_dl([(f"--{name}", what.replace("`", "")) for name, _, what in rows])
        formatter.write_paragraph()
        formatter.write_text("And every field of TRL's GRPOConfig and ModelConfig, and of a task (examples/tasks).")


class SpreadCommand(TyperCommand):
    """Accept several words after --arms and --seeds: `--seeds 1 2 3`."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = None
        for word in args:
            if word.startswith("-"):
                option = word if word in ("--arms", "--seeds") else None
                if option is None:
                    spread.append(word)
            else:
                spread += [word] if option is None else [option, word]
        return super().parse_args(ctx, spread)


def arms(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="YAML file of the run, or the name of a shipped one.")],
    arms: Annotated[list[str], typer.Option(help="nvfp4, bf16, nf4, full: with noise; <arm>-no-noise: without.")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Folder with a folder for each run, and the table.")],
    seeds: Annotated[list[int] | None, typer.Option(help="Seeds of each arm. Default: 1 2 3.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    num_processes: NumProcesses = None,
    accelerate_config: AccelerateConfig = None,
    as_json: AsJson = False,
) -> None:
    """Train arms x seeds, each in its own folder, and print the paired table. Further options go to every run.

    Example: qerl-trl arms embedded --arms nvfp4 nvfp4-no-noise bf16 --seeds 1 2 3 --output_dir runs/arms. The
    same command again continues. The table (arms.md, arms.json) has accuracies and differences from the first arm.
    """
    from qerl_trl.checkpoint import seal
    from qerl_trl.tasks import arms as comparison

    arms, seeds = list(dict.fromkeys(arms)), list(dict.fromkeys(seeds or [1, 2, 3]))
    comparison.check(arms)
    further = list(context.args)
    _refuse_varied(further)
    file = config_file(config)
    if accelerate_config is not None:
        accelerate_file(accelerate_config)  # fail now instead of once per run
    output_dir.mkdir(parents=True, exist_ok=True)
    runs, failed = [], []

    def run(arm: str, seed: int) -> tuple[str, int, int]:
        folder = output_dir / f"{arm}-{seed}"
        options = {"output_dir": folder, "seed": seed, "data_seed": seed, **comparison.ARMS[arm]}
        words = [*further, "--config", str(file), *(str(w) for name, v in options.items() for w in (f"--{name}", v))]
        code = _run(words, file, folder, example_command(words, num_processes, accelerate_config))
        return arm, seed, code

    found = None
    with _pool(jobs) as pool:
        for future in as_completed([pool.submit(run, arm, seed) for seed in seeds for arm in arms]):
            arm, seed, code = future.result()
            if code:
                last = _last_line(output_dir / f"{arm}-{seed}.log")
                failed.append(f"{arm} with seed {seed} ended with exit code {code} ({last})")
                note(failed[-1])
                continue
            runs.append(comparison.read_run(output_dir / f"{arm}-{seed}", arm, seed))
            found = comparison.summary(arms, seeds, sorted(runs, key=lambda r: (r["seed"], arms.index(r["arm"]))))
            seal.write_json_atomically(output_dir / "arms.json", found)
            (output_dir / "arms.md").write_text(comparison.table(found) + "\n")
    if found is not None:
        print_result(found, as_json, [comparison.table(found)])
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(arms) * len(seeds)} runs failed: {'; '.join(failed)}. The whole output is in the "
            f".log next to each folder of {output_dir}. Start the same command again: it keeps finished runs and "
            "resumes the others."
        )


def _run(words: Sequence[str], config: Path, folder: Path, command: Sequence[str]) -> int:
    """Train in `folder` unless that run is finished; returns the exit code."""
    from qerl_trl.checkpoint import seal
    from qerl_trl.checkpoint.records import RESULTS_NAME
    from qerl_trl.support import secrets

    started = {"options": secrets.redacted_words(words), "config_sha256": seal.sha256(config)}
    arm, _, seed = folder.name.rpartition("-")
    ended, log = folder / STARTED_NAME, folder.with_name(f"{folder.name}.log")
    if ended.is_file() and json.loads(ended.read_text()) == started and (folder / RESULTS_NAME).is_file():
        note(f"{arm}, seed {seed}: has ended already, in {folder}")
        return 0
    note(f"{arm}, seed {seed}: in {folder}, its output in {log}")
    code = launch(command, log)
    if code == 0:
        seal.write_json_atomically(ended, started)
    return code


def _refuse_varied(further: list[str]) -> None:
    """Refuse options set by `arms` itself."""
    if taken := [w for w in further if w.startswith("--") and w[2:].split("=")[0].replace("-", "_") in _VARIED]:
        raise ValueError(
            f"{' '.join(taken)} cannot be the same for all runs: qerl-trl arms sets it for each run. Leave it out, or "
            "use --arms, --seeds and --output_dir."
        )


def launch(command: Sequence[str], log: Path) -> int:
    """Run `command` to its end, appending its output to `log`; returns its exit code."""
    with open(log, "a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _running.add(process)
        try:
            return process.wait()
        finally:
            _running.discard(process)


_running: set[subprocess.Popen] = set()


@contextmanager
def _pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool, one run per thread. An error or Ctrl-C terminates the runs and starts no more."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):  # empty if all runs have ended
            process.terminate()
        pool.shutdown()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "no output"
