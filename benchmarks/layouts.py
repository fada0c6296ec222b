"""Every layout of processes and engines, through the shipped script and a shipped recipe, on a CPU: does it train, and go on after SIGKILL to the same bits?

    python benchmarks/layouts.py --output benchmarks/results/layouts_cpu.json       # about 10 minutes on two cores
    python benchmarks/layouts.py --only fsdp2 server-fsdp2 --output /tmp/layouts.json

Each row is `examples/grpo_gsm8k.py --config qwen2.5-3b` under torchrun, with vLLM, a tiny model of the recipe's class, a few problems (what is replaced is
`INSTEAD` of tests/test_recipes.py) and the recipe's own optimizer where a CPU has it or FSDP replaces it. accelerate has FSDP for accelerators only; the processes
of those rows are taken for some, as in tests/test_sharded.py. A row passes when the process ends with 0 and results.json has the steps, the accuracy before and
after, and as many devices as processes. `same_after_sigkill`: all processes of a second run were killed when it had a whole checkpoint, the same command
was given again, and the adapter is the first run's, byte for byte.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import about
from process_groups import end, errors_of, free_ports, said_in

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
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
#: one KV cache that a CPU can look through in no time
ENGINE = {"enforce_eager": True, "gpu_memory_utilization": 0.05, "num_gpu_blocks_override": 256}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
    "QERL_SERVER_SECRET": "of the servers and trainers of this measurement", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def work(layout: str, model: str, run: str, url: str) -> None:
    """One process of a layout: the shipped script."""
    import runpy

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
    instead |= (
        {"vllm_mode": "server", "vllm_server_base_url": url} if url else {"vllm_engine_kwargs": json.dumps(ENGINE)}
    )
    runpy.run_path(str(ROOT / "examples/grpo_gsm8k.py"))["main"](["--config", RECIPE, *words(instead)])
    os._exit(0)  # vLLM's own end can hang


def serve(model: str, folder: str) -> None:
    """A server for the recipe's adapter, with the command that a trainer prints; its address is left in `folder`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from server_sync import start, wait

    from qerl_trl.model.lora import register_nvfp4_lora
    from qerl_trl.nvfp4.config import from_pretrained
    from qerl_trl.rollout.spec import EngineSpec

    base = from_pretrained(model, dtype=torch.bfloat16)
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    spec = EngineSpec.of(get_peft_model(base, register_nvfp4_lora(lora)), max_model_len=256)
    log = Path(folder, "server.log")
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        *shlex.split(spec.serve_command())[2:],
    ]
    command += ["--max-num-seqs", "8", "--enforce-eager"]
    for name, value in ENGINE.items():
        command += [] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    process, url = start(command, None, log)
    wait(process, url, log, LIMIT)
    Path(folder, "url.partial").write_text(url)
    Path(folder, "url.partial").rename(Path(folder, "url"))
    process.wait()


def started(layout: str, model: Path, run: Path, url: str, log: Path) -> subprocess.Popen:
    for path in leftovers():
        path.unlink(missing_ok=True)
    processes = LAYOUTS[layout][0]
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port", str(free_ports(1)[0])]
    words = [__file__, "--worker", layout, "--model", str(model), "--folder", str(run), "--address", url]
    environment = os.environ | ENVIRONMENT
    if processes > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *torchrun, *words], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )  # fmt: skip


def ended(process: subprocess.Popen, until: Path | None = None) -> int | None:
    """Its code; None where it was killed, because it was late or because `until` is there."""
    begun = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - begun > LIMIT or (until is not None and until.exists()):
            end(process.pid)
            process.wait()
            return None
        time.sleep(0.1)
    return process.returncode


def leftovers() -> set[Path]:
    """Of vLLM's CPU engine, whose processes share memory under names that are always the same, so that the next ones stop."""
    return set(Path("/dev/shm").glob("*-cpushm_*"))


def measured(layout: str, model: Path, folder: Path, url: str) -> dict[str, Any]:
    processes, begun = LAYOUTS[layout][0], time.monotonic()
    log, run = folder / f"{layout}.log", folder / layout
    code = ended(started(layout, model, run, url, log))
    file = run / "results.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    several = f" x {processes}" if processes > 1 else ""
    row: dict[str, Any] = {
        "layout": layout,
        "commit": about.commit(),
        "processes": processes,
        "options": LAYOUTS[layout][3],
        "passed": code == 0
        and results["steps"] == STEPS
        and results["before"]["total"] == results["after"]["total"] == int(SMALL["eval_problems"])
        and results["device"].endswith(several),
        "seconds": round(time.monotonic() - begun, 1),
    }
    if row["passed"] and layout in KILLED:
        again = folder / f"{layout}-again"
        ended(started(layout, model, again, url, log), until=again / f"checkpoint-{2 * SAVED}")
        code = ended(started(layout, model, again, url, log))
        went_on = any("goes on at step" in line for line in said_in(log))
        digests = {hashlib.sha256((each / "adapter_model.safetensors").read_bytes()).hexdigest() for each in (run, again)}  # fmt: skip
        row["same_after_sigkill"] = code == 0 and went_on and len(digests) == 1
        row["passed"] = row["passed"] and row["same_after_sigkill"]
    if not row["passed"]:
        row["last_lines"] = [line[:600] for line in (errors_of(said_in(log)) or said_in(log))[:5]]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, required="--worker" not in sys.argv and "--serve" not in sys.argv)
    for hidden in ("--worker", "--model", "--folder", "--address", "--serve"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.folder, options.address)
    if options.serve:
        serve(options.model, options.serve)
        return 0
    from tests.test_recipes import write_tiny_model

    record = {"what": __doc__.splitlines()[0], **about.head("cpu"), "recipe": RECIPE, "rows": []}
    if options.output.is_file():  # what is in there stays until it has run again, each with its commit
        record["rows"] = json.loads(options.output.read_text())["rows"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(write_tiny_model(RECIPE, folder / "model", hidden_size=128, head_dim=32))
        for layout in options.only:
            url, server, place = "", None, folder / f"{layout}-server"
            if LAYOUTS[layout][2]:
                place.mkdir()
                command = [sys.executable, __file__, "--serve", str(place), "--model", str(model)]
                server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, cwd=ROOT, start_new_session=True)
                while not (place / "url").exists() and server.poll() is None:
                    time.sleep(0.2)
                if server.returncode is not None:
                    raise RuntimeError(
                        f"{layout}: its server ended with {server.returncode} before it listened; what it said stands above"
                    )
                url = (place / "url").read_text()
            try:
                row = measured(layout, model, folder, url)
            finally:
                if server is not None:
                    end(server.pid)
            shutil.rmtree(folder / layout, ignore_errors=True)
            others = [other for other in record["rows"] if other["layout"] != layout]
            record["rows"] = sorted([*others, row], key=lambda row: list(LAYOUTS).index(row["layout"]))
            print(row, flush=True)
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row["passed"] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
