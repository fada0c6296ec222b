#!/usr/bin/env python3
"""Scale rules and NF4 on pretrained models: KL from the dense model, perplexity, entropy, and greedy accuracy.

    python benchmarks/rules.py TEXT.yaml --model NAME FOLDER SHA256 NEW_TOKENS TASK.yaml ... [--model ...]

A task's file has `dataset_name`, a folder next to it with test.jsonl, and perhaps `system_prompt`. Rounded weights are
in dense layers, so all rules generate equally fast. KL is measured in float32, on answers that the dense model samples
to TEXT at temperature 1; accuracy in bf16, by the last number of an answer. SHA256: of the GGUF behind FOLDER.
"""

import argparse
import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import common
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qerl_trl.nvfp4.config import NVFP4Config
from qerl_trl.nvfp4.format import SCALE_RULES, dequantize, quantize
from qerl_trl.publish.distance import figures

OUT, DEVICE = common.RESULTS / "rules.json", "cuda" if torch.cuda.is_available() else "cpu"
RULES = ["bf16", *SCALE_RULES, *["nf4"] * bool(importlib.util.find_spec("bitsandbytes"))]


def rounded(weight: torch.Tensor, rule: str) -> torch.Tensor:
    if rule == "nf4":
        import bitsandbytes.functional as bnb

        return bnb.dequantize_4bit(*bnb.quantize_4bit(weight, quant_type="nf4"))
    return weight if rule == "bf16" else dequantize(*quantize(weight, rule), weight.dtype)


def problems(task: str, count: int) -> list[tuple[list[dict[str, str]], float]]:
    """Messages and answers of a task."""
    known = yaml.safe_load(Path(task).read_text())
    lines = (Path(task).parent / known["dataset_name"] / "test.jsonl").read_text().splitlines()[:count]
    system = [{"role": "system", "content": known["system_prompt"]}] if "system_prompt" in known else []
    rows = [json.loads(line) for line in lines]
    return [([*system, {"role": "user", "content": row["question"]}], float(row["answer"])) for row in rows]


def answered(model: Any, tokenizer: Any, asked: list, **how: Any) -> list[tuple[torch.Tensor, int]]:
    """Token ids (1, T) of each prompt with the model's answer, and the prompt's length."""
    texts = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(DEVICE)
    width, ends = given["input_ids"].shape[1], torch.tensor(model.generation_config.eos_token_id, device=DEVICE)
    found = []
    for ids, mask in zip(model.generate(**given, **how), given["attention_mask"], strict=True):
        ended = torch.isin(ids[width:], ends).nonzero().flatten().tolist()
        answer = ids[width:][: ended[0] + 1 if ended else None]
        found.append((torch.cat([ids[:width][mask.bool()], answer])[None].cpu(), int(mask.sum())))
    return found


def measure(options: argparse.Namespace, folder: str, new: int, tasks: list[str], model_row: dict[str, Any]) -> Any:
    """Fill the row of a model; yields after each rule."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    load = AutoModelForCausalLM.from_pretrained
    source, model = (load(folder, dtype=dtype).to(DEVICE).eval() for dtype in (torch.float32, torch.bfloat16))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ends, pad = model.generation_config.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)  # without the model's penalties
    exact, names = copy.deepcopy(source), NVFP4Config().linears_to_quantize(source)
    torch.manual_seed(0)
    asked = [messages for messages, _ in problems(options.text, options.sampled)]
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": options.longest}
    texts, prompts = zip(*answered(model, tokenizer, asked, **how), strict=True)
    sets = {Path(task).stem: problems(task, options.limit) for task in tasks}
    model_row |= {"problems": {task: len(rows) for task, rows in sets.items()}, "rules": {}}
    asked = [messages for rows in sets.values() for messages, _ in rows]
    for rule in RULES:
        for name in names:
            weight = rounded(source.get_submodule(name).weight.detach().bfloat16(), rule)
            for each in (model, exact):
                each.get_submodule(name).weight.data.copy_(weight)
        row: dict[str, float] = figures(source, {rule: exact}, texts, prompts)[rule]
        rows = iter(answered(model, tokenizer, asked, do_sample=False, max_new_tokens=new))
        for task, known in sets.items():
            own = [tokenizer.decode(ids[0, start:]) for ids, start in (next(rows) for _ in known)]
            last = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))[-1:] for text in own]
            row[task] = sum([*map(float, n)] == [truth] for n, (_, truth) in zip(last, known, strict=True)) / len(known)
        model_row["rules"][rule] = row
        yield rule, row


def markdown() -> str:
    """The table of docs/source/format.md."""
    from speed_tables import measured_by, table

    record, rows = json.loads(OUT.read_text()), []
    for model in record["models"]:
        for rule, row in model["rules"].items():
            measured = f"{row['kl_nats_per_token']:.4f}", f"{row['perplexity']:.3f}", f"{row['entropy']:.3f}"
            tasks = ", ".join(f"{task} {100 * row[task]:.1f} of {n}" for task, n in model["problems"].items())
            rows.append([model["model"], rule, *measured, tasks])
    tokens = ", ".join(f"{model['rules']['bf16']['tokens']:,.0f}" for model in record["models"])
    return (
        table(["model", "weights", "KL from bf16", "perplexity", "entropy", "greedy accuracy, %"], rows, left=2)
        + f"\n\nOn {tokens} tokens of answers to {record['text']} problems, sampled from bf16 at temperature 1. "
        "All weights were dequantized from 4-bit GGUFs (SHA-256 in the file). "
        f"{measured_by(OUT, record['device'], [record['commit'] or 'unknown'], torch=record['versions']['torch'])}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--model", nargs="+", action="append", required=True)
    parser.add_argument("--sampled", type=int, default=100, help="Sampled answers.")
    parser.add_argument("--longest", type=int, default=320, help="Tokens of a sampled answer.")
    parser.add_argument("--limit", type=int, default=500, help="Problems of a task.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    record: dict[str, Any] = {**common.head(DEVICE), "text": Path(options.text).stem, "models": []}
    for name, folder, sha256, new, *tasks in options.model:
        record["models"].append({"model": name, "gguf_sha256": sha256, "new_tokens": int(new)})
        for rule, row in measure(options, folder, int(new), tasks, record["models"][-1]):
            print(name, rule, row, flush=True)
            common.save(record, options.out)


if __name__ == "__main__":
    main()
