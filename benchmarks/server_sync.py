"""A rollout server on a GPU of its own: how long a step and its sync take, through shared memory and over the network.

    CUDA_VISIBLE_DEVICES=0,1 python benchmarks/server_sync.py --out results/server_h200x2.json       # 7B, two GPUs, about 3 minutes
    CUDA_VISIBLE_DEVICES=0,0 python benchmarks/server_sync.py --out results/server_h200.json         # both on one GPU
    python benchmarks/server_sync.py --out results/server_cpu.json --shape small --rank 464 --device cpu  # as many bytes as 7B, rank 32

The server is started with the command that the trainer prints (NVFP4 base of random weights, rank-32 adapter). Then a few GRPO steps; then
syncs of a changed adapter, each timed from the call to the server's answer, `REPEATS` times: `shared memory`, as on one host, and `tcp`,
the way between hosts, over the loopback interface here. `with noise` is what a rollout puts, weights and a draw at once. On one GPU nothing travels
between two, and trainer and engine take its time from each other while both compute. Without GPUs, what either end computes, sums that detect
damage above all, takes a CPU seconds, so `transport` is the way alone: writing the shared memory, and sending an update until the server has it.
`noise` is a draw, `contents` what a rollout is checked by. What is known is written after each part.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

SEQUENCES, NEW, PROMPT, RANK, STEPS, REPEATS = 8, 512, 256, 32, 4, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=RANK, help="Of the adapter.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # the server is ended too
    os.environ.setdefault("QERL_SERVER_SECRET", "of this measurement alone")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    gpus, cpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","), options.device == "cpu"
    one = not cpu and gpus[0] == gpus[-1]
    share = 0.1 if cpu else 0.35 if one else None
    if not cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    import torch
    from datasets import Dataset
    from models import write_checkpoint
    from peft import LoraConfig

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.noise.hooks import NoiseDraw
    from qerl_trl.rollout.weights import UpdateLayout

    folder = Path(tempfile.mkdtemp())
    new, prompt = (NEW, PROMPT) if not cpu else (8, 8)
    longest = 4 * prompt + new
    started = time.perf_counter()
    write_checkpoint(options.shape, folder / "model", options.device, packed=True)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    more = [] if share is None else ["--gpu-memory-utilization", str(share)]
    log = folder / "server.log"
    spec = common.spec_of(str(folder / "model"), lora, longest)
    more += ["--enforce-eager"] * cpu
    process, url = common.start_server(spec, None if cpu else gpus[-1], log, *more)
    try:
        common.wait(process, url, log, 300)
        ready = time.perf_counter() - started
        args = QeRLConfig(
            str(folder / "run"), use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=10, vllm_max_model_length=longest,
            per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES, max_completion_length=new, max_steps=STEPS,
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, aqn_num_stages=2, use_cpu=cpu, bf16=not cpu,
            generation_kwargs={"ignore_eos": True}, learning_rate=1e-5,
        )  # fmt: skip
        trainer = QeRLGRPOTrainer(
            str(folder / "model"),
            reward_funcs=lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"{i} " + "1 " * (prompt - 2) for i in range(64)]}),
            peft_config=lora,
        )
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        generation = trainer.vllm_generation
        engine, policy = generation.engine, trainer.accelerator.unwrap_model(trainer.model)
        results = {
            **common.head(options.device, times=1 if cpu or one else 2),
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
            "transport": {},
            "sync": {},
        }

        def timed(action: Callable[[], object]) -> dict:
            seconds = []
            for _ in range(REPEATS):
                with torch.no_grad():
                    for parameter in policy.parameters():
                        if parameter.requires_grad:
                            parameter.mul_(1.001)
                if not cpu:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                action()
                seconds.append(time.perf_counter() - begin)
            common.save(results, options.out)
            return {"median_s": round(statistics.median(seconds), 4), "all_s": [round(s, 4) for s in seconds]}

        def both_ways(name: str) -> None:
            results["transport"][name] = timed(
                lambda: engine._deliver(generation.trained._update(generation.trained.parameters()))
            )
            results["sync"][name] = timed(generation.sync_weights)

        if engine._local:
            both_ways("shared memory")
        draws = (NoiseDraw(1e-2, 1, step, 0) for step in range(1000, 2000))
        results["sync"]["with noise"] = timed(lambda: generation.sync_weights(draw=next(draws)))
        results["noise"] = timed(lambda: engine.put(None, generation._noisy, next(draws)))
        results["contents"] = timed(engine.contents)
        engine._local, engine._layout = False, UpdateLayout(())  # as between hosts
        both_ways("tcp")
        common.save(results, options.out)
        shown = ("transport", "sync", "noise", "contents", "bytes", "pinned", "steps")
        print(json.dumps({k: results[k] for k in shown}, indent=1))
    finally:
        common.end(process.pid)
        print(*log.read_text().splitlines()[-5:], sep="\n")
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
