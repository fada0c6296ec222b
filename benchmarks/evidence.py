"""Statistics, tables and plots of docs/source/evidence.md, from the records of learning.py. tables.py writes them."""

import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from common import ROOT
from protocol import CANDIDATES, LEARNING, Planned, Protocol, accuracy, decoded, read, verdicts
from speed_tables import table

PROTOCOL = ROOT / "benchmarks/protocol.yaml"
NONE = "No run is recorded yet."

# --- statistics -----------------------------------------------------------------------------------


def t_tails(t: float, df: float) -> float:
    """Two-sided p of Student's t: the midpoint rule on its density, with t = sqrt(df) tan(angle)."""

    def area(end: float) -> float:
        return end * fmean(math.cos(end * (i + 0.5) / 4000) ** (df - 1) for i in range(4000))

    return max(0.0, 1 - area(math.atan(abs(t) / math.sqrt(df))) / area(math.pi / 2))


def t_quantile(tails: float, df: float) -> float:
    """The t with this two-sided p, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, df) > tails else (low, middle)
    return high


def crossed(rows: list[list[int]]) -> dict[str, float]:
    """Mean of seeds x problems (a row per seed), both random: 95 % interval and p, see protocol.yaml."""
    seeds, problems = len(rows), len(rows[0])
    by_seed = [fmean(row) for row in rows]
    by_problem = [fmean(column) for column in zip(*rows, strict=True)]
    mean = fmean(by_seed)
    of_seeds = problems * statistics.variance(by_seed)
    of_problems = seeds * statistics.variance(by_problem)
    rest = sum((v - by_seed[s] - by_problem[p] + mean) ** 2 for s, row in enumerate(rows) for p, v in enumerate(row))
    more = max(of_problems - rest / ((seeds - 1) * (problems - 1)), 0.0)
    error = math.sqrt((of_seeds + more) / (seeds * problems))
    df = min((seeds - 1) * (1 + more / of_seeds) ** 2, 1e4) if of_seeds else 1e4
    half = t_quantile(0.05, df) * error
    p = t_tails(mean / error, df) if error else float(mean == 0)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "df": df, "seeds": seeds}


def holm(values: list[float]) -> list[float]:
    """Adjusted p values, in the given order."""
    adjusted, worst = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        worst = max(worst, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = worst
    return adjusted


def smallest(seeds: int, problems: int, seed_sd: float, discordant: float, power: float) -> float:
    """About the smallest true difference found with this power. Problems add the variance of the discordant ones, which
    more seeds do not reduce: the arms may differ on the same ones in each."""
    error = math.sqrt(seed_sd**2 / seeds + discordant / problems)
    return (t_quantile(0.05, seeds - 1) + t_quantile(2 * (1 - power), seeds - 1)) * error


def minutes_to(points: list[tuple[float, float]], target: float) -> float | None:
    """Minutes to the first of (minutes, accuracy), in order, that reaches the target, as the next one does too."""
    for (minutes, value), (_, following) in itertools.pairwise(points):
        if min(value, following) >= target:
            return minutes
    return None


def trailing(values: list[float], width: int = 5) -> list[float]:
    """Means of the last `width` values, from the first whole window."""
    return [fmean(values[i - width : i]) for i in range(width, len(values) + 1)]


# --- tables and plots -----------------------------------------------------------------------------


class Evidence:
    """Tables and plots, by the name of their place on the page."""

    def __init__(self, protocol: Path = PROTOCOL, folder: Path = LEARNING) -> None:
        self.protocol, self.records, file = Protocol(protocol), read(folder), folder / CANDIDATES
        self.content, self.task = self.protocol.content, next(iter(self.protocol.content["tasks"]))
        self.candidates: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        asked = {(r["task"], json.dumps([r["model"], r["problems_sha256"]])) for r in self.records.values()}
        asked |= {(self.protocol.base(r["arm"]), r["base_sha256"]) for r in self.records.values()}
        if len(asked) > len({of for of, _ in asked}):
            raise ValueError(f"{folder}: runs of one task have other problems or models, so they are not comparable.")

    def table(self, heads: list[str], rows: list[list[str]], text: str, left: int = 1) -> str:
        model = self.content["model"]
        origin = f"{model['name']}; bf16*: {model['weights']}, sha256 `{str(model['gguf_sha256'])[:12]}`."
        return f"{table(heads, rows, left)}\n\n{text} {origin}" if rows else NONE

    def of_stage(self, stage: str) -> list[dict[str, Any]]:
        """Runs of a stage that had the machine for themselves and were not resumed."""
        rows = [row for row in self.records.values() if (row["stage"], row["side_by_side"]) == (stage, 1)]
        return [row for row in rows if row["attempts"] == 1]

    def tested(self, arm: str, task: str | None = None) -> dict[int, dict[str, Any]]:
        """Runs of an arm that answered the test problems, by seed."""
        rows = [r for r in self.records.values() if (r["arm"], r["task"]) == (arm, task or self.task)]
        return {row["seed"]: row for row in sorted(rows, key=lambda r: r["seed"]) if "test" in row["answers"]}

    def difference(self, given: dict[str, Any]) -> dict[str, float] | None:
        """The comparison of two arms; None with fewer than two seeds of both."""
        if (task := given.get("task")) == "second":
            task = next((name for name, row in self.candidates.items() if self.protocol.passes(row)), "none")
        one, other = (self.tested(arm, task) for arm in given["arms"])
        sides = [
            [verdicts(runs[seed], given.get("split", "test")) for seed in one if seed in other] for runs in (one, other)
        ]
        rows = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(*sides, strict=True)]
        return crossed(rows) if len(rows) > 1 else None

    def compared(self) -> list[tuple[str, dict[str, float], float | None]]:
        """(title, difference, Holm's p): the primary comparison, which has none, and the others."""
        found = []
        for given in [self.content["primary"], *self.content["others"]]:
            more = [f"{key} {given[key]}" for key in ("task", "split") if key in given]
            found.append((", ".join([" - ".join(map(starred, given["arms"])), *more]), self.difference(given)))
        others = [(title, d) for title, d in found[1:] if d]
        adjusted = holm([d["p"] for _, d in others])
        first = [(f"{title} (primary)", d, None) for title, d in found[:1] if d]
        return first + [(title, d, p) for (title, d), p in zip(others, adjusted, strict=True)]

    def runs(self) -> str:
        rows = list(self.records.values())
        counts = [f"{stage} {sum(row['stage'] == stage for row in rows)}" for stage in self.protocol.stages]
        taken = [(row["seconds"] + row["eval_seconds"]) * row["gpus"] / row["side_by_side"] for row in rows]
        devices = ", ".join(sorted({row["device"] for row in rows}))
        cells = [str(len(rows)), ", ".join(counts), f"{sum(taken) / 60:.0f}", devices]
        heads = ["runs", "by stage", "GPU minutes", "GPU"]
        return self.table(heads, [cells] if rows else [], "Minutes of runs side by side are shared.")

    def second(self) -> str:
        keys, rows = ("greedy", "greedy_of_sampled", "pass_1", "pass_16"), []
        for name, row in self.candidates.items():
            cells = [percent(row[key]) if row["problems"] else "-" for key in keys]
            rows.append([name, *cells, "yes" if self.protocol.passes(row) else "no"])
        heads = ["task", "greedy", "greedy, of the sampled", "pass@1", "pass@16", "passes"]
        text = "Untrained bf16* on validation, in percent, in the protocol's order up to the first that passes."
        return self.table(heads, rows, text)

    def choices(self) -> str:
        rows = []
        for arm in self.protocol.arms:
            for noise in self.protocol.noises if self.protocol.noisy(arm) else ["none"]:
                runs = [Planned("rates", self.task, arm, noise, rate, 0).name for rate in self.protocol.rates]
                cells = [percent(accuracy(self.records[n], "validation")) if n in self.records else "" for n in runs]
                rows += [[starred(arm), noise, *cells]] if any(cells) else []
        heads = ["arm", "noise", *(f"rate {rate:g}" for rate in self.protocol.rates)]
        text = (
            "Greedy accuracy on validation in percent, one tuning seed; empty: not run, as the noise is chosen first."
        )
        return self.table(heads, rows, text, left=2)

    def visible(self) -> str:
        """Smallest visible difference by number of seeds and assumed standard deviation between seeds."""
        given, problems, rows = self.content["visible"], self.protocol.problems["test"], []
        for seeds in (3, 5):
            found = [smallest(seeds, problems, sd, given["discordant"], given["power"]) for sd in given["seed_sd"]]
            rows.append([f"{seeds}", *map(percent, found)])
        heads = ["seeds", *(f"{100 * sd:g} points between seeds" for sd in given["seed_sd"])]
        text = f"Smallest true difference in points seen with a power of {100 * given['power']:.0f} % on {problems} "
        text += f"problems, of which two arms differ on {100 * given['discordant']:.0f} %; assumed before any run."
        return self.table(heads, rows, text)

    def arms(self) -> str:
        rows = []
        for task in dict.fromkeys(row["task"] for row in self.records.values() if "test" in row["answers"]):
            for arm in self.protocol.arms:
                runs, cells = list(self.tested(arm, task).values()), []
                for part in ("test", "unseen"):
                    after = [accuracy(row, part) for row in runs if part in row["answers"]]
                    cells.append(f"{percent(*after)} ({', '.join(map(percent, after))})" if after else "-")
                if runs:
                    before = percent(*(accuracy(row, "test", "before") for row in runs))
                    chosen = f"{runs[0]['noise']}, {runs[0]['learning_rate']:g}"
                    rows.append([task, starred(arm), chosen, before, *cells])
        heads = ["task", "arm", "noise, rate", "test before", "test after: mean (seeds)", "unseen templates"]
        text = f"Greedy accuracy in percent before and after {self.content['completions']} completions, by seed; arms "
        text += f"below {starred(self.protocol.groups['all'][-1])} are exploratory."
        return self.table(heads, rows, text, left=3)

    def comparisons(self) -> str:
        rows = []
        for title, d, p in self.compared():
            interval = f"{100 * d['mean']:+.1f} ({100 * d['low']:+.1f} to {100 * d['high']:+.1f})"
            adjusted = "-" if p is None else f"{p:.3f}"
            rows.append([title, f"{d['seeds']}", interval, f"{d['df']:.0f}", f"{d['p']:.3f}", adjusted])
        heads = ["difference", "seeds", "points (95 %)", "degrees of freedom", "p", "p by Holm"]
        text = "Test accuracy, paired by problem and seed, both random ([the protocol](benchmarks/protocol.yaml)); "
        text += f"Holm over the {sum(p is not None for *_, p in self.compared())} comparisons so far."
        return self.table(heads, rows, text)

    def explored(self) -> str:
        rows, each = [], self.content["samples"]["each"]
        for arm in self.protocol.arms:
            if not (runs := list(self.tested(arm).values())):
                continue
            counts = [count for row in runs for count in row.get("sampled", [])]
            passed = [percent(*(c / each for c in counts)), percent(*(c > 0 for c in counts))] if counts else ["-", "-"]
            entropy = [row["curves"]["entropy"] for row in runs]
            start, end = fmean(fmean(e[:10]) for e in entropy), fmean(fmean(e[-10:]) for e in entropy)
            gain = 100 * fmean(accuracy(row, "test") - accuracy(row, "test", "before") for row in runs)
            cells = [*passed, f"{start:.3f} -> {end:.3f}", f"{(start - end) / gain:.4f}" if gain > 0 else "-"]
            for name in ("zero_variance", "mismatch_kl"):
                values = [value for row in runs for value in row["curves"][name]]
                cells.append(f"{fmean(values):.3g}" if values else "-")
            rows.append([starred(arm), *cells])
        heads = ["arm", "pass@1", f"pass@{each}", "entropy", "nats per point gained", "prompts without variance"]
        text = "Samples at temperature 1, top-p 0.95; entropy of the first and last ten updates; means over seeds."
        return self.table([*heads, "KL of rollout and trainer"], rows, text)

    def speed(self) -> str:
        rows, reward = [], self.content["reward"]
        for row in self.of_stage("speed"):
            per_step = fmean(row["curves"]["seconds"][4:])  # whole rollouts, of two updates each
            steps = [steps_to(run, reward) for run in self.tested(row["arm"]).values()]
            reached = [step for step in steps if step is not None]
            whole = bool(reached) and len(reached) == len(steps)
            cells = [f"{fmean(reached):.0f}", f"{fmean(reached) * per_step / 60:.1f}"] if whole else ["not by all", "-"]
            rows.append([starred(row["arm"]), f"{per_step:.2f}", *cells])
        heads = ["arm", "seconds per step, alone", f"steps to a reward of {reward:g}", "minutes"]
        return self.table(heads, rows, TIMES + " Reward: mean of five rollouts.")

    def race_points(self, row: dict[str, Any]) -> list[tuple[float, float]]:
        """(minutes from the command, validation accuracy) at the start and each checkpoint, see `TIMES`."""
        seconds, count, ready = row["curves"]["seconds"], row["problems"]["validation"], row["marks"]["ready_s"]
        scores = [(step, fmean(decoded(digits, count))) for step, digits in row["checkpoints"]]
        start = [(0, accuracy(row, "validation", "before"))]
        return [((ready + sum(seconds[:step])) / 60, score) for step, score in start + scores]

    def race(self) -> str:
        rows, target = [], self.content["target"]
        for row in self.of_stage("race"):
            minutes = minutes_to(self.race_points(row), target)
            shown = "not reached" if minutes is None else f"{minutes:.1f}"
            rows.append([starred(row["arm"]), str(row["seed"]), shown, row["device"], f"`{row['command']}`"])
        text = f"Minutes from the command to {100 * target:.0f} % of validation at two checkpoints in a row, greedy; "
        heads = ["arm", "seed", "minutes", "GPU", "command"]
        return self.table(heads, rows, text + TIMES, left=5)

    def plots(self) -> dict[str, str]:
        """File name -> SVG. No plot without its runs."""
        found = {}
        for name, title in PLOTS.items():
            series = {}
            for arm in self.protocol.groups["all"]:
                curves = [trailing(row["curves"][name]) for row in self.tested(arm).values()]
                if curves and (length := min(map(len, curves))):
                    steps = [self.content["completions"] * (i + 5) / (length + 4) for i in range(length)]
                    series[starred(arm)] = [(x, fmean(curve[i] for curve in curves)) for i, x in enumerate(steps)]
            if series:
                found[f"evidence_{name}.svg"] = lines_svg(series, "completions", title)
        if compared := self.compared():
            found["evidence_differences.svg"] = forest_svg(compared)
        races = {f"{starred(row['arm'])}, seed {row['seed']}": self.race_points(row) for row in self.of_stage("race")}
        if races:
            found["evidence_race.svg"] = lines_svg(races, "minutes", "accuracy on validation")
        return found

    def pictures(self) -> str:
        return "\n\n".join(f"![{name[9:-4]}](docs/source/{name})" for name in self.plots()) or NONE

    def tables(self) -> dict[str, Callable[[], str]]:
        made = (self.runs, self.visible, self.second, self.choices, self.arms, self.comparisons, self.explored,
                self.speed, self.race, self.pictures)  # fmt: skip
        return {f"evidence_{function.__name__}": function for function in made}


TIMES = "Times are TRL's step_time: without the optimizer's step, logging, saving and evaluation."
#: curve (mean of five rollouts or updates) -> title; with the differences and the race five plots
PLOTS = {"reward": "reward", "entropy": "entropy, nats per token", "zero_variance": "prompts without variance"}


def starred(arm: str) -> str:
    return arm.replace("bf16", "bf16*")


def percent(*shares: float) -> str:
    return f"{100 * fmean(shares):.1f}"


def steps_to(row: dict[str, Any], reward: float) -> int | None:
    """Updates until the mean of five rollouts reaches this reward."""
    rewards = row["curves"]["reward"]
    at = next((i for i, value in enumerate(trailing(rewards)) if value >= reward), None)
    return None if at is None else round((at + 5) * row["steps"] / len(rewards))


# --- SVG ------------------------------------------------------------------------------------------

COLORS = "#1f77b4 #d62728 #2ca02c #ff7f0e #9467bd #8c564b".split()
WIDTH, HEIGHT, LEFT, BELOW = 640, 320, 60, 40


def text_svg(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def svg(parts: list[str], height: int = HEIGHT, dark: bool = False) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
    head += f'font-size="11" fill="{"#e6e6e6" if dark else "#222"}">\n'
    head += f'<rect width="{WIDTH}" height="{height}" fill="{"#0d1117" if dark else "white"}"/>'
    return "\n".join([head, *parts, "</svg>\n"])


def bars_svg(
    groups: dict[str, list[tuple[str, float | None, float | None]]], heads: tuple[str, str], dark: bool
) -> str:
    """Two bars per row (None: not run), in groups of rows; `heads`: quantities with their units."""
    rows = [row for group in groups.values() for row in group]
    most = [max(row[i] or 0 for row in rows) for i in (1, 2)]
    parts, y = [text_svg(190 + 225 * i, 16, head) for i, head in enumerate(heads)], 24
    for title, group in groups.items():
        parts.append(text_svg(8, y + 14, title, 'font-weight="bold"'))
        y += 20
        for name, *values in group:
            parts.append(text_svg(20, y + 12, name))
            for i, value in enumerate(values):
                left, wide = 190 + 225 * i, 170 * (value or 0) / most[i]
                color = "#8b949e" if name.startswith("TRL") else COLORS[i]
                parts.append(f'<rect x="{left}" y="{y + 2}" width="{wide:.1f}" height="13" fill="{color}"/>')
                parts.append(text_svg(left + wide + 5, y + 12, "not run" if value is None else f"{value:.1f}"))
            y += 18
    return svg(parts, y + 8, dark)


def lines_svg(series: dict[str, list[tuple[float, float]]], x_title: str, y_title: str) -> str:
    """One line per name, from 0 on both axes."""
    right = max(x for points in series.values() for x, _ in points)
    top = 1.05 * max(max(y for points in series.values() for _, y in points), 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - LEFT - 150, HEIGHT - BELOW - 20
        return LEFT + wide * x / right, 20 + high * (1 - y / top)

    parts = [text_svg(LEFT, 12, y_title), text_svg(*place(right / 2, 0), x_title, 'dy="32" text-anchor="middle"')]
    for i in range(5):
        (x, bottom), (left, y) = place(right * i / 4, 0), place(0, top * i / 4)
        parts += [
            text_svg(
                x,
                bottom + 16,
                f"{right * i / 4:,.0f}" if right > 99 else f"{right * i / 4:.1f}",
                'text-anchor="middle"',
            ),
            text_svg(left - 6, y + 4, f"{top * i / 4:,.0f}" if top > 99 else f"{top * i / 4:.2g}", 'text-anchor="end"'),
            f'<path d="M{left:.1f} {y:.1f}H{WIDTH - 150}" stroke="#ddd"/>',
        ]
    for i, (name, points) in enumerate(series.items()):
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[i % 6]}" stroke-width="1.5"/>')
        parts.append(text_svg(WIDTH - 140, 30 + 16 * i, name, f'fill="{COLORS[i % 6]}"'))
    return svg(parts)


def forest_svg(compared: list[tuple[str, dict[str, float], float | None]]) -> str:
    """Differences with their 95 % intervals, in points."""
    most = max(abs(100 * d[side]) for _, d, _ in compared for side in ("low", "high")) or 1.0
    middle, scale, height = 450, 170 / most, 40 + 22 * len(compared)
    parts = [f'<path d="M{middle} 10V{height - 25}" stroke="#888"/>']
    for i, (title, d, _) in enumerate(compared):
        x, low, high = (middle + scale * 100 * d[side] for side in ("mean", "low", "high"))
        y = 24 + 22 * i
        parts += [
            text_svg(10, y + 4, title),
            f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{COLORS[0]}"/>',
            f'<circle cx="{x:.1f}" cy="{y}" r="3.5" fill="{COLORS[0]}"/>',
        ]
    title = f"points of test accuracy; the axis ends at {most:.1f}"
    parts.append(text_svg(middle, height - 8, title, 'text-anchor="middle"'))
    return svg(parts, height)
