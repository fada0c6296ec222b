"""Forward and backward of one micro-batch in Unsloth, beside update_speed.py: the same shape, sequences, adapter and completions.

    PYTHONPATH=WHERE_UNSLOTH_IS:src:kernels/torch-ext python unsloth_update.py --size 7b --out results/unsloth_h200.json      # about 2 minutes
    python unsloth_update.py --size tiny --device cpu --cases bf16 --out FILE                                                a dry run

Cases: `bf16`, LoRA on a bf16 base; `4bit`, on bitsandbytes' NF4 (`load_in_4bit`). The rank-32 LoRA is on all seven projections, without dropout,
as Unsloth's fast path wants it. What is timed is Unsloth's own training forward, a cross entropy over the completion's tokens, and its
backward, under bf16 autocast as its trainers run them; the log-probabilities of GRPO are the same sum over the vocabulary. Modes: `checkpointed`
(`use_gradient_checkpointing=True`), `offloaded` ("unsloth", its default: activations wait in host memory), `plain` (False).

Unsloth 2026.10 asks for trl below 1.16 and datasets below 5 and must be imported first, so it gets a folder of its own on the path. A case or mode that fails
is a row that says why.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import about

SHAPE = {
    "cuda": (8, 768, 512),
    "cpu": (2, 48, 16),
}  # sequences, tokens of each, of which completion; as update_speed.py
MODES: dict[str, bool | str] = {"checkpointed": True, "offloaded": "unsloth", "plain": False}
RANK = 32
#: what another package may raise, torch.OutOfMemoryError among them; a row says it
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError, AssertionError)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = (
    "unsloth",
    "unsloth_zoo",
    "torch",
    "triton",
    "transformers",
    "peft",
    "trl",
    "datasets",
    "bitsandbytes",
    "xformers",
)


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def checkpoint(size: str, device: str) -> Path:
    """A bf16 base of random weights, written in a process that imports no Unsloth."""
    folder = Path(tempfile.gettempdir()) / f"unsloth-update-{size}"
    if not (folder / "model.safetensors").exists() and not (folder / "model.safetensors.index.json").exists():
        script = str(Path(__file__).with_name("random_checkpoint.py"))
        subprocess.run(
            [sys.executable, *(["-S"] * sys.flags.no_site), script, size, str(folder), "--device", device], check=True
        )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", help="Of random_checkpoint.py.")
    parser.add_argument(
        "--model", type=Path, help="Folder of a bf16 checkpoint in that shape. Default: one is written."
    )
    parser.add_argument("--cases", nargs="+", choices=("bf16", "4bit"), default=["bf16", "4bit"])
    parser.add_argument("--device", default="cuda", choices=SHAPE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=100, help="Seconds after which no further mode is begun.")
    parser.add_argument("--commit", default="", help="Recorded in the result.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = time.monotonic()
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(tempfile.gettempdir()) / "unsloth-compiled"))
    model_folder = args.model or checkpoint(args.size, args.device)
    import unsloth  # noqa: F401, I001  before transformers and torch's users
    import torch
    from unsloth import FastLanguageModel

    batch, tokens, completion = SHAPE[args.device]
    cuda = args.device == "cuda"
    record: dict[str, Any] = {
        "what": "seconds of forward and backward of one micro-batch in Unsloth, median",
        "command": about.command(),
        "commit": about.commit(args.commit),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": versions(),
        "size": args.size,
        "sequences": batch,
        "tokens_each": tokens,
        "completion_tokens_each": completion,
        "imports_s": round(time.monotonic() - started, 1),
        "cases": {},
    }

    def seconds(call: Callable[[], None]) -> float:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def save() -> None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    save()
    for case in args.cases:
        row: dict[str, Any] = {}
        record["cases"][case] = row
        model = None
        try:
            model, _ = FastLanguageModel.from_pretrained(
                str(model_folder), max_seq_length=tokens, dtype=torch.bfloat16, load_in_4bit=case == "4bit"
            )
            model = FastLanguageModel.get_peft_model(
                model, r=RANK, lora_alpha=2 * RANK, lora_dropout=0, bias="none", target_modules=PROJECTIONS,
                use_gradient_checkpointing=True,
            )  # fmt: skip
            ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=args.device)
            labels = ids.clone()
            labels[:, : tokens - completion] = -100
            for mode, checkpointing in MODES.items():
                if time.monotonic() - started > args.limit:
                    row[mode] = {"skipped": f"no time left after {args.limit:g} s"}
                    continue
                row[mode] = one_mode(FastLanguageModel, model, ids, labels, checkpointing, args.rounds, seconds, cuda)
                print(f"{time.monotonic() - started:5.0f} s  {case} {mode}: {row[mode]}", flush=True)
                save()
        except FAILURES as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:600]}"
            print(f"{case}: {row['failed']}", flush=True)
        save()
        del model
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def one_mode(
    fast: Any, model: Any, ids: Any, labels: Any, checkpointing: bool | str, rounds: int, seconds: Callable, cuda: bool
) -> dict[str, Any]:
    """`first_s`: the first call, with what it compiles; `peak_gib`: the most that is allocated, the model included."""
    import torch

    fast.for_training(model, use_gradient_checkpointing=checkpointing)

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    try:
        first = seconds(step)
        gradients = []

        def with_gradients() -> None:
            model(input_ids=ids, labels=labels).loss.backward()
            gradients.extend(p.grad is not None for p in model.parameters() if p.requires_grad)
            model.zero_grad(set_to_none=True)

        with torch.autocast(ids.device.type, torch.bfloat16):
            with_gradients()
        if not gradients or not all(gradients):
            return {"failed": f"{gradients.count(False)} of {len(gradients)} trained tensors got no gradient"}
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = [seconds(step) for _ in range(rounds)]
    except FAILURES as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    row = {"seconds": round(statistics.median(times), 4), "first_s": round(first, 2)}
    return row | ({"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if cuda else {})


if __name__ == "__main__":
    main()
