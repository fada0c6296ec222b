"""A run of real_models.py: the shipped command in one arm, and its row of the record."""

import argparse
import functools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import about
from real_models_products import Products
from server_sync import wait
from tests.hub_server import StandInHub
from watched import RUNNING, end, watched

from qerl_trl.tasks.arms import ARMS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

#: run -> (arm, the library's arm, where its rollouts are)
RUNS = {
    "nvfp4": ("nvfp4", "nvfp4-no-noise", "colocate"),
    "nvfp4+noise": ("nvfp4 + noise", "nvfp4", "colocate"),
    "bf16": ("bf16", "bf16-no-noise", "colocate"),
    "bf16+noise": ("bf16 + noise", "bf16", "colocate"),
    "server": ("nvfp4 + noise", "nvfp4", "server"),
}
RECIPE, EMBEDDED = "examples/configs/qwen2.5-3b.yaml", "examples/configs/embedded.yaml"
SETTINGS = {
    "max_steps": 20, "num_generations": 8, "generation_batch_size": 256,
    "per_device_train_batch_size": 16, "max_completion_length": 320, "learning_rate": "3e-5", "eval_problems": 200,
    "seed": 1,
}  # fmt: skip
ON_CPU = {
    "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 16,
    "eval_problems": 8, "learning_rate": "1e-2", "use_vllm": "true", "seed": 1,
}  # fmt: skip
CPU_ENGINE = {"enforce_eager": True, "gpu_memory_utilization": 0.25, "num_gpu_blocks_override": 256}
CPU_LAUNCH = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no".split()
#: of the GPU, what runs side by side may take (the rest is for products); GiB of a server's KV cache, and of the server
SHARE, KV_GIB, SERVER_GIB = 0.75, 4, 8
CURVES = {
    "reward": "rewards/correctness_reward/mean", "entropy": "entropy", "sigma": "aqn/sigma",
    "mismatch_kl": "rollout/mismatch_kl", "logp_difference": "sampling/sampling_logp_difference/mean",
    "logp_difference_max": "sampling/sampling_logp_difference/max", "clipped": "completions/clipped_ratio",
    "seconds_rollout": "seconds/rollout", "seconds_update": "seconds/update",
}  # fmt: skip
#: warnings that are no log records: Python's and PyTorch's own
PRINTED = re.compile(r"\w*Warning: |^(\[rank\d+\]:)?\[W\d+ ")
MARKS = {"ready_s": "  versions", "evaluated_s": "Held-out accuracy before"}
STEP = re.compile(r"^step (\d+) of \d+")
#: progress
BAR = re.compile(r"\d+%\|")
LOG_LINES = 200


def words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Bench:
    """What all runs have in common: options, environment, Hub, and the record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.cpu, self.work, self.lock = options, options.cpu, options.work.resolve(), threading.Lock()
        site = self.work / "site"
        info = (
            site / "qerl_trl-0.1.0.dev0.dist-info"
        )  # a checkout has no entry points, by which a server finds the plugin
        info.mkdir(parents=True, exist_ok=True)
        parts = [(HERE / name).read_text() for name in ("shown_card.py", "kept_warnings.py")]
        (site / "sitecustomize.py").write_text("\n".join(parts))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qerl-trl\nVersion: 0.1.0.dev0\n")
        plugin = "[vllm.general_plugins]\nqerl_nvfp4 = qerl_trl.rollout.vllm.plugin:register\n"
        (info / "entry_points.txt").write_text(plugin)
        given = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        others = [str(path) for path in given if not path.is_relative_to(ROOT)]
        self.elsewhere = ":".join(others)
        self.path = ":".join([str(site), str(ROOT / "src"), str(ROOT / "kernels/torch-ext"), *others])
        self.names = {
            str(self.work): "WORK",
            str(ROOT): ".",
            **dict.fromkeys([sys.prefix, sys.base_prefix, *others], "PYTHON"),
        }
        self.names[f"{Path(options.task).parent}/"] = ""
        self.hub = StandInHub()
        for name, folder, _ in options.model:
            self.names[folder] = name
            small = [file for file in Path(folder).iterdir() if file.is_file() and file.stat().st_size < 2**24]
            self.hub.put(
                name, **{file.name: file.read_bytes() for file in small}
            )  # its weights are read from the folder
        self.rows = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
        self.log_file, self.logs = options.out.with_suffix(".log"), {}
        if self.log_file.is_file():
            _, *parts = re.split(r"^===== (.*) =====\n", self.log_file.read_text(), flags=re.MULTILINE)
            self.logs = dict(zip(parts[::2], parts[1::2], strict=True))

    @functools.cached_property
    def head(self) -> dict[str, Any]:
        """Imports PyTorch, so it is not asked for before the first runs have started."""
        return about.head("cpu" if self.cpu else "cuda")

    def card_gib(self, less: float = 0.0) -> float:
        """A run's share of the GPU, without what others of it take."""
        if self.cpu:
            return 0.0
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(os.environ["CUDA_VISIBLE_DEVICES"]))
        return pynvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**30 * SHARE / self.options.parallel - less

    def clean(self, text: str) -> str:
        """Without this machine's folders."""
        for path in sorted(self.names, key=len, reverse=True):
            text = text.replace(path, self.names[path])
        return text

    def last(self, lines: list[str], count: int) -> list[str]:
        """The last lines, without progress bars."""
        return [self.clean(line)[:400] for line in lines if not BAR.search(line)][-count:]

    def environment(self, **more: str) -> dict[str, str]:
        own = {"PYTHONPATH": self.path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port())}
        return dict(os.environ) | own | {"VLLM_NO_USAGE_STATS": "1"} | more

    def keep(self, row: dict[str, Any], lines: list[str] | None = None) -> None:
        with self.lock:
            name = f"{row['model']} {row['run']}"
            if lines is not None:
                self.logs[name] = "".join(f"{line}\n" for line in self.last(lines, LOG_LINES))
            row |= {"commit": self.head["commit"], "device": self.head["device"]}
            self.rows = [one for one in self.rows if (one["model"], one["run"]) != (row["model"], row["run"])] + [row]
            self.options.out.write_text(json.dumps({**self.head, "runs": self.rows}, indent=1) + "\n")
            self.log_file.write_text("".join(f"===== {name} =====\n{text}" for name, text in self.logs.items()))


class Run:
    """One run of one model."""

    def __init__(self, bench: Bench, model: tuple[str, str, str], run: str) -> None:
        self.bench, self.run, (self.name, self.model, gguf) = bench, run, model
        arm, self.library_arm, self.placement = RUNS[run]
        self.place = bench.work / self.name.replace("/", "--") / run
        self.folder = self.place / "run"
        self.place.mkdir(parents=True, exist_ok=True)
        self.row: dict[str, Any] = {
            "model": self.name, "run": run, "arm": arm, "placement": self.placement, "gguf_sha256": gguf,
            "passed": False,
        }  # fmt: skip

    def command(self, output: Path, *last: str) -> list[str]:
        """As a user types it; the launcher follows `accelerate launch`."""
        cpu, options = self.bench.cpu, self.bench.options
        given = {"model_name_or_path": self.model, "task": options.task, "output_dir": output} | ARMS[self.library_arm]
        given |= ON_CPU if cpu else SETTINGS
        if cpu and self.placement == "colocate":
            given["vllm_engine_kwargs"] = json.dumps(CPU_ENGINE)
        shipped = [*(CPU_LAUNCH if cpu else []), "examples/grpo_gsm8k.py", "--config", EMBEDDED if cpu else RECIPE]
        return ["accelerate", "launch", *shipped, *words(given), *last, *options.extra]

    def launched(self, command: list[str], look: Any = lambda line: None, **more: str) -> tuple[int, list[str]]:
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]
        return watched(launcher, self.bench.environment(**more), self.bench.options.timeout, look)

    def train(self) -> None:
        lines: list[str] = []
        try:
            if self.placement == "colocate":
                lines = self.watch(self.command(self.folder), self.bench.card_gib())
            else:
                server, url = self.server()
                try:
                    through = ["--vllm_mode", "server", "--vllm_server_base_url", url]
                    lines = self.watch(self.command(self.folder, *through), self.bench.card_gib(SERVER_GIB))
                finally:
                    end(server)
        except (RuntimeError, OSError, ValueError) as error:
            self.row["error"] = f"{type(error).__name__}: {self.bench.clean(str(error))}"
        self.bench.keep(self.row, lines)
        shown = ("trained", "seconds", "ready_s", "evaluated_s", "first_step_s", "seconds_per_step", "error")
        print(self.name, self.run, {name: self.row[name] for name in shown if name in self.row}, flush=True)
        if not self.row.get("trained"):
            print(*self.row.get("last_lines", []), sep="\n", flush=True)

    def watch(self, command: list[str], card: float) -> list[str]:
        """The training, seen from outside; the lines that it printed."""
        kept, peak, started = self.place / "warnings.jsonl", self.place / "peak", time.perf_counter()
        marks: dict[str, float] = {}
        steps: dict[int, float] = {}
        kept.unlink(missing_ok=True)

        def look(line: str) -> None:
            seconds = round(time.perf_counter() - started, 2)
            for mark in (mark for mark, text in MARKS.items() if text in line):
                marks.setdefault(mark, seconds)
            if step := STEP.search(line):
                steps.setdefault(int(step[1]), seconds)

        shown = {"CARD_GIB": f"{card:.1f}", "PEAK_FILE": str(peak)} if card else {}
        code, lines = self.launched(command, look, WARNINGS_FILE=str(kept), **shown)
        records = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
        said = [f"{one['level']} {one['logger']}: {one['text']}" for one in records if one["level"] != "INFO"]
        said += [line.strip() for line in lines if PRINTED.search(line)]
        probes = [one["text"] for one in records if "probe" in one["text"].lower()]
        file, times = self.folder / "results.json", [steps[step] for step in sorted(steps)]
        results = json.loads(file.read_text()) if file.is_file() else {}
        logged, clean = results.get("log_history", []), self.bench.clean
        self.row |= {
            "command": clean(shlex.join(command)),
            "card_gib": float(shown.get("CARD_GIB", 0)) or None,
            "peak_gib": round(int(peak.read_text() or 0) / 2**30, 2) if peak.is_file() else None,
            "exit_code": code,
            "trained": code == 0 and bool(results),
            "seconds": round(time.perf_counter() - started, 1),
            **marks,
            "first_step_s": times[0] if times else None,
            "seconds_per_step": round((times[-1] - times[0]) / (len(times) - 1), 2) if len(times) > 1 else None,
            "warnings": list(dict.fromkeys(map(clean, said))),
            "probes": list(dict.fromkeys(map(clean, probes))),
            **{
                name: results.get(name)
                for name in ("steps", "before", "after", "difference", "train_seconds", "versions")
            },
            "curves": {
                name: [float(f"{entry[key]:.4g}") for entry in logged if entry.get(key) is not None]
                for name, key in CURVES.items()
            },
        }
        if not self.row["trained"]:
            self.row["last_lines"] = self.bench.last(lines, 25)
            self.row["step_lines"] = [line for line in lines if STEP.search(line)]  # of a run that was cut off
        return lines

    def server(self) -> tuple[subprocess.Popen, str]:
        """A server for this run, started with what the trainer that finds none prints."""
        url, log, limit = f"http://127.0.0.1:{free_port()}", self.place / "server.log", self.bench.options.timeout
        asking = ["--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_server_timeout", "1"]
        lines = self.launched(self.command(self.place / "asking", *asking))[1]
        printed = next((line for line in lines if line.startswith("vllm serve ")), None)
        if printed is None:
            raise RuntimeError("\n".join(["The trainer printed no command for a server:", *self.bench.last(lines, 25)]))
        # the CPU build's own `vllm serve` looks for a distribution called vllm
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *shlex.split(printed)[2:]]
        room = {"gpu-memory-utilization": 0.02, "kv-cache-memory-bytes": KV_GIB * 2**30}
        if self.bench.cpu:
            command.append("--enforce-eager")
            room = {name.replace("_", "-"): value for name, value in CPU_ENGINE.items() if value is not True}
        started, environment = time.perf_counter(), self.bench.environment()
        with log.open("w") as file:
            command += words(room)
            server = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        RUNNING.add(server.pid)
        try:
            wait(server, url, log, limit)
        except RuntimeError:
            end(server)
            raise
        ready = round(time.perf_counter() - started, 1)
        self.row |= {
            "server_command": self.bench.clean(f"{printed} {shlex.join(words(room))}"),
            "server_ready_s": ready,
        }
        return server, url

    def make(self) -> None:
        if self.row.get("trained"):
            started, products = time.perf_counter(), Products(self.bench, self)
            self.row |= {"passed": products.make(), "products_s": round(time.perf_counter() - started, 1)}
            self.bench.keep(self.row)
            print(
                self.name,
                self.run,
                "passed" if self.row["passed"] else "FAILED",
                self.row["products_s"],
                "s",
                flush=True,
            )
            for name in products.wrong():
                print(f"  {name}", json.dumps(products.made[name], indent=1), flush=True)
