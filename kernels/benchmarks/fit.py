"""Fit the cost model (qerl_nvfp4/cost.py) to the candidates timed by every_size.py.

    python kernels/benchmarks/fit.py every_size.json [more.json ...] [--write] [--result results/every_size_h200.json]

`--write` writes configs/cost_model.json. Variants that make nothing faster are dropped, since each must be compiled
(a `--result` file has already dropped them). The others have nonnegative factors, by least squares of the relative
error, and a largest number of tokens. Slow candidates count less (`NEAR`). Variants were timed on few matrices: factors
without enough data stay near those of the kernel's other tiles (`FAMILY`), in proportion to a tile's rows, tokens, or
both. "loss", printed and stored: the chosen candidate relative to the fastest measured one, dropped ones included, for
all shapes and with each matrix left out of the fit (the figure to judge by). "entries" in the file (measured.py): the
fastest measured configuration, where the model's would be slower by more than `GAIN`; sizes with one price use the last
run. Entries up to 16 tokens of W4A16, and without an adapter, stay: an earlier tuner timed them.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from qerl_nvfp4 import cost, measured

TOLERANCE = 0.002  # allowed mean loss from dropping variants
AT_ANY_SIZE = 0.003  # the same at any single token count
GAIN = 1.01  # a candidate measured to be slower by this factor is not chosen
OF_A_GPU = ("device", "multiprocessors")
OF_A_RUN = (*OF_A_GPU, "torch", "triton", "commit", "command")
NEAR = 0.3  # a candidate slower than the fastest by this share counts half
FAMILY = 3.0  # weight of a family's factors relative to a variant's samples
# scaling of a term with a tile (64 P rows, BM tokens) within a family; others are constant
BY_TILE = dict.fromkeys(("tiles", "pieces", "split", "shares"), ("rows x tokens", "nothing")) | {
    "units": ("rows x tokens", "rows", "tokens", "nothing"),
    "units of tokens that are not": ("rows x tokens", "tokens"),
}
AT_LEAST = 4  # samples of a variant, and at its largest token counts


class Sample(NamedTuple):
    """A timed candidate: cost terms, microseconds, tokens, weight."""

    values: dict[str, float]
    us: float
    tokens: int
    weight: float = 1.0


def not_negative(samples: list[Sample], near: dict[str, float] | None = None) -> dict[str, float]:
    """Factors >= 0 with the least sum of (weight (predicted / us - 1))^2 and distance to `near`, by active sets."""
    names = list(samples[0].values)
    A = torch.tensor([[s.values[n] / s.us * s.weight for n in names] for s in samples], dtype=torch.float64)
    scale = A.norm(dim=0).clamp(min=1e-30)
    A = A / scale
    gram = A.T @ A + 1e-9 * torch.eye(len(names), dtype=torch.float64)
    target = A.T @ torch.tensor([s.weight for s in samples], dtype=torch.float64)
    if near is not None:
        gram += FAMILY * torch.eye(len(names), dtype=torch.float64)
        target += FAMILY * torch.tensor([near.get(n, 0.0) for n in names], dtype=torch.float64) * scale
    x, used = torch.zeros_like(target), torch.zeros(len(names), dtype=torch.bool)
    for _ in range(3 * len(names)):
        gradient = (target - gram @ x).masked_fill(used, -math.inf)
        if gradient.max() < 1e-9:
            break
        used[gradient.argmax()] = True
        while True:
            z = torch.zeros_like(x)
            z[used] = torch.linalg.solve(gram[used][:, used], target[used])
            low = used & (z <= 0)
            if not low.any():
                break
            step = (x[low] / (x[low] - z[low])).min()
            x = x + step * (z - x)
            used &= x > 1e-12
            x[~used] = 0.0
        x = z
    return {n: float(f"{(x[i] / scale[i]).item():.5g}") for i, n in enumerate(names) if x[i] > 0}


def known(config: dict) -> bool:
    """Whether the model has a price for the configuration."""
    return config["kernel"] in ("wgmma", "wide", "dense")


def fewest(rows: list[dict], tolerance: float, at_any: float = math.inf) -> set[str]:
    """Smallest set of variants with a loss up to `tolerance` in the mean, and up to `at_any` per token count."""
    timed = [{} for _ in rows]
    for best, row in zip(timed, rows, strict=True):
        for c in row["candidates"]:
            if known(c["config"]):
                name = cost.variant(c["config"], row["M"])
                best[name] = min(c["us"], best.get(name, math.inf))
    kept = set().union(*timed)

    def loss(names: set[str]) -> float:
        """Loss as a share of the allowed one."""
        by_size: dict[int, list[float]] = {}
        for row, t in zip(rows, timed, strict=True):
            lost = min((us for n, us in t.items() if n in names), default=1e9) / min(t.values()) - 1 if t else 0.0
            by_size.setdefault(row["M"], []).append(lost)
        mean = sum(map(sum, by_size.values())) / len(rows)
        return max(mean / tolerance, *(statistics.mean(lost) / at_any for lost in by_size.values()))

    while True:
        price, name = min((loss(kept - {n}), n) for n in kept)
        if price > 1:
            return kept
        kept.remove(name)


def samples_of(rows: list[dict], sms: int) -> tuple[dict[str, list[Sample]], dict[str, dict]]:
    """variant -> samples, and one configuration each."""
    found: dict[str, list[Sample]] = {}
    configs = {}
    for row in rows:
        fastest = fastest_us(row)
        for timed in row["candidates"]:
            config = complete(timed["config"], row["M"])
            if known(config):
                values = cost.terms(config, row["N"], row["K"], row["M"], sms, row["rows"])
                counts = 1 / (1 + ((timed["us"] / fastest - 1) / NEAR) ** 2)
                name = cost.variant(config, row["M"])
                found.setdefault(name, []).append(Sample(values, timed["us"], row["M"], counts))
                configs[name] = config
    return found, configs


def family(config: dict) -> tuple:
    """Key of variants with the same kernel and other tiles."""
    names = ("permute", "natural", "fp8", "tasks")
    return config["kernel"], *(config.get(name, False) for name in names)


def by_tile(values: dict[str, float], config: dict) -> dict[tuple[str, str], float]:
    """The terms of a family, each scaled by parts of a tile."""
    if config["kernel"] not in ("wgmma", "wide"):
        return {(name, "nothing"): value for name, value in values.items()}
    rows, tokens = config["P"], config["BM"] / 64
    of = {"rows x tokens": rows * tokens, "rows": rows, "tokens": tokens, "nothing": 1.0}
    return {
        (name, what): value * of[what] for name, value in values.items() for what in BY_TILE.get(name, ("nothing",))
    }


def factors_of(rows: list[dict], sms: int) -> dict[str, dict[str, float]]:
    """Factors of variants with enough samples, with the largest token count covered by as many samples."""
    variants, configs = samples_of(rows, sms)
    families: dict[tuple, list[Sample]] = {}
    for name, samples in sorted(variants.items()):
        config = configs[name]
        of_all = families.setdefault(family(config), [])
        of_all += [s._replace(values=by_tile(s.values, config)) for s in samples]
    shared = {of: not_negative(samples) for of, samples in families.items()}
    found = {}
    for name, samples in sorted(variants.items()):
        if len(samples) >= AT_LEAST:
            own = shared[family(configs[name])]
            near = {
                term: sum(own.get(part, 0.0) * value for part, value in by_tile({term: 1.0}, configs[name]).items())
                for term in samples[0].values
            }
            found[name] = not_negative(samples, near)
            found[name][cost.TOKENS] = cost.size_of(sorted(s.tokens for s in samples)[-AT_LEAST])
    return found


def complete(config: dict, M: int) -> dict:
    """Configuration as launched with an adapter; older records name the `pieces` of the dense path."""
    tiles = {"tasks": cost.beside(config, M)} if config["kernel"] in ("wgmma", "wide") else {}
    return {name: value for name, value in config.items() if name != "pieces"} | tiles


def slower(config: dict, rows: list[dict]) -> float:
    """Worst ratio of a configuration to the fastest candidate over these rows; infinity if not timed in all."""
    worst = 0.0
    for row in rows:
        us = [c["us"] for c in row["candidates"] if complete(c["config"], row["M"]) == complete(config, row["M"])]
        worst = max(worst, min(us, default=math.inf) / min(c["us"] for c in row["candidates"]))
    return worst


def latest(rows: list[dict]) -> list[dict]:
    """Last row per matrix, rows of A and token count. Token counts with one price take rows of the last run only, since
    differences of a few percent between runs are noise.
    """
    size = {r["M"]: cost.size_of(r["M"], fp8(r)) or r["M"] for r in rows}
    last = {(r["N"], r["K"], r["rows"], size[r["M"]]): r.get("commit") for r in rows}
    of_each = {(r["N"], r["K"], r["rows"], r["M"]): r for r in rows}
    return [r for (*matrix, M), r in of_each.items() if r.get("commit") == last[(*matrix, size[M])]]


def faster_than_chosen(rows: list[dict], sms: int, model: dict) -> list[dict]:
    """Entries: timed configurations faster than the model's by more than `GAIN`, one for all tokens with one price."""
    places: dict[tuple[int, int, int, int], list[dict]] = {}
    for row in latest(rows):
        row = row | {"candidates": kept(row, model)}
        if (row["M"] > 16 or fp8(row)) and row["candidates"] and (size := cost.size_of(row["M"], fp8(row))):
            places.setdefault((row["N"], row["K"], row["rows"], size), []).append(row)
    found = []
    for (N, K, of_a, size), some in sorted(places.items()):
        chosen = cost.cheapest(N, K, size, sms, of_a, model, fp8(some[0]))
        now = math.inf if chosen is None else slower(chosen, some)
        timed = [complete(c["config"], size) for c in some[0]["candidates"]]
        best = min(timed, key=lambda config: slower(config, some))
        if now > GAIN and slower(best, some) < now:
            below = max((s for s in (16, *cost.SIZES) if s < size), default=0)
            tokens = range(below + measured.STEP, size + 1, measured.STEP)
            found += [{"N": N, "K": K, "rank": measured.SHIPPED_RANK, "tokens": M, "config": best} for M in tokens]
    return found


def replaced(entry: dict, mine: bool) -> bool:
    """Whether a fit of W4A8 (`mine`), or of W4A16, makes this entry."""
    of_w4a8 = entry["config"].get("fp8", False)
    return of_w4a8 == mine and entry["rank"] > 0 and (mine or entry["tokens"] > 16)


def fp8(row: dict) -> bool:
    """Whether a row is of W4A8, whose variants and configurations are apart."""
    return any(c["config"].get("fp8") for c in row["candidates"])


def fastest_us(row: dict) -> float:
    """Fastest of all timed candidates, dropped ones included."""
    return row.get("best_us") or min(c["us"] for c in row["candidates"])


def losses(rows: list[dict], sms: int, model: dict) -> list[tuple[float, dict, dict]]:
    """(relative loss of the chosen timed candidate, row, candidate)."""
    found = []
    for row in rows:
        priced = [
            (cost.predicted_us(c["config"], row["N"], row["K"], row["M"], sms, row["rows"], model), i, c)
            for i, c in enumerate(row["candidates"])
            if known(c["config"])
        ]
        if (row["M"] <= 16 and not fp8(row)) or not priced:
            continue
        us, _, chosen = min(priced)
        if math.isfinite(us):
            found.append((chosen["us"] / fastest_us(row) - 1, row, chosen))
    return found


def quality(found: list) -> dict:
    values = sorted(loss for loss, _, _ in found)
    if not values:
        return {"rows": 0}
    worst = max(found, key=lambda f: f[0])
    return {
        "rows": len(values),
        "mean_loss": round(statistics.mean(values), 4),
        "p90_loss": round(values[int(0.9 * (len(values) - 1))], 4),
        "worst_loss": round(values[-1], 4),
        "worst": f"{worst[1]['matrix']} M={worst[1]['M']}",
    }


def fit(rows: list[dict], sms: int) -> tuple[dict, dict]:
    """Factors and their quality."""
    if any("best_us" not in row for row in rows):
        names = fewest(rows, TOLERANCE, AT_ANY_SIZE)
        rows = [row | {"best_us": fastest_us(row), "candidates": kept(row, names)} for row in rows]
    model = factors_of(rows, sms)
    shapes, outside = sorted({(r["N"], r["K"]) for r in rows}), []
    for shape in shapes:
        others = factors_of([r for r in rows if (r["N"], r["K"]) != shape], sms)
        outside += losses([r for r in rows if (r["N"], r["K"]) == shape], sms, others)
    whole = quality(losses(rows, sms, model))
    return model, {"variants": len(model), "all_shapes": whole, "shape_left_out": quality(outside)}


def kept(row: dict, names: Collection[str]) -> list[dict]:
    """Candidates of the row with these variants."""
    return [c for c in row["candidates"] if known(c["config"]) and cost.variant(c["config"], row["M"]) in names]


def joined(runs: list[dict]) -> dict:
    """The first run with the rows of all; later rows have their commit, and `more` has the later heads.

    Raises `ValueError` for runs on different GPUs.
    """
    first = runs[0]
    for head in (head for run in runs for head in (run, *run.get("more", ()))):
        if any(head[k] != first[k] for k in OF_A_GPU):
            one, other = (
                f"{h['commit']} on {h['device']} with {h['multiprocessors']} multiprocessors" for h in (first, head)
            )
            raise ValueError(
                f"Runs of several GPUs have no cost model in common: {one}, {other}. Fit those of one GPU."
            )
    whole = first | {"matrices": list(first["matrices"]), "more": list(first.get("more", ()))}
    for run in runs[1:]:
        whole["more"] += [{k: run[k] for k in OF_A_RUN}, *run.get("more", ())]
        whole["matrices"] += [{"commit": run["commit"]} | row for row in run["matrices"]]
    return whole if whole["more"] else first


def write_result(run: dict, model: dict, path: Path) -> None:
    """Write a run with one row per line, with the candidates of the model only."""
    head = {k: v for k, v in run.items() if k not in ("matrices", "layers", "fit")}
    for row in run["matrices"]:
        row.setdefault("candidates_timed", len(row["candidates"]))
        row["best_us"] = fastest_us(row)
        row["candidates"] = kept(row, model)
    text = json.dumps(head)[:-1]
    for key in ("matrices", "layers"):
        text += f', "{key}": [\n  ' + ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in run[key]) + "\n]"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "}\n")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write configs/cost_model.json")
    parser.add_argument("--result", type=Path, help="file for the rows of all runs, without dropped candidates")
    args = parser.parse_args()
    whole = joined([json.loads(path.read_text()) for path in args.files])
    rows, sms = whole["matrices"], whole["multiprocessors"]
    model, found = fit(rows, sms)
    for name, value in found.items():
        print(name, value)
    for loss, row, chosen in sorted(losses(rows, sms, model), key=lambda f: -f[0])[:12]:
        print(f"  {loss:6.1%} {row['matrix']} M={row['M']}: {chosen['config']}, best {row['candidates'][0]['config']}")
    if args.write:
        old, mine = json.loads(cost.FACTORS.read_text()), fp8(rows[0])  # the other arithmetic's part stays
        head = {k: whole[k] for k in (*OF_A_RUN, "more") if k in whole} | {"quality": found}
        head = {k: v for k, v in old.items() if k not in ("factors", "entries")} | {"w4a8": head} if mine else head
        model |= {name: factors for name, factors in old["factors"].items() if ("fp8=1" in name) != mine}
        entries = [e for e in old["entries"] if not replaced(e, mine)] + faster_than_chosen(rows, sms, model)
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(factors)}" for name, factors in sorted(model.items()))
        some = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text = f'{json.dumps(head)[:-1]}, "factors": {{\n{lines}\n}}, "entries": [\n{some}\n]}}\n'
        temporary = cost.FACTORS.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, cost.FACTORS)
        print(f"# wrote {cost.FACTORS}")
    if args.result:
        write_result(whole, model, args.result)


if __name__ == "__main__":
    main()
