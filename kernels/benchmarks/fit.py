"""Fit the cost model (qerl_nvfp4/cost.py) to the candidates that every_size.py timed, and write
configs/cost_model.json.

    python kernels/benchmarks/fit.py every_size.json [more.json ...] [--write] [--result results/every_size_h200.json]

Variants without which nothing gets slower are left out, since each must be compiled; of a result, where that was done,
none.  Every other one has factors of its own, none of them negative, by least squares of the relative error, and the
number of tokens up to which they hold. Candidates far from the fastest count less (`NEAR`): how slow they are decides
nothing. A variant was timed on few matrices; where these do not say what a term costs, its factors stay near those of
its kernel with all its tiles (`FAMILY`), in which a term costs in proportion to a tile's rows, tokens, or both.
Printed, and kept in the file: how far the chosen candidate is from the fastest one measured, be it left out or not
("loss"), with all shapes in the fit and, which is what counts, with the matrix in question left out of it.  For the
matrices that were measured the file also holds what was fastest ("timed"), where the table or the model would choose
something slower by more than `GAIN`; of a matrix and numbers of tokens that are priced as one, by the last run that
timed them.
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

from qerl_nvfp4 import cost, select

TOLERANCE = 0.002  # how much slower than with all variants the best of those that are kept may be, in the mean
AT_ANY_SIZE = 0.003  # the same at any one number of tokens


GAIN = 1.01  # what is measured to be slower by more than this is not chosen
OF_A_GPU = ("device", "multiprocessors")
OF_A_RUN = (*OF_A_GPU, "torch", "triton", "commit", "command")
NEAR = 0.3  # a candidate that is slower than the fastest by this counts half
FAMILY = 3.0  # weight of a family's factors beside a variant's own samples
# by what of a tile (64 P rows, BM tokens) a term may cost within a family; others by nothing
BY_TILE = {
    "units": ("rows x tokens", "rows", "tokens", "nothing"),
    "units of tokens that are not": ("rows x tokens", "tokens"),
    "tiles": ("rows x tokens", "nothing"),
    "pieces": ("rows x tokens", "nothing"),
    "split": ("rows x tokens", "nothing"),
    "shares": ("rows x tokens", "nothing"),
}
AT_LEAST = 4  # samples of a variant, and of its largest numbers of tokens


class Sample(NamedTuple):
    """A timed candidate: its cost terms, microseconds, tokens, weight."""

    values: dict[str, float]
    us: float
    tokens: int
    weight: float = 1.0


def not_negative(samples: list[Sample], near: dict[str, float] | None = None) -> dict[str, float]:
    """Factors >= 0 that minimize the sum of (weight (predicted / us - 1))^2, and of how far they are from `near`:
    Lawson and Hanson's active sets.
    """
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
    """Whether the model has a price for such a configuration."""
    return config["kernel"] in ("wgmma", "wide", "dense") and config.get("tasks", True) in (True, False)


def fewest(rows: list[dict], tolerance: float, at_any: float = math.inf) -> set[str]:
    """Variants without which the best candidates would be slower by `tolerance`, the mean over rows, or by `at_any`,
    that over those of one number of tokens: others only cost time to compile.
    """
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
    """variant -> samples, and a configuration of each."""
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
    """Key of variants that differ only in their tiles."""
    return config["kernel"], config.get("permute"), config.get("natural", False), config.get("tasks")


def by_tile(values: dict[str, float], config: dict) -> dict[tuple[str, str], float]:
    """The terms of a family: each by what of a tile it may cost."""
    if config["kernel"] not in ("wgmma", "wide"):
        return {(name, "nothing"): value for name, value in values.items()}
    rows, tokens = config["P"], config["BM"] / 64
    of = {"rows x tokens": rows * tokens, "rows": rows, "tokens": tokens, "nothing": 1.0}
    return {
        (name, what): value * of[what] for name, value in values.items() for what in BY_TILE.get(name, ("nothing",))
    }


def factors_of(rows: list[dict], sms: int) -> dict[str, dict[str, float]]:
    """Of every variant with enough samples; they hold up to the number of tokens that as many samples have."""
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
    """A configuration as it is launched with an adapter."""
    config = {name: value for name, value in select.with_adapter(config).items() if name != "lora"}
    return config | {"tasks": cost.beside(config, M)} if config["kernel"] in ("wgmma", "wide") else config


def slower(config: dict, rows: list[dict]) -> float:
    """How much slower than the fastest candidate a configuration is at the worst of these rows; infinity if it was not
    timed in all.
    """
    worst = 0.0
    for row in rows:
        us = [c["us"] for c in row["candidates"] if complete(c["config"], row["M"]) == complete(config, row["M"])]
        worst = max(worst, min(us, default=math.inf) / min(c["us"] for c in row["candidates"]))
    return worst


def latest(rows: list[dict]) -> list[dict]:
    """One row for each matrix, rows of A and number of tokens. Of numbers of tokens that are priced as one, those of
    the last run: one configuration answers them, and what two runs timed is not to be told apart by a few percent.
    """
    size = {r["M"]: cost.size_of(r["M"]) or r["M"] for r in rows}
    last = {(r["N"], r["K"], r["rows"], size[r["M"]]): r.get("commit") for r in rows}
    of_each = {(r["N"], r["K"], r["rows"], r["M"]): r for r in rows}
    return [r for (*matrix, M), r in of_each.items() if r.get("commit") == last[(*matrix, size[M])]]


def faster_than_chosen(rows: list[dict], sms: int, model: dict, table: dict) -> list[dict]:
    """What was timed to be faster by more than `GAIN` than what is chosen without having been timed; `table`:
    select.load_table's.

    Numbers of tokens that are priced as one are answered by one configuration.
    """
    places: dict[tuple[int, int, int, int], list[dict]] = {}
    for row in latest(rows):
        row = row | {"candidates": kept(row, model)}
        if row["M"] > 16 and row["candidates"] and (size := cost.size_of(row["M"])):
            places.setdefault((row["N"], row["K"], row["rows"], size), []).append(row)
    found = []
    for (N, K, of_a, size), some in sorted(places.items()):
        chosen = []
        for row in some:
            tuned = table.get((N, K, select.bucket_of(row["M"])))
            chosen.append(select.by_price(N, K, row["M"], sms, of_a, tuned, model))
        now = max(math.inf if c is None else slower(c, [row]) for c, row in zip(chosen, some, strict=True))
        timed = [complete(c["config"], size) for c in some[0]["candidates"]]
        best = min(timed, key=lambda config: slower(config, some))
        if now > GAIN and slower(best, some) < now:
            found.append({"N": N, "K": K, "rows": of_a, "size": size, "config": best})
    return found


def fastest_us(row: dict) -> float:
    """Of all candidates that were timed, those that are left out among them."""
    return row.get("best_us") or min(c["us"] for c in row["candidates"])


def losses(rows: list[dict], sms: int, model: dict) -> list[tuple[float, dict, dict]]:
    """(relative loss of the chosen one of the candidates that were timed, row, chosen)."""
    found = []
    for row in rows:
        priced = [
            (cost.predicted_us(c["config"], row["N"], row["K"], row["M"], sms, row["rows"], model), i, c)
            for i, c in enumerate(row["candidates"])
            if known(c["config"])
        ]
        if row["M"] <= 16 or not priced:
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
    """The factors and their quality."""
    if any("best_us" not in row for row in rows):
        names = fewest(rows, TOLERANCE, AT_ANY_SIZE)
        rows = [row | {"best_us": fastest_us(row), "candidates": kept(row, names)} for row in rows]
    model = factors_of(rows, sms)
    shapes, outside = sorted({(r["N"], r["K"]) for r in rows}), []
    for shape in shapes:
        others = factors_of([r for r in rows if (r["N"], r["K"]) != shape], sms)
        outside += losses([r for r in rows if (r["N"], r["K"]) == shape], sms, others)
    return model, {
        "variants": len(model),
        "all_shapes": quality(losses(rows, sms, model)),
        "shape_left_out": quality(outside),
    }


def kept(row: dict, names: Collection[str]) -> list[dict]:
    """The row's candidates of these variants."""
    return [c for c in row["candidates"] if known(c["config"]) and cost.variant(c["config"], row["M"]) in names]


def joined(runs: list[dict]) -> dict:
    """The first run with the rows of all, of which those of later ones say their commit; `more`: what made these.

    Raises `ValueError` where they are of several GPUs.
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
    """A run with one row per line, of the candidates only those that the model knows."""
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
    parser.add_argument(
        "--result", type=Path, help="write the rows of all runs in one file, without the candidates that are left out"
    )
    args = parser.parse_args()
    whole = joined([json.loads(path.read_text()) for path in args.files])
    rows, sms = whole["matrices"], whole["multiprocessors"]
    model, found = fit(rows, sms)
    table = select.load_table(whole["device"], sms)
    for name, value in found.items():
        print(name, value)
    for loss, row, chosen in sorted(losses(rows, sms, model), key=lambda f: -f[0])[:12]:
        print(f"  {loss:6.1%} {row['matrix']} M={row['M']}: {chosen['config']}, best {row['candidates'][0]['config']}")
    if args.write:
        head = {k: whole[k] for k in (*OF_A_RUN, "more") if k in whole}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(factors)}" for name, factors in model.items())
        timed = ",\n".join("  " + json.dumps(entry) for entry in faster_than_chosen(rows, sms, model, table))
        text = (
            json.dumps(head | {"quality": found})[:-1]
            + ', "factors": {\n'
            + lines
            + '\n}, "timed": [\n'
            + timed
            + "\n]}\n"
        )
        temporary = cost.FACTORS.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, cost.FACTORS)
        print(f"# wrote {cost.FACTORS}")
    if args.result:
        write_result(whole, model, args.result)


if __name__ == "__main__":
    main()
