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
Where commands are ended early, start it with `setsid nohup ... &` and take --out with the later commands. BENCH_COMMIT
names the commit where git is missing.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import protocol as protocols
from common import ROOT
from protocol import CANDIDATES, LEARNING, Planned, Protocol, encoded

#: curve -> key of the log; curves of a rollout have one value per rollout, the others one per update
CURVES = {
    "reward": "rewards/correctness_reward/mean", "zero_variance": "frac_reward_zero_std",
    "clipped": "completions/clipped_ratio", "rollout_entropy": "rollout/entropy", "mismatch_kl": "rollout/mismatch_kl",
    "entropy": "entropy", "sigma": "aqn/sigma", "seconds": "step_time",
}  # fmt: skip


# --- problems -------------------------------------------------------------------------------------


def write_task(protocol: Protocol, folder: Path, name: str, settings: dict[str, Any]) -> str:
    """Write a task's problems (of reasoning-gym, or the folder `source`) and a YAML file per use; returns a message."""
    from qerl_trl.tasks.data import of_gym, read
    from qerl_trl.tasks.grading import BOXED_PROMPT

    sizes, drawn, prompt = protocol.problems, protocol.content["samples"], ""
    splits: Any
    first, both = sizes["validation"], sizes["validation"] + sizes["test"]
    if "source" in settings:
        splits = read(ROOT / settings["source"], as_text=("answer",))
    else:
        splits = of_gym(name, train_size=sizes["train"], test_size=both, seed=sizes["seed"], **settings)
        prompt = f"system_prompt: {json.dumps(BOXED_PROMPT)}\n"
    rows = {split: [[row["question"], whole(row["answer"])] for row in splits[split]] for split in splits}
    parts = {"train": rows["train"][: sizes["train"]], "unseen": rows.get("unseen", [])[: sizes["unseen"]]}
    parts |= {"validation": rows["test"][:first], "test": rows["test"][first:both]}
    known = {part: sizes[part] for part in ("train", "test", *["unseen"] * ("unseen" in rows))}
    if any(len(parts[part]) < size for part, size in known.items()):
        return f"too few problems: {len(parts['train'])} to train, {len(rows['test'])} held out"
    parts["held_out"] = [row for part in protocols.PARTS for row in parts[part]]
    for part in ("validation", "test"):
        parts[f"sampled_{part}"] = [row for row in parts[part][: drawn["problems"]] for _ in range(drawn["each"])]
    (folder / name).mkdir(parents=True, exist_ok=True)
    for part in filter(parts.__getitem__, parts):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in parts[part]]
        (folder / name / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        text = f"name: {name}\ndataset_name: {name}\ndataset_test_split: {part}\n{prompt}"
        (folder / f"{name}.{part}.yaml").write_text(text)
    return "written"


def whole(answer: str) -> str:
    """A whole number without its decimals: gsm_symbolic writes 12.0."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", answer)


def tasks(args: argparse.Namespace) -> None:
    protocol = Protocol(args.protocol)
    for name, settings in (protocol.content["tasks"] | protocol.content["second"]["candidates"]).items():
        print(name, write_task(protocol, args.tasks, name, settings), flush=True)


# --- one run --------------------------------------------------------------------------------------


class Session(common.Launcher):
    """One call of `run` or `select`: its folders and deadline."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.work, args.seconds)
        self.args, self.protocol, self.began = args, Protocol(args.protocol), time.monotonic()
        self.model = str(args.model.resolve()) if args.model else str(ROOT / "examples/assets/tiny-qwen2")
        self.names |= {self.model: self.protocol.content["model"]["name"], f"{args.tasks.resolve()}/": ""}

    def limit(self) -> float:
        """Seconds left."""
        return max(1.0, self.args.seconds - (time.monotonic() - self.began))

    def task(self, name: str, part: str) -> Path:
        return self.args.tasks.resolve() / f"{name}.{part}.yaml"

    def place(self, run: Planned) -> Path:
        return self.work / run.name

    def done(self, command: list[str], gpu: int, **more: Any) -> tuple[list[str], dict[str, float]]:
        """Lines and milestones of a command on a GPU; RuntimeError with its last lines if it fails."""
        shown = {"CUDA_VISIBLE_DEVICES": "" if self.args.cpu else str(gpu)}
        code, lines, marks = self.call(command, **shown | more)
        if code:
            raise RuntimeError("\n".join(lines[-15:]))
        return lines, marks

    def evaluated(self, model: Path | str, task: Path, out: Path, gpu: int, *more: str) -> list[bool]:
        """Verdicts of `qerl-trl eval`, once."""
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.is_file():
            words = ["eval", model, "--task", task, "--output", out, "--batch-size", 320, *more]
            words += ["--max-new-tokens", self.protocol.longest]
            self.done([sys.executable, "-m", "qerl_trl.cli.main", *map(str, words)], gpu)
        return [row[0] for row in json.loads(out.read_text())["verdicts"]]

    def sampled(self, model: Path | str, task: Path, out: Path, gpu: int) -> list[int]:
        """Correct completions of each problem at temperature 1."""
        each = self.protocol.content["samples"]["each"]
        found = self.evaluated(model, task, out, gpu, "--temperature", "1")
        return [sum(found[i : i + each]) for i in range(0, len(found), each)]


def take(work: Path) -> int:
    """Lock a work folder while the returned file is open; end processes of a killed harness that still write there."""
    import psutil

    lock = os.open(work / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{work} is in use by another learning.py. Wait for it, or pass another --work.") from None
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        ours = any(word.endswith("grpo_gsm8k.py") or word == "qerl_trl.cli.main" for word in words)
        if ours and any(word.startswith(f"{work}/") for word in words):
            common.end(process.pid)
    return lock


def command_of(session: Session, run: Planned) -> list[str]:
    """The command as typed by a user."""
    given = {"model_name_or_path": session.model, "task": session.task(run.task, "held_out")}
    given |= {"output_dir": session.place(run) / "run"} | session.protocol.options(run)
    cpu = {"use_vllm": "false"} if session.args.cpu else {}
    start = ["accelerate", "launch", *["--cpu"] * session.args.cpu, "examples/grpo_gsm8k.py", "--config"]
    return [*start, session.protocol.content["config"], *common.words(given | cpu)]


def train(session: Session, run: Planned, gpu: int) -> dict[str, Any]:
    """Train, or resume, and return the record."""
    place, options, command = session.place(run), session.protocol.stages[run.stage], command_of(session, run)
    place.mkdir(parents=True, exist_ok=True)
    ended, more = place / "ended.json", dict[str, Any]()
    if not ended.is_file():
        clock = place / f"{len(list(place.glob('*.seconds')))}.seconds"  # one file per attempt
        clock.write_text("0")
        share = {} if session.args.cpu else common.share_of_card(session.args.parallel, place, gpu=gpu)
        look = {"look": lambda line, seconds: clock.write_text(str(seconds))}
        lines, marks = session.done(common.launched(command), gpu, **look, **share)
        (place / "log").write_text("\n".join(lines))
        common.save(marks, ended)
    began = time.monotonic()
    if options.get("samples"):
        task = session.task(run.task, "sampled_test")
        more["sampled"] = session.sampled(place / "run", task, place / "sampled.json", gpu)
    if options.get("checkpoints"):
        task, steps = session.task(run.task, "validation"), sorted(int(path.name[11:]) for path in checkpoints(place))
        files = {step: (place / f"run/checkpoint-{step}", task, place / f"{step}.json") for step in steps}
        more["checkpoints"] = [[step, encoded(session.evaluated(*given, gpu))] for step, given in files.items()]
    more["eval_seconds"] = round(time.monotonic() - began, 1)
    return record_of(session, run, session.clean(shlex.join(command))) | more


def checkpoints(place: Path) -> list[Path]:
    return list(place.glob("run/checkpoint-*"))


def record_of(session: Session, run: Planned, command: str) -> dict[str, Any]:
    """Record of a finished run, from its folder."""
    place, answers, at, counts = session.place(run), {}, 0, session.protocol.measured(run.stage)
    results, *held = (json.loads((place / "run" / f"{n}.json").read_text()) for n in ("results", "before", "after"))
    assert len(held[1]["correct"]) == sum(counts.values()), f"{run.name}: other problems than the protocol's"
    for part, count in counts.items():
        cut, at = slice(at, at + count), at + count
        answers[part] = {when: encoded(h["correct"][cut]) for when, h in zip(("before", "after"), held, strict=True)}
    attempts = [float(file.read_text() or 0) for file in place.glob("*.seconds")]
    files = {part: session.args.tasks / run.task / f"{part}.jsonl" for part in ("train", "held_out")}
    return {
        "stage": run.stage, "task": run.task, "arm": run.arm, "noise": run.noise, "learning_rate": run.rate,
        "seed": run.seed, "model": session.protocol.content["model"], "options": session.protocol.options(run),
        "command": command, "commit": common.commit(), "device": results["device"], "versions": results["versions"],
        "base_sha256": results["base"]["sha256"],
        "problems_sha256": {part: hashlib.sha256(file.read_bytes()).hexdigest() for part, file in files.items()},
        "steps": results["steps"], "attempts": len(attempts), "seconds": round(sum(attempts), 1),
        "side_by_side": session.args.parallel * len(session.args.gpus), "gpus": len(session.args.gpus),
        "marks": json.loads((place / "ended.json").read_text()),
        "curves": {
            name: [float(f"{entry[key]:.4g}") for entry in results["log_history"] if entry.get(key) is not None]
            for name, key in CURVES.items()
        },
        "problems": counts, "answers": answers,
    }  # fmt: skip


# --- many runs ------------------------------------------------------------------------------------


def next_run(session: Session, records: protocols.Records, taken: set[str]) -> Planned | None:
    """The next run that can end within the lease: those with a checkpoint first. `taken`: running or failed."""
    lease = (session.args.lease or session.args.seconds) - (time.monotonic() - session.began)

    def able(run: Planned) -> bool:
        alike = [row for row in records.values() if (row["stage"], row["side_by_side"]) == (run.stage, beside)]
        known = [row["seconds"] + row["eval_seconds"] for row in alike]
        needed = 1.1 * max(known) if known else session.protocol.stages[run.stage]["seconds"]
        return run.name not in taken and needed * (0.5 if checkpoints(session.place(run)) else 1) <= lease

    runs, beside = list[Planned](), session.args.parallel * len(session.args.gpus)
    for stage in session.args.stages or session.protocol.stages:
        if session.protocol.stages[stage].get("alone") and beside > 1:
            continue
        planned, _ = session.protocol.planned(stage, records, candidates(session.args.out))
        runs += [run for run in planned if run.name not in records and able(run)]
    return min(runs, key=lambda run: not checkpoints(session.place(run)), default=None) if session.limit() > 1 else None


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    session, lock, running, failed = Session(args), threading.Lock(), set[str](), set[str]()
    kept = take(session.work)

    def worker(gpu: int) -> None:
        while True:
            with lock:
                chosen = next_run(session, protocols.read(LEARNING, args.out), running | failed)
                if chosen is not None:
                    running.add(chosen.name)
                elif not running or session.limit() <= 1:
                    return
            if chosen is None:  # a running one may decide what comes next
                time.sleep(5)
                continue
            try:
                record = train(session, chosen, gpu)
                common.save(record, args.out / f"{chosen.name}.json", compact=True)
                shown = f"{protocols.accuracy(record, 'validation'):.3f}, {record['seconds']} s"
            except Exception as error:  # the other runs continue
                failed.add(chosen.name)
                shown = session.clean(str(error))
            print(f"{chosen.name}: {shown}", flush=True)
            with lock:
                running.discard(chosen.name)

    with ThreadPoolExecutor(args.parallel * len(args.gpus)) as pool:
        list(pool.map(worker, args.gpus * args.parallel))
    os.close(kept)
    plan(args)


def candidates(*folders: Path) -> dict[str, Any]:
    files = [folder / CANDIDATES for folder in (*folders, LEARNING)]
    return next((json.loads(file.read_text()) for file in files if file.is_file()), {})


def plan(args: argparse.Namespace) -> None:
    """Print the runs that are left by stage, and the smallest visible difference."""
    import evidence

    protocol, records = Protocol(args.protocol), protocols.read(LEARNING, args.out)
    for stage in protocol.stages:
        runs, missing = protocol.planned(stage, records, candidates(args.out))
        left = [run.name for run in runs if run.name not in records]
        how = " (with --parallel 1 and one GPU)" * bool(protocol.stages[stage].get("alone"))
        print(f"{stage}{how}: {len(runs) - len(left)} of {len(runs)} done", *left, *missing, sep="\n    ")
    print(evidence.Evidence(args.protocol, args.out).visible())


def select(args: argparse.Namespace) -> None:
    """Measure the candidates of the second task with the untrained bf16 model, up to the first that passes."""
    args.out.mkdir(parents=True, exist_ok=True)
    session, found, gpu = Session(args), candidates(args.out), args.gpus[0]
    for name in session.protocol.content["second"]["candidates"]:
        files = [session.task(name, part) for part in ("validation", "sampled_validation")]
        if name not in found and files[0].is_file():
            place, each = session.work / f"select-{name}", session.protocol.content["samples"]["each"]
            greedy = session.evaluated(session.model, files[0], place / "greedy.json", gpu)
            counts = session.sampled(session.model, files[1], place / "sampled.json", gpu)
            found[name] = {
                "problems": len(greedy), "greedy": fmean(greedy), "greedy_of_sampled": fmean(greedy[: len(counts)]),
                "pass_1": fmean(counts) / each, "pass_16": fmean(map(bool, counts)), "commit": common.commit(),
                "model": session.protocol.content["model"]["name"],
            }  # fmt: skip
        row = found.setdefault(name, {"problems": 0})  # too few problems
        common.save(found, args.out / CANDIDATES)
        print(name, row, flush=True)
        if session.protocol.passes(row):
            return


def report(args: argparse.Namespace) -> None:
    import tables

    tables.write_all(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (tasks, plan, select, run):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        command.add_argument("protocol", type=Path)
        command.add_argument("--tasks", type=Path, default=ROOT / "runs/tasks", help="Folder of the problem files.")
        command.add_argument("--model", type=Path, help="Folder of the bf16 model; on a CPU the embedded one.")
        command.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "learning", help="Run folders.")
        command.add_argument("--out", type=Path, default=LEARNING, help="Folder of new records.")
        command.add_argument("--stages", nargs="+", help="Default: all, as far as their choices are made.")
        command.add_argument("--gpus", type=int, nargs="+", default=[0])
        command.add_argument("--parallel", type=int, default=4, help="Runs at a time on each GPU.")
        command.add_argument("--seconds", type=float, default=1e6, help="Runs are ended after these.")
        command.add_argument("--lease", type=float, help="Seconds in which a run must be able to end (--seconds).")
        command.add_argument("--cpu", action="store_true")
    commands.add_parser("report", help="`tables.py --check` only compares.").set_defaults(run=report)
    args = parser.parse_args()
    if args.run in (select, run) and not (args.cpu or args.model):
        parser.error("--model is needed, or --cpu.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, common.end_all)
    args.run(args)


if __name__ == "__main__":
    main()
