"""GRPO steps on several GPUs in every layout, ours and stock TRL's: seconds per phase, memory per GPU.

    python benchmarks/several_gpus.py --output multi_gpu_h200x2.json      # as many modes as fit into 9 minutes
    python benchmarks/several_gpus.py --modes ours-fsdp2 stock-fsdp2 --output multi_gpu_h200x2.json
    python benchmarks/several_gpus.py --modes ours-fsdp2-tp2 --shape 70b --output FILE
    python benchmarks/several_gpus.py --modes ours-one ours-dp --shape 1.5b --cold --output FILE
    python benchmarks/several_gpus.py --modes ours-one ours-dp --shape tiny --device cpu       # dry run

    one               one GPU, colocated engine
    dp, dp4           data parallel on two or four GPUs, one engine each
    server            trainer on one GPU, server on the other; server-tcp: without /dev/shm, as between hosts
    fsdp2, fsdp2-4    FSDP 2 over two or four GPUs, one engine each
    tp2, fsdp2-tp2    as dp and fsdp2, with one engine of two shards
    zero2             as dp, with DeepSpeed ZeRO-2 if installed

`accelerate launch` starts the processes with the configurations of examples/accelerate. Models, settings and
measurements are those of step.py, with 8 completions (--sequences) of 512 tokens per process and step. A failed mode is
a row with the steps so far; a mode beyond this machine is skipped. Rows of other modes stay in the file, checkpoints in
`--models`. `--cold`: empty compilation caches.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import step
from models import SHAPES, write_checkpoint

SEQUENCES, NEW, PROMPT, RANK, SHAPE = 8, 512, 256, 32, "7b"
#: environment variables of the compilation caches
COMPILED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
#: seconds for all modes, and the least for one mode with warm caches
TOTAL, LEAST = 540, 90
ACCELERATE = common.ROOT / "examples" / "accelerate"
SERVER_LOG, SERVER_PID = "server.log", "server.pid"
#: start of this process, and seconds to the server's first answer
STARTED, SERVER_READY = time.perf_counter(), list[float]()


class Mode(NamedTuple):
    who: str
    processes: int
    config: str | None
    options: dict[str, Any]


#: most informative first: time may be short
LAYOUTS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "dp": (2, "data_parallel_2", {}),
    "server": (1, None, {"vllm_mode": "server"}),
    "server-tcp": (1, None, {"vllm_mode": "server"}),
    "fsdp2": (2, "fsdp2_2", {}),
    "one": (1, None, {}),
    "tp2": (2, "data_parallel_2", {"vllm_tensor_parallel_size": 2}),
    "fsdp2-tp2": (2, "fsdp2_2", {"vllm_tensor_parallel_size": 2}),
    "zero2": (2, "zero2_2", {}),
    "dp4": (4, "data_parallel_4", {}),
    "fsdp2-4": (4, "fsdp2_4", {}),
}
MODES = {f"{who}-{layout}": Mode(who, *rest) for layout, rest in LAYOUTS.items() for who in ("ours", "stock")}
del MODES["stock-server-tcp"]


def row_name(mode: str, shape: str, sequences: int = SEQUENCES, cold: bool = False) -> str:
    """Name of a row: the mode, plus shape, sequences and `cold` unless default."""
    return mode + f"-{shape}" * (shape != SHAPE) + f"-of-{sequences}" * (sequences != SEQUENCES) + "-cold" * cold


#: order of the rows
ORDER = [row_name(mode, shape) for shape in (SHAPE, *SHAPES) for mode in MODES]


# --- one process of a mode ------------------------------------------------------------------------


def build(mode: Mode, model: str, folder: Path, case: step.Case, device: str, callback: Any) -> Any:
    """The trainer of this process; in server mode also starts the server on the other GPU."""
    from datasets import Dataset
    from peft import LoraConfig

    cpu, prompt = device == "cpu", PROMPT if device != "cpu" else 8
    use_vllm = not (cpu and mode.who == "stock")  # stock TRL cannot sync into an engine on a CPU
    longest = 4 * prompt + case.new
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    options: dict[str, Any] = {
        "output_dir": str(folder / "run"), "use_vllm": use_vllm, "vllm_mode": "colocate", "use_cpu": cpu,
        "bf16": not cpu, "per_device_train_batch_size": case.micro,
        "gradient_accumulation_steps": case.batch // case.micro, "max_steps": step.STEPS,
        "num_generations": case.batch, "max_completion_length": case.new, "learning_rate": 1e-5,
        # vLLM takes at most 128 end tokens with min_tokens; the checkpoint has thousands
        "generation_kwargs": {"ignore_eos": True} if use_vllm else {"min_new_tokens": case.new},
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "vllm_max_model_length": longest, **mode.options,
    }  # fmt: skip
    if options["vllm_mode"] == "server":
        options["vllm_server_base_url"] = start_server(mode, model, folder, lora, longest, cpu)
    common_options: dict[str, Any] = {
        "model": model, "peft_config": lora, "callbacks": [callback],
        "reward_funcs": lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
        "train_dataset": Dataset.from_dict({"prompt": [f"{i} " + "1 " * (prompt - 2) for i in range(64)]}),
    }  # fmt: skip
    if mode.who == "ours":
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer

        if cpu:
            options |= {"vllm_gpu_memory_utilization": 0.05, "vllm_engine_kwargs": {"enforce_eager": True}}
        untrained = dict(step.UNTRAINED if case.size == "70b" else ())
        return QeRLGRPOTrainer(args=QeRLConfig(aqn_num_stages=2, **options, **untrained), **common_options)
    from trl import GRPOConfig, GRPOTrainer

    if use_vllm and options["vllm_mode"] == "colocate":
        options["vllm_gpu_memory_utilization"] = 0.4
    return GRPOTrainer(args=GRPOConfig(model_init_kwargs={"dtype": "bfloat16"}, **options), **common_options)


def start_server(mode: Mode, model: str, folder: Path, lora: Any, longest: int, cpu: bool) -> str:
    """Start our server or TRL's on the second GPU, in a new process group that `run_mode` ends."""
    log, gpu = folder / SERVER_LOG, None if cpu else os.environ["QERL_SERVER_GPU"]
    if mode.who == "ours":
        more = ["--gpu-memory-utilization", "0.1", "--enforce-eager"] if cpu else []
        process, url = common.start_server(common.spec_of(model, lora, longest), gpu, log, *more)
    else:
        command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", model, "--max_model_len", str(longest)]
        command += ["--max-num-seqs", str(common.AT_A_TIME)]  # as ours; TRL passes unknown options to vLLM
        process, url = common.start(command, gpu, log)
    (folder / SERVER_PID).write_text(str(process.pid))
    threading.Thread(target=await_server, args=(process, url, log), daemon=True).start()
    return url


def await_server(process: Any, url: str, log: Path) -> None:
    """Wait in a thread while the trainer loads its model; exit if the server ends."""
    try:
        common.wait(process, url, log, 240)  # below a mode's limit, to report the server's error
        SERVER_READY.append(round(time.perf_counter() - STARTED, 1))
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
        os._exit(1)


def work(name: str, model: str, folder: Path, shape: str, device: str, steps: int, sequences: int) -> None:
    """Measure in this process and write its row to `folder`."""
    rank = os.environ.get("RANK", "0")  # unique even if each process sees one GPU only
    if name == "ours-server-tcp":
        from qerl_trl.rollout import weights

        weights._SHM = folder / "none"
    if device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mode, new = MODES[name], NEW if device == "cuda" else 8
    base_format = "nvfp4" if mode.who == "ours" else "bf16"
    # a time limit per process would stop them at different steps
    step.STEPS, step.ENOUGH = steps, math.inf
    case = step.Case(mode.who, shape, sequences, new, sequences, base_format=base_format)
    row = step.measure(case, device, partial(build, mode, model, folder))
    if mode.options.get("vllm_mode") == "server":
        row["server_ready"] = SERVER_READY[0]
    common.save(row, folder / f"{rank}.json")


# --- all of them ----------------------------------------------------------------------------------


def why_not(name: str, device: str, gpus: int) -> str | None:
    """Reason why this machine cannot run a mode, or None."""
    mode = MODES[name]
    if mode.config is not None and mode.config.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if device == "cpu":
        sharded = mode.config is not None and not mode.config.startswith("data_parallel")
        return "accelerate has FSDP and DeepSpeed for GPUs only" if sharded else None
    wanted = mode.processes + (mode.options.get("vllm_mode") == "server")
    return f"it needs {wanted} GPUs, there is {gpus}" if wanted > gpus else None


def command_of(name: str, device: str, worker: list[str]) -> list[str]:
    mode = MODES[name]
    if mode.config is None:
        return [sys.executable, *worker]
    if device == "cpu":  # here accelerate launch always starts one process
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={mode.processes}"]
        return [sys.executable, *run, *worker]
    port = str(common.free_ports(1)[0])
    config = ["--config_file", str(ACCELERATE / f"{mode.config}.yaml"), "--main_process_port", port]
    return [sys.executable, "-m", "accelerate.commands.launch", *config, *worker]


def checkpoint(who: str, shape: str, device: str, models: Path) -> Path:
    """Folder of the base, written by the first call."""
    folder = models / f"{shape}-{who}"
    if not folder.exists():
        begun = folder.with_name(f"{folder.name}.{os.getpid()}")
        write_checkpoint(shape, begun, device, packed=who == "ours")
        begun.rename(folder)
        if device == "cuda":
            import torch

            torch.cuda.empty_cache()
    return folder


def run_mode(name: str, given: dict[str, Any], limit: float, cold: bool = False) -> dict[str, Any]:
    """Start the processes of a mode, wait, end them and their server, and return the row.

    Args:
        given: options of the processes.
        cold: with empty compilation caches.
    """
    mode, folder = MODES[name], Path(tempfile.mkdtemp(prefix=f"{name}-"))
    words = [str(word) for pair in {"--worker": name, "--folder": folder, **given}.items() for word in pair]
    device, log = given["--device"], folder / "log"
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    environment = (
        step.CACHES
        | {"VLLM_HOST_IP": "127.0.0.1"}  # works without a network
        | os.environ
        | common.ENVIRONMENT
        | {"VLLM_LOGGING_LEVEL": "INFO", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}
        | {"TMPDIR": str(folder), "QERL_SERVER_SECRET": "of this measurement"}
    )
    environment |= {name: str(folder / name) for name in COMPILED} if cold else {}
    if device == "cuda":
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: mode.processes]), "QERL_SERVER_GPU": gpus[-1]}
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "TORCHDYNAMO_DISABLE": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join("01" * (mode.processes // 2)) or "auto"}
    files, started = [folder / f"{rank}.json" for rank in range(mode.processes)], time.monotonic()
    command = command_of(name, device, [__file__, *words])
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:  # the launcher may wait for an engine that hangs
        while process.poll() is None and not all(path.exists() for path in files):
            if time.monotonic() - started > limit:
                break
            time.sleep(0.5)
    finally:
        ended = process.poll()
        common.end(process.pid)
        process.wait()
        if (folder / SERVER_PID).exists():
            common.end(int((folder / SERVER_PID).read_text()))
    took = {"name": name, "seconds_in_all": round(time.monotonic() - started, 1)}
    if not all(path.exists() for path in files):
        lines = [line for path in (log, folder / SERVER_LOG) if path.exists() for line in common.said_in(path)]
        why = f"not done in {limit:.0f} s" if ended is None else f"ended with code {ended}"
        failed = [why, *dict.fromkeys(line[:600] for line in common.errors_of(lines))][:6]
        return took | {"failed": failed, "last_lines": lines[-40:], "steps": common.steps_of(log)}
    rows = [json.loads(path.read_text()) for path in files]
    shutil.rmtree(folder, ignore_errors=True)
    first = rows[0]
    return {
        "processes": mode.processes,
        "sequences": mode.processes * first["batch"],
        "sequences_per_second": round(mode.processes * first["batch"] / first["median"]["step"], 3),
        "gib": [row.get("measured_gib") for row in rows],
        **{key: value for key, value in first.items() if key not in ("measured_gib", "options", "cap", "ragged")},
        **took,
    }


def line(row: dict[str, Any]) -> str:
    for what in ("skipped", "failed"):
        if what in row:
            return f"{row['name']:<18} {what}: {row[what]}"
    median = row["median"]
    phases = "  ".join(f"{name} {median[name]:.3f}" for name in ("step", "rollout", "sync", "update"))
    speed = f"{row['sequences_per_second']:.2f} sequences/s"
    return f"{row['name']:<18} {phases}  {speed}, {row['gib']} GiB, start {row['start']:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--shape", default=SHAPE, help="Shape in models.py.")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="Completions per process and step.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=300, help="Seconds for one mode; the first start compiles.")
    parser.add_argument("--steps", type=int, default=step.STEPS, help="The first two are not counted.")
    parser.add_argument("--cold", action="store_true", help="Empty compilation caches; `-cold` in the row's name.")
    parser.add_argument("--commit", help="Commit of the code, if there is no git.")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "multi-gpu-models")
    parser.add_argument("--output", type=Path)
    for hidden in ("--worker", "--model", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        case = options.shape, options.device, options.steps, options.sequences
        work(options.worker, options.model, Path(options.folder), *case)
        os._exit(0)  # vLLM's own shutdown can hang
    import torch

    # ends the processes of the current mode, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    started, failed = time.monotonic(), False
    origin = common.head(options.device, options.commit, times=torch.cuda.device_count() or 1)
    record: dict[str, Any] = {"multi_gpu": []}
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
    options.models.mkdir(parents=True, exist_ok=True)
    for name in options.modes:
        reason = why_not(name, options.device, torch.cuda.device_count())
        if reason is not None:
            row: dict[str, Any] = {"skipped": reason}
        elif TOTAL - (time.monotonic() - started) < LEAST:
            row = {"failed": "no time was left: name it alone in --modes"}
        else:
            model = checkpoint(MODES[name].who, options.shape, options.device, options.models)
            given = {f"--{of}": getattr(options, of) for of in ("shape", "device", "steps", "sequences")}
            limit = min(options.limit, TOTAL - (time.monotonic() - started))
            row = run_mode(name, {"--model": model} | given, limit, options.cold)
        row |= {"name": row_name(name, options.shape, options.sequences, options.cold)}
        print(line(row), flush=True)
        failed |= "failed" in row
        before = next((old for old in record["multi_gpu"] if old["name"] == row["name"]), {})
        if "median" in before and "median" not in row:  # a failure does not replace a measurement
            continue
        record["multi_gpu"] = [old for old in record["multi_gpu"] if old is not before] + [row | origin]
        record["multi_gpu"].sort(key=lambda row: ORDER.index(row["name"].removesuffix("-cold").partition("-of-")[0]))
        common.save(record, options.output)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
