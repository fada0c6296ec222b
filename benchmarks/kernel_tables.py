"""The tables of tables.py about the kernels: products of a decoder layer relative to cuBLAS bf16."""

import json
from typing import Any

import rollout
from rollout_tables import OTHERS, ROLLOUT
from speed_tables import ROOT, measured_by

KERNELS = ROOT / "kernels/benchmarks/results/h200.json"
EVERY_SIZE = ROOT / "kernels/benchmarks/results/every_size_h200.json"
#: layers by what ships; a model stands in it whole or not at all
LAYERS = ROOT / "kernels/benchmarks/results/layers_h200.json"
#: the same on a card on which nothing was fitted
LAYERS_H100 = ROOT / "kernels/benchmarks/results/layers_h100.json"
FACTORS = ROOT / "kernels/torch-ext/qerl_nvfp4/configs/cost_model.json"


def kernels() -> str:
    """The four products of a decoder layer: microseconds, and ratios of cuBLAS bf16's time to ours and to Marlin's."""
    record = json.loads(KERNELS.read_text())
    sums = {(entry["model"], entry["M"]): entry for entry in record["sums"]}
    #: columns, in microseconds; the adapter first, which is what a rollout runs
    columns = {"ours + LoRA": "ours_lora_us", "ours": "ours_us", "bf16": "bf16_us", "Marlin": "marlin_us"}
    models = ("7B", "32B")
    heads = [f"{model}: {column}" if column == "ours + LoRA" else column for model in models for column in columns]
    times = [f"| us, at tokens | {' | '.join(heads)} |", "|---:|" + "---:|" * len(heads)]
    heads = [column for column in heads if column != "bf16"]
    ratios = [f"| times bf16's speed, at tokens | {' | '.join(heads)} |", "|---:|" + "---:|" * len(heads)]
    for tokens in sorted({tokens for _, tokens in sums}):
        entries = [sums[model, tokens] for model in models]
        cells = [f"{entry[key]:.0f}" for entry in entries for key in columns.values()]
        times.append(f"| {tokens} | {' | '.join(cells)} |")
        cells = [
            f"{entry['bf16_us'] / entry[key]:.2f}" for entry in entries for key in columns.values() if key != "bf16_us"
        ]
        ratios.append(f"| {tokens} | {' | '.join(cells)} |")
    rows = [*times, "", *ratios]
    versions = {name: record[name] for name in ("torch", "triton")}
    return (
        "\n".join([*rows, "", *floor_share(sums)])
        + "\n\nSummed over the four matrices of a Qwen2.5 decoder layer; bf16 is cuBLAS's, and a ratio above 1 is faster than it; "
        f"rank-{record['lora_rank']} adapter inside the kernel, against bf16 without one. The floor is what memory and matrix units need at the least. "
        f"{measured_by(KERNELS, record['device'], [record['commit']], **versions)}.{others_in_sums(record)}"
        f"\n\n{above_the_floor(record)}"
    )


def _ships(N: int, K: int, M: int, rows: int) -> dict[str, Any] | None:
    """What ships for an H200; None: what no table and no model knows. `rows` of the stacked A's, 0: no adapter."""
    from qerl_nvfp4 import cost, select

    tuned = select.load_table("NVIDIA H200", SMS).get((N, K, select.bucket_of(M)))
    if M <= 16:
        return tuned
    found = cost.fastest_timed(N, K, M, SMS, rows)
    return found[0] if found else select.by_price(N, K, M, SMS, rows, tuned) or tuned


def others_in_sums(record: dict[str, Any]) -> str:
    """In how many of the sums some product has another kernel now than when it was timed."""
    from qerl_nvfp4 import select, tune

    def launched(config: dict[str, Any], adapter: bool) -> dict[str, Any]:
        return {k: v for k, v in (select.with_adapter(config) if adapter else config).items() if k != "lora"}

    changed: dict[bool, dict[tuple[str, int], list[str]]] = {False: {}, True: {}}
    for row in record["rows"]:
        model, _, name = row["shape"].partition(".")
        shape = row["N"], row["K"]
        shards = len(tune.layer_splits(model).get(shape, shape[:1]))
        then = {False: row["config"], True: row.get("lora_config", row["config"])}
        for adapter, config in then.items():
            now = _ships(*shape, row["M"], record["lora_rank"] * shards * adapter)
            if now is not None and launched(now, adapter) != launched(config, adapter):
                changed[adapter].setdefault((model, row["M"]), []).append(name)
    said = []
    for adapter, places in changed.items():
        if places:
            where = ", ".join(f"{model} at {M} ({', '.join(names)})" for (model, M), names in sorted(places.items()))
            columns = "with LoRA" if adapter else "without LoRA"
            said.append(
                f"{len(places)} of the {len(record['sums'])} sums {columns} have a matrix with another kernel now: {where}"
            )
    if not said:
        return ""
    return f" The cost model was fitted again since: {'; '.join(said)}. They have not been timed with it."


def above_the_floor(record: dict[str, Any]) -> str:
    """What the four products of 7B take beyond their floor at few tokens: the adapter, and what even the smallest pays."""
    sums = {entry["M"]: entry for entry in record["sums"] if entry["model"] == "7B"}
    smallest = min((row["N"] * row["K"], row["shape"]) for row in record["rows"] if row["shape"].startswith("7B."))[1]
    least = {row["M"]: row["ours_us"] - row["floor_us"] for row in record["rows"] if row["shape"] == smallest}

    def each(values: list[float]) -> str:
        *first, last = [f"{value:.0f}" for value in values]
        return f"{', '.join(first)} and {last}"

    above = [sums[M]["ours_lora_us"] - sums[M]["floor_us"] for M in FLOOR_TOKENS]
    adapter = [sums[M]["ours_lora_us"] - sums[M]["ours_us"] for M in FLOOR_TOKENS]
    four = [4 * least[M] for M in FLOOR_TOKENS]
    return (
        f"What keeps 7B with LoRA from half of the floor: at {each(list(FLOOR_TOKENS))} tokens the four products of 7B take {each(above)} us more than their floor. Of these the adapter "
        f"is {each(adapter)}; {each(four)} are four times what {smallest.removeprefix('7B.')}, the smallest matrix, takes beyond its own floor without an adapter, taken for what each product pays however few "
        "bytes it has (its launch, its first and last steps, the ends of tiles that are cut); the rest is what the larger matrices take beyond that."
    )


def humming() -> str:
    """Single matrices of 7B by humming-kernels, which vLLM takes on Hopper from 0.32 on, and by ours: how many times as fast ours are."""
    record = json.loads(KERNELS.read_text())
    run, rows = record.get("humming_run", record), record["humming"]
    shapes = dict.fromkeys(row["shape"] for row in rows)
    times = {(row["shape"], row["M"]): row["humming_us"] / row["ours_us"] for row in rows}
    lines = [f"| tokens | {' | '.join(shapes)} |", "|---:|" + "---:|" * len(shapes)]
    for tokens in dict.fromkeys(row["M"] for row in rows):
        lines.append(f"| {tokens} | {' | '.join(f'{times[shape, tokens]:.2f}' for shape in shapes)} |")
    versions = {name: run[name] for name in ("torch", "triton")}
    slower = []
    for shape in shapes:
        worse = {tokens: ratio for (name, tokens), ratio in times.items() if name == shape and ratio < 1}
        if worse:
            most = 1 / min(worse.values()) - 1
            up_to = "up to " if len(worse) > 1 else ""
            slower.append(f"on {shape} at {', '.join(map(str, worse))} tokens, by {up_to}{most:.0%}")
    return (
        "\n".join(lines)
        + f"\n\nhumming-kernels are faster {'; '.join(slower) or 'nowhere'}; elsewhere ours are. How many times as fast as humming-kernels {run['humming_kernels']}, by its own heuristic: "
        "without an adapter, which it has not; single launches with a cold cache, "
        f"the time of launching left out. {measured_by(KERNELS, run['device'], [run['commit']], **versions)}."
    )


#: of the physical limit, what 7B should reach with the adapter, and at how many tokens
FLOOR_WANTED, FLOOR_TOKENS = 0.5, (16, 32, 64)


def floor_share(sums: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """What a layer of 7B could take at the least (compare.floor_us, in the record) over what it takes with the adapter."""
    cells = []
    for tokens in FLOOR_TOKENS:
        entry = sums["7B", tokens]
        share = entry["floor_us"] / entry["ours_lora_us"]
        cells.append(f"{share:.0%}, wanted {FLOOR_WANTED:.0%}: {'reached' if share >= FLOOR_WANTED else 'missed'}")
    head = f"| tokens | {' | '.join(map(str, FLOOR_TOKENS))} |"
    return [head, "|---|" + "---:|" * len(FLOOR_TOKENS), f"| 7B with LoRA, share of the floor | {' | '.join(cells)} |"]


SHOWN = (8, 16, 24, 32, 48, 64, 72, 80, 96, 128, 144, 160, 192, 208, 256, 272, 320, 384, 448, 512)
#: of the cards on which layers were timed, and of the adapter in them
SMS, LORA_RANK = 132, 32
#: of each model's layer, the worst ratio wanted from 24 to 128 tokens, and from 136 to 512
WANTED = {"7B": (1.05, 0.9), "32B": (1.05, 0.9), "Llama-3-8B": (1.05, 0.9), "1.5B": (0.95, 0.95), "0.5B": (0.95, 0.95)}
#: below what ratio no layer should be, whatever the number of tokens
NEVER_BELOW = 0.95
#: how much slower than the fastest the selected kernel may be on a matrix that the fit has not seen: at most, and aimed at
OUTSIDE_WANTED = (0.08, 0.05)


def layers_of(record: dict[str, Any], wanted: bool = True) -> list[str]:
    """A table of a decoder layer's ratios, and the worst of all multiples of 8; `wanted`: beside what they should be at least."""
    layers = {(row["model"], row["M"]): row["ratio"] for row in record["layers"]}
    models = list(WANTED)
    rows = [f"| tokens | {' | '.join(models)} |", "|" + "---:|" * (1 + len(models))]
    for tokens in SHOWN:
        rows.append(f"| {tokens} | {' | '.join(f'{layers[model, tokens]:.2f}' for model in models)} |")
    for low, high, column in ((24, 128, 0), (136, 512, 1)):
        cells = []
        for model in models:
            worst, tokens = min((ratio, M) for (name, M), ratio in layers.items() if name == model and low <= M <= high)
            reached = "reached" if worst >= WANTED[model][column] else "missed"
            cells.append(f"{worst:.3f} at {tokens}" + f", wanted {WANTED[model][column]:g}: {reached}" * wanted)
        rows.append(f"| worst of {low} to {high} | {' | '.join(cells)} |")
    return rows


def other_now(record: dict[str, Any]) -> str:
    """What a reader must know of layers that were timed before the cost model was fitted last: at how many of the numbers of tokens another kernel
    ships now, and from where to where they are."""
    from qerl_nvfp4 import select, tune

    changed, timed = set[int](), set[int]()
    for row in record["layers"]:
        shapes, M = tune.layer_shapes(row["model"]), row["M"]
        if M <= 16:  # priced by no model
            continue
        timed.add(M)
        for name, (N, K) in shapes.items():
            rows = LORA_RANK * len(tune.layer_splits(row["model"]).get((N, K), (N,)))
            now = _ships(N, K, M, rows)
            if now is not None and tune.short(select.with_adapter(now)) != row["chosen"][name]:
                changed.add(M)
    if not changed:
        return ""
    return (
        f" The model was fitted again since: at {len(changed)} of the {len(timed)} numbers of tokens above 16 ({min(changed)} to {max(changed)}) some matrix "
        "has another kernel now, and these layers have not been timed with it."
    )


def every_size() -> str:
    """A decoder layer as in a model at numbers of tokens between the tuned ones, adapter included, and the worst of all multiples of 8."""
    record, later = json.loads(EVERY_SIZE.read_text()), json.loads(LAYERS.read_text())
    rows = layers_of(later)
    outside = json.loads(FACTORS.read_text())["quality"]["shape_left_out"]
    new, source = (path.relative_to(ROOT) for path in (LAYERS, EVERY_SIZE))
    commits = " and ".join(dict.fromkeys(run["commit"][:7] for run in (record, *record.get("more", ()))))
    return (
        "\n".join(rows)
        + "\n\nSpeed relative to cuBLAS bf16 without an adapter: a decoder layer without its attention, RMSNorm and SwiGLU between the products as in a model, "
        f"rank-{record['lora_rank']} adapter inside ours. By what ships: {'; '.join(map(_run, later['runs']))}; [{new.name}]({new}).{other_now(later)} Its cost model is fitted to candidates that were timed "
        f"at commit {commits} ({record['device']}, torch {record['torch']}, triton {record['triton']}, [{source.name}]({source})), and the fastest timed one is taken where "
        "the fit misses it. On a matrix that the fit has not seen, the selected kernel is slower than the "
        f"fastest of all that were timed by {outside['mean_loss']:.1%} in the mean, by {outside['p90_loss']:.1%} in nine of ten cases, and by {outside['worst_loss']:.0%} at worst ({outside['worst']}). "
        f"{_outside_wanted(outside)}\n\n{never_below(later)}"
    )


def _outside_wanted(outside: dict[str, Any]) -> str:
    """Whether the matrices left out are chosen for as well as they should be."""
    must, aimed = OUTSIDE_WANTED
    verdicts = [
        f"{words} {f'within {aimed:.0%}' if loss <= aimed else f'within {must:.0%}' if loss <= must else 'beyond both: missed'}"
        for words, loss in (
            ("the mean is", outside["mean_loss"]),
            ("nine of ten are", outside["p90_loss"]),
            ("the worst is", outside["worst_loss"]),
        )
    ]
    return (
        f"Wanted was at most {must:.0%} everywhere, aimed at {aimed:.0%}: {', '.join(verdicts)}. That worst is one matrix at one number of tokens of {outside['rows']} "
        "that were left out in turn."
    )


def never_below(record: dict[str, Any]) -> str:
    """From where on whole layers fall below `NEVER_BELOW` of bf16, and how far."""
    cells = []
    for model in WANTED:
        ratios = {row["M"]: row["ratio"] for row in record["layers"] if row["model"] == model}
        below = [M for M, ratio in sorted(ratios.items()) if ratio < NEVER_BELOW]
        if below:
            worst = min(below, key=lambda M: ratios[M])
            first = f"first {ratios[below[0]]:.3f} at {below[0]} tokens, " if below[0] != worst else ""
            cells.append(f"{model} {first}at worst {ratios[worst]:.3f} at {worst}")
    if not cells:
        return f"No whole layer is slower than {NEVER_BELOW:g} of bf16 at any number of tokens timed."
    return (
        f"Never slower than {NEVER_BELOW:g} of bf16: that does not hold for whole layers with an adapter, against bf16 without one. {'; '.join(cells)}. What bounds them is in "
        "[HOW_IT_WORKS.md](kernels/HOW_IT_WORKS.md#what-bounds-it)."
    )


def rollout_why() -> str:
    """What products alone gain, and what stands beside them in a whole rollout."""
    products = {(entry["model"], entry["M"]): entry for entry in json.loads(KERNELS.read_text())["sums"]}
    record = json.loads(ROLLOUT.read_text())
    speed, cases = record["tokens_per_s"], record["cases"]
    alone, beside = [], []
    for size in ("7B", "32B"):
        case = f"ours:{size.lower()}"
        counts = [int(n) for n in speed[case] if (size, int(n)) in products and int(n) <= 128]
        ratios = {n: products[size, n]["bf16_us"] / products[size, n]["ours_lora_us"] for n in counts}
        alone.append(f"{size} {', '.join(f'{ratio:.2f} at {n}' for n, ratio in ratios.items())} sequences")
        ((count, prefill),) = cases[case]["prefill_s"].items()
        new = rollout.NEW * int(count) / speed[case][count]
        rest = " and ".join(
            f"{cases[f'{other}:{size.lower()}']['prefill_s'][count]:.2f} s for {words}"
            for other, words in OTHERS.items()
        )
        beside.append(
            f"{rollout.label(size.lower())} {prefill:.2f} s of the {new:.1f} s that ours takes for {count} sequences ({rest})"
        )
    slots = "; ".join(
        f"{ours:.0f} beside {speed['stock-lora:32b'][n]:.0f} tokens/s at {n}"
        for n, ours in speed["ours:32b"].items()
        if n in speed["stock-lora:32b"]
    )
    return (
        f"The four products of a layer alone, adapter included, are as many times as fast as bf16's without one: {'; '.join(alone)}. What dilutes that in a whole rollout is about "
        f"the same for merged bf16: attention, head, sampling ([HOW_IT_WORKS.md](kernels/HOW_IT_WORKS.md#one-kernel-per-layer-for-1-to-16-sequences-not-built) has 7B's decode step), and prefill: "
        f"{'; '.join(beside)}. 32B against vLLM's LoRA slots: {slots}. No engine of bf16 was profiled with 32B, so what its time and that of the slots is made of is not known; "
        "ours alone was traced, in a training step with 8 sequences (the traced steps below)."
    )


def every_size_h100() -> str:
    """The same on an H100. What is wanted is wanted of an H200."""
    record = json.loads(LAYERS_H100.read_text())
    link = LAYERS_H100.relative_to(ROOT)
    return (
        "\n".join(layers_of(record, wanted=False))
        + f"\n\n{'; '.join(map(_run, record['runs']))}; [{link.name}]({link}).{other_now(record)}"
    )


def _run(run: dict[str, Any]) -> str:
    """Which models' layers were timed in a run, and where."""
    return f"{', '.join(run['models'])} on {run['device']}, torch {run['torch']}, triton {run['triton']}, commit {run['commit'][:7]}"
