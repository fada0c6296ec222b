#!/usr/bin/env python3
"""What a 4-bit base and noise buy: the runs of a protocol by the shipped commands, and the page made of their records.

    python benchmarks/learning.py tasks benchmarks/protocol.yaml --tasks runs/tasks     # pip install reasoning-gym
    python benchmarks/learning.py plan benchmarks/protocol.yaml                         # runs left, smallest difference
    python benchmarks/learning.py select benchmarks/protocol.yaml --tasks runs/tasks --model FOLDER
    python benchmarks/learning.py run benchmarks/protocol.yaml --tasks runs/tasks --model FOLDER --gpus 0 1 \\
        --stages noise rates test --seconds 1500 [--lease 1700] [--out DIR]
    python benchmarks/learning.py run benchmarks/protocol_cpu.yaml --cpu --tasks runs/tasks --out /tmp/learning
    python benchmarks/learning.py report                                                # tables, plots and page

A run is `accelerate launch examples/grpo_gsm8k.py`, with a share of a GPU (shown_card.py), and ends as one JSON in
results/learning/. `run` can be killed at any time: the same command skips runs with a JSON and resumes the others from
their last checkpoint in --work. After --seconds it ends its runs; none starts that cannot end within --lease seconds.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import protocol as protocols
from common import ROOT
from protocol import CANDIDATES, LEARNING, NotYet, Planned, Protocol, encoded

#: curve -> key of the log; curves of a rollout have one value per rollout, the others one per update
CURVES = {
    "reward": "rewards/correctness_reward/mean", "zero_variance": "frac_reward_zero_std",
    "clipped": "completions/clipped_ratio", "rollout_entropy": "rollout/entropy", "mismatch_kl": "rollout/mismatch_kl",
    "entropy": "entropy", "sigma": "aqn/sigma", "seconds": "step_time",
}  # fmt: skip


# --- problems -------------------------------------------------------------------------------------


def of_source(settings: dict[str, Any], name: str, sizes: dict[str, int]) -> dict[str, list[dict[str, str]]]:
    """Splits of a reasoning-gym set, or of the folder `source`: train, held-out problems, and unseen templates."""
    from qerl_trl.tasks.data import of_gym, read

    if "source" in settings:
        return {split: list(rows) for split, rows in read(ROOT / settings["source"], as_text=("answer",)).items()}
    held_out = sizes["validation"] + sizes["test"]
    return of_gym(name, train_size=sizes["train"], test_size=held_out, seed=sizes["seed"], **settings)


def plain(answer: str) -> str:
    """A whole number without its decimals: gsm_symbolic writes 12.0."""
    whole, dot, decimals = answer.partition(".")
    return whole if dot and whole.lstrip("-").isdigit() and decimals.strip("0") == "" else answer


def write_task(protocol: Protocol, folder: Path, name: str, settings: dict[str, Any]) -> str | None:
    """Write a task's problems and one YAML file per use. Returns why not, if there are too few problems."""
    sizes, drawn = protocol.problems, protocol.content["samples"]
    splits = of_source(settings, name, sizes)
    parts, at = {"train": splits["train"][: sizes["train"]]}, 0
    for part in ("validation", "test"):
        parts[part], at = splits["test"][at : at + sizes[part]], at + sizes[part]
    parts["unseen"] = splits.get("unseen", [])[: sizes["unseen"]]
    if few := [f"{part} {len(rows)}" for part, rows in parts.items() if len(rows) < sizes[part] and part != "unseen"]:
        return f"too few problems: {', '.join(few)}"
    parts["held_out"] = [row for part in protocols.PARTS for row in parts[part]]
    for part in ("validation", "test"):
        once = parts[part][: drawn["problems"]]
        parts[f"sampled_{part}"] = [row for row in once for _ in range(drawn["each"])]
    (folder / name).mkdir(parents=True, exist_ok=True)
    for part, rows in ((part, rows) for part, rows in parts.items() if rows):
        lines = [json.dumps({"question": row["question"], "answer": plain(row["answer"])}) for row in rows]
        (folder / name / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        prompt = "" if "source" in settings else "system_prompt: |-\n  " + boxed_prompt() + "\n"
        text = f"name: {name}\ndataset_name: {name}\ndataset_test_split: {part}\n{prompt}"
        (folder / f"{name}.{part}.yaml").write_text(text)
    return None


def boxed_prompt() -> str:
    from qerl_trl.tasks.grading import BOXED_PROMPT

    return BOXED_PROMPT


def tasks(args: argparse.Namespace) -> None:
    protocol = Protocol(args.protocol)
    every = protocol.content["tasks"] | protocol.content.get("second", {}).get("candidates", {})
    for name, settings in every.items():
        print(name, write_task(protocol, args.tasks, name, settings) or "written", flush=True)


# --- one run --------------------------------------------------------------------------------------


class Session(common.Launcher):
    """One call of `run` or `select`: its folders and deadline."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.work, args.seconds)
        self.args, self.protocol, self.began = args, Protocol(args.protocol), time.monotonic()
        self.model = str(args.model.resolve()) if args.model else str(ROOT / "examples/assets/tiny-qwen2")
        self.names |= {self.model: self.protocol.content["model"]["name"], f"{args.tasks.resolve()}/": ""}

    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.began)

    def limit(self) -> float:
        return max(1.0, self.left())

    def task(self, name: str, part: str) -> Path:
        return self.args.tasks.resolve() / f"{name}.{part}.yaml"

    def place(self, run: Planned) -> Path:
        return self.work / run.name

    def evaluated(self, model: Path, task: Path, out: Path, *more: str, **environment: str) -> list[bool]:
        """Verdicts of `qerl-trl eval`, once."""
        if not out.is_file():
            words = ["eval", model, "--task", task, "--output", out, "--batch-size", 320, *more]
            code, lines, _ = self.call(
                [sys.executable, "-m", "qerl_trl.cli.main", *map(str, words)], **self.gpu(environment)
            )
            if code:
                raise RuntimeError("\n".join(lines[-15:]))
        return [row[0] for row in json.loads(out.read_text())["verdicts"]]

    def gpu(self, environment: dict[str, str]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""} if self.args.cpu else environment


def end_orphans(folder: Path) -> None:
    """End a training of a killed harness that still writes to this folder."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and any(word.endswith("grpo_gsm8k.py") for word in words):
            common.end(process.pid)


def command_of(session: Session, run: Planned) -> list[str]:
    """The command as typed by a user."""
    given = {"model_name_or_path": session.model, "task": session.task(run.task, "held_out")}
    given |= {"output_dir": session.place(run) / "run"} | session.protocol.options(run)
    cpu = {"use_vllm": "false"} if session.args.cpu else {}
    start = ["accelerate", "launch", *["--cpu"] * session.args.cpu, "examples/grpo_gsm8k.py", "--config"]
    return [*start, session.protocol.content["config"], *common.words(given | cpu)]


def train(session: Session, run: Planned, gpu: int) -> dict[str, Any]:
    """Train, or resume, and return the record."""
    place, options = session.place(run), session.protocol.stages[run.stage]
    place.mkdir(parents=True, exist_ok=True)
    ended, command = place / "ended.json", command_of(session, run)
    if not ended.is_file():
        end_orphans(place / "run")
        clock = place / f"{len(list(place.glob('*.seconds')))}.seconds"  # one file per attempt
        clock.write_text("0")
        share = {} if session.args.cpu else common.share_of_card(session.args.parallel, place, gpu=gpu)
        code, lines, marks = session.call(
            common.launched(command), lambda line, seconds: clock.write_text(str(seconds)), **session.gpu(share)
        )
        with (place / "log").open("a") as log:
            log.write("\n".join([*lines, ""]))
        if code:
            raise RuntimeError("\n".join(lines[-15:]))
        common.save({"marks": marks}, ended)
    card = {"CUDA_VISIBLE_DEVICES": str(gpu)}
    more: dict[str, Any] = {}
    if options.get("samples"):
        each, task = session.protocol.content["samples"]["each"], session.task(run.task, "sampled_test")
        found = session.evaluated(place / "run", task, place / "sampled.json", "--temperature", "1", **card)
        more["sampled"] = [sum(found[i : i + each]) for i in range(0, len(found), each)]
    if options.get("checkpoints"):
        more["checkpoints"] = []
        for folder in sorted(place.glob("run/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])):
            out, task = place / f"{folder.name}.json", session.task(run.task, "validation")
            more["checkpoints"].append(
                [int(folder.name.rpartition("-")[2]), encoded(session.evaluated(folder, task, out, **card))]
            )
    return record_of(session, run, session.clean(shlex.join(command))) | more


def record_of(session: Session, run: Planned, command: str) -> dict[str, Any]:
    """Record of a finished run, from its folder."""
    place, content = session.place(run), session.protocol.content
    folder = place / "run"
    results, before, after = (json.loads((folder / f"{n}.json").read_text()) for n in ("results", "before", "after"))
    answers, at, counts = {}, 0, session.protocol.measured(run.stage)
    assert len(after["correct"]) == sum(counts.values()), f"{run.name}: other problems than the protocol's"
    for part, count in counts.items():
        cut = slice(at, at + count)
        answers[part], at = (
            {"before": encoded(before["correct"][cut]), "after": encoded(after["correct"][cut])},
            cut.stop,
        )
    attempts = sorted(place.glob("*.seconds"))
    history, data = results["log_history"], session.args.tasks.resolve() / run.task
    side_by_side = session.args.parallel * len(session.args.gpus)
    return {
        "stage": run.stage, "task": run.task, "arm": run.arm, "noise": run.noise, "learning_rate": run.rate,
        "seed": run.seed, "model": content["model"], "options": session.protocol.options(run), "command": command,
        "commit": common.commit(), "device": results["device"], "versions": results["versions"],
        "base_sha256": results["base"]["sha256"],
        "problems_sha256": {part: file_sha256(data / f"{part}.jsonl") for part in ("train", "held_out")},
        "steps": results["steps"], "attempts": len(attempts), "side_by_side": side_by_side,
        "seconds": round(sum(float(file.read_text() or 0) for file in attempts), 1),
        "marks": json.loads((place / "ended.json").read_text())["marks"],
        "curves": {
            name: [float(f"{entry[key]:.4g}") for entry in history if entry.get(key) is not None]
            for name, key in CURVES.items()
        },
        "problems": counts, "answers": answers,
    }  # fmt: skip


def file_sha256(file: Path) -> str:
    from qerl_trl.checkpoint import seal

    return seal.sha256(file)


def write(record: dict[str, Any], file: Path) -> None:
    """One line per field, atomically."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    lines = [f" {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in record.items()]
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(file)


# --- many runs ------------------------------------------------------------------------------------


def expected(session: Session, run: Planned, records: protocols.Records) -> float:
    """Seconds that a run will take: of the slowest finished one with the arm, or else the protocol's; less if begun."""
    known = [row["seconds"] for row in records.values() if (row["arm"], row["task"]) == (run.arm, run.task)]
    whole = 1.1 * max(known) if known else session.protocol.content["seconds"]
    return whole / 2 if begun(session, run) else whole


def begun(session: Session, run: Planned) -> bool:
    return any(session.place(run).glob("run/checkpoint-*"))


def next_run(session: Session, records: protocols.Records, taken: set[str]) -> Planned | None:
    """The next run that can end within the lease: those with a checkpoint first. `taken`: running or failed."""
    lease = (session.args.lease or session.args.seconds) - (time.monotonic() - session.began)
    open_runs = []
    for stage in session.args.stages or session.protocol.stages:
        try:
            planned = session.protocol.planned(stage, records, candidates(session.args.out))
        except NotYet:
            continue
        open_runs += [run for run in planned if run.name not in records and run.name not in taken]
    able = [run for run in open_runs if session.left() > 0 and expected(session, run, records) <= lease]
    return min(able, key=lambda run: not begun(session, run), default=None)


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    session, lock, running, failed = Session(args), threading.Lock(), set[str](), set[str]()

    def worker(gpu: int) -> None:
        while True:
            with lock:
                chosen = next_run(session, known(args.out), running | failed)
                if chosen is not None:
                    running.add(chosen.name)
                elif not running or session.left() <= 0:
                    return
            if chosen is None:  # a running one may decide what comes next
                time.sleep(5)
                continue
            try:
                record = train(session, chosen, gpu)
                write(record, args.out / f"{chosen.name}.json")
                print(
                    f"{chosen.name}: {protocols.accuracy(record, 'validation'):.3f}, {record['seconds']} s", flush=True
                )
            except Exception as error:  # the other runs continue
                failed.add(chosen.name)
                print(f"{chosen.name}: {session.clean(str(error))}", flush=True)
            with lock:
                running.discard(chosen.name)

    places = [gpu for _ in range(args.parallel) for gpu in args.gpus]
    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(worker, places))
    plan(args)


def known(out: Path) -> dict[str, dict[str, Any]]:
    return protocols.read(LEARNING, out)


def candidates(*folders: Path) -> dict[str, Any]:
    files = [folder / CANDIDATES for folder in (*folders, LEARNING)]
    return next((json.loads(file.read_text()) for file in files if file.is_file()), {})


def plan(args: argparse.Namespace) -> None:
    """Print the runs that are left by stage, and the smallest visible difference."""
    import evidence

    protocol, records = Protocol(args.protocol), known(args.out)
    for stage in protocol.stages:
        try:
            runs = protocol.planned(stage, records, candidates(args.out))
            left = [run.name for run in runs if run.name not in records]
            print(f"{stage}: {len(runs) - len(left)} of {len(runs)} done" + "".join(f"\n    {name}" for name in left))
        except NotYet as reason:
            print(f"{stage}: not yet ({reason})")
    print(evidence.visible(protocol))


def select(args: argparse.Namespace) -> None:
    """Measure the candidates of the second task with the untrained bf16 model, up to the first that passes."""
    args.out.mkdir(parents=True, exist_ok=True)
    session, found, card = Session(args), candidates(args.out), {"CUDA_VISIBLE_DEVICES": str(args.gpus[0])}
    drawn = session.protocol.content["samples"]
    for name in session.protocol.content["second"]["candidates"]:
        if name not in found and session.task(name, "validation").is_file():
            place = session.work / f"select-{name}"
            place.mkdir(parents=True, exist_ok=True)
            model, each = Path(session.model), drawn["each"]
            greedy = session.evaluated(model, session.task(name, "validation"), place / "greedy.json", **card)
            task, once = session.task(name, "sampled_validation"), greedy[: drawn["problems"]]
            rows = session.evaluated(model, task, place / "sampled.json", "--temperature", "1", **card)
            counts = [sum(rows[i : i + each]) for i in range(0, len(rows), each)]
            found[name] = {
                "problems": len(greedy), "greedy": sum(greedy) / len(greedy),
                "greedy_of_sampled": sum(once) / len(once), "pass_1": sum(counts) / len(rows),
                "pass_16": sum(map(bool, counts)) / len(counts),
                "model": session.protocol.content["model"]["name"], "commit": common.commit(),
            }  # fmt: skip
        elif name not in found:
            found[name] = {"problems": 0}
        common.save(found, args.out / CANDIDATES)
        print(name, found[name], flush=True)
        if session.protocol.passes(found[name]):
            return


def report(args: argparse.Namespace) -> None:
    import tables

    tables.write_all(args.check)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (tasks, plan, select, run):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        command.add_argument("protocol", type=Path)
        command.add_argument("--tasks", type=Path, default=ROOT / "runs/tasks", help="Folder of the problem files.")
        command.add_argument("--model", type=Path, help="Folder of the bf16 model. Default: the embedded model.")
        command.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "learning", help="Run folders.")
        command.add_argument("--out", type=Path, default=LEARNING, help="Folder of new records.")
        command.add_argument("--stages", nargs="+", help="Default: all, as far as their choices are made.")
        command.add_argument("--gpus", type=int, nargs="+", default=[0])
        command.add_argument("--parallel", type=int, default=4, help="Runs at a time on each GPU.")
        command.add_argument("--seconds", type=float, default=1e6, help="Runs are ended after these.")
        command.add_argument("--lease", type=float, help="Seconds in which a run must be able to end (--seconds).")
        command.add_argument("--cpu", action="store_true")
    command = commands.add_parser("report")
    command.set_defaults(run=report)
    command.add_argument("--check", action="store_true", help="Only compare.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, common.end_all)
    signal.signal(signal.SIGINT, common.end_all)
    args.run(args)


if __name__ == "__main__":
    main()
