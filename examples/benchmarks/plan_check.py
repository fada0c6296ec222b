"""Does `qerl-trl plan` predict what a GPU measures? Random weights, real shapes.

    python examples/benchmarks/plan_check.py --shapes 7b 3b --folder /tmp/check --output plan_check.json     # about 3 minutes on an H200
    python examples/benchmarks/plan_check.py --shapes tiny --device cpu --folder /tmp/check                  # dry run

Prints every prediction first. Then quantizes a random checkpoint of each shape, loads it with LoRA and measures torch's peak memory of
updates (TRL's tiled output head, AdamW) and of rollouts in transformers.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from random_checkpoint import random_config, write_checkpoint

from qerl_trl import offline, plan
from qerl_trl.linear import describe
from qerl_trl.lora import register_nvfp4_lora
from qerl_trl.quantizer import from_pretrained
from qerl_trl.report import device_name, versions

WORKLOADS = {
    "tiny": {
        "update": [plan.Workload(batch=2, prompt_length=16, completion_length=48)],
        "rollout": [plan.Workload(prompt_length=16, completion_length=48, completions=4)],
    },
    "3b": {
        "update": [plan.Workload(batch=6, prompt_length=384, completion_length=1152)],
        "rollout": [plan.Workload(prompt_length=512, completion_length=64, completions=96)],
    },
    "7b": {
        "update": [
            plan.Workload(batch=4, prompt_length=256, completion_length=768),
            plan.Workload(batch=8, prompt_length=512, completion_length=1536),
            plan.Workload(batch=16, prompt_length=512, completion_length=3584),
            plan.Workload(batch=2, prompt_length=256, completion_length=768, gradient_checkpointing=False),
            plan.Workload(batch=3, prompt_length=1024, completion_length=2048),
        ],
        "rollout": [
            plan.Workload(prompt_length=256, completion_length=64, completions=64),
            plan.Workload(prompt_length=128, completion_length=192, completions=160),
        ],
    },
}


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


def generate(model, work: plan.Workload, device: str) -> None:
    """A rollout in transformers, every completion of full length."""
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


def measure(model, optimizer, work: plan.Workload, phase: str, device: str) -> dict:
    """Peak of one phase."""
    cuda = torch.device(device).type == "cuda"
    model.train(phase == "update")
    if phase == "update" and work.gradient_checkpointing:
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
        generate(model, work, device)
    if cuda:
        torch.cuda.synchronize()
    return {
        "measured_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "seconds": time.perf_counter() - started,
    }


def load(folder: Path, device: str):
    """(NVFP4 model with LoRA on every linear layer, its optimizer)"""
    model = from_pretrained(folder, device_map={"": device})
    torch.manual_seed(1)
    model = get_peft_model(
        model, register_nvfp4_lora(LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))
    )
    model.enable_input_require_grads()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def check(shape: str, rows: list[dict], folder: Path, device: str) -> None:
    """Measure the rows of one shape and add what was measured to them."""
    source, result = folder / shape / "source", folder / shape / "nvfp4"
    if not source.is_dir():
        write_checkpoint(shape, source, device)
    if not result.is_dir():
        offline.quantize_folder(source, result, device=device)
    model, optimizer = load(result, device)
    warm = plan.Workload(batch=1, prompt_length=16, completion_length=48)
    update(model, optimizer, warm, device)  # creates the optimizer's state, compiles the kernels
    for row in rows:
        row.update(measure(model, optimizer, plan.Workload(**row["workload"]), row["phase"], device))
        if row["measured_gib"]:
            row["error"] = row["predicted_gib"] / row["measured_gib"] - 1
        print(json.dumps(row), flush=True)


def predictions(shape: str) -> list[dict]:
    numbers = plan.shape_of(random_config(shape))
    return [
        {
            "shape": shape,
            "phase": phase,
            "workload": dataclasses.asdict(work),
            "predicted_gib": getattr(plan.predict(numbers, work), phase) / 2**30,
        }
        for phase, works in WORKLOADS[shape].items()
        for work in works
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=WORKLOADS, default=["7b", "3b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="For checkpoints; ones that are there are used.")
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    rows = {shape: predictions(shape) for shape in arguments.shapes}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": arguments.commit or git or None,
        "device": device_name(torch.device(arguments.device)),
        "versions": versions(),
        "linear": describe(arguments.device),
        "memory": [row for shape in arguments.shapes for row in rows[shape]],
    }
    for row in report["memory"]:
        print(json.dumps(row), flush=True)
    for shape in arguments.shapes:
        check(shape, rows[shape], arguments.folder, arguments.device)
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
