"""Forward and backward of one micro-batch of an update, ours and stock, in one run, on random weights in the Qwen2.5 shapes.

    python update_speed.py --size 7b --out results/update_speed_h200.json --commit COMMIT
    python update_speed.py --size 7b --cases stock,stock-torch-compile --limit 400 --out FILE
    python update_speed.py --size 7b --cases nvfp4-compiled-fused --modes checkpointed,checkpointed-around --out FILE
    python update_speed.py --size tiny --device cpu --out FILE                         a dry run

Cases (rank-32 LoRA on all seven projections, bf16 autocast, as TRL computes an update: log-probabilities of the completion through its fused
head):
    stock                  PEFT on a bf16 base, eager: what TRL runs
    stock-torch-compile    the same with transformers' own torch_compile=True (the whole model)
    bf16-compiled          bf16 base, decoder layers compiled (`update/compiled_layers.py`)
    bf16-fused             bf16 base, LoRA linears with their own backward (`update/lora_linear.py`)
    bf16-compiled-fused    both
    nvfp4, nvfp4-compiled, nvfp4-fused, nvfp4-compiled-fused      the same on the NVFP4 base; `nvfp4` is PEFT in eager mode
    nvfp4-compiled-timed   as nvfp4-compiled, with inductor's choices by timing, which may differ from run to run

Each is measured with gradient checkpointing (compiled layers recompute inside, as in the trainer; `checkpointed-around`: compiled layers with
transformers' checkpoints around them), without, and as a forward alone, the cases in turns (the clock falls with the power), and the
median is kept. `first_s`: the first call of a mode, with what it compiles. `peak_gib`: what a call takes
beyond what the run holds, plus the case's own model. The case named by --profile (by default the fastest without checkpointing) is profiled as well.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import about
from rollout_models import policy, seconds

from qerl_trl.update.compiled_layers import compile_layers

CASES = (
    "stock",
    "stock-torch-compile",
    "bf16-compiled",
    "bf16-fused",
    "bf16-compiled-fused",
    "nvfp4",
    "nvfp4-compiled",
    "nvfp4-fused",
    "nvfp4-compiled-fused",
    "nvfp4-compiled-timed",
)
#: left out unless they are named: compiling the whole model takes minutes, timing is no default of ours
DEFAULT = tuple(case for case in CASES if case not in ("stock-torch-compile", "nvfp4-compiled-timed"))
AROUND = "checkpointed-around"
MODES = ("checkpointed", AROUND, "plain", "forward")
SHAPE = {"cuda": (8, 768, 512), "cpu": (2, 48, 16)}  # sequences, tokens of each, of which completion
RANK = 32
TOP = 25


def sharing(model: nn.Module) -> nn.Module:
    """A copy with an adapter of its own on the same base weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


class Case:
    """A model as the case has it, and the calls that are timed."""

    def __init__(self, name: str, bases: dict[bool, nn.Module], size: str, device: str, shape: tuple[int, int, int]):
        self.name, self.device, self.shape = name, device, shape
        dense = not name.startswith("nvfp4")
        if dense not in bases:
            bases[dense] = policy(size, RANK, device, dense)
        self.model = self.run = sharing(bases[dense])
        self.model.train()
        self.add_head()
        if "fused" in name:
            from qerl_trl.update import lora_linear

            if not lora_linear.fuse(self.model):
                raise ValueError("no layer could be fused")
        self.compiled = "compiled" in name
        if name == "stock-torch-compile":
            self.run = torch.compile(self.model)
        elif self.compiled:
            self.layers = compile_layers(self.model, deterministic="timed" not in name)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.ids = torch.randint(0, vocabulary, shape[:2], device=device)
        self.labels = self.ids.clone()
        self.labels[:, : -shape[2]] = -100

    def add_head(self) -> None:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(self.model.get_base_model(), outputs=("log_probs", "entropy"))

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
        """What is timed, with the model set for it."""
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

    def own_gib(self) -> float:
        return sum(p.numel() * p.element_size() for p in self.model.parameters()) / 2**30

    def failed(self) -> str | None:
        if self.compiled and self.layers.failed:
            return "its layers did not compile and ran in eager mode"
        if self.compiled and not all(forward.function.recomputes for forward in self.layers.forwards):
            return "its layers could not recompute inside"
        return None


def profile(call: Callable[[], None], device: str) -> dict[str, Any]:
    """Kernels of one call by time, with counts, and the sum of all."""
    from torch.profiler import ProfilerActivity

    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as trace:
        wall = seconds(call, device)
    field = "device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(((getattr(e, field) / 1e3, e.count, e.key) for e in trace.key_averages()), reverse=True)
    return {
        "wall_ms": round(1e3 * wall, 1),
        "kernels_ms": round(sum(row[0] for row in rows), 1),
        "launches": sum(row[1] for row in rows),
        "top": [{"ms": round(ms, 2), "count": count, "kernel": key[:140]} for ms, count, key in rows[:TOP]],
    }


def measure(
    names: list[str],
    modes: list[str],
    size: str,
    device: str,
    rounds: int,
    save: Callable[[dict], None],
    limit: float,
) -> dict:
    """case -> what was measured, or `skipped` and why."""
    started = time.monotonic()
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    bases: dict[bool, nn.Module] = {}
    cases: dict[str, Case] = {}
    shape = SHAPE[device]

    def give_up(name: str, error: Exception | str) -> None:
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        found[name]["skipped"] = reason
        cases.pop(name, None)
        print(f"{name}: skipped, {reason}", flush=True)

    for name in names:
        try:
            cases[name] = Case(name, bases, size, device, shape)
        except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            give_up(name, error)
    for mode in modes:
        for name in [
            name for name in cases if mode != AROUND or cases[name].compiled
        ]:  # the first call of each, with what it compiles
            if time.monotonic() - started > limit:
                give_up(name, f"no time left after {limit:g} s")
                continue
            case = cases[name]
            if device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            try:
                call = case.call(mode)
                found[name].setdefault("first_s", {})[mode] = round(seconds(call, device), 2)
                call()
            except (RuntimeError, NotImplementedError) as error:  # also torch.OutOfMemoryError
                give_up(name, error)
                continue
            if why := case.failed():
                give_up(name, why)
                continue
            if device == "cuda":
                peak = (torch.cuda.max_memory_allocated() - held) / 2**30
                found[name].setdefault("peak_gib", {})[mode] = round(peak + case.own_gib(), 2)
            print(
                f"{time.monotonic() - started:5.0f} s  {name} {mode}: first call {found[name]['first_s'][mode]} s",
                flush=True,
            )
        times: dict[str, list[float]] = {name: [] for name in cases if mode in found[name].get("first_s", {})}
        for _ in range(rounds):
            for name, values in times.items():
                values.append(seconds(cases[name].call(mode), device))
        for name, values in times.items():
            found[name].setdefault("seconds", {})[mode] = round(statistics.median(values), 4)
            print(f"        {name} {mode}: {found[name]['seconds'][mode]} s", flush=True)
        save(found)
    return found | {"": cases}  # type: ignore[dict-item]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b")
    parser.add_argument("--cases", default=",".join(DEFAULT), help="comma-separated")
    parser.add_argument(
        "--modes",
        default=",".join(mode for mode in MODES if mode != AROUND),
        help=f"comma-separated, of {', '.join(MODES)}",
    )
    parser.add_argument("--device", default="cuda", choices=SHAPE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", help="case to profile; by default the fastest")
    parser.add_argument("--limit", type=float, default=220, help="seconds after which no further case is begun")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    names = args.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    modes = args.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown modes {sorted(unknown)}; there are {', '.join(MODES)}")
    batch, tokens, completion = SHAPE[args.device]
    record: dict[str, Any] = {
        "what": "seconds of one micro-batch, median; `checkpointed` and `plain`: forward and backward with and without gradient checkpointing; "
        "`checkpointed-around`: with transformers' checkpoints around compiled layers; `forward`: without gradient",
        **about.head(args.device, args.commit),
        "size": args.size,
        "sequences": batch,
        "tokens_each": tokens,
        "completion_tokens_each": completion,
    }

    def save(cases: dict) -> None:
        record["cases"] = cases
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    found = measure(names, modes, args.size, args.device, args.rounds, save, args.limit)
    cases: Any = found.pop("")
    measured = [name for name in cases if "plain" in found[name].get("seconds", {})]
    best = args.profile or min(measured, key=lambda name: found[name]["seconds"]["plain"], default=None)
    if best in cases:
        record["profile"] = {"case": best}
        for mode in [mode for mode in modes if mode != "forward"]:
            call = cases[best].call(mode)
            call()
            record["profile"][mode] = profile(call, args.device)
            for row in record["profile"][mode]["top"]:
                print(f"{mode} {row['ms']:9.2f} ms {row['count']:6d}x {row['kernel'][:110]}", flush=True)
    save(found)


if __name__ == "__main__":
    main()
