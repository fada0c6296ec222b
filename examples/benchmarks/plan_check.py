"""Does `qerl-trl plan` predict what a GPU measures, and is `qerl-trl quantize` as fast as its disk? Random weights, real shapes.

    python examples/benchmarks/plan_check.py --shape 7b --folder /tmp/check --output plan_check.json      # about 3 minutes on an H200
    python examples/benchmarks/plan_check.py --shape tiny --device cpu --folder /tmp/check                # dry run

Writes a random bf16 checkpoint, times reading it and writing the result's bytes (the floor of any quantizer), times quantize_folder, loads
the result with LoRA and measures torch's peak memory of updates (TRL's tiled output head, AdamW) and of a rollout in transformers.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl_trl import offline, plan, shards
from qerl_trl.linear import describe
from qerl_trl.lora import register_nvfp4_lora
from qerl_trl.quantizer import from_pretrained
from qerl_trl.report import device_name, versions

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    },
}
KV_HEADS = {"tiny": 2, "7b": 4}
SOURCE_SHARD_BYTES = 4_000_000_000
WORKLOADS = {
    "tiny": [plan.Workload(batch=2, prompt_length=16, completion_length=48, completions=4)],
    "7b": [
        plan.Workload(batch=4, prompt_length=256, completion_length=768, completions=64),
        plan.Workload(batch=8, prompt_length=512, completion_length=1536, completions=64),
        plan.Workload(batch=16, prompt_length=512, completion_length=3584, completions=64),
        plan.Workload(batch=2, prompt_length=256, completion_length=768, completions=64, gradient_checkpointing=False),
    ],
}


def write_checkpoint(config: Qwen2Config, folder: Path, device: str) -> int:
    """A bf16 checkpoint with normally distributed weights; returns its bytes."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def job(name: str, shape: tuple[int, ...]) -> shards.Job:
        def make():
            if "norm" in name:
                return [torch.ones(shape, dtype=torch.bfloat16)]
            return [(torch.randn(shape, device=device) * 0.02).to(torch.bfloat16)]

        return shards.Job((shards.TensorSpec(name, torch.bfloat16, shape),), make)

    jobs = [job(name, tuple(p.shape)) for name, p in model.named_parameters()]
    shards.write_shards(folder, jobs, {}, SOURCE_SHARD_BYTES, workers=8)
    return sum(job.nbytes for job in jobs)


def floor_seconds(source: Path, result: Path, scratch: Path, workers: int) -> float:
    """Read every tensor of `source` and write as many bytes as `result` has, with the same threads and calls, sealed alike."""
    written = {info.name: info for info in offline.formats.read_headers(result.glob("*.safetensors")).values()}
    read = offline.formats.read_headers(source.glob("*.safetensors"))

    def job(info) -> shards.Job:
        prefix = info.name.removesuffix(".weight")
        parts = offline.formats.LAYOUTS["compressed-tensors"].tensors
        names = (info.name, *(f"{prefix}.{part}" for part in parts))
        outputs = [written[name] for name in names if name in written]
        specs = tuple(shards.TensorSpec(o.name, offline.formats.torch_dtype(o), o.shape) for o in outputs)

        def make():
            raw = offline._read(info).reshape(-1).view(torch.uint8)
            for spec in specs:
                yield (
                    raw[: spec.nbytes].view(spec.dtype).view(spec.shape)
                    if spec.nbytes <= raw.numel()
                    else torch.zeros(spec.shape, dtype=spec.dtype)
                )

        return shards.Job(specs, make)

    started = time.perf_counter()
    with shards.staging(scratch, {"floor": True}) as partial:
        shards.write_shards(partial, [job(info) for info in read.values()], {}, workers=workers)
    seconds = time.perf_counter() - started
    shutil.rmtree(scratch)
    return seconds


def update(model, optimizer, work: plan.Workload, device: str) -> None:
    """One optimizer step as TRL makes it: backbone, tiled output head, policy-gradient loss."""
    from trl.kernels import ChunkedLogProbFunction

    ids = torch.randint(0, model.config.vocab_size, (work.batch, work.length), device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        scored = hidden[:, -work.completion_length :].reshape(-1, hidden.size(-1))
        targets = ids[:, -work.completion_length :].reshape(-1)
        head = model.get_output_embeddings().weight
        tile = plan.HEAD_TILE[1]
        logps = ChunkedLogProbFunction.apply(
            scored, head, None, targets, 1.0, tile, None, 1.0, ("log_probs", "entropy")
        )[0]
        loss = -(torch.exp(logps - logps.detach()) * torch.randn_like(logps)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def measure(model, optimizer, work: plan.Workload, shape: plan.Shape, device: str, phase: str) -> dict:
    """Peak of one phase against the plan's."""
    cuda = torch.device(device).type == "cuda"
    model.train()
    if work.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    if phase == "update":
        update(model, optimizer, work, device)
    else:
        model.eval()
        model.gradient_checkpointing_disable()
        prompts = torch.randint(4, model.config.vocab_size, (work.completions, work.prompt_length), device=device)
        tokens = work.completion_length
        with torch.no_grad():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
            )
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    predicted = getattr(plan.predict(shape, work), phase)
    measured = torch.cuda.max_memory_allocated() if cuda else 0
    row = {
        "phase": phase,
        "workload": dataclasses.asdict(work),
        "predicted_gib": predicted / 2**30,
        "measured_gib": measured / 2**30,
        "error": predicted / measured - 1 if measured else None,
        "seconds": seconds,
    }
    print(phase, {k: v for k, v in row.items() if k not in ("phase", "workload")}, work, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument(
        "--repeats", type=int, default=2, help="Times to quantize; the first includes compiling the kernels."
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[arguments.shape],
        num_key_value_heads=KV_HEADS[arguments.shape],
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=1,
        pad_token_id=0,
    )
    source, result = arguments.folder / "source", arguments.folder / "nvfp4"
    source_bytes = write_checkpoint(config, source, arguments.device)
    print(f"checkpoint: {source_bytes / 1e9:.2f} GB", flush=True)
    timed = []
    for repeat in range(arguments.repeats):
        started = time.perf_counter()
        done = offline.quantize_folder(source, result, device=arguments.device, workers=arguments.workers)
        timed.append(time.perf_counter() - started)
        print(
            f"quantize: {timed[-1]:.2f} s, {done.weights / timed[-1] / 1e6:.0f} M weights/s, nmse {done.nmse:.5f}",
            flush=True,
        )
        floor = floor_seconds(source, result, arguments.folder / "floor", arguments.workers)
        print(f"reading and writing: {floor:.2f} s, ratio {timed[-1] / floor:.2f}", flush=True)
        timed[-1] = (timed[-1], floor)
        if repeat < arguments.repeats - 1:
            shutil.rmtree(result)
    shape = plan.shape_of(source)
    model = from_pretrained(result, device_map={"": arguments.device})
    torch.manual_seed(1)
    model = get_peft_model(
        model, register_nvfp4_lora(LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))
    )
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    works = WORKLOADS[arguments.shape]
    update(model, optimizer, dataclasses.replace(works[0], batch=1), arguments.device)  # optimizer state and kernels
    rows = [measure(model, optimizer, work, shape, arguments.device, "update") for work in works]
    rollout = dataclasses.replace(
        works[0], prompt_length=works[0].prompt_length, completion_length=min(256, works[0].completion_length)
    )
    rows.append(measure(model, optimizer, rollout, shape, arguments.device, "rollout"))
    report = {
        "device": device_name(torch.device(arguments.device)),
        "versions": versions(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None,
        "linear": describe(arguments.device),
        "quantize": {
            "source_bytes": source_bytes,
            "weights": done.weights,
            "seconds_and_floor": timed,
            "workers": arguments.workers,
        },
        "memory": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
