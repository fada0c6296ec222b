"""The command that compares arms: each with each seed, in a folder of its own."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from ..support.recipes import accelerate_file, config_file
from .evaluate import example_command
from .options import AccelerateConfig, AsJson, NumProcesses, note, print_result

#: what a finished run was started with, in its folder
STARTED_NAME = "arm.json"
_VARIED = ("output_dir", "seed", "data_seed", "base_format", "aqn", "resume_from_checkpoint")


class SpreadCommand(TyperCommand):
    """Options that take several words: `--seeds 1 2 3`."""

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
    """Train arms x seeds, each in a folder of its own, and print the paired table. Further options go to every run, as with train.

    Example: qerl-trl arms embedded --arms nvfp4 nvfp4-no-noise bf16 --seeds 1 2 3 --output_dir runs/arms. Started again, it goes on where
    it stopped. The table (arms.md, arms.json) has the accuracies, and each arm's differences from the first one, seed by seed.
    """
    from qerl_trl.checkpoint import seal
    from qerl_trl.tasks import arms as comparison

    seeds = seeds or [1, 2, 3]
    comparison.check(arms, seeds)
    further = list(context.args)
    names = {word: word.split("=")[0].removeprefix("--").replace("-", "_") for word in further if word.startswith("--")}
    if taken := [word for word, name in names.items() if name in _VARIED]:
        raise ValueError(
            f"{' '.join(taken)} is what qerl-trl arms gives to each run: use --arms, --seeds and --output_dir."
        )
    if "hub_model_id" in names.values():
        raise ValueError(
            "--hub_model_id would push every run to one repository. Leave it out: each is named after its folder."
        )
    file = config_file(config)
    if accelerate_config is not None:
        accelerate_file(accelerate_config)  # refused now, not once for each run
    output_dir.mkdir(parents=True, exist_ok=True)
    runs, failed = [], []

    def run(arm: str, seed: int) -> tuple[str, int, int]:
        folder = output_dir / f"{arm}-{seed}"
        options = {"output_dir": folder, "seed": seed, "data_seed": seed, **comparison.ARMS[arm]}
        words = [*further, "--config", str(file), *(str(w) for name, v in options.items() for w in (f"--{name}", v))]
        started = _started(words, file)
        if _read(folder / STARTED_NAME) == started and (folder / comparison.RESULTS_NAME).is_file():
            note(f"{arm}, seed {seed}: has ended already, in {folder}")
            return arm, seed, 0
        log = output_dir / f"{folder.name}.log"
        note(f"{arm}, seed {seed}: in {folder}, its output in {log}")
        code = launch(example_command(words, num_processes, accelerate_config), log)
        if code == 0:
            seal.write_json_atomically(folder / STARTED_NAME, started)
        return arm, seed, code

    found = None
    with _pool(jobs) as pool:
        for future in as_completed([pool.submit(run, arm, seed) for seed in seeds for arm in arms]):
            arm, seed, code = future.result()
            if code:
                failed.append(
                    f"{arm} with seed {seed} ended with exit code {code} ({_last_line(output_dir / f'{arm}-{seed}.log')})"
                )
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
            f"{len(failed)} of {len(arms) * len(seeds)} runs failed: {'; '.join(failed)}. The whole output is in the .log beside each folder of "
            f"{output_dir}. Once the cause is gone, start the same command again: runs that have ended stay, the others go on."
        )


def launch(command: Sequence[str], log: Path) -> int:
    """Run `command` to its end, its output appended to `log`; returns its exit code."""
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
    """Threads that each wait for a run. On an error, or Ctrl-C, no further run begins and those that run are ended."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):
            process.terminate()
        raise
    finally:
        pool.shutdown()


def _started(words: Sequence[str], config: Path) -> dict[str, object]:
    from qerl_trl.checkpoint import seal
    from qerl_trl.support import secrets

    return {"options": secrets.redacted_words(words), "config_sha256": seal.sha256(config)}


def _read(file: Path) -> object:
    return json.loads(file.read_text()) if file.is_file() else None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it said nothing"
