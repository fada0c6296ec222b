"""A rollout server on a GPU of its own: how long a step and its sync take, through shared memory and over the network.

    CUDA_VISIBLE_DEVICES=0,1 python benchmarks/server_sync.py --out results/server_h200x2.json       # 7B, two GPUs, about 3 minutes
    CUDA_VISIBLE_DEVICES=0,0 python benchmarks/server_sync.py --out results/server_h200.json         # both on one GPU
    python benchmarks/server_sync.py --out /tmp/server.json --shape tiny --device cpu                # does it run at all
    python benchmarks/server_sync.py --out results/server_cpu.json --shape small --rank 464 --device cpu  # as many bytes as 7B, rank 32

The server is started with the command that the trainer prints (NVFP4 base of random weights, rank-32 adapter). Then a few GRPO steps; then
syncs of a changed adapter, each timed from the call to the server's answer, `--repeats` times: `shared memory`, as on one host, and `tcp`,
the way between hosts, over the loopback interface here. `with noise` is what a rollout puts, weights and a draw at once. On one GPU nothing travels
between two, and trainer and engine take its time from each other while both compute; requests, and copies to the host and back, are the same. Without GPUs trainer and engine have their tensors in host memory, so what is left out is
the copy from one GPU and to the other over their buses; and what either end computes, sums that detect damage above all, takes a CPU seconds, so
`transport` is the way alone: writing the shared memory, and sending all parts of an update until the server has them. `noise` is a draw, `contents` what a rollout is checked by. What is known is written
after each part, so a run that is ended early leaves what it has.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import about

sys.path.insert(0, str(Path(__file__).parent))
SEQUENCES, NEW, PROMPT, RANK = 8, 512, 256, 32
#: sequences that the server has CUDA graphs for; by default a thousand, which takes longer to start
AT_A_TIME = 64


def start_server(
    spec, gpu: str | None, log: Path, cpu: bool, memory: float | None = None
) -> tuple[subprocess.Popen, str]:
    """The server that `spec` prints the command of, with this share of its GPU's memory; its process, and its address."""
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", *shlex.split(spec.serve_command())[2:]]
    command += ["--max-num-seqs", str(AT_A_TIME)]
    memory = 0.1 if cpu else memory
    command += [] if memory is None else ["--gpu-memory-utilization", str(memory)]
    return start([*command, *(["--enforce-eager"] if cpu else [])], gpu, log)


def start(command: list[str], gpu: str | None, log: Path) -> tuple[subprocess.Popen, str]:
    """Start a server on a free port, in a process group of its own, on this GPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, f"http://127.0.0.1:{port}"


def wait(process: subprocess.Popen, url: str, log: Path, seconds: float, path: str = "/health") -> None:
    import requests

    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if requests.get(url + path, timeout=2).status_code == 200:
                return
        except requests.RequestException:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=RANK, help="Of the adapter.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="The server's share of its GPU; vLLM's own, or 0.35 beside the trainer.",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # the server is ended too
    os.environ.setdefault("QERL_SERVER_SECRET", "of this measurement alone")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    cpu = options.device == "cpu"
    one = not cpu and gpus[0] == gpus[-1]
    share = options.gpu_memory_utilization or (0.35 if one else None)
    if not cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from random_checkpoint import write_checkpoint

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.model.lora import register_nvfp4_lora
    from qerl_trl.noise.hooks import NoiseDraw
    from qerl_trl.nvfp4.config import from_pretrained
    from qerl_trl.rollout.spec import EngineSpec

    folder = Path(tempfile.mkdtemp())
    new, prompt = (NEW, PROMPT) if not cpu else (8, 8)
    longest = 4 * prompt + new
    started = time.perf_counter()
    write_checkpoint(options.shape, folder / "model", options.device, packed=True)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    dataset = Dataset.from_dict({"prompt": [f"{i} " + "1 " * (prompt - 2) for i in range(64)]})

    def trainer(url: str, timeout: float) -> QeRLGRPOTrainer:
        args = QeRLConfig(
            str(folder / "run"), use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=timeout, vllm_max_model_length=longest,
            per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES, max_completion_length=new, max_steps=options.steps,
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, aqn_num_stages=2, use_cpu=cpu, bf16=not cpu,
            generation_kwargs={"ignore_eos": True}, learning_rate=1e-5,
        )  # fmt: skip
        return QeRLGRPOTrainer(
            str(folder / "model"),
            reward_funcs=lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
            args=args,
            train_dataset=dataset,
            peft_config=lora,
        )

    base = from_pretrained(str(folder / "model"), dtype=torch.bfloat16)
    model = get_peft_model(base, register_nvfp4_lora(lora))
    spec = EngineSpec.of(model, max_model_len=longest)
    del model, base
    log = folder / "server.log"
    process, url = start_server(spec, gpus[-1] if not cpu else None, log, cpu, share)
    try:
        wait(process, url, log, 300)
        ready = time.perf_counter() - started
        built = trainer(url, 10)
        built.train()
        history = [entry for entry in built.state.log_history if "loss" in entry]
        generation = built.vllm_generation
        engine, policy = generation.engine, built.accelerator.unwrap_model(built.model)
        results = {
            **about.head(options.device, times=1 if cpu or one else 2),
            "gpu_memory_utilization": share,
            "shape": options.shape,
            "rank": options.rank,
            "sequences": SEQUENCES,
            "new_tokens": new,
            "server_ready_s": round(ready, 1),
            "steps": [
                {k: v for k, v in e.items() if k.startswith(("seconds/", "step_time", "rollout/"))} for e in history
            ],
            "bytes": engine._layout.nbytes,
            "shared_memory": engine._local,
            "pinned": engine._local and engine._memory.pinned,
        }

        def write() -> None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")

        def timed(action) -> dict:
            seconds = []
            for _ in range(options.repeats):
                with torch.no_grad():
                    for parameter in policy.parameters():
                        if parameter.requires_grad:
                            parameter.mul_(1.001)
                if not cpu:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                action()
                seconds.append(time.perf_counter() - begin)
            return {"median_s": round(statistics.median(seconds), 4), "all_s": [round(s, 4) for s in seconds]}

        write()

        def between_hosts() -> None:
            engine._local = False
            engine.client.listen()
            engine._make_room(engine._layout, engine._flat)

        results["transport"], results["sync"] = {}, {}
        if engine._local:
            results["transport"]["shared memory"] = timed(engine._deliver)
            results["sync"]["shared memory"] = timed(generation.sync_weights)
            write()
        draws = iter(range(1000, 2000))

        def with_noise() -> None:
            generation.sync_weights(draw=NoiseDraw(1e-2, 1, next(draws), 0))

        results["sync"]["with noise"] = timed(with_noise)
        write()
        norms = generation._noisy
        results["noise"] = timed(lambda: engine.set_noise(norms, NoiseDraw(1e-2, 1, next(draws), 0)))
        results["contents"] = timed(engine.contents)
        write()
        between_hosts()
        results["transport"]["tcp"] = timed(engine._deliver)
        results["sync"]["tcp"] = timed(generation.sync_weights)
        write()
        print(
            json.dumps(
                {k: results[k] for k in ("transport", "sync", "noise", "contents", "bytes", "pinned", "steps")},
                indent=1,
            )
        )
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        print(*log.read_text().splitlines()[-5:], sep="\n")
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
