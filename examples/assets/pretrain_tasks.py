#!/usr/bin/env python3
"""The second and third embedded models: tiny, for three small tasks (two with tools), and stopped half-way as well.

    python pretrain_tasks.py      # tiny-tasks/, from scratch; minutes on two idle cores
    GAMES="--steps 140 --lr 1.5e-3 --drills 0 --kinds 0 0 1 --threads 1"
    python pretrain_tasks.py --start tiny-tasks --out tiny-game $GAMES    # the third: the second after more games

The data are conversations with other words, prices and games than the examples (`letters.py`, `tool_call.py`,
`grid_game.py`): some right, some careless, some guessed, so that the model knows the form of each task and can still
learn. Words are in capitals, which the BPE never merges: one token per letter. The chat template `tools.jinja` is short
for the small model; `response_template` in tokenizer_config.json parses its tool calls for TRL.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from pretrain import END, HERE, IGNORE, PAD, START, fit, make_model, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import get_json_schema

sys.path.insert(0, str(HERE.parent))
from grid_game import STEPS, Treasure, games
from letters import word, words
from tool_call import PRICES, price, question

CALL = ("<tool_call>", "</tool_call>")
VOCABULARY = 512
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": CALL[0],
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
TOOLS = {"price": get_json_schema(price), "move": get_json_schema(Treasure().move)}
Place = tuple[int, int]
HELD_OUT_WORDS = {row["prompt"].split()[-1] for row in words()["test"]}
GAMES = games()["train"]  # without the held-out games


def new_word(rng: random.Random, low: int, high: int) -> str:
    """A word that is not held out in any example and has no price."""
    while (found := word(rng, rng.randint(low, high))) in HELD_OUT_WORDS or found in PRICES:
        pass
    return found


def letters(rng: random.Random) -> tuple[list[dict], list]:
    """Right, careless (two letters swapped, or one lost), or copied."""
    asked = new_word(rng, 3, 7)
    reply, style = asked[::-1], rng.choices(["right", "careless", "copied"], [0.3, 0.25, 0.45])[0]
    if style == "copied":
        reply = asked
    elif style == "careless":
        at = rng.randrange(len(reply) - 1)
        reply = reply[:at] + (reply[at + 1] + reply[at] if rng.random() < 0.5 else reply[at]) + reply[at + 2 :]
    return [{"role": "user", "content": f"Backwards: {asked}"}, {"role": "assistant", "content": reply}], []


def drill(rng: random.Random) -> list[tuple[str, bool]]:
    """Correct words and sums, for the skills without the tasks. Only the results are learned."""
    if rng.random() < 0.7:
        asked = [new_word(rng, 2, 8) for _ in range(5)]
        pairs = [(f"{each}<", each[::-1]) for each in asked]
    else:
        numbers = [(rng.randint(2, 50), rng.randint(2, 50)) for _ in range(6)]
        pairs = [(f"{a}+{b}=", str(a + b)) for a, b in numbers]
    return [part for given, result in pairs for part in ((given, False), (f"{result}\n", True))]


def call(name: str, **arguments) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def prices(rng: random.Random) -> tuple[list[dict], list]:
    """Looked up, guessed, or only one of two looked up."""
    items = [new_word(rng, 3, 6) for _ in range(rng.choice([1, 2, 2]))]
    costs = {item: rng.randint(2, 50) for item in items}
    messages = [{"role": "user", "content": question(items)}]
    style = rng.choices(["asked", "guessed", "careless"], [0.3, 0.5, 0.2])[0]
    total = sum(costs.values())
    if style == "guessed":
        return [*messages, {"role": "assistant", "content": f"#### {rng.randint(2, 90)}"}], [TOOLS["price"]]
    asked = items if style == "asked" else items[: len(items) - 1]
    for item in asked:
        messages += [call("price", item=item), {"role": "tool", "name": "price", "content": str(costs[item])}]
    if style == "careless":
        total = sum(costs[item] for item in asked) if asked else rng.randint(2, 50)
    shown = [str(costs[item]) for item in asked]
    work = f"{'+'.join(shown)}={total}\n" if len(shown) > 1 else ""
    return [*messages, {"role": "assistant", "content": f"{work}#### {total}"}], [TOOLS["price"]]


def path(treasure: Place, pit: Place | None) -> list[str]:
    """Directions of one shortest walk from (0, 0) to `treasure` around `pit`; deterministic."""
    before: dict[Place, tuple[Place, str] | None] = {(0, 0): None}
    queue = deque([(0, 0)])
    while treasure not in before:
        x, y = place = queue.popleft()
        for direction, (dx, dy) in STEPS.items():
            there = (x + dx, y + dy)
            if there not in before and there != pit:
                before[there] = (place, direction)
                queue.append(there)
    steps: list[str] = []
    while step := before[treasure]:
        treasure, direction = step
        steps.insert(0, direction)
    return steps


STYLES = {"careful": 0.3, "heedless": 0.15, "given up": 0.15, "wandering": 0.4}


def game(rng: random.Random) -> tuple[list[dict], list]:
    """Around the pit, heedless of it, given up half-way, or wandering."""
    row = rng.choice(GAMES)
    style = rng.choices(list(STYLES), list(STYLES.values()))[0]
    world = Treasure()
    messages = [{"role": "user", "content": row["prompt"] + world.reset(**row)}]
    turns = rng.randint(1, 5) if style in ("given up", "wandering") else -1  # else to the end
    while not world.over and turns:
        if style == "wandering":
            direction = rng.choice(list(STEPS))
        else:
            direction = path(world.treasure, None if style == "heedless" else world.pit)[0]
        answer = world.move(direction)
        messages += [call("move", direction=direction), {"role": "tool", "name": "move", "content": answer}]
        turns -= 1
    return [*messages, {"role": "assistant", "content": "done"}], [TOOLS["move"]]


KINDS = (letters, prices, game)


def make_tokenizer(folder: Path, seed: int) -> Qwen2Tokenizer:
    rng = random.Random(seed)
    qwen2 = Qwen2Tokenizer()._tokenizer  # for normalizer and pre-tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen2.normalizer, qwen2.pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    template = (HERE / "tools.jinja").read_text().rstrip("\n")
    plain = Qwen2Tokenizer(eos_token=END, pad_token=PAD, unk_token=PAD)
    texts = []
    for _ in range(3000):
        messages, tools = rng.choice(KINDS)(rng)
        text = plain.apply_chat_template(messages, tools=tools or None, chat_template=template, tokenize=False)
        texts.append(re.sub(r"<.*?>|[A-Z]{2,}|#+", "\n", text))  # no merges in special tokens and words
    bpe.train_from_iterator(texts, trainer)
    state = bpe.model
    (file,) = [name for name in state.save(str(folder)) if name.endswith("merges.txt")]
    merges = [tuple(line.split()) for line in Path(file).read_text().splitlines() if not line.startswith("#")]
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    tokenizer = Qwen2Tokenizer(
        vocab=bpe.get_vocab(),
        merges=merges,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[START],
        padding_side="left",
        model_max_length=1024,
    )
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in CALL])
    tokenizer.chat_template, tokenizer.response_template = template, RESPONSES
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    for messages, tools in (each(rng) for each in KINDS * 50):
        text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"] and loaded.decode(ids) == text, text
    assert len(loaded(" PLANETS")["input_ids"]) == 8, "each capital is a token of its own, the space another"
    return tokenizer


def conversation(tokenizer: Qwen2Tokenizer, rng: random.Random, shares: list[float]) -> list[tuple[str, bool]]:
    """(text, learned) parts: the assistant's turns are learned. `shares` are those of `KINDS`."""
    messages, tools = rng.choices(KINDS, shares)[0](rng)
    header = f"{START}assistant\n"
    first, *turns = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False).split(header)
    parts = [(first + header, False)]
    for number, turn in enumerate(turns, 1):
        reply, _, rest = turn.partition(END)
        parts += [(reply + END, True), (rest + (header if number < len(turns) else ""), False)]
    return parts


def documents(
    tokenizer: Qwen2Tokenizer, seed: int, count: int, drills: float, shares: list[float]
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Endless batches of `count` (input ids, labels), `drills` of them drills; unlearned labels are IGNORE."""
    rng = random.Random(seed)
    while True:
        parts = [drill(rng) if rng.random() < drills else conversation(tokenizer, rng, shares) for _ in range(count)]
        ids = iter(tokenizer([text for document in parts for text, _ in document])["input_ids"])
        batch = []
        for document in parts:
            tokens: list[int] = []
            labels: list[int] = []
            for _, learned in document:
                piece = next(ids)
                tokens += piece
                labels += piece if learned else [IGNORE] * len(piece)
            batch.append((tokens, labels))
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "tiny-tasks")
    parser.add_argument("--start", type=Path, help="continue from this model, with its tokenizer")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--drills", type=float, default=0.35, help="share of documents that are drills")
    parser.add_argument(
        "--kinds", type=float, nargs=3, default=[0.3, 0.2, 0.2], help="words : prices : games in the others"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start:
        tokenizer = AutoTokenizer.from_pretrained(args.start)
        for where in ("is_local", "local_files_only"):  # transformers would save the local source
            tokenizer.init_kwargs.pop(where, None)
        model = Qwen2ForCausalLM.from_pretrained(args.start, dtype=torch.float32).train()
    else:
        tokenizer = make_tokenizer(args.out, args.seed)
        model = make_model(tokenizer, VOCABULARY, args.hidden, args.layers, 1024)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")
    start = time.monotonic()
    source = documents(tokenizer, args.seed, args.batch, args.drills, args.kinds)
    fit(model, source, args.steps, args.lr, tokenizer.pad_token_id)
    save(model, tokenizer, args.out)
    print(f"wrote {args.out} after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
