"""Several processes on a CPU, by the shipped script: every layout, two simulated nodes, and one of two processes killed again and again.

    python benchmarks/processes.py layouts --output benchmarks/results/layouts_cpu.json       # about 10 minutes on two cores
    python benchmarks/processes.py layouts --only fsdp2 server-fsdp2 --output /tmp/layouts.json
    python benchmarks/processes.py nodes --output benchmarks/results/two_nodes_cpu.json       # wants root
    python benchmarks/processes.py kills --output benchmarks/results/kill_a_rank_cpu.json

layouts: `examples/grpo_gsm8k.py --config qwen2.5-3b` under torchrun, with vLLM, a tiny model of the recipe's class and a few problems (what is replaced is
`INSTEAD` of tests/test_recipes.py). accelerate has FSDP for accelerators only; the processes of those rows are taken for some, as in tests/test_sharded.py.
A row passes when it ends with 0 and results.json has the steps, both accuracies, and as many devices as processes. `same_after_sigkill`: all processes of a
second run were killed when it had a whole checkpoint, the same command was given again, and the adapter is the first run's, byte for byte.

nodes: does a run on two nodes learn what one process learns from the same batch (tests/test_many_ranks.py)? A node is a Linux network namespace with its
own address, host name and /dev/shm, joined to the other one by a virtual cable; without root and `ip` both have the loopback interface (`link`). `apart`:
distance of its adapter from one process's, relative to what that one learned; `logged_apart`: the largest relative difference of what the steps logged.

kills: the embedded default under torchrun is started again and again, and a random process of two is killed by SIGKILL at a random moment; at last its
adapter is compared, byte for byte, with an undisturbed twin's. `seconds`: from the kill until no process is left; `cause`: whether the agent names it.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
from common import ROOT, errors_of, said_in

sys.path[:0] = [str(ROOT), str(ROOT / "src")]
ENVIRONMENT = common.ENVIRONMENT | {
    "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo",
    "QERL_SERVER_SECRET": "of the servers and trainers of this measurement",
}  # fmt: skip


def popen(command: list[str], log: Path, **more: str) -> subprocess.Popen:
    environment = os.environ | ENVIRONMENT | more
    with log.open("w") as to:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
        )


def digest(run: Path) -> str:
    return hashlib.sha256((run / "adapter_model.safetensors").read_bytes()).hexdigest()


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


# --- layouts -----------------------------------------------------------------------------------------------------------------------------

RECIPE = "qwen2.5-3b"
#: layout -> processes, whether FSDP 2 shares the trainer out, whether a server samples, further options
LAYOUTS: dict[str, tuple[int, bool, bool, dict[str, str]]] = {
    "one": (1, False, False, {}),
    "dp": (2, False, False, {}),
    "tp2": (2, False, False, {"vllm_tensor_parallel_size": "2"}),
    "fsdp2": (2, True, False, {}),
    "fsdp2-tp2": (2, True, False, {"vllm_tensor_parallel_size": "2"}),
    "server": (1, False, True, {}),
    "server-dp": (2, False, True, {}),
    "server-fsdp2": (2, True, True, {}),
}
#: of those that are killed: the others differ from one of these in nothing that a checkpoint holds
KILLED = ("one", "dp", "fsdp2", "fsdp2-tp2")
STEPS, SAVED, LIMIT = 16, 4, 240.0
SMALL = {"max_steps": str(STEPS), "save_steps": str(SAVED), "max_completion_length": "16", "eval_problems": "3"}
ENGINE = {"enforce_eager": True, "gpu_memory_utilization": 0.05, "num_gpu_blocks_override": 256}


def work_in_layout(layout: str, model: str, run: str, url: str) -> None:
    """One process of a layout: the shipped script."""
    from tests.test_recipes import INSTEAD, words
    from tests.test_sharded import FSDP, as_accelerators

    processes, sharded, _, options = LAYOUTS[layout]
    if sharded:
        os.environ |= FSDP
        as_accelerators()
    elif processes > 1:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    instead = INSTEAD | SMALL | {"model_name_or_path": model, "output_dir": run, "use_vllm": "true", **options}
    if sharded:
        del instead["optim"]
    server = {"vllm_mode": "server", "vllm_server_base_url": url}
    instead |= server if url else {"vllm_engine_kwargs": json.dumps(ENGINE)}
    runpy.run_path(str(ROOT / "examples/grpo_gsm8k.py"))["main"](["--config", RECIPE, *words(instead)])
    os._exit(0)  # vLLM's own end can hang


def serve(model: str, folder: Path) -> None:
    """A server for the recipe's adapter, with the command that a trainer prints; its address is left in `folder`."""
    from peft import LoraConfig

    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    log, more = folder / "server.log", ["--max-num-seqs", "8"]
    for name, value in ENGINE.items():
        more += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    process, url = common.start_server(common.spec_of(model, lora, 256), None, log, *more)
    common.wait(process, url, log, LIMIT)
    (folder / "url.partial").write_text(url)
    (folder / "url.partial").rename(folder / "url")
    process.wait()


def started(layout: str, model: Path, run: Path, url: str, log: Path) -> subprocess.Popen:
    for path in Path("/dev/shm").glob("*-cpushm_*"):  # of vLLM's CPU engine: the next ones would stop at them
        path.unlink(missing_ok=True)
    count = LAYOUTS[layout][0]
    port = str(common.free_ports(1)[0])
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={count}", "--master_port", port]
    words = [__file__, "layouts", "--worker", layout, "--model", str(model), "--folder", str(run), "--address", url]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if count > 1 else {}
    return popen([sys.executable, *torchrun, *words], log, **threads)


def ended(process: subprocess.Popen, until: Path | None = None) -> int | None:
    """Its code; None where it was killed, because it was late or because `until` is there."""
    wait_until(lambda: process.poll() is not None or (until is not None and until.exists()), LIMIT)
    if process.poll() is None:
        common.end(process.pid)
        process.wait()
        return None
    return process.returncode


def measured(layout: str, model: Path, folder: Path, url: str) -> dict[str, Any]:
    processes, begun = LAYOUTS[layout][0], time.monotonic()
    log, run = folder / f"{layout}.log", folder / layout
    code = ended(started(layout, model, run, url, log))
    file = run / "results.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    row: dict[str, Any] = {
        "layout": layout,
        "commit": common.commit(),
        "processes": processes,
        "options": LAYOUTS[layout][3],
        "passed": code == 0
        and results["steps"] == STEPS
        and results["before"]["total"] == results["after"]["total"] == int(SMALL["eval_problems"])
        and results["device"].endswith(f" x {processes}" if processes > 1 else ""),
        "seconds": round(time.monotonic() - begun, 1),
    }
    if row["passed"] and layout in KILLED:
        again = folder / f"{layout}-again"
        ended(started(layout, model, again, url, log), until=again / f"checkpoint-{2 * SAVED}")
        code = ended(started(layout, model, again, url, log))
        went_on = any("goes on at step" in line for line in said_in(log))
        row["same_after_sigkill"] = code == 0 and went_on and digest(run) == digest(again)
        row["passed"] = row["passed"] and row["same_after_sigkill"]
    if not row["passed"]:
        row["last_lines"] = [line[:600] for line in (errors_of(said_in(log)) or said_in(log))[:5]]
    return row


def layouts(options: argparse.Namespace) -> bool:
    from tests.test_recipes import write_tiny_model

    record = {"what": "every layout of processes and engines", **common.head("cpu"), "recipe": RECIPE, "rows": []}
    if options.output.is_file():  # what is in there stays until it has run again, each with its commit
        record["rows"] = json.loads(options.output.read_text())["rows"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(write_tiny_model(RECIPE, folder / "model", hidden_size=128, head_dim=32))
        for layout in options.only:
            url, server, place = "", None, folder / f"{layout}-server"
            if LAYOUTS[layout][2]:
                place.mkdir()
                words = [sys.executable, __file__, "layouts", "--serve", str(place), "--model", str(model)]
                server = popen(words, log := place / "log")
                wait_until(lambda at=place / "url", of=server: at.exists() or of.poll() is not None, LIMIT)
                if not (place / "url").exists():
                    raise RuntimeError(f"{layout}: its server did not listen: {log.read_text()[-3000:]}")
                url = (place / "url").read_text()
            try:
                row = measured(layout, model, folder, url)
            finally:
                if server is not None:
                    common.end(server.pid)
            shutil.rmtree(folder / layout, ignore_errors=True)
            others = [other for other in record["rows"] if other["layout"] != layout]
            record["rows"] = sorted([*others, row], key=lambda row: list(LAYOUTS).index(row["layout"]))
            print(row, flush=True)
            common.save(record, options.output)
    return all(row["passed"] for row in record["rows"])


# --- two nodes ---------------------------------------------------------------------------------------------------------------------------

PORT = "29577"
LAUNCHERS = {
    "torchrun": "torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node {each} --master-addr {address} --master-port {port}",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_machines 2 --machine_rank {node} --num_processes {all} --main_process_ip {address} "
    "--main_process_port {port} --mixed_precision no --dynamo_backend no",
}
#: launcher and processes per node
CASES = [("torchrun", 1), ("torchrun", 2), ("accelerate", 1)]


class Node(NamedTuple):
    """prefix: of every command that shall run there. interface: its end of the cable."""

    prefix: list[str]
    address: str
    interface: str

    def bytes(self) -> int:
        """Received and sent through the cable so far."""
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


def work_on_node(folder: Path) -> None:
    """One process of a run, whoever started it; process 0 leaves what was logged beside the adapter."""
    import platform

    from accelerate.utils import gather_object
    from tests.test_many_ranks import train

    logged = train(int(os.environ.get("WORLD_SIZE", "1")), folder)
    hosts = gather_object([platform.node()])
    if os.environ.get("RANK", "0") == "0":
        (folder / "logged.json").write_text(json.dumps({"steps": logged, "hosts": hosts}))


def run_nodes(commands: list[list[str]], nodes: list[Node], folder: Path) -> float:
    """Seconds until all of them have ended.

    Raises:
        `RuntimeError`: one of them failed or is late; with the last words of each.
    """
    began, logs = time.monotonic(), [folder.with_name(f"{folder.name}-{n}.log") for n in range(len(commands))]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    running = [
        popen(
            [*node.prefix, *words], log, GLOO_SOCKET_IFNAME=node.interface, ACCELERATE_USE_CPU="true", PYTHONPATH=path
        )
        for node, words, log in zip(nodes, commands, logs, strict=False)
    ]
    wait_until(lambda: all(process.poll() is not None for process in running), 400)
    codes = [process.poll() for process in running]
    for process in running:
        common.end(process.pid)
    if any(code != 0 for code in codes):
        said = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
        raise RuntimeError(f"The processes ended with {codes} (None: they were late).\n{said}")
    return round(time.monotonic() - began, 1)


def compare(alone: Path, folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file
    from tests.test_many_ranks import APART, apart

    one, many = (json.loads((place / "logged.json").read_text()) for place in (alone, folder))
    distance = apart(*(load_file(place / "adapter_model.safetensors") for place in (alone, folder)))
    logged = [
        abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-2)
        for expected, found in zip(one["steps"], many["steps"], strict=True)
        for name in expected
    ]
    return {
        "hosts": many["hosts"],
        "steps": len(many["steps"]),
        "apart": float(f"{distance:.2e}"),
        "logged_apart": float(f"{max(logged):.2e}"),
        "same_to_rounding": distance < APART,
    }


def nodes(options: argparse.Namespace) -> bool:
    from tests.test_many_ranks import SETTINGS

    record: dict[str, Any] = {**common.head("cpu"), "settings": SETTINGS, "runs": []}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # the networks are taken apart too
    with two_nodes() as both, tempfile.TemporaryDirectory() as scratch:
        record["link"] = "two network namespaces" if both[0].prefix else "loopback"
        alone = Path(scratch) / "alone"
        worker = [__file__, "nodes", "--worker", "node", "--folder"]
        record["one_process_s"] = run_nodes([[sys.executable, *worker, str(alone)]], [Node([], "", "lo")], alone)
        for launcher, each in CASES:
            folder = Path(scratch) / f"{launcher}-{each}"
            where = {"each": each, "all": 2 * each, "address": both[0].address, "port": PORT}
            words = [LAUNCHERS[launcher].format(node=number, **where).split() for number in range(2)]
            before = both[0].bytes()
            took = run_nodes([[sys.executable, "-m", *w, *worker, str(folder)] for w in words], both, folder)
            row = {"launcher": launcher, "nodes": 2, "processes": each, "seconds": took}
            record["runs"].append(row | {"link_bytes": both[0].bytes() - before} | compare(alone, folder))
            print(json.dumps(record["runs"][-1]), flush=True)
            common.save(record, options.output)
    return all(row["same_to_rounding"] for row in record["runs"])


# --- kills -------------------------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "max_steps": 72, "save_steps": 1, "per_device_train_batch_size": 16, "max_completion_length": 24, "eval_problems": 8,
    "aqn_num_stages": 4, "lora_r": 4, "use_cpu": "true",
}  # fmt: skip
GONE = 60.0  # seconds after which a process has to be gone
#: what torchrun's agent says of the death
CAUSE = re.compile(r"rank\s*:\s*(\d)[^\n]*\n(?:[^\n]*\n){0,3}?[^\n]*Signal 9")


def train(folder: Path, log: Path) -> subprocess.Popen:
    """torchrun's agent of two processes."""
    script = ["examples/grpo_gsm8k.py", "--output_dir", str(folder)]
    script += [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return popen([*agent, *script], log)


def ranks(agent: subprocess.Popen) -> list[int]:
    """Process ids of the two; fewer while the agent has not started them."""
    children, found = Path(f"/proc/{agent.pid}/task/{agent.pid}/children"), {}
    for pid in children.read_text().split() if children.exists() else []:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(v.removeprefix(b"RANK=")): int(pid) for v in variables if v.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def newest(folder: Path) -> int:
    steps = [p.parent.name.removeprefix("checkpoint-") for p in folder.glob("checkpoint-*/qerl_manifest.json")]
    return max(map(int, steps), default=0)


def kill_once(folder: Path, log: Path, moments: random.Random) -> dict[str, Any]:
    before, agent = newest(folder), train(folder, log)
    # a few steps of training, with their saves; every third time already the start
    starting = moments.random() < 1 / 3
    steps, more = (0, moments.uniform(1, 15)) if starting else (moments.randint(1, 2), moments.uniform(0, 2))
    wait_until(lambda: len(ranks(agent)) == 2, 60)
    wait_until(lambda: starting or newest(folder) >= before + steps or agent.poll() is not None, 300)
    time.sleep(more)
    pids = ranks(agent)
    if len(pids) < 2 or newest(folder) >= SETTINGS["max_steps"]:
        common.end(agent.pid)
        raise RuntimeError(f"The run was over before it was killed; its last words: {log.read_text()[-2000:]}")
    rank = moments.randrange(2)
    os.kill(pids[rank], signal.SIGKILL)
    killed = time.monotonic()
    gone = wait_until(lambda: agent.poll() is not None and not any(map(alive, pids)), GONE)
    seconds = round(time.monotonic() - killed, 1) if gone else None
    common.end(agent.pid)
    row = {"launcher": "torchrun", "killed": rank, "at": newest(folder), "while_starting": starting}
    cause = any(int(found) == rank for found in CAUSE.findall(log.read_text()))
    return row | {"seconds": seconds, "code": agent.poll(), "cause": cause}


def kills(options: argparse.Namespace) -> bool:
    record: dict[str, Any] = common.head("cpu") | {"device": f"CPU, {os.cpu_count()} cores, shared"}
    record |= {"settings": SETTINGS, "kills": []}
    moments = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        log, folder = Path(scratch) / "log", Path(scratch) / "run"
        for _ in range(10):
            record["kills"].append(kill_once(folder, log, moments))
            print(json.dumps(record["kills"][-1]), flush=True)
            common.save(record, options.output)
        record["resumed_at"] = newest(folder)
        ends = [digest(run) for run in (folder, Path(scratch) / "twin") if train(run, log).wait() == 0]
    seconds = [row["seconds"] for row in record["kills"]]
    record |= {"same_adapter": len(ends) == 2 and ends[0] == ends[1], "adapter_sha256": ends[0] if ends else None}
    record["slowest_end_s"] = None if None in seconds else max(seconds)
    record["causes_named"] = sum(row["cause"] for row in record["kills"])
    common.save(record, options.output)
    return record["same_adapter"] and None not in seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layouts", "nodes", "kills"))
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="Of the layouts.")
    parser.add_argument("--output", type=Path, default=Path("processes.json"))
    for hidden in ("--worker", "--model", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--folder", "--serve"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.serve)
    elif options.worker == "node":
        work_on_node(options.folder)
    elif options.worker:
        work_in_layout(options.worker, options.model, str(options.folder), options.address)
    else:
        return int(not {"layouts": layouts, "nodes": nodes, "kills": kills}[options.what](options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
