#!/usr/bin/env python3
"""Scale rules, W4A8 and NF4 on pretrained models: KL from the dense model, perplexity, entropy, and greedy accuracy.

    python benchmarks/rules.py TEXT.yaml --model NAME FOLDER SHA256 NEW_TOKENS TASK.yaml ... [--model ...]

A task's file has `dataset_name`, a folder next to it with test.jsonl, and perhaps `system_prompt`. Rounded weights are
in dense layers. KL is measured in float32, on answers that the dense model samples to TEXT at temperature 1, and on
the plain text of a file (`plain`); accuracy in bf16, by the last number of an answer. SHA256: of the GGUF behind
FOLDER. Models run side by side, one process each.

`RULE w4a8`: the same codes and scales by compute="w4a8" (weights rounded once to e4m3, activations per token), emulated
in plain torch; `own_kl` is from the same rule in W4A16. `exact`: squared error among neighbouring block scales with the
mantissas 1, 1.25 and 1.5, for which W4A8 does not round a weight.
"""

import argparse
import copy
import functools
import importlib.util
import json
import math
import multiprocessing
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qerl_trl.nvfp4 import format as nvfp4
from qerl_trl.nvfp4.config import NVFP4Config
from qerl_trl.nvfp4.format import SCALE_RULES, NVFP4Tensor, dequantize, quantize

OUT, DEVICE = common.RESULTS / "rules.json", "cuda" if torch.cuda.is_available() else "cpu"
NVFP4 = [*SCALE_RULES, "exact"]
RULES = ["bf16", *NVFP4, *["nf4"] * bool(importlib.util.find_spec("bitsandbytes"))]
#: scale bytes of rule "exact": mantissas 1, 1.25, 1.5, and at least 2^-3, so that 0.5 * scale / 8 is no smaller than a
#: step of e4m3
EXACT = [byte for byte in range(0x20, 0x7E) if byte % 8 in (0, 2, 4)]


def packed(weight: torch.Tensor, rule: str) -> NVFP4Tensor:
    if rule in SCALE_RULES:
        return quantize(weight, rule)
    plain = quantize(weight)
    allowed = torch.tensor(EXACT, device=weight.device)
    nearest = torch.bucketize(plain.block_scale.long(), allowed)
    blocks = weight.float().unflatten(-1, (-1, 16))
    candidates = ((nearest + offset).clamp(0, len(EXACT) - 1) for offset in range(-4, 4))
    scale = nvfp4._best_scale(blocks, plain.global_scale, (allowed[index].to(torch.uint8) for index in candidates))
    codes = nvfp4.encode_e2m1(blocks / (nvfp4.decode_scale(scale) / plain.global_scale)[..., None])
    return NVFP4Tensor(nvfp4.pack(codes.flatten(-2)), scale, plain.global_scale)


class W4A8Linear(torch.nn.Module):
    """compute="w4a8" for inputs of type `dtype`. e4m3 values are exact in bf16 and float32; sums are float32, and
    bf16 rounds them twice, before and after the scales."""

    def __init__(self, layer: torch.nn.Linear, weight: NVFP4Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        eight = torch.full_like(weight.global_scale, 8.0)
        w8 = dequantize(weight.packed, weight.block_scale, eight, torch.float32).to(torch.float8_e4m3fn)
        self.w8, self.row, self.bias = w8.to(dtype), eight / weight.global_scale, layer.bias
        self.most = torch.full_like(eight, 448.0)  # CUDA multiplies by the reciprocal of a number, rounded differently

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        amax = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32).clamp(min=2.0**-100)
        x8 = (x * (self.most / amax)).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)  # a float32 product
        y = torch.nn.functional.linear(x8, self.w8) * (self.row * (amax / self.most))
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def rounded(weight: torch.Tensor, rule: str) -> torch.Tensor:
    if rule == "nf4":
        import bitsandbytes.functional as bnb

        return bnb.dequantize_4bit(*bnb.quantize_4bit(weight, quant_type="nf4"))
    return dequantize(*packed(weight, rule), weight.dtype) if rule in NVFP4 else weight


def problems(task: str, count: int) -> list[tuple[list[dict[str, str]], float]]:
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


@torch.no_grad()
def compared(models: dict[str, Any], batches: Iterable[torch.Tensor], prompts: Iterable[int]) -> dict[str, Any]:
    """KL from the first model and from the one before (`own`), perplexity and entropy of all others, in one pass over
    token ids (1, T); `prompts`: how many of a batch's first tokens do not count."""
    sums = {name: torch.zeros(5, dtype=torch.float64) for name in models}
    for batch, start in zip(batches, prompts, strict=True):
        ids, logs = batch.to(DEVICE), list[torch.Tensor]()
        for name, model in models.items():
            log_q = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
            logs.append(log_q)
            kl, own = (log_p.exp() * (log_p - log_q) for log_p in (logs[0], logs[-2:][0]))
            said = log_q.gather(-1, ids[0, start:, None])
            parts = kl, own, -said, -log_q.exp() * log_q, torch.ones_like(said)
            sums[name] += torch.stack([part.sum(dtype=torch.float64) for part in parts]).cpu()
    names = "kl_nats_per_token", "own_kl", "negative_log_likelihood", "entropy"
    found = {name: dict(zip(names, (total[:-1] / total[-1]).tolist(), strict=True)) for name, total in sums.items()}
    for name, row in found.items():
        row |= {"perplexity": math.exp(row["negative_log_likelihood"]), "tokens": sums[name][-1].item()}
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
    in_fp8, dense = ((copy.deepcopy(each, {id(p): p for p in each.parameters()})) for each in (exact, model))
    torch.manual_seed(0)
    asked = [messages for messages, _ in problems(options.text, options.sampled)]
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": options.longest}
    texts, prompts = zip(*answered(model, tokenizer, asked, **how), strict=True)
    plain = tokenizer(options.plain.read_text(), return_tensors="pt").input_ids[:, : 16 * 512].split(512, 1)
    sets = {Path(task).stem: problems(task, options.limit) for task in tasks}
    model_row |= {"problems": {task: len(rows) for task, rows in sets.items()}, "rules": {}}
    asked = [messages for rows in sets.values() for messages, _ in rows]
    for rule in RULES:
        if time.time() > options.until:
            return
        for name in names:
            weight = source.get_submodule(name).weight.detach().bfloat16()
            for each in (dense, exact):
                each.get_submodule(name).weight.data.copy_(rounded(weight, rule))
            for each, dtype in ((model, torch.bfloat16), (in_fp8, torch.float32)) if rule in NVFP4 else ():
                each.set_submodule(name, W4A8Linear(dense.get_submodule(name), packed(weight, rule), dtype))
        models = {"source": source, rule: exact} | ({f"{rule} w4a8": in_fp8} if rule in NVFP4 else {})
        found = compared(models, texts, prompts)
        on_plain = compared(models, plain, [1] * len(plain))
        for way in list(models)[1:]:
            policy = model if way.endswith("w4a8") else dense
            row = found[way] | {"plain": on_plain[way]}
            rows = iter(answered(policy, tokenizer, asked, do_sample=False, max_new_tokens=new) if asked else ())
            for task, known in sets.items():
                own = [tokenizer.decode(ids[0, start:]) for ids, start in (next(rows) for _ in known)]
                last = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))[-1:] for text in own]
                right = sum([*map(float, n)] == [truth] for n, (_, truth) in zip(last, known, strict=True))
                row[task] = right / len(known)
            model_row["rules"][way] = row
            yield way, row


def of_model(options: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """The row of a model; `failed`: the reason why it has not all rules."""
    name, folder, sha256, new, *tasks = given
    model_row: dict[str, Any] = {"model": name, "gguf_sha256": sha256, "new_tokens": int(new)}
    try:
        for rule, row in measure(options, folder, int(new), tasks, model_row):
            print(name, rule, row, flush=True)
    except RuntimeError as error:  # also torch.OutOfMemoryError
        model_row["failed"] = str(error)[:300]
    return model_row


def markdown() -> str:
    from speed_tables import measured_by, table

    record, rows = json.loads(OUT.read_text()), []
    for model in record["models"]:
        for rule, row in model["rules"].items():
            own = f" ({row['own_kl']:.4f} from W4A16)" if rule.endswith("w4a8") else ""
            measured = f"{row['kl_nats_per_token']:.4f}{own}", f"{row['perplexity']:.3f}", f"{row['entropy']:.3f}"
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
    parser.add_argument("--plain", type=Path, default=common.ROOT / "README.md", help="Plain text.")
    parser.add_argument("--seconds", type=float, default=165, help="Seconds after which no further rule starts.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.until = time.time() + options.seconds
    record: dict[str, Any] = {**common.head(DEVICE), "text": Path(options.text).stem, "plain": options.plain.name}
    record["models"] = []
    with multiprocessing.get_context("spawn").Pool(len(options.model)) as pool:
        for model_row in pool.imap(functools.partial(of_model, options), options.model):
            record["models"].append(model_row)
            common.save(record, options.out)


if __name__ == "__main__":
    main()
