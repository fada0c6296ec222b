"""Every shipped GPU configuration, in every arm, started as its user starts it.

    python benchmarks/acceptance.py --out acceptance.json                       # 3B, 7B, 14B and 32B; about 10 minutes on two H200s
    python benchmarks/acceptance.py --out a.json --only "3b nvfp4" "32b nvfp4 without noise"
    python benchmarks/acceptance.py --out a.json --only "qwen3-8b nvfp4" "gemma3-12b nvfp4"     # recipes newer than the paper, by their names
    python benchmarks/acceptance.py --out a.json --only "7b nvfp4" --layouts data_parallel_2 fsdp2_2       # over several GPUs, one after another

Each run is `accelerate launch examples/grpo_gsm8k.py --config examples/configs/<file>` with the file unedited; on the command line stand
only what this machine cannot have (model and dataset: random weights in the same shape, the embedded example's problems; room for
checkpoints of a fully trained model), the number of steps, an output folder and the arm's options as the README gives them. The
weights stop as `models.py` says. A run passes when its process ends with 0 and results.json holds the steps asked for. A model is
written before its runs, and deleted after them.

`card_gib`: the run sees a GPU of that size (torch's allocator is capped, `mem_get_info` answers accordingly); so several runs share one
large GPU, and seconds are those of runs side by side. In a layout, which is one of examples/accelerate as it is shipped, a run has the GPUs that
it asks for alone and whole. `peak_gib`: the process's memory by NVML, CUDA context and graphs included.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import yaml
from common import ROOT

from qerl_trl.tasks.arms import ARMS as OPTIONS

sys.path.append(str(ROOT))

from tests.shapes import NEWER

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
    return f"examples/configs/{name if name in NEWER else 'qwen2.5-' + name}.yaml"


def named_gib(size: str) -> float:
    """Of the card that the first lines of a size's configuration name, in GB as it is sold."""
    found = re.search(r"^# Starts on a card of (\d+) GB", (ROOT / config_of(size)).read_text(), re.MULTILINE)
    assert found is not None, config_of(size)
    return round(int(found[1]) * 10**9 / GIB, 2)


#: GiB of the card that each run is shown; an arm that is not here does not fit one GPU of 141 GiB, or its weights this machine's disk
CARDS = {
    "3b": {"bf16": 24, "bf16 with noise": 24, "nf4": 16, "full": 64},
    "7b": {"bf16": 48, "nf4": 24, "full": 128},
    "14b": {"bf16": 80, "nf4": 48},
    "32b": {},
}
CARDS |= {name: {} for name in NEWER}
for _size in CARDS:
    CARDS[_size] |= dict.fromkeys(("nvfp4", "nvfp4 without noise"), named_gib(_size))
#: written in bf16, as their users download them, the others as NVFP4: the disk holds only so much, and both ways of loading are to be seen
DENSE = ("3b", "7b", "14b", "qwen3-4b", "qwen3.5-9b")
#: where accelerate's configurations are
LAYOUTS = "examples/accelerate"
#: GiB that cards side by side add up to on one GPU, and runs on one, at the most
CAPACITY, SIDE_BY_SIDE = 134.0, 4
#: weights drawn at random rarely stop: each held-out problem is a completion of full length
PROBLEMS, HELD_OUT = 512, 8
LOGGED = ("seconds/", "rollout/", "memory/", "aqn/", "completions/mean_len")


def problems(folder: Path) -> None:
    """The embedded example's problems, fewer of them, in the layout that the example reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", PROBLEMS), ("test", HELD_OUT)):
        lines = (ROOT / f"examples/assets/{split}.jsonl").read_text().splitlines()[:count]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def environment(card: float, gpu: int, peak_file: Path, site: Path) -> dict[str, str]:
    # two runs that start at the same moment would both find PyTorch's usual port free
    port = str(common.free_ports(1)[0])
    found = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1", VLLM_NO_USAGE_STATS="1", MASTER_PORT=port)
    if card:
        found |= {"CARD_GIB": str(card), "CUDA_VISIBLE_DEVICES": str(gpu), "PEAK_FILE": str(peak_file)}
        found["PYTHONPATH"] = f"{site}:{found.get('PYTHONPATH', '')}"
    return found


def run(size: str, arm: str, steps: int, gpu: int, work: Path, timeout: float, layout: str | None = None) -> dict:
    """One run, watched until it ends; what it printed, how long each part took, and how it ended."""
    card, name = 0 if layout else CARDS[size][arm], "-".join([size, *arm.split(), *([layout] if layout else [])])
    config, output = config_of(size), work / "runs" / name
    processes = ["--config_file", f"{LAYOUTS}/{layout}.yaml"] if layout else []
    command = ["accelerate", "launch", *processes, "examples/grpo_gsm8k.py", "--config", config]
    command += ["--model_name_or_path", str(work / size), "--dataset_name", str(work / "problems")]
    command += ["--max_steps", str(steps), *(["--save_strategy", "no"] if arm == "full" else [])]  # this machine's disk
    command += ["--output_dir", str(output), *options_of(arm)]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]
    peak_file, started = work / f"{name}.peak", time.perf_counter()
    code, lines, marks = common.watched(launcher, environment(card, gpu, peak_file, work / "site"), timeout)
    (work / f"{name}.log").write_text("\n".join(lines))
    results = json.loads((output / "results.json").read_text()) if (output / "results.json").is_file() else {}
    on_all = ""  # a launcher that starts one process does not say so
    if layout:
        on_all = f" x {yaml.safe_load((ROOT / LAYOUTS / f'{layout}.yaml').read_text())['num_processes']}"
    shutil.rmtree(output, ignore_errors=True)
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
            {k: v for k, v in entry.items() if k.startswith(LOGGED)}
            for entry in results.get("log_history", [])
            if "loss" in entry
        ],
        "commit": common.commit(),
    }
    return found | ({} if found["passed"] else {"last_lines": lines[-25:]})


def groups(size: str, arms: list[str], gpus: list[int]) -> list[list[tuple[str, int]]]:
    """(arm, GPU) of runs that are side by side, the largest first."""
    found: list[list[tuple[str, int]]] = []
    waiting = sorted(arms, key=lambda arm: -CARDS[size][arm])
    while waiting:
        free, together = dict.fromkeys(gpus, (CAPACITY, SIDE_BY_SIDE)), []
        for arm in list(waiting):
            gpu = max(free, key=lambda gpu: free[gpu])
            room, places = free[gpu]
            if places and (room >= CARDS[size][arm] or room == CAPACITY):
                free[gpu] = room - CARDS[size][arm], places - 1
                together.append((arm, gpu))
                waiting.remove(arm)
        found.append(together)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    every = [f"{size} {arm}" for size in CARDS for arm in CARDS[size]]
    default = [name for name in every if name.split()[0] not in NEWER]
    parser.add_argument("--only", nargs="+", choices=every, default=default, metavar="SIZE ARM")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "acceptance")
    parser.add_argument("--timeout", type=float, default=240.0, help="Seconds that one run may take.")
    parser.add_argument("--limit", type=float, default=570.0, help="Seconds after which no further run starts.")
    layouts = sorted(file.stem for file in (ROOT / LAYOUTS).glob("*.yaml"))
    parser.add_argument("--layouts", nargs="+", choices=layouts, help="Each run in each of these, and in no other way.")
    options = parser.parse_args()
    import torch
    from models import write_checkpoint

    signal.signal(signal.SIGTERM, common.end_all)
    begun, work, gpus = time.perf_counter(), options.work, list(range(torch.cuda.device_count()))
    problems(work / "problems")
    (work / "site").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("shown_card.py"), work / "site" / "sitecustomize.py")
    results: dict[str, Any] = {
        "what": "every shipped GPU configuration in every arm, started unedited but for model, dataset and number of steps",
        **{name: part for name, part in common.head("cuda", times=len(gpus)).items() if name != "commit"},
        "runs": [],
    }
    if options.out.is_file():  # what is in there stays until it has run again, each with its commit
        before = json.loads(options.out.read_text())
        if before["device"].partition(" x ")[0] != results["device"].partition(" x ")[0]:
            parser.error(f"{options.out} is of {before['device']}, this is {results['device']}. Write to another file.")
        results = before | results | {"runs": before["runs"]}
    lock, missing = threading.Lock(), list(options.only)

    def keep(size: str, arm: str, gpu: int, layout: str | None = None) -> None:
        steps = 3 if arm == "nvfp4" or layout else 2
        row = run(size, arm, steps, gpu, work, options.timeout, layout)
        with lock:  # a run is the same where its whole line is
            results["runs"] = [*(e for e in results["runs"] if e["command"] != row["command"]), row]
            common.save(results, options.out)
            shown = ("passed", "seconds", *common.MARKS, "peak_gib", "card_gib")
            print(f"{size} {arm}", layout or "", {k: row.get(k) for k in shown}, flush=True)
            print(*row.get("last_lines", []), sep="\n", flush=True)

    for size in dict.fromkeys(name.split()[0] for name in options.only):
        if time.perf_counter() - begun > options.limit:
            break
        arms = [name.partition(" ")[2] for name in options.only if name.split()[0] == size]
        shutil.rmtree(work / size, ignore_errors=True)  # of a call that was ended
        write_checkpoint(size, work / size, "cuda", packed=size not in DENSE)
        torch.cuda.empty_cache()
        for together in groups(size, arms, gpus):
            if time.perf_counter() - begun > options.limit:
                break
            for arm, gpu in together:
                missing.remove(f"{size} {arm}")
                for layout in options.layouts or ():
                    keep(size, arm, gpu, layout)
            if not options.layouts:
                with ThreadPoolExecutor(len(together)) as pool:
                    list(pool.map(lambda pair, size=size: keep(size, *pair), together))
        shutil.rmtree(work / size)
    results["not_started"] = missing
    common.save(results, options.out)
    passed = sum(row["passed"] for row in results["runs"])
    print(f"{passed} of {len(results['runs'])} passed, {len(missing)} not started")
    return int(passed < len(results["runs"]))


if __name__ == "__main__":
    sys.exit(main())
