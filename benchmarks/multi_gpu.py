"""GRPO steps on several GPUs in every layout, ours and stock TRL's twin: seconds per phase, sync, sequences per second, memory of each GPU.

    python benchmarks/multi_gpu.py --output multi_gpu_h200x2.json                              # what fits into 9 minutes
    python benchmarks/multi_gpu.py --modes ours-fsdp2 stock-fsdp2 --output multi_gpu_h200x2.json # rows of other modes stay in the file
    python benchmarks/multi_gpu.py --modes ours-server stock-server --output multi_gpu_h200x2.json        # in turn, so one server
    python benchmarks/multi_gpu.py --modes ours-fsdp2 ours-fsdp2-tp2 --shape 70b --output multi_gpu_h200x2.json  # rows of their own
    python benchmarks/multi_gpu.py --modes ours-one ours-server --sequences 64 --output multi_gpu_h200x2.json  # the same
    python benchmarks/multi_gpu.py --modes ours-one ours-dp --shape 1.5b --cold --output multi_gpu_h200x2.json   # starts, side by side
    python benchmarks/multi_gpu.py --modes ours-one ours-dp --shape tiny --device cpu            # dry run; FSDP and DeepSpeed want GPUs

    one      one GPU, engine in the process                   fsdp2    the base shared out by FSDP 2, an engine of its own in each process
    dp       a process and an engine on each                  tp2      as dp, with one engine of two shards
    server   the trainer on one GPU, a server on the other    zero2    as dp, under DeepSpeed ZeRO-2, where deepspeed is installed
    dp4      as dp, on four                                   fsdp2-4  as fsdp2, over four
                                                              fsdp2-tp2  as fsdp2, with one engine of two shards

Processes are started by `accelerate launch` with the configurations of examples/accelerate. `ours-*` is a `QeRLGRPOTrainer` with its defaults on
an NVFP4 base, `stock-*` a `trl.GRPOTrainer` with its defaults on the same shape in bf16; random weights, the same rank-32 LoRA on all linear layers,
8 completions (--sequences) of 512 tokens per process and step. What is measured, and how, is step_speed.py's. A mode is a process group of its own with a
limit of time; one that fails, is late, or is ended with this script leaves a row that says so, with the steps that it took, and its log beside
the output. One that this machine cannot run is skipped, with the reason. On a machine with four GPUs CUDA_VISIBLE_DEVICES=0,1 and 2,3 may each have a run. The checkpoints are kept between calls (`--models`). Where two modes of
one party that follow each other want a server, the second one finds the first one's (`server_ready` is 0).
"""

import argparse
import faulthandler
import importlib.util
import itertools
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

import about
import plan_check
import step_speed
from process_groups import ask_where, end, errors_of, free_ports, said_in, steps_of
from random_checkpoint import SHAPES, write_checkpoint

SEQUENCES, NEW, PROMPT, RANK, SHAPE = 8, 512, 256, 32, "7b"
#: what names the folders in which compiled code is kept
COMPILED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
#: seconds that all modes may take together, and that one needs at least with everything compiled
TOTAL, LEAST = 540, 90
ACCELERATE = Path(__file__).resolve().parents[1] / "examples" / "accelerate"
SERVER_LOG, SERVER_RECORD = "server.log", "server.json"
#: when this process was started, and seconds from then on until the mode's server answered
STARTED, SERVER_READY = time.perf_counter(), list[float]()
#: seconds between two lines about a mode that runs; of the logs of one that fails: bytes that are kept, lines that its row has of each
SAY, KEPT, TAIL = 20.0, 200_000, 40


class Mode(NamedTuple):
    who: str
    processes: int
    config: str | None
    options: dict[str, Any]


#: those that say most come first: time may be short
LAYOUTS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "dp": (2, "data_parallel_2", {}),
    "server": (1, None, {"vllm_mode": "server"}),
    "fsdp2": (2, "fsdp2_2", {}),
    "one": (1, None, {}),
    "tp2": (2, "data_parallel_2", {"vllm_tensor_parallel_size": 2}),
    "fsdp2-tp2": (2, "fsdp2_2", {"vllm_tensor_parallel_size": 2}),
    "zero2": (2, "zero2_2", {}),
    "dp4": (4, "data_parallel_4", {}),
    "fsdp2-4": (4, "fsdp2_4", {}),
}
MODES = {f"{who}-{layout}": Mode(who, *rest) for layout, rest in LAYOUTS.items() for who in ("ours", "stock")}


def row_name(mode: str, shape: str, sequences: int = SEQUENCES, cold: bool = False) -> str:
    """A mode's row is called as the mode; where shape and sequences are not the default, or nothing was compiled, it says so."""
    return mode + f"-{shape}" * (shape != SHAPE) + f"-of-{sequences}" * (sequences != SEQUENCES) + "-cold" * cold


#: of the rows
ORDER = [row_name(mode, shape) for shape in (SHAPE, *SHAPES) for mode in MODES]


# --- one process of a mode -----------------------------------------------------------------------------------------------------------


def build(mode: Mode, model: str, folder: Path, case: step_speed.Case, device: str, callback: Any) -> Any:
    """The trainer of this process; in server mode the server too, on the other GPU."""
    from datasets import Dataset
    from peft import LoraConfig

    cpu, prompt = device == "cpu", PROMPT if device != "cpu" else 8
    use_vllm = not (cpu and mode.who == "stock")  # stock TRL cannot sync into an engine on a CPU
    longest = 4 * prompt + case.new
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    options: dict[str, Any] = {
        "output_dir": str(folder / "run"), "use_vllm": use_vllm, "vllm_mode": "colocate", "use_cpu": cpu, "bf16": not cpu,
        "per_device_train_batch_size": case.micro, "gradient_accumulation_steps": case.batch // case.micro,
        "num_generations": case.batch, "max_completion_length": case.new, "learning_rate": 1e-5,
        # vLLM takes at most 128 tokens that end a completion beside min_tokens, and the checkpoint has thousands
        "generation_kwargs": {"ignore_eos": True} if use_vllm else {"min_new_tokens": case.new}, "max_steps": step_speed.STEPS,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "vllm_max_model_length": longest, **mode.options,
    }  # fmt: skip
    if options["vllm_mode"] == "server":
        options["vllm_server_base_url"] = start_server(mode, model, folder, lora, longest, cpu)
    common: dict[str, Any] = {
        "model": model,
        "reward_funcs": lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
        "train_dataset": Dataset.from_dict({"prompt": [f"{i} " + "1 " * (prompt - 2) for i in range(64)]}),
        "peft_config": lora,
        "callbacks": [callback],
    }
    if mode.who == "ours":
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer

        if cpu:
            options |= {"vllm_gpu_memory_utilization": 0.05, "vllm_engine_kwargs": {"enforce_eager": True}}
        untrained = dict(step_speed.UNTRAINED if case.size == "70b" else ())
        return QeRLGRPOTrainer(args=QeRLConfig(aqn_num_stages=2, **options, **untrained), **common)
    from trl import GRPOConfig, GRPOTrainer

    if use_vllm and options["vllm_mode"] == "colocate":
        options["vllm_gpu_memory_utilization"] = 0.4
    return GRPOTrainer(args=GRPOConfig(model_init_kwargs={"dtype": "bfloat16"}, **options), **common)


def start_server(mode: Mode, model: str, folder: Path, lora: Any, longest: int, cpu: bool) -> str:
    """On the second GPU: the command that our trainer prints, or TRL's. Its process is a group of its own, ended by `run_mode`."""
    import server_sync

    if "QERL_SERVER_URL" in os.environ:  # that of the mode before
        SERVER_READY.append(0.0)
        return os.environ["QERL_SERVER_URL"]
    log, gpu = folder / SERVER_LOG, None if cpu else os.environ["QERL_SERVER_GPU"]
    if mode.who == "ours":
        import torch
        from peft import get_peft_model

        from qerl_trl.model.lora import register_nvfp4_lora
        from qerl_trl.nvfp4.config import from_pretrained
        from qerl_trl.rollout.spec import EngineSpec

        base = from_pretrained(model, dtype=torch.bfloat16)
        spec = EngineSpec.of(get_peft_model(base, register_nvfp4_lora(lora)), max_model_len=longest)
        process, url = server_sync.start_server(spec, gpu, log, cpu)
    else:
        command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", model, "--max_model_len", str(longest)]
        command += ["--max-num-seqs", str(server_sync.AT_A_TIME)]  # as ours; TRL hands on to vLLM what it does not know
        process, url = server_sync.start(command, gpu, log)
    (folder / SERVER_RECORD).write_text(json.dumps({"pid": process.pid, "url": url, "folder": str(folder)}))
    threading.Thread(target=await_server, args=(process, url, log), daemon=True).start()
    return url


def await_server(process: Any, url: str, log: Path) -> None:
    """Beside the trainer, which loads its model meanwhile and then waits for the same answer; a server that ends, ends it."""
    import server_sync

    try:
        server_sync.wait(process, url, log, 240)  # less than a mode's limit: the error says what the server said
        SERVER_READY.append(round(time.perf_counter() - STARTED, 1))
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
        os._exit(1)


def work(name: str, model: str, folder: Path, shape: str, device: str, steps: int, sequences: int) -> None:
    """Measure in this process, one of the mode's, and leave the row in `folder`."""
    rank = os.environ.get("RANK", "0")  # each has its own, also where the launcher shows each process one GPU
    faulthandler.register(signal.SIGUSR1, (folder / f"{rank}.threads").open("w"))  # where they are, if it is late
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    if device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mode, new = MODES[name], NEW if device == "cuda" else 8
    base_format = "nvfp4" if mode.who == "ours" else "bf16"
    # processes that look at their own clocks would stop at different steps
    step_speed.STEPS, step_speed.ENOUGH = steps, math.inf
    case = step_speed.Case(mode.who, shape, sequences, new, sequences, base_format=base_format)
    row = step_speed.measure(case, device, partial(build, mode, model, folder))
    if mode.options.get("vllm_mode") == "server":
        row["server_ready"] = SERVER_READY[0]
        if device == "cuda":
            row["server_gib"] = round(in_use(os.environ["QERL_SERVER_GPU"]) / plan_check.GIB, 2)
    partial_file = folder / f"{rank}.partial"
    partial_file.write_text(json.dumps(row))
    partial_file.rename(folder / f"{rank}.json")


def in_use(gpu: str) -> int:
    """Bytes of a GPU that somebody uses, by its index or UUID."""
    import pynvml

    pynvml.nvmlInit()
    named = pynvml.nvmlDeviceGetHandleByIndex if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
    return int(pynvml.nvmlDeviceGetMemoryInfo(named(int(gpu) if gpu.isdigit() else gpu)).used)


# --- all of them ----------------------------------------------------------------------------------------------------------------------


def why_not(name: str, device: str, gpus: int) -> str | None:
    """Why this machine cannot run a mode."""
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
    if device == "cpu":  # where accelerate launch starts one process, whatever it is told
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={mode.processes}"]
        return [sys.executable, *run, *worker]
    config = ["--config_file", str(ACCELERATE / f"{mode.config}.yaml"), "--main_process_port", str(free_ports(1)[0])]
    return [sys.executable, "-m", "accelerate.commands.launch", *config, *worker]


def checkpoint(who: str, shape: str, device: str, models: Path) -> Path:
    """The base, written at the first call."""
    folder = models / f"{shape}-{who}"
    if not folder.exists():
        begun = folder.with_name(f"{folder.name}.{os.getpid()}")
        write_checkpoint(shape, begun, device, packed=who == "ours")
        try:
            begun.rename(folder)
        except OSError:  # another run of this script has written it meanwhile
            shutil.rmtree(begun)
        if device == "cuda":
            import torch

            torch.cuda.empty_cache()
    return folder


def end_server(record: dict[str, Any]) -> None:
    """A server that `start_server` left a record of, and the folder in which its sockets are."""
    end(record["pid"])
    shutil.rmtree(record["folder"], ignore_errors=True)


def run_mode(
    name: str, told: dict[str, Any], limit: float, kept: Path | None, server: dict[str, Any] | None, cold: bool = False
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Start the mode's processes, wait for them, and end whatever is left of them, but for the server of a mode that went well.

    Args:
        told: the options of its processes.
        kept: folder for the log of a mode that fails.
        server: the record of one that the mode before has left.
        cold: with no compiled code to begin with.

    Returns:
        The mode's row, and the record of its server.
    """
    mode, folder = MODES[name], Path(tempfile.mkdtemp(prefix=f"{name}-"))
    words = [str(word) for pair in {"--worker": name, "--folder": folder, **told}.items() for word in pair]
    worker, device = [__file__, *words], told["--device"]
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    environment = (
        step_speed.CACHES
        | {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "INFO"}  # there may be no network to ask for an address
        | os.environ
        | {name: value for name, value in step_speed.ENVIRONMENT.items() if name != "VLLM_LOGGING_LEVEL"}
        | {"TMPDIR": str(folder), "QERL_SERVER_SECRET": "of this measurement", "PYTHONUNBUFFERED": "1"}
    )
    environment |= {name: str(folder / name) for name in COMPILED} if cold else {}
    if server is not None:
        environment["QERL_SERVER_URL"] = server["url"]
    if device == "cuda":
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: mode.processes]), "QERL_SERVER_GPU": gpus[-1]}
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "TORCHDYNAMO_DISABLE": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join("01" * (mode.processes // 2)) or "auto"}
    log, started, late = folder / "log", time.monotonic(), False
    files = [folder / f"{rank}.json" for rank in range(mode.processes)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command_of(name, device, worker),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            said = started
            while process.poll() is None and not all(path.exists() for path in files):
                now = time.monotonic()
                if late := now - started > limit:
                    break
                if now - said > SAY:
                    said = now
                    print(f"  {name}: {now - started:.0f} s, {len(steps_of(log))} lines of steps", flush=True)
                time.sleep(0.5)
            time.sleep(0.5)  # for the last bytes
        finally:
            if process.poll() is None and not all(path.exists() for path in files):
                ask_where(folder)
            end(process.pid)
            process.wait()
            done = all(path.exists() for path in files)
            if (folder / SERVER_RECORD).exists():
                server = json.loads((folder / SERVER_RECORD).read_text())
            if server is not None and not done:
                end(server["pid"])
            logs = [path for path in (log, folder / SERVER_LOG, *sorted(folder.glob("*.threads"))) if path.exists()]
            if kept is not None and not done:  # also where this script is ended
                for path in logs:
                    (kept / f"{name}.{path.name}.txt").write_bytes(path.read_bytes()[-KEPT:])
    took = {"seconds_in_all": round(time.monotonic() - started, 1)}
    if not done:
        lines = {path.name: said_in(path) for path in logs}
        errors = [line[:600] for those in lines.values() for line in errors_of(those)]
        ended = f"not done in {limit:.0f} s" if late else f"ended with code {process.returncode}"
        return {
            "name": name,
            "failed": [ended, *dict.fromkeys(errors)][:6],
            "last_lines": {which: [line[:300] for line in those[-TAIL:]] for which, those in lines.items()},
            "steps": steps_of(log),
            **took,
        }, None
    rows = [json.loads(path.read_text()) for path in files]
    if server is None or server["folder"] != str(folder):
        shutil.rmtree(folder, ignore_errors=True)
    first = rows[0]
    return {
        "name": name,
        "processes": mode.processes,
        "sequences": mode.processes * first["batch"],
        "sequences_per_second": round(mode.processes * first["batch"] / first["median"]["step"], 3),
        "gib": [row.get("measured_gib") for row in rows],
        **{key: value for key, value in first.items() if key not in ("measured_gib", "options", "cap", "ragged")},
        **took,
    }, server


def goes_on(mode: str, after: str | None) -> bool:
    """Whether the mode that comes after this one can use its server."""
    return after is not None and MODES[after].who == MODES[mode].who and "vllm_mode" in MODES[after].options


def line(row: dict[str, Any]) -> str:
    for what in ("skipped", "failed"):
        if what in row:
            return f"{row['name']:<18} {what}: {row[what]}"
    median = row["median"]
    phases = "  ".join(f"{name} {median[name]:.3f}" for name in ("step", "rollout", "sync", "update"))
    return f"{row['name']:<18} {phases}  {row['sequences_per_second']:.2f} sequences/s, {row['gib']} GiB, start {row['start']:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--shape", default=SHAPE, help="Of random_checkpoint.py.")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="Per process and step.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--limit", type=float, default=300, help="Seconds for one mode; the first start compiles for 150."
    )
    parser.add_argument("--steps", type=int, default=step_speed.STEPS, help="The first two are not counted.")
    parser.add_argument("--cold", action="store_true", help="Nothing is compiled before a mode; rows are called so.")
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    parser.add_argument("--models", type=Path, help="Folder of checkpoints. Default: in that of temporary files.")
    parser.add_argument("--output", type=Path)
    for hidden in ("--worker", "--model", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(
            options.worker, options.model, Path(options.folder), options.shape, options.device, options.steps, options.sequences,
        )  # fmt: skip
        os._exit(0)  # vLLM's own end can hang
    import torch

    # the processes of the mode that runs are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    started = time.monotonic()
    origin = about.head(options.device, options.commit, times=torch.cuda.device_count() or 1)
    record: dict[str, Any] = {"multi_gpu": []}
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
    named = partial(row_name, shape=options.shape, sequences=options.sequences, cold=options.cold)
    models = options.models or Path(tempfile.gettempdir()) / "multi-gpu-models"
    models.mkdir(parents=True, exist_ok=True)
    kept, failed = None if options.output is None else options.output.parent, False

    def keep(row: dict[str, Any]) -> None:
        """Into the output; a row without figures replaces none that has some."""
        before = next((old for old in record["multi_gpu"] if old["name"] == row["name"]), {})
        if "median" in before and "median" not in row:
            return
        record["multi_gpu"] = [old for old in record["multi_gpu"] if old is not before] + [row | origin]
        record["multi_gpu"].sort(key=lambda row: ORDER.index(row["name"].removesuffix("-cold").partition("-of-")[0]))
        if options.output is not None:
            partial_file = options.output.with_suffix(".partial")
            partial_file.write_text(json.dumps(record, indent=1) + "\n")
            partial_file.rename(options.output)

    server: dict[str, Any] | None = None
    try:
        for name, after in itertools.zip_longest(options.modes, options.modes[1:]):
            left, called = TOTAL - (time.monotonic() - started), named(name)
            reason = why_not(name, options.device, torch.cuda.device_count())
            if reason is not None:
                row: dict[str, Any] = {"name": called, "skipped": reason}
            elif left < LEAST:
                row = {"name": called, "failed": "no time was left: name it alone in --modes"}
            else:
                keep({"name": called, "failed": "it was running when this script was ended"})
                model = checkpoint(MODES[name].who, options.shape, options.device, models)
                limit = min(options.limit, TOTAL - (time.monotonic() - started))
                told = {"--model": model} | {
                    f"--{of}": getattr(options, of) for of in ("shape", "device", "steps", "sequences")
                }
                row, server = run_mode(name, told, limit, kept, server, options.cold)
                row["name"] = called
            if server is not None and not goes_on(name, after):
                end_server(server)
                server = None
            print(line(row), flush=True)
            failed |= "failed" in row
            keep(row)
    finally:
        if server is not None:
            end_server(server)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
