#!/usr/bin/env python3
"""Does the engine check at start (`qerl_trl.rollout.probe`) separate correct from faulty engines?

    python benchmarks/probe_separation.py MODEL --arm nvfp4 --noise --seed 1 --out FILE   # one engine, many probes
    python benchmarks/probe_separation.py --unquantized MODEL --out FILE                  # engine with other weights
    python benchmarks/probe_separation.py --table FILE ...                                # join and print records

Probes run before training and after some updates, each on other prompts: on the healthy engine, and with a fault in
its adapter or noise. Records have the measurements at every size of adapter and noise; `--table` selects a size and
judges by the package's rules.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results/probe_separation.json"
#: probes: healthy, per adapter fault, per noise fault (each before and after training); unquantized (before only)
SETS, FAULT_SETS, NOISE_SETS, UNQUANTIZED_SETS = 8, 2, 4, 14
FAULTS = "lost,halved,doubled,half of the layers,MLPs lost,k and v exchanged,noise lost,unquantized".split(",")


def change_of(fault: str):
    """Function from the given adapter, {layer: tensors}, to the faulty adapter in the engine."""

    def scaled(factor, where=lambda name: True):
        return lambda adapter: {n: replace(t, b=t.b * factor) if where(n) else t for n, t in adapter.items()}

    def exchanged(adapter):
        others = {"k_proj": "v_proj", "v_proj": "k_proj"}
        return {n: adapter[re.sub("[kv]_proj", lambda found: others[found[0]], n)] for n in adapter}

    return {
        "lost": scaled(0.0),
        "halved": scaled(0.5),
        "doubled": scaled(2.0),
        "half of the layers": scaled(0.0, lambda name: int(name.split(".")[2]) % 2),
        "MLPs lost": scaled(0.0, lambda name: ".mlp." in name),
        "k and v exchanged": exchanged,
    }[fault]


def serve_unquantized() -> None:
    """Let vLLM compute with the bf16 weights of the base before quantization."""
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.rollout.vllm.engine import InProcessEngine

    build = InProcessEngine.__init__

    def wrong(self: Any, model: Any, spec: Any, share: bool, *args: Any, **kwargs: Any) -> None:
        import torch
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        dense = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.bfloat16)
        policy = get_peft_model(dense.to(model.device), model.peft_config["default"])
        policy.requires_grad_(False)
        spec = EngineSpec.of(policy, dtype=torch.bfloat16, max_model_len=spec.max_model_len)
        build(self, policy, spec, False, *args, **kwargs)

    InProcessEngine.__init__ = wrong


def sums() -> list[str]:
    """Problems as text, in many forms, like the prompts of a run."""
    import random

    draw = random.Random(0)
    forms = (
        "{a} trains with {b} cars each leave the station. How many cars is that? Think step by step.",
        "Tom has {a} apples and gives {b} of them to Ann, who had {b} before. How many apples does Ann have now?",
        "What is {a} + {b} * 2? Answer with only the result, nothing else.",
        "A book has {a} pages. Mia reads {b} pages a day. How many pages are left after three days of reading?",
        "Write a Python function that returns {a} if its argument is larger than {b}, else the argument itself.",
        "Name a number between {b} and {a} that can be divided by three, and say why it can.",
        "Translate into French: the house with {a} windows and {b} doors has a red roof and a small garden.",
        "Which is larger, {a}/{b} or {b}/{a}? "
        "Please reason step by step, and put your final answer within \\boxed{{}}.",
    )
    return [forms[i % len(forms)].format(a=draw.randint(12, 99), b=draw.randint(2, 11)) for i in range(1024)]


def build(args: argparse.Namespace, folder: str) -> Any:
    """An ordinary trainer without the probe at start, which this script calls."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    cpu = not torch.cuda.is_available()
    config = QeRLConfig(
        output_dir=folder, seed=args.seed, use_cpu=cpu, bf16=not cpu, model_init_kwargs={"dtype": "bfloat16"},
        base_format=args.arm, aqn=args.noise, aqn_sigma_start=1e-2, rollout_probe="off", use_vllm=True,
        rollout_mismatch_threshold=None, vllm_mode="colocate", vllm_max_model_length=256,
        share_weights=not args.unquantized,
        vllm_engine_kwargs={"enforce_eager": True, "num_gpu_blocks_override": 512} if cpu else {},
        per_device_train_batch_size=4, num_generations=4, max_completion_length=16, max_steps=args.updates or 1,
        learning_rate=1e-4, lr_scheduler_type="constant", report_to="none", save_strategy="no", logging_steps=10,
        disable_tqdm=True, compile_layers=False,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in sums()]

    def letters(completions, **kwargs):
        return [float(sum(map(ord, completion[-1]["content"])) % 7) for completion in completions]

    return QeRLGRPOTrainer(args.model, letters, config, Dataset.from_list(prompts), peft_config=lora)


#: measured in order, up to a size with a clear effect
SIZES = {"adapter": (0.05, 0.1, 0.15, 0.2, 0.3), "noise": (0.05, 0.1, 0.2, 0.4)}


def every_size() -> type:
    """The package's probe, which also measures the sizes after the one that it selects."""
    from qerl_trl.rollout import probe

    @dataclass(frozen=True)
    class EverySize(probe.Probe):
        sizes: list[list[float]] = field(default_factory=list)

        def _compared(self, kind: str, sizes: Any, known: Any, sample: Any, change: Any) -> Any:
            self.sizes.clear()
            for size in SIZES[kind]:
                moved = self._changed(known.completions, change, size)
                exact = self._changed(known.completions, change, size, exact=True)
                effect, rounding = probe.mean_difference(moved, known.scored), probe.mean_difference(moved, exact)
                found = effect, rounding, *self._at(size, sample, change)
                self.sizes.append([size, *(float(f"{number:.4g}") for number in found)])
                if effect > 1.6 * probe.ENOUGH * max(rounding, known.difference) or effect > 2 * probe.CHAOTIC:
                    break
            return self._result(known, kind)

    return EverySize


def row_of(result: Any, probe: Any) -> dict[str, Any]:
    """Row of a result. `sizes`: size, effect, rounding, difference and rounding there; some records add a slope."""
    found = {name: float(f"{getattr(result, name):.4g}") for name in ("base_difference", "rounding")}
    return {"kind": result.kind} | found | ({"sizes": list(probe.sizes)} if probe.sizes else {})


def judged(record: dict[str, Any], floor: float) -> Any:
    """A record as the package's probe result."""
    from qerl_trl.rollout.probe import ProbeResult, large_enough

    clean = record["base_difference"]
    result = ProbeResult(clean, record["rounding"], floor, record["kind"])
    if not record.get("sizes"):
        return replace(result, kind=None)
    sizes = {size: rest for size, *rest in record["sizes"]}
    size, effect = large_enough((size, each[0], max(each[1], clean, floor / 4)) for size, each in sizes.items())
    if size is None:
        return replace(result, effect=effect)
    return replace(result, effect=effect, size=size, difference=sizes[size][2], rounding_there=sizes[size][3])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import common
    import torch

    from qerl_trl.rollout import probe
    from qerl_trl.rollout.engine import update_fingerprint
    from qerl_trl.rollout.vllm.state import RolloutState

    if args.unquantized:
        serve_unquantized()
    os.environ["MASTER_PORT"] = str(common.free_ports(1)[0])  # several engines on one machine
    change: list[Any] = [None]
    load = RolloutState.load_adapter

    def load_adapter(self: Any, adapter: Any, norms: Any, received: str | None = None) -> int:
        changed = change[0](dict(adapter)) if callable(change[0]) else adapter
        return load(self, changed, norms, received or update_fingerprint(adapter, norms))

    RolloutState.load_adapter = load_adapter
    began = time.time()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(args, folder)
        generation = trainer.vllm_generation
        tokenizer, chats = trainer.processing_class, [[{"role": "user", "content": text}] for text in sums()]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        texts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        device, dtype = generation.accelerator.device, getattr(torch, generation.spec.dtype)
        head = {
            "model": args.name or Path(args.model).name, "arm": args.arm, "noise": args.noise, "seed": args.seed,
            "dtype": generation.spec.dtype, "start_s": round(time.time() - began, 1),
        } | common.head("cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip

        def put(draw: Any) -> None:
            generation.sync_noise(draw)
            if change[0] == "noise lost":  # after the engine reported it
                generation.engine.state.set_noise(draw._replace(sigma=0.0))

        def probed(fault: str | None, updates: int, which: int) -> None:
            prompts = probe.prompts_of(texts[8 * which : 8 * which + 24], 1000, 256)
            both = every_size()(generation.engine, generation.model, prompts, device, dtype)
            where = {"fault": fault, "updates": updates, "prompts": which}
            generation.engine.wake()
            if fault != "noise lost":
                change[0] = change_of(fault) if fault not in (None, "unquantized") else None
                t = time.time()
                result, _ = both.adapter(generation.sync_weights)
                records.append(where | row_of(result, both) | {"seconds": round(time.time() - t, 3)})
                if change[0] is not None:
                    change[0] = None
                    generation.sync_weights()
            if args.noise and which < NOISE_SETS and fault in (None, "noise lost"):
                change[0] = fault
                t = time.time()
                result = both.noise(put, trainer.aqn.under)
                records.append(where | row_of(result, both) | {"seconds": round(time.time() - t, 3)})
                change[0] = None
            generation.engine.sleep()
            if args.out:  # for an interrupted command
                args.out.write_text(json.dumps(head | {"finished": False, "records": records}) + "\n")

        def all_of(updates: int) -> None:
            if args.unquantized:
                for which in range(UNQUANTIZED_SETS):
                    probed("unquantized", updates, which)
                return
            for which in range(SETS):
                probed(None, updates, which)
            for which in range(FAULT_SETS):
                for fault in FAULTS[:6]:
                    probed(fault, updates, which)
            for which in range(NOISE_SETS if args.noise else 0):
                probed("noise lost", updates, which)

        all_of(0)
        if args.updates and not args.unquantized:
            trainer.train()
            if args.noise:
                trainer.aqn.attach(generation.model)  # training detaches it at its end
            all_of(trainer.state.global_step)
        log = [{k: v for k, v in row.items() if "mismatch" in k or k == "reward"} for row in trainer.state.log_history]
        seconds = round(time.time() - began, 1)
    return head | {"finished": True, "seconds": seconds, "log": log[-1:], "records": records}


def table(engines: list[dict[str, Any]], of: Any = lambda record: True) -> list[dict[str, Any]]:
    """One row per fault over the records with `of`: number of probes refused by the current rules, and smallest margins
    (2: measured at half of the limit, or at twice the limit).
    """
    import torch

    from qerl_trl.rollout.probe import FLOOR

    rows = []
    for fault in (None, *FAULTS):
        counts, base, changed = {"passed": 0, "undecided": 0, "refused": 0}, [], []
        for engine in engines:
            for record in engine["records"]:
                if record["fault"] != fault or not of(record):
                    continue
                result = judged(record, FLOOR[getattr(torch, engine["dtype"])])
                counts["refused" if result.fault else "undecided" if result.undecided else "passed"] += 1
                base.append(result.base_difference / result.limits[0])
                changed += [result.difference / result.limits[1]] if result.size else []
        if fault is None:
            margins = {"base": 1 / max(base, default=1), "adapter or noise": 1 / max(changed, default=1)}
        elif fault == "unquantized":
            margins = {"base": min(base, default=None), "adapter or noise": None}
        else:
            margins = {"base": None, "adapter or noise": min(changed, default=None)}
        having = sum(any(record["fault"] == fault for record in engine["records"]) for engine in engines)
        rows.append({"fault": fault or "healthy", "engines": having} | counts | {"margins": margins})
    return rows


def markdown() -> str:
    """The table of docs/source/rollout.md."""
    engines = json.loads(RESULT.read_text())
    lines = [
        "| engine | engines | probes | passed | undecided | refused "
        "| smallest margin before training | after updates |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    halves_of = (lambda record: not record["updates"], lambda record: record["updates"])
    for row, *halves in zip(table(engines), *(table(engines, of) for of in halves_of), strict=True):
        counts = [row[name] for name in ("passed", "undecided", "refused")]
        margins = [min(filter(None, half["margins"].values()), default=None) for half in halves]
        shown = [row["fault"], row["engines"], sum(counts), *counts, *(f"{m:.1f}" if m else "-" for m in margins)]
        lines.append(f"| {' | '.join(map(str, shown))} |")
    models = ", ".join(sorted({engine["model"] for engine in engines}))
    devices = ", ".join(sorted({engine["device"] for engine in engines}))
    return (
        "\n".join(lines)
        + f"\n\nEngines in bf16 of {models} on {devices}, NVFP4 and bf16, on other prompts each time, 7B before "
        "training only (`benchmarks/probe_separation.py`). Margin: 2 means half of the limit for a healthy engine, "
        "twice the limit for a faulty one. Undecided engines are logged and not warned about. After the updates these "
        "engines' rounding was measured under Accelerate's autocast and came out too small, and those with lost noise "
        "still held the adapter of the fault before it; both are mended since."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--name", help="model name in the records; default: folder name")
    parser.add_argument("--arm", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--unquantized", action="store_true", help="engine with the weights before quantization")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.table:
        read = [json.loads(path.read_text()) for path in args.table]
        engines = [engine for found in read for engine in (found if isinstance(found, list) else [found])]
        if args.out:
            args.out.write_text(json.dumps(engines, indent=None, separators=(",", ":")) + "\n")
        print(*table(engines), sep="\n")
        return
    found = measure(args)
    print(*table([found]), sep="\n", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # skips the engine's own shutdown, which may hang


if __name__ == "__main__":
    main()
