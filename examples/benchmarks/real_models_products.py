"""The products of a run of real_models.py: merged, pushed to the stand-in Hub, and loaded again without qerl-trl."""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.hub_server import TOKEN
from watched import watched

WORKER = Path(__file__).with_name("real_models_reload.py")
#: a reload agrees within these with what it is compared with
AGREES = {"kl_nats_per_token": 0.01, "mean_logp_difference": 0.05}
SAME_GREEDY = 0.9
#: refused where next to nothing of the adapter survives the rounding; the same command with --force follows
AGAIN = "merge nvfp4"


class Products:
    """Of one run, in `row["products"]`: command, exit code, seconds and last lines; of a reload, whether it agrees."""

    def __init__(self, bench: Any, run: Any) -> None:
        self.bench, self.run, self.place = bench, run, run.place
        self.made: dict[str, dict[str, Any]] = {}
        run.row["products"] = self.made

    def call(self, name: str, command: list[str], environment: dict[str, str], shown: list[str]) -> str:
        """One command; its last line, if it succeeded."""
        started = time.perf_counter()
        code, lines = watched(command, environment, self.bench.options.timeout)
        says = self.bench.last(lines, 6 if code == 0 else 25)
        seconds = round(time.perf_counter() - started, 1)
        self.made[name] = {
            "command": self.bench.clean(shlex.join(shown)),
            "exit_code": code,
            "seconds": seconds,
            "says": says,
        }
        return lines[-1] if lines and code == 0 else ""

    def tool(self, name: str, *arguments: object, **environment: str) -> int:
        said = [str(word) for word in arguments]
        command = [sys.executable, "-m", "qerl_trl.cli.main", *said]
        self.call(name, command, self.bench.environment(**environment), ["qerl-trl", *said])
        return self.made[name]["exit_code"]

    def worker(self, name: str, environment: dict[str, str], *arguments: object) -> dict[str, Any]:
        said = [str(word) for word in arguments]
        last = self.call(name, [sys.executable, str(WORKER), *said], environment, ["python", WORKER.name, *said])
        self.made[name]["measured"] = json.loads(last) if last else {}
        return self.made[name]["measured"]

    def reload(self, name: str, kind: str, *names: object, against: str = "to_policy", **environment: str) -> None:
        """In a process without qerl-trl; `against`: what it is compared with."""
        # one process, so that vLLM's engine too is seen to be without qerl-trl
        stock = {"PYTHONPATH": self.bench.elsewhere, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment = self.bench.environment(**stock, **environment)
        found = self.worker(name, environment, kind, self.place / "reference.pt", *names)
        near = found.get(against, {"same_greedy_token": 0.0})
        within = all(near[limit] <= most for limit, most in AGREES.items() if limit in near)
        agrees = within and near["same_greedy_token"] >= SAME_GREEDY and found.get("same_tokenizer", True)
        self.made[name] |= {"against": against, "agrees": agrees}

    def at_once(self, *several: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1 if self.bench.cpu else len(several)) as pool:
            for done in [pool.submit(one) for one in several]:
                done.result()

    def make(self) -> bool:
        """Whether every command succeeded and every reload agrees."""
        folder, place, cpu = self.run.folder, self.place, self.bench.cpu
        packed, device = self.run.library_arm.startswith("nvfp4"), ["--device", "cpu" if cpu else "cuda"]
        repo = "tester/" + re.sub(r"\W+", "-", f"{self.run.name.rpartition('/')[2]}-{self.run.run}").lower()
        base = f"{repo}-base" if packed else self.run.name
        hub = {
            "HF_ENDPOINT": self.bench.hub.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        hub["HF_HOME"] = str(place / "hub")

        def merge() -> None:
            self.tool("merge bf16", "merge", folder, place / "merged", *device)
            if not packed:  # what a merge to NVFP4 of a run on a bf16 base says to do
                self.tool("quantize merged", "quantize", place / "merged", place / "nvfp4", *device)

        def merge_nvfp4() -> None:
            if self.tool(AGAIN, "merge", folder, place / "nvfp4", "--as", "nvfp4", *device):
                self.tool(f"{AGAIN} --force", "merge", folder, place / "nvfp4", "--as", "nvfp4", "--force", *device)

        def merge_base() -> None:
            self.tool("merge base", "merge", folder, place / "base", "--as", "base", *device)

        def push() -> None:
            if packed:
                self.tool("push base", "push", "base", place / "base", base, **hub)
            self.tool("push adapter", "push", "adapter", folder, repo, "--base-model", base, **hub)

        def reference() -> None:
            own = self.bench.environment()
            self.worker(
                "reference", own, "reference", place / "reference.pt", folder, self.bench.options.task, place / "nvfp4"
            )

        reloads = [
            lambda: self.reload("reload merged", "transformers", place / "merged"),
            lambda: self.reload("reload adapter", "peft", base if packed else self.run.model, repo, **hub),
            lambda: self.reload("reload nvfp4", "transformers", place / "nvfp4", against="to_nvfp4"),
        ]
        if not cpu:  # stock vLLM has no NVFP4 on a CPU
            reloads.append(lambda: self.reload("reload nvfp4 in vLLM", "vllm", place / "nvfp4", against="to_nvfp4"))
        self.at_once(merge, *([merge_nvfp4, merge_base] if packed else []))
        self.at_once(push, reference)
        self.at_once(*reloads)
        return not self.wrong()

    def wrong(self) -> list[str]:
        """Names of what failed or does not agree."""
        repeated = {AGAIN} & {AGAIN for name in self.made if name == f"{AGAIN} --force"}
        return [
            n
            for n, each in self.made.items()
            if n not in repeated and (each["exit_code"] or not each.get("agrees", True))
        ]
