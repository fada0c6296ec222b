"""Forward and backward of one micro-batch in Unsloth, next to update.py: the same shape, sequences, adapter and completions.

    PYTHONPATH=WHERE_UNSLOTH_IS:src:kernels/torch-ext python benchmarks/unsloth_update.py --size 7b --out results/unsloth_h200.json   # 2 minutes
    python benchmarks/unsloth_update.py --size tiny --device cpu --cases bf16 --out FILE                                              a dry run

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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

MODES: dict[str, bool | str] = {"checkpointed": True, "offloaded": "unsloth", "plain": False}
RANK = 32
#: what another package may raise, torch.OutOfMemoryError among them; a row says it
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError, AssertionError)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = "unsloth unsloth_zoo torch triton transformers peft trl datasets bitsandbytes xformers".split()


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def one_mode(fast: Any, model: Any, ids: Any, labels: Any, checkpointing: bool | str, rounds: int) -> dict[str, Any]:
    """`first_s`: the first call, with what it compiles; `peak_gib`: the most that is allocated, the model included."""
    import torch

    cuda = ids.device.type == "cuda"
    fast.for_training(model, use_gradient_checkpointing=checkpointing)

    def step(look: Callable[[], None] = lambda: None) -> None:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        look()
        model.zero_grad(set_to_none=True)

    def seconds() -> float:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        first, gradients = seconds(), list[bool]()
        step(lambda: gradients.extend(p.grad is not None for p in model.parameters() if p.requires_grad))
        if not gradients or not all(gradients):
            return {"failed": f"{gradients.count(False)} of {len(gradients)} trained tensors got no gradient"}
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = [seconds() for _ in range(rounds)]
    except FAILURES as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    row = {"seconds": round(statistics.median(times), 4), "first_s": round(first, 2)}
    return row | ({"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if cuda else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b")
    parser.add_argument("--cases", nargs="+", choices=("bf16", "4bit"), default=["bf16", "4bit"])
    parser.add_argument("--device", default="cuda", choices=common.MICRO_BATCH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=200, help="Seconds after which no further mode is begun.")
    parser.add_argument("--commit", default="", help="Recorded in the result.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started, folder = time.monotonic(), Path(tempfile.gettempdir()) / f"unsloth-update-{args.size}"
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(tempfile.gettempdir()) / "unsloth-compiled"))
    if not list(folder.glob("model.safetensors*")):  # written in a process that imports no Unsloth
        script = [str(Path(__file__).with_name("models.py")), args.size, str(folder), "--device", args.device]
        subprocess.run([sys.executable, *(["-S"] * sys.flags.no_site), *script], check=True)
    import unsloth  # noqa: F401, I001  before transformers and torch's users
    import torch
    from unsloth import FastLanguageModel

    batch, tokens, completion = common.MICRO_BATCH[args.device]
    record: dict[str, Any] = {
        "what": "seconds of forward and backward of one micro-batch in Unsloth, median",
        "command": common.command(),
        "commit": common.commit(args.commit),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": {name: version(name) for name in PACKAGES},
        "size": args.size,
        "sequences": batch,
        "tokens_each": tokens,
        "completion_tokens_each": completion,
        "cases": {},
    }
    for case in args.cases:
        row: dict[str, Any] = {}
        record["cases"][case] = row
        model = None
        try:
            model, _ = FastLanguageModel.from_pretrained(
                str(folder), max_seq_length=tokens, dtype=torch.bfloat16, load_in_4bit=case == "4bit"
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
                row[mode] = one_mode(FastLanguageModel, model, ids, labels, checkpointing, args.rounds)
                print(f"{time.monotonic() - started:5.0f} s  {case} {mode}: {row[mode]}", flush=True)
                common.save(record, args.out)
        except FAILURES as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:600]}"
            print(f"{case}: {row['failed']}", flush=True)
        common.save(record, args.out)
        del model
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
