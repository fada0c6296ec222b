#!/usr/bin/env python3
"""Held-out accuracy of a model folder, greedy and by sampling, as JSON.

    python measure.py                              # tiny-qwen2/ on test.jsonl
    python measure.py FOLDER --adapter ADAPTER     # with a LoRA on top

Correct means: the last `#### n` line of the reply carries the number of the reference's `#### n` line.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
FINAL = re.compile(r"^#### (-?[\d,]+)\s*$", re.MULTILINE)


def final_number(text: str) -> str | None:
    """The number after the last `####`, commas removed; None if there is none."""
    found = FINAL.findall(text)
    return found[-1].replace(",", "") if found else None


def interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = right / total
    centre, half = share + z * z / (2 * total), z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (centre - half) / (1 + z * z / total), (centre + half) / (1 + z * z / total)


@torch.no_grad()
def replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], samples: int, **options
) -> list[list[str]]:
    """`samples` replies to every question; `options` go to `generate`."""
    out: list[list[str]] = []
    step = max(1, 500 // samples)
    for i in range(0, len(questions), step):
        chats = [[{"role": "user", "content": q}] for q in questions[i : i + step]]
        text = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        done = model.generate(**inputs, max_new_tokens=64, num_return_sequences=samples, **options)
        decoded = tokenizer.batch_decode(done[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        out += [decoded[j : j + samples] for j in range(0, len(decoded), samples)]
    return out


def pass_at(k: int, right: int, samples: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (Chen et al. 2021)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict], sampled: int, samples: int
) -> dict:
    questions, truths = [r["question"] for r in rows], [final_number(r["answer"]) for r in rows]
    greedy = [r[0] for r in replies(model, tokenizer, questions, 1, do_sample=False)]
    right = sum(final_number(g) == t for g, t in zip(greedy, truths, strict=True))
    low, high = interval(right, len(rows))
    report = {
        "problems": len(rows),
        "greedy": round(right / len(rows), 4),
        "greedy_95": [round(low, 4), round(high, 4)],
        "greedy_shows_work": round(sum("=" in g for g in greedy) / len(rows), 4),
        "greedy_well_formed": round(sum(final_number(g) is not None for g in greedy) / len(rows), 4),
    }
    if samples:
        drawn = replies(
            model, tokenizer, questions[:sampled], samples, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        counts = [sum(final_number(x) == t for x in xs) for xs, t in zip(drawn, truths, strict=False)]
        worked = [(final_number(x) == t) for xs, t in zip(drawn, truths, strict=False) for x in xs if "=" in x]
        report["sampled_problems"] = len(counts)
        report["sample_shows_work"] = round(len(worked) / (len(counts) * samples), 4)
        report["right_when_work_is_shown"] = round(sum(worked) / max(1, len(worked)), 4)
        for k in (1, 4, 8, 16):
            if k <= samples:
                report[f"pass@{k}"] = round(sum(pass_at(k, c, samples) for c in counts) / len(counts), 4)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(HERE / "tiny-qwen2"))
    parser.add_argument("--adapter")
    parser.add_argument("--problems", type=Path, default=HERE / "test.jsonl")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--sampled", type=int, default=250, help="problems to sample for pass@k")
    parser.add_argument("--samples", type=int, default=16, help="samples a problem; 0 measures greedy replies only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, args.adapter).eval()
    rows = [json.loads(line) for line in args.problems.read_text(encoding="utf-8").splitlines()][: args.count]
    print(json.dumps(measure(model, tokenizer, rows, args.sampled, args.samples), indent=1))


if __name__ == "__main__":
    main()
