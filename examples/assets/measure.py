#!/usr/bin/env python3
"""Held-out accuracy of a model folder, greedy and by sampling (pass@k), as JSON.

    python measure.py                              # tiny-qwen2/ on test.jsonl, quantized to NVFP4
    python measure.py FOLDER --base-format bf16    # without quantization
    python measure.py --adapter runs/embedded      # with a LoRA adapter

Replies are graded as in training, by the answer after `####`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from qerl_trl import NVFP4Config, load_adapter
from qerl_trl.tasks.data import with_prompts
from qerl_trl.tasks.evaluation import Accuracy, grade, solve
from qerl_trl.tasks.grading import final_answer

HERE = Path(__file__).resolve().parent
MAX_NEW_TOKENS, BATCH = 64, 512


def shows_work(reply: str) -> bool:
    return "=" in reply


def pass_at(k: int, right: int, samples: int) -> float:
    """Unbiased estimate of the probability that one of k samples is right (Chen et al. 2021)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def greedy_report(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Dataset) -> dict:
    replies = solve(model, tokenizer, problems, MAX_NEW_TOKENS, BATCH, progress=False)
    right = Accuracy(sum(grade(replies, problems)), len(problems))
    return {
        **right.as_dict(),
        "shows_work": sum(map(shows_work, replies)) / len(replies),
        "states_an_answer": sum(final_answer(r) is not None for r in replies) / len(replies),
    }


def sampled_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Dataset, samples: int, seed: int
) -> dict:
    torch.manual_seed(seed)
    repeated = problems.select([i for i in range(len(problems)) for _ in range(samples)])
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    replies = solve(model, tokenizer, repeated, MAX_NEW_TOKENS, BATCH, settings, progress=False)
    right = grade(replies, repeated)
    counts = [sum(right[i : i + samples]) for i in range(0, len(right), samples)]
    worked = [ok for ok, reply in zip(right, replies, strict=True) if shows_work(reply)]
    return {
        "problems": len(problems),
        "samples": samples,
        "shows_work": len(worked) / len(replies),
        "right_when_work_is_shown": sum(worked) / max(1, len(worked)),
        **{
            f"pass@{k}": sum(pass_at(k, count, samples) for count in counts) / len(counts)
            for k in (1, 2, 4, 8, 16)
            if k <= samples
        },
    }


def load(folder: str, base_format: str, adapter: str | None) -> PreTrainedModel:
    quantization = NVFP4Config(compute_dtype="float32") if base_format == "nvfp4" else None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=quantization)
    if adapter is not None:
        model = load_adapter(model, adapter)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(HERE / "tiny-qwen2"))
    parser.add_argument("--base-format", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--adapter")
    parser.add_argument("--problems", type=Path, default=HERE / "test.jsonl")
    parser.add_argument("--sampled", type=int, default=250, help="problems to sample for pass@k")
    parser.add_argument("--samples", type=int, default=16, help="samples per problem")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load(args.model, args.base_format, args.adapter)
    problems = with_prompts(load_dataset("json", data_files=str(args.problems), split="train"))
    sampled = problems.select(range(min(args.sampled, len(problems))))
    report = {
        "base_format": args.base_format,
        "greedy": greedy_report(model, tokenizer, problems),
        "sampled": sampled_report(model, tokenizer, sampled, args.samples, args.seed),
    }
    print(json.dumps(json.loads(json.dumps(report), parse_float=lambda x: round(float(x), 4)), indent=1))


if __name__ == "__main__":
    main()
