"""The embedded default on two nodes that are simulated on one machine, a CPU: does it learn what one process learns from the same batch?

    python benchmarks/two_nodes.py --output benchmarks/results/two_nodes_cpu.json

A node is a process group with a network of its own: a Linux network namespace with its own address, host name and /dev/shm, joined to the other
one by a virtual cable, so that all that its processes and the other's say to each other goes over TCP through it. That takes root and `ip`; without
them both nodes have the loopback interface, and the record says so (`link`). Each launcher is started once per node, as on two machines, with the
commands of docs/source/multi_gpu.md. It is the run of tests/test_many_ranks.py: the same completions, dealt to the updates in the same way,
on any number of processes.

A row: {launcher, nodes, processes: per node, seconds: from the start of the launchers to their end, apart: distance of its adapter from one
process's, relative to what that one learned, logged_apart: the largest relative difference of what the steps logged, link_bytes: that went
through the cable both ways, hosts: the names that its processes see, warnings: lines of its logs that say that processes cannot reach each other}.
Then, with networks of their own, node 1 is lost in the middle of a run: all its processes are killed at once, or the cable is taken out.
{how, seconds: until all that node 0 has started is gone, code: of its launcher, cause: what its process said of node 1}.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import about
from process_groups import end

ROOT = Path(__file__).resolve().parents[1]
#: seconds for one run
LIMIT = 400
PORT = "29577"
LAUNCHERS = {
    "torchrun": "torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node {each} --master-addr {address} --master-port {port}",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_machines 2 --machine_rank {node} --num_processes {all} --main_process_ip {address} "
    "--main_process_port {port} --mixed_precision no --dynamo_backend no",
}
#: launcher and processes per node
CASES = [("torchrun", 1), ("torchrun", 2), ("accelerate", 1)]
#: the cable last: it is not put in again
LOSSES = ("killed", "unplugged")


class Node(NamedTuple):
    """prefix: of every command that shall run there. interface: its end of the cable."""

    prefix: list[str]
    address: str
    interface: str

    def unplug(self) -> None:
        """Take the cable out, for good."""
        subprocess.run([*self.prefix, "ip", "link", "set", self.interface, "down"], check=True)

    def bytes(self) -> int | None:
        """Received and sent through the cable so far."""
        if not self.prefix:
            return None
        counters = [f"/sys/class/net/{self.interface}/statistics/{way}_bytes" for way in ("rx", "tx")]
        said = subprocess.run([*self.prefix, "cat", *counters], check=True, capture_output=True, text=True)
        return sum(map(int, said.stdout.split()))


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Two networks with a cable between them, taken apart afterwards; both on the loopback interface where there can be none."""
    names = [f"qerl-{os.getpid()}-{node}" for node in range(2)]
    ends = [f"q{os.getpid() % 10**6}n{node}" for node in range(2)]
    addresses = ["10.77.0.1", "10.77.0.2"]
    settings = [
        *(["netns", "add", name] for name in names),
        ["link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]],
    ]
    for name, interface, address in zip(names, ends, addresses, strict=True):
        settings.append(["-n", name, "addr", "add", f"{address}/24", "dev", interface])
        settings += [["-n", name, "link", "set", which, "up"] for which in (interface, "lo")]
    try:
        try:
            for setting in settings:
                subprocess.run(["ip", *setting], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"No networks of their own, so both nodes have the loopback interface: {error}", flush=True)
            yield [Node([], "127.0.0.1", "lo")] * 2
            return
        script = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        yield [
            Node(["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, f"node-{node}"], address, end)
            for node, (name, address, end) in enumerate(zip(names, addresses, ends, strict=True))
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def work(folder: Path, steps: int | None) -> None:
    """One process of a run, whoever started it; process 0 leaves what was logged beside the adapter."""
    import platform

    from accelerate.utils import gather_object
    from tests.test_many_ranks import SETTINGS, train

    if steps is not None:
        SETTINGS["max_steps"] = steps
    logged = train(int(os.environ.get("WORLD_SIZE", "1")), folder)
    hosts = gather_object([platform.node()])
    if os.environ.get("RANK", "0") == "0":
        (folder / "logged.json").write_text(json.dumps({"steps": logged, "hosts": hosts}))


def run(command: list[str], log: Path, more: dict[str, str]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1", "PYTHONPATH": search_path()} | more
    with log.open("w") as to:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
        )


def search_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


def end_of(started: list[subprocess.Popen], logs: list[Path]) -> None:
    """
    Raises:
        `RuntimeError`: one of them failed or is late; with the last words of each.
    """
    until = time.monotonic() + LIMIT
    try:
        codes = [process.wait(max(1.0, until - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        codes = [None]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if any(codes):
        said = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
        raise RuntimeError(f"The processes ended with {codes} (None: they were late).\n{said}")


def one_process(folder: Path) -> float:
    """The same run in one process; its seconds."""
    began, log = time.monotonic(), folder.with_suffix(".log")
    end_of([run([sys.executable, __file__, "--worker", str(folder)], log, {})], [log])
    return time.monotonic() - began


def start(
    launcher: str, each: int, nodes: list[Node], folder: Path, *more: str
) -> tuple[list[subprocess.Popen], list[Path]]:
    """A launcher on each node, and their logs."""
    logs = [folder.with_name(f"{folder.name}-{node}.log") for node in range(2)]
    started = []
    for number, (node, log) in enumerate(zip(nodes, logs, strict=True)):
        words = LAUNCHERS[launcher].format(node=number, each=each, all=2 * each, address=nodes[0].address, port=PORT)
        command = [sys.executable, "-m", *words.split(), __file__, "--worker", str(folder), *more]
        started.append(run([*node.prefix, *command], log, {"GLOO_SOCKET_IFNAME": node.interface}))
    return started, logs


def on_nodes(launcher: str, each: int, nodes: list[Node], folder: Path) -> dict[str, Any]:
    before, began = nodes[0].bytes(), time.monotonic()
    started, logs = start(launcher, each, nodes, folder)
    end_of(started, logs)
    after = nodes[0].bytes()
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return {
        "launcher": launcher,
        "nodes": 2,
        "processes": each,
        "seconds": round(time.monotonic() - began, 1),
        "link_bytes": None if before is None or after is None else after - before,
        "warnings": [line[:300] for line in lines if "cannot reach process 0" in line],
    }


def lose(how: str, nodes: list[Node], folder: Path) -> dict[str, Any]:
    """Node 1, once a first step is logged."""
    started, logs = start("torchrun", 1, nodes, folder, "--steps", "100000")
    until = time.monotonic() + LIMIT
    while "'loss'" not in logs[0].read_text() and time.monotonic() < until:
        time.sleep(0.2)
    if how == "killed":
        end(started[1].pid)
    else:
        nodes[1].unplug()
    lost, code = time.monotonic(), None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = started[0].wait(LIMIT)
    seconds = time.monotonic() - lost
    for process in started:
        end(process.pid)
        process.wait()
    cause = re.search(r"Process 1 of 2 \(node-1\)[^\n]*", logs[0].read_text())
    return {
        "how": how,
        "seconds": None if code is None else round(seconds, 1),
        "code": code,
        "cause": cause and cause[0][:400],
    }


def compare(alone: Path, folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file
    from tests.test_many_ranks import APART, apart

    one, many = (json.loads((place / "logged.json").read_text()) for place in (alone, folder))
    adapters = [load_file(place / "adapter_model.safetensors") for place in (alone, folder)]
    logged = [
        abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-2)
        for expected, found in zip(one["steps"], many["steps"], strict=True)
        for name in expected
    ]
    distance = apart(*adapters)
    return {
        "hosts": many["hosts"],
        "steps": len(many["steps"]),
        "apart": float(f"{distance:.2e}"),
        "logged_apart": float(f"{max(logged):.2e}"),
        "same_to_rounding": distance < APART,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    if options.worker:
        work(options.worker, options.steps)
        return 0
    from tests.test_many_ranks import SETTINGS

    from qerl_trl.checkpoint import records

    record: dict[str, Any] = {
        "command": about.command(),
        "commit": about.commit(),
        "versions": records.versions(),
        "device": f"CPU, {os.cpu_count()} cores, shared",
        "settings": SETTINGS,
        "runs": [],
        "lost": [],
    }

    def keep(rows: str, row: dict[str, Any]) -> None:
        record[rows].append(row)
        print(json.dumps(row), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n")

    scratch = Path(tempfile.mkdtemp())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # the networks are taken apart too
    with two_nodes() as nodes:
        record["link"] = "two network namespaces" if nodes[0].prefix else "loopback"
        record["one_process_s"] = round(one_process(scratch / "alone"), 1)
        for launcher, each in CASES:
            folder = scratch / f"{launcher}-{each}"
            keep("runs", on_nodes(launcher, each, nodes, folder) | compare(scratch / "alone", folder))
        for how in LOSSES if nodes[0].prefix else ():
            keep("lost", lose(how, nodes, scratch / how))
    shutil.rmtree(scratch)
    good = all(row["same_to_rounding"] and not row["warnings"] for row in record["runs"])
    return int(not good or not all(row["cause"] and row["code"] for row in record["lost"]))


if __name__ == "__main__":
    sys.exit(main())
