"""Every shipped GPU configuration, in every arm, started as its user starts it.

    python acceptance.py --out acceptance.json                       # 3B, 7B, 14B and 32B; about 10 minutes on two H200s
    python acceptance.py --out a.json --sizes 7b --arms nvfp4 bf16
    python acceptance.py --out a.json --only "3b nvfp4" "32b nvfp4 without noise"
    python acceptance.py --out a.json --only "qwen3-8b nvfp4" "gemma3-12b nvfp4" --delete    # recipes newer than the paper, by their names
    python acceptance.py --out a.json --only "tiny-gemma3-12b nvfp4" --extra --use_cpu true ...  # the same command on a CPU
    python acceptance.py --out a.json --sizes 3b --commands quantize eval train merge-adapter   # no other run; two minutes and a half
    python acceptance.py --out a.json --only "7b nvfp4" --layouts data_parallel_2 fsdp2_2       # over several GPUs, one run after another

Each run is `accelerate launch examples/grpo_gsm8k.py --config examples/configs/<file>` with the file unedited; on the command line stand
only what this machine cannot have (model and dataset: random weights in the same shape, the embedded example's problems; room for
checkpoints of a fully trained model), the number of steps, an output folder and the arm's options as the README gives them. The
weights stop as `random_checkpoint.py` says. A run passes when its process ends with 0 and results.json holds the steps asked for.

`card_gib`: the run sees a GPU of that size (torch's allocator is capped, `mem_get_info` answers accordingly); so several runs share one
large GPU, and seconds are those of runs side by side. In a layout, which is one of examples/accelerate as it is shipped, a run has the GPUs that
it asks for alone and whole. `peak_gib`: the process's memory by NVML, CUDA context and graphs included.
Commands of the CLI (COMMANDS) run for the first size, side by side, on the folder that `train` among them writes; `push`, `arms` and `tune` are
tested elsewhere.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from acceptance_commands import AFTER_TRAIN, COMMANDS, name_of, words_of
from watched import RUNNING, watched

from qerl_trl.tasks.arms import ARMS as OPTIONS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(ROOT))

from tests.shapes import NEWER  # noqa: E402

GIB = 2**30

#: what a row says -> the library's arm
ARMS = {
    "nvfp4": "nvfp4",
    "nvfp4 without noise": "nvfp4-no-noise",
    "bf16": "bf16-no-noise",
    "bf16 with noise": "bf16",
    "nf4": "nf4-no-noise",
    "full": "full-no-noise",
}


def options_of(arm: str) -> list[str]:
    """As on a command line, beyond what the configurations say, which are of the first arm."""
    ours, first = OPTIONS[ARMS[arm]], OPTIONS["nvfp4"]
    return [word for name, value in ours.items() if first.get(name) != value for word in (f"--{name}", value)]


def config_of(size: str) -> str:
    name = size.removeprefix("tiny-")
    return f"examples/configs/{name if name in NEWER else 'qwen2.5-' + ('3b' if size == 'tiny' else size)}.yaml"


def is_packed(size: str) -> bool:
    return size.removeprefix("tiny-") not in (*DENSE, "tiny")


def disk_bytes(size: str) -> float:
    """Of a recipe's model, at the most."""
    _, billions = NEWER.get(size, (None, 0.0))
    return billions * 1e9 * (0.8 if is_packed(size) else 2.0)


def named_gib(size: str) -> float:
    """Of the card that the first lines of a size's configuration name, in GB as it is sold."""
    found = re.search(r"^# Starts on a card of (\d+) GB", (ROOT / config_of(size)).read_text(), re.MULTILINE)
    assert found is not None, config_of(size)
    return round(int(found[1]) * 10**9 / GIB, 2)


#: GiB of the card that each run is shown; an arm that is not here does not fit one GPU of 141 GiB, or its weights this machine's disk
CARDS = {
    "tiny": dict.fromkeys(ARMS, 0),
    "3b": {"bf16": 24, "bf16 with noise": 24, "nf4": 16, "full": 64},
    "7b": {"bf16": 48, "nf4": 24, "full": 128},
    "14b": {"bf16": 80, "nf4": 48},
    "32b": {},
}
CARDS |= {name: {} for name in NEWER} | {f"tiny-{name}": {"nvfp4": 0} for name in NEWER}
for _size in ("3b", "7b", "14b", "32b", *NEWER):
    CARDS[_size] |= dict.fromkeys(("nvfp4", "nvfp4 without noise"), named_gib(_size))
#: written in bf16, as their users download them, the others as NVFP4: the disk holds only so much, and both ways of loading are to be seen
DENSE = ("3b", "7b", "14b", "qwen3-4b", "qwen3.5-9b")
#: where accelerate's configurations are
LAYOUTS = "examples/accelerate"
#: bytes of disk that runs need beside the models: adapters, checkpoints, what compilers keep
DISK_LEFT = 5_000_000_000
#: weights drawn at random rarely stop: each held-out problem is a completion of full length
PROBLEMS, HELD_OUT = 512, 8


def problems(folder: Path) -> Path:
    """The embedded example's problems, fewer of them, in the layout that the example reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", PROBLEMS), ("test", HELD_OUT)):
        lines = (ROOT / f"examples/assets/{split}.jsonl").read_text().splitlines()[:count]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def environment(card: float, gpu: int, peak_file: Path, site: Path) -> dict[str, str]:
    # two runs that start at the same moment would both find PyTorch's usual port free
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1", VLLM_NO_USAGE_STATS="1", MASTER_PORT=str(port))
    if card:
        found |= {"CARD_GIB": str(card), "CUDA_VISIBLE_DEVICES": str(gpu), "PEAK_FILE": str(peak_file)}
        found["PYTHONPATH"] = f"{site}:{found.get('PYTHONPATH', '')}"
    return found


def run_name(size: str, arm: str, layout: str | None = None) -> str:
    return "-".join([size, *arm.split(), *([layout] if layout else [])])


def processes_of(layout: str) -> int:
    return int(yaml.safe_load((ROOT / LAYOUTS / f"{layout}.yaml").read_text())["num_processes"])


def run(
    size: str, arm: str, steps: int, gpu: int, work: Path, timeout: float, extra: list[str], layout: str | None = None
) -> dict:
    """One run, watched until it ends; what it printed, how long each part took, and how it ended."""
    card, name = 0 if layout else CARDS[size][arm], run_name(size, arm, layout)
    config, output = config_of(size), work / "runs" / name
    processes = ["--config_file", f"{LAYOUTS}/{layout}.yaml"] if layout else []
    command = ["accelerate", "launch", *processes, "examples/grpo_gsm8k.py", "--config", config]
    local = [
        "--model_name_or_path",
        str(work / size),
        "--dataset_name",
        str(work / "problems"),
        "--max_steps",
        str(steps),
    ]
    if arm == "full":
        local += ["--save_strategy", "no"]  # this machine's disk
    command += [*local, "--output_dir", str(output), *options_of(arm), *extra]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]
    peak_file = work / f"{name}.peak"
    started, marks = time.perf_counter(), {}

    def look(line: str) -> None:
        for mark, text in (
            ("ready_s", "  versions"),
            ("evaluated_s", "Held-out accuracy before"),
            ("trained_s", "Held-out accuracy, greedy"),
        ):
            if text in line and mark not in marks:
                marks[mark] = round(time.perf_counter() - started, 1)

    code, lines = watched(launcher, environment(card, gpu, peak_file, work / "site"), timeout, look)
    (work / f"{name}.log").write_text("\n".join(lines))
    results = json.loads((output / "results.json").read_text()) if (output / "results.json").is_file() else {}
    logs = [entry for entry in results.get("log_history", []) if "loss" in entry]
    on_all = f" x {processes_of(layout)}" if layout else ""  # a launcher that starts one process does not say so
    found = {
        "size": size,
        "arm": arm,
        "config": config,
        **({"layout": layout} if layout else {}),
        "command": " ".join(command).replace(str(work), "LOCAL"),
        "card_gib": card or None,
        "passed": code == 0 and results.get("steps") == steps and results["device"].endswith(on_all),
        "exit_code": code,
        "device": results.get("device"),
        "steps": results.get("steps"),
        "seconds": round(time.perf_counter() - started, 1),
        **marks,
        "peak_gib": round(int(peak_file.read_text() or 0) / GIB, 2) if peak_file.is_file() else None,
        "memory_lines": [line.strip() for line in lines if "GiB" in line][:12],
        "log": [
            {
                k: v
                for k, v in entry.items()
                if k.startswith(("seconds/", "rollout/", "memory/", "aqn/", "completions/mean_len"))
            }
            for entry in logs
        ],
    }
    if not found["passed"]:
        found["last_lines"] = lines[-25:]
    return found


def command_line(
    chosen: list[str], size: str, gpu: int, work: Path, timeout: float, extra: list[str], keep: Callable[[dict], None]
) -> None:
    """Commands of the CLI side by side, what reads a finished run after `train`, which is run for it if nobody chose it."""

    def call(name: str) -> None:
        started, words = time.perf_counter(), words_of(name, work, size, config_of(size), extra)
        env = environment(CARDS[size]["nvfp4"], gpu, work / f"{name}.peak", work / "site")
        code, lines = watched([sys.executable, "-m", "qerl_trl.cli.main", *words], env, timeout)
        passed = code == 0
        if name == "train":
            result = work / "train" / "results.json"
            passed = passed and result.is_file() and json.loads(result.read_text())["steps"] == 1
        text = " ".join(["qerl-trl", *words]).replace(str(work), "LOCAL")
        entry = {"command": text, "passed": passed, "seconds": round(time.perf_counter() - started, 1)}
        keep(entry | {"last_lines": "\n".join(lines).replace(str(work), "LOCAL").splitlines()[-12:]})

    def all_of(names: list[str]) -> list[threading.Thread]:
        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        return threads

    for name in ("train", "merged", "adapter", "quantized"):  # of an earlier call
        shutil.rmtree(work / name, ignore_errors=True)
    after = [name for name in chosen if name in AFTER_TRAIN]
    threads = all_of([name for name in chosen if name not in (*AFTER_TRAIN, "train")])
    if after or "train" in chosen:
        call("train")
        threads += all_of(after)
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=["3b", "7b", "14b", "32b"], choices=CARDS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    every = [f"{size} {arm}" for size in CARDS for arm in CARDS[size]]
    parser.add_argument("--only", nargs="+", choices=every, help="These runs, in place of sizes and arms.")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "acceptance")
    parser.add_argument("--timeout", type=float, default=240.0, help="Seconds that one run may take.")
    parser.add_argument("--limit", type=float, default=570.0, help="Seconds after which no further run starts.")
    parser.add_argument("--gpus", type=int, nargs="+", help="Indices of the GPUs to use. Default: all.")
    parser.add_argument(
        "--capacity", type=float, default=134.0, help="GiB that cards side by side add up to on one GPU."
    )
    parser.add_argument(
        "--commands",
        nargs="*",
        choices=COMMANDS,
        help="Of the README; no run then, unless --only. Default: all, none with --only.",
    )
    layouts = sorted(file.stem for file in (ROOT / LAYOUTS).glob("*.yaml"))
    parser.add_argument("--layouts", nargs="+", choices=layouts, help="Each run in each of these, and in no other way.")
    parser.add_argument("--side-by-side", type=int, default=4, help="Runs on one GPU at a time, at the most.")
    parser.add_argument(
        "--delete", action="store_true", help="Delete a model when its last run has ended, and wait for disk."
    )
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="Further options of every run.")
    options = parser.parse_args()
    wanted = [(size, arm) for size in options.sizes for arm in options.arms if arm in CARDS[size]]
    if options.only or options.commands is not None:
        wanted = [(size, arm) for size, _, arm in (name.partition(" ") for name in options.only or ())]
    commands = list(COMMANDS) if options.commands is None and not options.only else options.commands or []
    sizes = list(
        dict.fromkeys([*(size for size, _ in wanted), *(options.sizes[:1] if commands and not wanted else ())])
    )
    import about
    import torch
    from random_checkpoint import write_checkpoint

    from qerl_trl.checkpoint.records import device_name, versions

    def end(signum, frame):
        for group in RUNNING:
            os.killpg(group, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    begun = time.perf_counter()
    work, gpus = options.work, options.gpus or list(range(max(1, torch.cuda.device_count())))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problems(work / "problems")
    (work / "site").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("shown_card.py"), work / "site" / "sitecustomize.py")
    results = {
        "what": "every shipped GPU configuration in every arm, started unedited but for model, dataset and number of steps",
        "command": about.command(),
        "device": device_name(torch.device(device)) + (f" x {len(gpus)}" if len(gpus) > 1 else ""),
        "versions": versions(),
        "runs": [],
        "command_line": [],
    }
    if options.out.is_file():  # what is in there stays until it has run again, each with its commit
        before = json.loads(options.out.read_text())
        if before["device"].partition(" x ")[0] != results["device"].partition(" x ")[0]:
            parser.error(f"{options.out} is of {before['device']}, this is {results['device']}. Write to another file.")
        results |= {"runs": before["runs"], "command_line": before["command_line"]}
    lock, free, written = threading.Condition(), {gpu: [options.capacity, options.side_by_side] for gpu in gpus}, {}

    done: list[tuple[str, str]] = []

    def ready(size: str) -> threading.Event:
        return written.setdefault(size, threading.Event())

    def prepare() -> None:
        for size in sizes:
            if not (work / size / "generation_config.json").is_file():
                while options.delete and shutil.disk_usage(work).free < disk_bytes(size) + DISK_LEFT:
                    time.sleep(1.0)  # until a run has ended
                write_checkpoint(size, work / size, device, packed=is_packed(size))
            torch.cuda.empty_cache()
            ready(size).set()

    def keep(entry: dict, where: str) -> None:
        entry["commit"] = about.commit()
        with lock:
            same = name_of if where == "command_line" else str  # a run is the same where its whole line is
            others = [e for e in results[where] if same(e["command"]) != same(entry["command"])]
            results[where] = [*others, entry]
            options.out.write_text(json.dumps(results, indent=1))
        shown = ("passed", "seconds", "ready_s", "evaluated_s", "trained_s", "peak_gib", "card_gib")
        print(
            entry.get("command")
            if where == "command_line"
            else run_name(entry["size"], entry["arm"], entry.get("layout")),
            {k: entry.get(k) for k in shown},
            flush=True,
        )
        if not entry["passed"]:
            print("\n".join(entry["last_lines"]), flush=True)

    def job(size: str, arm: str, gpu: int) -> None:
        steps = 3 if arm == "nvfp4" else 2
        keep(run(size, arm, steps, gpu, work, options.timeout, options.extra), "runs")
        shutil.rmtree(work / "runs" / run_name(size, arm), ignore_errors=True)
        with lock:
            done.append((size, arm))
            if options.delete and all(other in done for other in wanted if other[0] == size):
                shutil.rmtree(work / size, ignore_errors=True)
            free[gpu][0] += CARDS[size][arm]
            free[gpu][1] += 1
            lock.notify_all()

    def in_layouts(size: str, arm: str) -> None:
        ready(size).wait()
        for layout in options.layouts:
            if time.perf_counter() - begun > options.limit:
                break
            keep(run(size, arm, 3, 0, work, options.timeout, options.extra, layout), "runs")
            shutil.rmtree(work / "runs" / run_name(size, arm, layout), ignore_errors=True)

    def call_commands(size: str, gpu: int, room: float) -> None:
        ready(size).wait()
        command_line(
            commands, size, gpu, work, options.timeout, options.extra, lambda entry: keep(entry, "command_line")
        )
        with lock:
            free[gpu][0] += room
            free[gpu][1] += 2
            lock.notify_all()

    for size in sizes:
        ready(size)
    threading.Thread(target=prepare, daemon=True).start()
    # longest first where they are ready: the large models
    waiting, threads = list(wanted), []
    if commands:  # beside the runs: room for `train`, `eval` and `quantize` of the smallest model
        gpu, room = gpus[-1], min(options.capacity, 3 * CARDS[sizes[0]]["nvfp4"])
        free[gpu][0] -= room
        free[gpu][1] -= 2
        threads.append(threading.Thread(target=call_commands, args=(sizes[0], gpu, room)))
        threads[-1].start()
    while options.layouts and waiting and time.perf_counter() - begun < options.limit:
        in_layouts(*waiting.pop(0))
    while waiting and not options.layouts:
        with lock:
            found = None
            for size, arm in sorted(waiting, key=lambda w: -CARDS[w[0]][w[1]]):
                gpu = max(free, key=lambda g: free[g][0])
                if ready(size).is_set() and free[gpu][0] >= CARDS[size][arm] and free[gpu][1] > 0:
                    found = (size, arm, gpu)
                    break
            if found is None:
                lock.wait(timeout=1.0)
            else:
                waiting.remove(found[:2])
                free[found[2]][0] -= CARDS[found[0]][found[1]]
                free[found[2]][1] -= 1
        if time.perf_counter() - begun > options.limit:
            break
        if found is not None:
            threads.append(threading.Thread(target=job, args=found))
            threads[-1].start()
    for thread in threads:
        thread.join()
    results["not_started"] = [f"{size} {arm}" for size, arm in waiting]
    results["seconds"] = round(time.perf_counter() - begun, 1)
    options.out.write_text(json.dumps(results, indent=1))
    for where in ("runs", "command_line"):
        print(f"{where}: {sum(entry['passed'] for entry in results[where])} of {len(results[where])} passed")
    print(f"{len(waiting)} not started, {results['seconds']} s")


if __name__ == "__main__":
    main()
