#!/usr/bin/env python3
"""The embedded model: a tiny Qwen2 trained from scratch on generated problems, deliberately stopped half-way.

    python pretrain.py                 # writes tiny-qwen2/ next to this file; a few minutes on two CPU cores

The data resemble the web pages seen by a real base model: many only state a result, some work the problem out, some are
careless. The model can solve problems line by line when a sample starts that way, but its greedy reply is a bare guess;
this gap is the signal for reinforcement learning. All data are from the training side of `make_problems.bucket`.

The tokenizer is a byte-level BPE with Qwen2's pre-tokenizer (one token per digit), because `AutoTokenizer` builds a
`Qwen2Tokenizer` for each qwen2 folder, regardless of the pre-tokenizer in `tokenizer.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from make_problems import LARGEST, Problem, calculate, problems
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

HERE = Path(__file__).resolve().parent
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
IGNORE = -100


def answer(problem: Problem, style: str, rng: random.Random) -> str:
    """Reply of one document: `bare` states the result, `worked` derives it, `careless` derives a wrong one."""
    if style == "bare":
        return f"#### {problem.result}"
    if style == "worked":
        return problem.answer
    lines, equations = problem.lines(), problem.equations()
    if rng.random() < 0.5:  # stops a step early
        return "\n".join([*lines[:-1], f"#### {equations[-2][3]}"])
    a, op, b, c = equations[-1]  # takes the wrong operation at the end
    options = [(o, v) for o in "+-*/" if o != op and (v := calculate(a, o, b)) is not None]
    if not options:
        return problem.answer
    wrong, value = rng.choice(options)
    return "\n".join([*lines[:-1], lines[-1].replace(f"{a}{op}{b}={c}", f"{a}{wrong}{b}={value}"), f"#### {value}"])


def drill(rng: random.Random, count: int = 10) -> list[tuple[str, str]]:
    """Sums as (prompt, target) pairs, with results from 1 to LARGEST."""
    out: list[tuple[str, str]] = []
    while len(out) < count:
        op = rng.choice("+-*/")
        if op == "+":
            a, b = rng.randint(2, 99), rng.randint(2, 99)
        elif op == "-":
            a, b = rng.randint(2, 120), rng.randint(2, 99)
        elif op == "*":
            a, b = rng.choice([(rng.randint(2, 9), rng.randint(2, 9)), (rng.randint(2, 30), rng.randint(2, 9))])
        else:
            b = rng.randint(2, 9)
            a = b * rng.randint(1, 30)
        value = calculate(a, op, b)
        if value is not None and max(a, value) <= LARGEST:
            out.append((f"{a}{op}{b}=", f"{value}\n"))
    return out


def make_tokenizer(folder: Path, seed: int) -> Qwen2Tokenizer:
    """Train the BPE on generated documents, save it, and check that AutoTokenizer loads the same."""
    rng = random.Random(seed)
    source = problems(rng, from_held_out=False)
    text = [part for _ in range(20000) for p in [next(source)] for part in (p.question, p.answer)]
    qwen2 = Qwen2Tokenizer()._tokenizer  # for normalizer and pre-tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen2.normalizer, qwen2.pre_tokenizer, decoders.ByteLevel()
    special = [PAD, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    bpe.train_from_iterator([*text, "user\nassistant\nsystem\n"], trainer)
    bpe.save(str(folder / "bpe.json"))
    state = json.loads((folder / "bpe.json").read_text())["model"]
    (folder / "bpe.json").unlink()
    merges = [tuple(m) for m in state["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=state["vocab"],
        merges=merges,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[START],
        padding_side="left",
        model_max_length=512,
    )
    tokenizer.chat_template = qwen3_instruct_2507_chat_template  # renders tools, with calls that TRL can parse
    tokenizer.save_pretrained(folder)
    return tokenizer


def check_tokenizer(folder: Path, reference: Qwen2Tokenizer, rng: random.Random) -> None:
    """Check that AutoTokenizer loads the training tokenizer from the folder, and that no text is lost."""
    loaded = AutoTokenizer.from_pretrained(folder)
    source = problems(rng, from_held_out=False)
    texts = [f"{p.question}\n{p.answer}" for p in (next(source) for _ in range(200))]
    texts += ["12+7=19\n#### 19", "naïve café — 東京 🙂 1e-3\t{x}\r\n", f"{START}user\nhi{END}\n"]
    for text in texts:
        ids = loaded(text)["input_ids"]
        assert ids == reference(text)["input_ids"], f"AutoTokenizer reads {text!r} differently"
        assert loaded.decode(ids) == text, f"{text!r} doesn't survive encoding and decoding"
    assert len(loaded("190")["input_ids"]) == 3, "digits must be tokens of their own"
    assert (loaded.eos_token, loaded.pad_token, loaded.padding_side) == (END, PAD, "left")


def documents(
    tokenizer: Qwen2Tokenizer, seed: int, count: int, drills: float, styles: dict[str, float]
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Endless batches of `count` (input ids, labels); labels of questions and operands are IGNORE.

    `drills`: share of sums among the documents. `styles`: mixture of replies in the others.
    """
    rng = random.Random(seed)
    source = problems(rng, from_held_out=False)
    while True:
        kinds = [rng.random() < drills for _ in range(count)]
        parts: list[list[tuple[str, bool]]] = []
        for is_drill in kinds:
            if is_drill:
                parts.append([part for given, result in drill(rng) for part in ((given, False), (result, True))])
            else:
                problem = next(source)
                reply = answer(problem, rng.choices(list(styles), list(styles.values()))[0], rng)
                prompt = f"{START}user\n{problem.question}{END}\n{START}assistant\n"
                parts.append([(prompt, False), (reply + END, True)])
        flat = tokenizer([text for document in parts for text, _ in document])["input_ids"]
        pieces = iter(flat)
        batch = []
        for document in parts:
            ids: list[int] = []
            labels: list[int] = []
            for _, learned in document:
                piece = next(pieces)
                ids += piece
                labels += piece if learned else [IGNORE] * len(piece)
            batch.append((ids, labels))
        yield batch


def micro_batches(batch: list[tuple[list[int], list[int]]], size: int) -> list[list[tuple[list[int], list[int]]]]:
    """The batch in parts of similar length, to save padding."""
    ordered = sorted(batch, key=lambda document: len(document[0]))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def collate(batch: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([x + [pad] * (length - len(x)) for x, _ in batch])
    labels = torch.tensor([y + [IGNORE] * (length - len(y)) for _, y in batch])
    return {"input_ids": ids, "labels": labels}


def learning_rate(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def make_model(tokenizer, vocabulary: int, hidden: int, layers: int, positions: int) -> Qwen2ForCausalLM:
    """A random Qwen2 of this width and depth, for sequences of up to `positions` tokens."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def fit(
    model: Qwen2ForCausalLM,
    source: Iterator[list[tuple[list[int], list[int]]]],
    steps: int,
    lr: float,
    pad: int,
) -> None:
    """Train `model` on `steps` batches of `source`: Muon for the matrices, AdamW for the rest."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimizers = [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    start, running = time.monotonic(), None
    for step, batch in zip(range(steps), source, strict=False):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, steps, lr)
        learned = sum(label != IGNORE for _, labels in batch for label in labels)
        loss = 0.0
        for part in micro_batches(batch, 16):
            part_loss = model(**collate(part, pad), use_cache=False, num_items_in_batch=learned).loss
            part_loss.backward()
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        running = loss if running is None else 0.98 * running + 0.02 * loss
        if step % 100 == 99 or step == 9:
            print(f"step {step + 1} of {steps}  loss {running:.4f}  {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "tiny-qwen2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--drills", type=float, default=0.3, help="share of documents that are plain sums")
    parser.add_argument("--bare", type=float, default=0.55, help="share of the problems that only state the result")
    parser.add_argument("--careless", type=float, default=0.15, help="share of the problems worked out with a slip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(args.out, args.seed)
    check_tokenizer(args.out, tokenizer, random.Random(args.seed))

    model = make_model(tokenizer, VOCABULARY, args.hidden, args.layers, 512)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(tokenizer)} tokens")
    styles = {"bare": args.bare, "careless": args.careless, "worked": 1 - args.bare - args.careless}
    source = documents(tokenizer, args.seed, args.batch, args.drills, styles)
    start = time.monotonic()
    fit(model, source, args.steps, args.lr, tokenizer.pad_token_id)
    save(model, tokenizer, args.out)
    print(f"wrote {args.out} after {time.monotonic() - start:.0f} s")


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Save bf16 weights, tokenizer and generation defaults, without changing the model in training."""
    copy = Qwen2ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = tokenizer.eos_token_id
    copy.generation_config.pad_token_id = tokenizer.pad_token_id
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
