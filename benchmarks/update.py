"""Forward and backward of one micro-batch of an update, ours and stock, on random weights in the Qwen2.5 shapes.

    python benchmarks/update.py --out results/update_h200.json --commit COMMIT
    python benchmarks/update.py --cases stock stock-torch-compile --limit 400 --out FILE
    python benchmarks/update.py --cases nvfp4-compiled-fused --modes checkpointed checkpointed-around --out FILE
    python benchmarks/update.py --cases nvfp4-compiled-fused nvfp4-compiled-fused-w4a8 --rounds 9 --out FILE
    python benchmarks/update.py --size tiny --device cpu --out FILE                   # dry run

Cases (rank-32 LoRA on all seven projections, bf16 autocast, log-probabilities by TRL's fused head): `stock` is PEFT in
eager mode on a bf16 base, as in TRL; `stock-torch-compile` adds transformers' torch_compile=True (minutes, so only by
name). `bf16-*` and `nvfp4-*` are on that base with compiled decoder layers (update/compiled_layers.py), fused LoRA
layers (update/lora_linear.py), or both; `nvfp4` is PEFT in eager mode. `-w4a8`: compute="w4a8", only by name.

Modes: `checkpointed` (compiled layers recompute inside, as in the trainer), `checkpointed-around` (transformers'
checkpoints around compiled layers), `plain`, and `forward` alone. Cases alternate; the median counts. `first_s`: the
first call with compilation. `peak_gib`: memory of a call plus the case's model.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from models import policy, seconds
from torch import nn

from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.update.compiled_layers import compile_layers

CASES = (
    "stock", "bf16-compiled", "bf16-fused", "bf16-compiled-fused", "nvfp4", "nvfp4-compiled", "nvfp4-fused",
    "nvfp4-compiled-fused", "stock-torch-compile", "nvfp4-compiled-fused-w4a8",
)  # fmt: skip
#: sequences, tokens per sequence, tokens per completion
MICRO_BATCH = {"cuda": (8, 768, 512), "cpu": (2, 48, 16)}
AROUND = "checkpointed-around"
MODES = ("checkpointed", AROUND, "plain", "forward")
RANK = 32


class Case:
    """The model of a case, and its timed calls."""

    def __init__(self, name: str, bases: dict[bool, nn.Module], size: str, device: str):
        self.name, self.device, self.shape = name, device, MICRO_BATCH[device]
        dense = not name.startswith("nvfp4")
        if dense not in bases:
            bases[dense] = policy(size, RANK, device, dense)
        # a separate adapter on shared base weights
        shared = {id(p): p for p in bases[dense].parameters() if not p.requires_grad}
        self.model = self.run = copy.deepcopy(bases[dense], shared)
        self.model.train()
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(self.model.get_base_model(), outputs=("log_probs", "entropy"))
        if "fused" in name:
            from qerl_trl.update import lora_linear

            if not lora_linear.fuse(self.model):
                raise ValueError("no layer could be fused")
        for layer in self.model.modules() if name.endswith("w4a8") else ():
            if isinstance(layer, NVFP4Linear):
                layer.compute = "w4a8"
        self.compiled = "compiled" in name
        if name == "stock-torch-compile":
            self.run = torch.compile(self.model)
        elif self.compiled:
            self.layers = compile_layers(self.model, deterministic=True)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.ids = torch.randint(0, vocabulary, self.shape[:2], device=device)
        self.labels = self.ids.clone()
        self.labels[:, : -self.shape[2]] = -100

    def logps(self) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            output = self.run(
                input_ids=self.ids, attention_mask=torch.ones_like(self.ids), labels=self.labels, fused_lm_head=True
            )
        return output.log_probs[:, -self.shape[2] :]

    def step(self) -> None:
        self.logps().mean().backward()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward(self) -> None:
        self.logps()

    def call(self, mode: str) -> Callable[[], None]:
        """The call of a mode, after preparing the model."""
        inside = self.compiled and mode == "checkpointed"
        if self.compiled:
            self.layers.recompute(self.layers.layers if inside else ())
        if mode in ("checkpointed", AROUND):
            self.model.enable_input_require_grads()
        if mode in ("checkpointed", AROUND) and not inside:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        return self.forward if mode == "forward" else self.step

    def failed(self) -> str | None:
        if self.compiled and self.layers.failed:
            return "its layers did not compile and ran in eager mode"
        if self.compiled and not all(forward.function.recomputes for forward in self.layers.forwards):
            return "its layers could not recompute inside"
        return None


def measure(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Fill `record["cases"]` with the measurements, or `skipped` with the reason."""
    started, device = time.monotonic(), args.device
    found: dict[str, dict[str, Any]] = {name: {} for name in args.cases}
    bases: dict[bool, nn.Module] = {}
    cases: dict[str, Case] = {}
    record["cases"] = found

    def give_up(name: str, error: Exception | str) -> None:
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        found[name]["skipped"] = reason
        cases.pop(name, None)
        print(f"{name}: skipped, {reason}", flush=True)

    def first(name: str, mode: str) -> None:
        """The first call, including compilation."""
        case = cases[name]
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        call = case.call(mode)
        found[name].setdefault("first_s", {})[mode] = round(seconds(call, device), 2)
        call()
        if why := case.failed():
            raise RuntimeError(why)
        if device == "cuda":
            own = sum(p.numel() * p.element_size() for p in case.model.parameters())
            peak = torch.cuda.max_memory_allocated() - before + own
            found[name].setdefault("peak_gib", {})[mode] = round(peak / 2**30, 2)
        took = time.monotonic() - started
        print(f"{took:5.0f} s  {name} {mode}: first call {found[name]['first_s'][mode]} s", flush=True)

    for name in args.cases:
        try:
            cases[name] = Case(name, bases, args.size, device)
        except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            give_up(name, error)
    for mode in args.modes:
        for name in [name for name in cases if mode != AROUND or cases[name].compiled]:
            if time.monotonic() - started > args.limit:
                give_up(name, f"no time left after {args.limit:g} s")
                continue
            try:
                first(name, mode)
            except (RuntimeError, NotImplementedError) as error:  # also torch.OutOfMemoryError
                give_up(name, error)
        times: dict[str, list[float]] = {name: [] for name in cases if mode in found[name].get("first_s", {})}
        for _ in range(args.rounds):
            for name, values in times.items():
                values.append(seconds(cases[name].call(mode), device))
        for name, values in times.items():
            found[name].setdefault("seconds", {})[mode] = round(statistics.median(values), 4)
            print(f"        {name} {mode}: {found[name]['seconds'][mode]} s", flush=True)
        common.save(record, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES[:-2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[mode for mode in MODES if mode != AROUND])
    parser.add_argument("--device", default="cuda", choices=MICRO_BATCH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=220, help="seconds after which no further case starts")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    batch, tokens, completion = MICRO_BATCH[args.device]
    sizes = {"size": args.size, "sequences": batch, "tokens_each": tokens, "completion_tokens_each": completion}
    measure(args, common.head(args.device, args.commit) | sizes)


if __name__ == "__main__":
    main()
