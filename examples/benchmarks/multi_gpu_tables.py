"""The table of readme_tables.py about several GPUs: what was aimed at, what was measured, and what has not been."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plan_check
import speed_tables

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "examples/benchmarks/results/multi_gpu_h200x2.json"
STEPS = ROOT / "examples/benchmarks/results/step_h200.json"
#: syncs to a server, by server_sync.py, which shared its trainer's GPU
SERVER = ROOT / "examples/benchmarks/results/server_h200.json"
ONE_GPU, ONE_GPU_64 = "ours-7b-8x512", "ours-7b-64x512"
#: aims of which there is no row in RESULT
NOT_RUN = "sync over TCP (300 ms; measured without a GPU only, see below), tensor parallel engines, ZeRO-2, stock TRL beside each of them, 70B, any layout with 64 completions per process, starts of two processes beside one"


def planned_today(row: dict[str, Any]) -> float:
    """GiB that the memory plan of the code that is here says of a row's workload."""
    from qerl_trl.memory.plan import Gpu
    from qerl_trl.memory.workload import Workload

    known = {field.name for field in dataclasses.fields(Workload)}
    work = Workload(**{name: value for name, value in row["workload"].items() if name in known})
    return plan_check.plan_of_shape(row["size"], work, Gpu.of_gib(140)).peak / 2**30


def one_gpu(rows: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The row of one GPU, and whether it is of the same file, from the same kind of machine, as those it is compared with."""
    if "median" in rows.get("ours-one", {}) and rows["ours-one"]["device"] == rows["ours-dp"]["device"]:
        return rows["ours-one"], True
    return step_of(ONE_GPU), False


def step_of(name: str) -> dict[str, Any]:
    """A row of one GPU, measured by step_speed.py."""
    return next(row for row in json.loads(STEPS.read_text())["step"] if row["name"] == name)


def overlap_on_one(aim: Callable[..., str]) -> str:
    """The line of `aim` about a rollout beside an update on the same GPU, and what the two can gain there at most."""
    one, beside = step_of(ONE_GPU_64), step_of(f"{ONE_GPU_64}-overlap")
    same = one["commit"] == beside["commit"] and one["device"] == beside["device"]
    profiles = json.loads(STEPS.read_text())["profiles"]
    busy = next(row for row in profiles if row["name"] == ONE_GPU_64)["profile"]["phases"]["step"]["kernels_ms"] / 1000
    step, waited = one["median"]["step"], beside["median"]["rollout"]
    why = (
        f"with 64 completions: {step:.2f} s without, {beside['median']['step']:.2f} s with it, of which {waited:.2f} s still wait for the rollout. Kernels run "
        f"for {busy:.2f} s of a step, most of them on every multiprocessor, so those of an update and of a rollout take turns: {step / busy:.2f} at most"
    )
    return aim(
        "one GPU with `overlap=1`: times its steps without", 1.2, step / beside["median"]["step"], why, judged=same
    )


def sync_on_one_host(aim: Callable[..., str], formerly: float, then: str) -> str:
    """The line of `aim` about updates through shared memory, with the noise that goes along."""
    record = json.loads(SERVER.read_text())
    sync = record["sync"]
    why = (
        f"adapter and noise, commit {record['commit'][:7]}, trainer and server on one {record['device'].partition(',')[0]}; the adapter alone {1000 * sync['shared memory']['median_s']:.0f}. "
        f"With a GPU for each it took {1000 * formerly:.0f} at commit {then[:7]}, when an update was four requests, and has not been measured since"
    )
    return aim("sync to a server on one host, ms", 50, 1000 * sync["with noise"]["median_s"], why, most=True)


def multi_gpu() -> str:
    """Sequences per second and the sync beside their aims; what each layout takes of a GPU beside what is planned."""
    # of 8 completions per process; those of other numbers have the number in their name, and what failed or was skipped has no median
    found = json.loads(RESULT.read_text())["multi_gpu"]
    rows = {row["name"]: row for row in found if "-of-" not in row["name"] and "median" in row}
    one, same = one_gpu(rows)
    alone, parts = one["batch"] / one["median"]["step"], one["median"]
    server = rows["ours-server"]["median"]
    many = step_of(ONE_GPU_64)["median"]
    hidden = (
        f"a step is no shorter than its rollout: by these parts at most {parts['step']:.2f} s / {server['rollout']:.2f} s = "
        f"{parts['step'] / server['rollout']:.2f} can be had with 8 completions; with 64, where one GPU takes {many['step']:.2f} s, "
        f"{many['rollout']:.2f} s of them the rollout, {many['step'] / many['rollout']:.2f} (not run)"
    )

    def aim(what: str, least: float, found: float, why: str, most: bool = False, judged: bool = True) -> str:
        reached = "yes" if (found <= least if most else found >= least) else "no"
        return f"| {what} | {'at most' if most else 'at least'} {least:g} | {found:.3g} | {reached if judged else 'open: of two sessions'} | {why} |"

    aims = [
        "| 7B, 8 completions of 512 tokens per process, two GPUs | aim | measured | reached | |",
        "|---|---|---:|---|---|",
        aim("data parallel: times the sequences per second of one GPU", 1.9, rows["ours-dp"]["sequences_per_second"] / alone, "the rollouts of two processes are no slower than one's; gradients and checks wait for the slower one", judged=same),
        aim("a server with `overlap=1`: times the sequences per second of one GPU", 1.5, rows["ours-server-overlap"]["sequences_per_second"] / alone, hidden, judged=same),
        overlap_on_one(aim),
        sync_on_one_host(aim, server["sync"], rows["ours-server"]["commit"]),
    ]  # fmt: skip
    taken = ["| | planned, GiB | measured, GiB | planned above |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        if "workload" not in row:  # stock TRL has no plan
            continue
        planned, most = planned_today(row), max(row["gib"])
        taken.append(f"| {name} | {planned:.1f} | {most:.1f} | {100 * (planned / most - 1):.1f} % |")
    device = rows["ours-dp"]["device"]
    session = (
        "the same file"
        if same
        else f"another session, machine and commit ({STEPS.name}, {one['commit'][:7]}), so the two ratios say about how much, and not whether an aim is reached"
    )
    commits = [row["commit"] for row in rows.values()]
    return (
        "\n".join(aims)
        + f"\n\nOne GPU: {alone:.2f} sequences per second, of {session}. Not run: {NOT_RUN}.\n\n"
        + "\n".join(taken)
        + "\n\nOf the fullest GPU, by the plan of this commit; FSDP 2's was 4.4 % too low when it was measured, and was mended after this one row.\n\n"
        + f"{speed_tables.measured_by(RESULT, device, commits)}."
    )
