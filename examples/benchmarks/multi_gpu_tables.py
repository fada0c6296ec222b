"""The table of readme_tables.py about several GPUs: what was aimed at, what was measured, and what has not been."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import plan_check
import speed_tables

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "examples/benchmarks/results/multi_gpu_h200x2.json"
STEPS = ROOT / "examples/benchmarks/results/step_h200.json"
ONE_GPU = "ours-7b-8x512"
#: aims of which there is no row in RESULT
NOT_RUN = "sync over TCP (300 ms), tensor parallel engines, ZeRO-2, stock TRL beside each of them, 70B, one GPU with `overlap=1`, starts of two processes beside one"


def planned_today(row: dict[str, Any]) -> float:
    """GiB that the memory plan of the code that is here says of a row's workload."""
    from qerl_trl.memory.plan import Gpu
    from qerl_trl.memory.workload import Workload

    known = {field.name for field in dataclasses.fields(Workload)}
    work = Workload(**{name: value for name, value in row["workload"].items() if name in known})
    return plan_check.plan_of_shape(row["size"], work, Gpu.of_gib(140)).peak / 2**30


def multi_gpu() -> str:
    """Sequences per second and the sync beside their aims; what each layout takes of a GPU beside what is planned."""
    rows = {row["name"]: row for row in json.loads(RESULT.read_text())["multi_gpu"]}
    one = next(row for row in json.loads(STEPS.read_text())["step"] if row["name"] == ONE_GPU)
    alone = one["batch"] / one["median"]["step"]
    server, overlapped = rows["ours-server"]["median"], rows["ours-server-overlap"]["median"]
    hidden = f"its rollout alone takes {server['rollout']:.2f} s of a step of {server['step']:.2f} s, and no more than the update's {server['update']:.2f} s can be hidden"

    def aim(what: str, least: float, found: float, why: str, most: bool = False) -> str:
        reached = found <= least if most else found >= least
        return f"| {what} | {'at most' if most else 'at least'} {least:g} | {found:.3g} | {'yes' if reached else 'no'} | {why} |"

    aims = [
        "| 7B, 8 completions of 512 tokens per process, two GPUs | aim | measured | reached | |",
        "|---|---|---:|---|---|",
        aim("data parallel: times the sequences per second of one GPU", 1.9, rows["ours-dp"]["sequences_per_second"] / alone, "the rollouts of two processes are no slower than one's; gradients and checks wait for the slower one"),
        aim("a server with `overlap=1`: times the sequences per second of one GPU", 1.5, rows["ours-server-overlap"]["sequences_per_second"] / alone, hidden),
        aim("sync to a server on one host, ms", 50, 1000 * server["sync"], f"{1000 * overlapped['sync']:.0f} with `overlap=1`", most=True),
    ]  # fmt: skip
    taken = ["| | planned, GiB | measured, GiB | planned above |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        planned, most = planned_today(row), max(row["gib"])
        taken.append(f"| {name} | {planned:.1f} | {most:.1f} | {100 * (planned / most - 1):.1f} % |")
    device = rows["ours-dp"]["device"]
    commits = [row["commit"] for row in rows.values()]
    return (
        "\n".join(aims)
        + f"\n\nOne GPU: {alone:.2f} sequences per second, another session ({STEPS.name}, commit {one['commit'][:7]}). Not run: {NOT_RUN}.\n\n"
        + "\n".join(taken)
        + "\n\nOf the fullest GPU, by the plan of this commit; FSDP 2's was 4.4 % too low when it was measured, and was mended after this one row.\n\n"
        + f"{speed_tables.measured_by(RESULT, device, commits)}."
    )
