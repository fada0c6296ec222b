"""Statistics, tables and plots of docs/source/evidence.md, from the records of learning.py. tables.py writes them."""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import ROOT
from protocol import CANDIDATES, LEARNING, NotYet, Planned, Protocol, Records, accuracy, read, verdicts
from speed_tables import table

PROTOCOL = ROOT / "benchmarks/protocol.yaml"
NONE = "No run is recorded yet."

# --- statistics -----------------------------------------------------------------------------------


def t_tails(t: float, df: float) -> float:
    """Two-sided p of Student's t: Simpson's rule on its density, with t = sqrt(df) tan(angle)."""

    def area(end: float) -> float:
        step = end / 2000
        return step / 3 * sum((1, 4, 2)[(i > 0) + (i > 0 and i % 2 == 0)] * math.cos(i * step) ** (df - 1)
                              for i in range(2000)) + step / 3 * math.cos(end) ** (df - 1)  # fmt: skip

    return max(0.0, 1 - area(math.atan(abs(t) / math.sqrt(df))) / area(math.pi / 2 - 1e-9))


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
    by_seed = [statistics.fmean(row) for row in rows]
    by_problem = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    mean = statistics.fmean(by_seed)
    of_seeds = problems * statistics.variance(by_seed)
    of_problems = seeds * statistics.variance(by_problem)
    rest = sum((v - by_seed[s] - by_problem[p] + mean) ** 2 for s, row in enumerate(rows) for p, v in enumerate(row))
    more = max(of_problems - rest / ((seeds - 1) * (problems - 1)), 0.0)
    error = math.sqrt((of_seeds + more) / (seeds * problems))
    df = (of_seeds + more) ** 2 / (of_seeds**2 / (seeds - 1)) if of_seeds else 1e4
    df = min(df, 1e4)
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
    """Smallest true difference found with this power: problems add the variance of their discordant share."""
    error = math.sqrt(seed_sd**2 / seeds + discordant / (problems * seeds))
    return (t_quantile(0.05, seeds - 1) + t_quantile(2 * (1 - power), seeds - 1)) * error


def minutes_to(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """Minutes to the first of (seconds, accuracy), in order, that reaches the target and so does the next one."""
    points = list(points)
    for (seconds, value), (_, following) in zip(points, [*points[1:], points[-1]], strict=True):
        if min(value, following) >= target:
            return seconds / 60
    return None


def trailing(values: list[float], width: int = 5) -> list[float]:
    """Means of the last `width` values, from the first whole window."""
    return [statistics.fmean(values[i - width : i]) for i in range(width, len(values) + 1)]


# --- the records ----------------------------------------------------------------------------------


class Evidence:
    """Tables and plots, by the name of their place on the page."""

    def __init__(self, protocol: Path = PROTOCOL, folder: Path = LEARNING) -> None:
        self.protocol, self.records, file = Protocol(protocol), read(folder), folder / CANDIDATES
        self.candidates: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        self.first = next(iter(self.protocol.content["tasks"]))

    def note(self, text: str) -> str:
        model = self.protocol.content["model"]
        return f"\n\n{text} {model['name']}; bf16*: {model['weights']}, sha256 `{str(model['gguf_sha256'])[:12]}`."

    def tested(self, arm: str, task: str | None = None) -> Records:
        """Runs of an arm that answered the test problems, by seed."""
        rows = [r for r in self.records.values() if (r["arm"], r["task"]) == (arm, task or self.first)]
        return {str(row["seed"]): row for row in sorted(rows, key=lambda r: r["seed"]) if "test" in row["answers"]}

    def difference(self, given: dict[str, Any]) -> dict[str, float] | None:
        """The comparison of two arms; None with fewer than two seeds of both."""
        try:
            task = self.protocol.second(self.candidates) if given.get("task") == "second" else None
        except NotYet:
            return None
        one, other = (self.tested(arm, task) for arm in given["arms"])
        part = given.get("split", "test")
        rows = [
            [a - b for a, b in zip(verdicts(one[seed], part), verdicts(other[seed], part), strict=True)]
            for seed in one
            if seed in other
        ]
        return crossed(rows) if len(rows) > 1 else None

    def compared(self) -> list[tuple[str, dict[str, float], float | None]]:
        """(title, difference, Holm's p): the primary comparison, which has none, and the others."""
        every = [self.protocol.content["primary"], *self.protocol.content["others"]]
        found = [(" - ".join(map(starred, g["arms"])), g, self.difference(g)) for g in every]
        named = [(f"{title}{''.join(f', {g[k]}' for k in ('task', 'split') if k in g)}", d) for title, g, d in found]
        primary, others = named[0], [(title, d) for title, d in named[1:] if d is not None]
        adjusted = holm([d["p"] for _, d in others])
        first = [] if primary[1] is None else [(f"**{primary[0]}** (primary)", primary[1], None)]
        return first + [(title, d, p) for (title, d), p in zip(others, adjusted, strict=True)]

    # --- tables ---

    def runs(self) -> str:
        if not self.records:
            return NONE
        rows = list(self.records.values())
        by_stage = {stage: sum(row["stage"] == stage for row in rows) for stage in self.protocol.stages}
        minutes = sum(row["seconds"] / row["side_by_side"] for row in rows) / 60
        shared = [row["device"] for row in rows], [(row["commit"] or "unknown")[:7] for row in rows]
        devices, commits = (", ".join(sorted(set(each))) for each in shared)
        counted = ", ".join(f"{stage} {n}" for stage, n in by_stage.items() if n)
        return f"{len(rows)} runs ({counted}), {minutes:.0f} GPU minutes; {devices}; commit {commits}."

    def choices(self) -> str:
        rows = []
        for arm in self.protocol.arms:
            for noise in self.protocol.noises if self.protocol.noisy(arm) else ["none"]:
                runs = [Planned("rates", self.first, arm, noise, rate, 0).name for rate in self.protocol.rates]
                cells = [
                    f"{100 * accuracy(self.records[n], 'validation'):.1f}" if n in self.records else "" for n in runs
                ]
                rows += [[starred(arm), noise, *cells]] if any(cells) else []
        heads = ["arm", "noise", *(f"rate {rate:g}" for rate in self.protocol.rates)]
        text = (
            "Greedy accuracy on validation in percent, one tuning seed; empty: not run, as the noise is chosen first."
        )
        return table(heads, rows, left=2) + self.note(text) if rows else NONE

    def arms(self) -> str:
        rows = []
        for task in dict.fromkeys(row["task"] for row in self.records.values() if "test" in row["answers"]):
            for arm in self.protocol.arms:
                if not (runs := list(self.tested(arm, task).values())):
                    continue
                cells = []
                for part in ("test", "unseen"):
                    has = [row for row in runs if part in row["answers"]]
                    after = [f"{100 * accuracy(row, part):.1f}" for row in has]
                    mean = statistics.fmean(accuracy(row, part) for row in has) if has else 0
                    cells.append(f"{100 * mean:.1f} ({', '.join(after)})" if has else "-")
                before = 100 * statistics.fmean(accuracy(row, "test", "before") for row in runs)
                setting = f"{runs[0]['noise']}, {runs[0]['learning_rate']:g}"
                rows.append([task, starred(arm), setting, f"{before:.1f}", *cells])
        text = (
            f"Greedy accuracy in percent before and after {self.protocol.content['completions']} completions, by seed."
        )
        heads = ["task", "arm", "noise, rate", "test before", "test after: mean (seeds)", "unseen templates"]
        return table(heads, rows, left=3) + self.note(text) if rows else NONE

    def comparisons(self) -> str:
        rows = []
        for title, d, p in self.compared():
            interval = f"{100 * d['mean']:+.1f} ({100 * d['low']:+.1f} to {100 * d['high']:+.1f})"
            adjusted = "-" if p is None else f"{p:.3f}"
            rows.append([title, f"{d['seeds']}", interval, f"{d['df']:.0f}", f"{d['p']:.3f}", adjusted])
        heads = ["difference", "seeds", "points (95 %)", "degrees of freedom", "p", "p by Holm"]
        text = "Test accuracy, paired by problem and seed, both random ([the protocol](benchmarks/protocol.yaml))."
        return table(heads, rows) + self.note(text) if rows else NONE

    def explored(self) -> str:
        rows = []
        for arm in self.protocol.arms:
            runs = list(self.tested(arm).values())
            if not runs:
                continue
            drawn = [row for row in runs if "sampled" in row]
            each = self.protocol.content["samples"]["each"]
            one = statistics.fmean(c / each for row in drawn for c in row["sampled"]) if drawn else math.nan
            all_ = statistics.fmean(c > 0 for row in drawn for c in row["sampled"]) if drawn else math.nan
            ends = [
                (statistics.fmean(e[:10]), statistics.fmean(e[-10:])) for e in (r["curves"]["entropy"] for r in runs)
            ]
            start, end = (statistics.fmean(side) for side in zip(*ends, strict=True))
            gain = 100 * statistics.fmean(accuracy(r, "test") - accuracy(r, "test", "before") for r in runs)
            spent = f"{(start - end) / gain:.4f}" if gain > 0 else "-"
            of = {name: [v for r in runs for v in r["curves"][name]] for name in ("zero_variance", "mismatch_kl")}
            shown = [f"{statistics.fmean(values):.3g}" if values else "-" for values in of.values()]
            sampled = [f"{100 * v:.1f}" if drawn else "-" for v in (one, all_)]
            rows.append([starred(arm), *sampled, f"{start:.3f} -> {end:.3f}", spent, *shown])
        heads = [
            "arm",
            "pass@1",
            f"pass@{self.protocol.content['samples']['each']}",
            "entropy",
            "nats per point gained",
        ]
        text = "After training, at temperature 1; entropy of the first and last ten updates; means over all seeds."
        more = ["prompts without variance", "KL of rollout and trainer"]
        return table([*heads, *more], rows) + self.note(text) if rows else NONE

    def speed(self) -> str:
        rows, reward = [], self.protocol.content["reward"]
        for arm in self.protocol.arms:
            alone = [r for r in self.records.values() if (r["arm"], r["stage"], r["side_by_side"]) == (arm, "speed", 1)]
            runs = list(self.tested(arm).values())
            if not alone or not runs:
                continue
            per_step = statistics.median(alone[0]["curves"]["seconds"][4:])
            steps = [steps_to(row, reward) for row in runs]
            mean = None if None in steps else statistics.fmean(s for s in steps if s is not None)
            shown = ["not reached by all", "-"] if mean is None else [f"{mean:.0f}", f"{mean * per_step / 60:.1f}"]
            rows.append([starred(arm), f"{per_step:.2f}", *shown])
        heads = ["arm", "seconds per step, alone", f"steps to a reward of {reward:g}", "minutes"]
        text = "Reward: mean of five rollouts. Steps are means over the seeds of the test."
        return table(heads, rows) + self.note(text) if rows else NONE

    def race_points(self, row: dict[str, Any]) -> list[tuple[float, float]]:
        """(seconds from the command, validation accuracy) of each checkpoint, without the evaluations."""
        seconds, count = row["curves"]["seconds"], row["problems"]["validation"]
        scores = [(step, sum(verdicts_of(text, count)) / count) for step, text in row["checkpoints"]]
        start = [(row["marks"]["ready_s"], accuracy(row, "validation", "before"))]
        return start + [(row["marks"]["ready_s"] + sum(seconds[:step]), score) for step, score in scores]

    def race(self) -> str:
        rows = []
        for row in self.records.values():
            if row["stage"] == "race" and row["attempts"] == 1 and row["side_by_side"] == 1:
                minutes = minutes_to(self.race_points(row), self.protocol.content["target"])
                shown = "not reached" if minutes is None else f"{minutes:.1f}"
                rows.append([starred(row["arm"]), str(row["seed"]), shown, row["device"], f"`{row['command']}`"])
        text = (
            f"Minutes from the command to a greedy accuracy of {100 * self.protocol.content['target']:.0f} % on "
            "validation at two checkpoints in a row, evaluations left out."
        )
        return table(["arm", "seed", "minutes", "GPU", "command"], rows, left=5) + self.note(text) if rows else NONE

    def second(self) -> str:
        rows = []
        for name, row in self.candidates.items():
            names = "greedy", "greedy_of_sampled", "pass_1", "pass_16"
            cells = [f"{100 * row[k]:.1f}" if row["problems"] else "-" for k in names]
            rows.append([name, *cells, "yes" if self.protocol.passes(row) else "no"])
        heads = ["task", "greedy", "greedy, of the sampled", "pass@1", "pass@16", "passes"]
        text = "Untrained bf16* on validation, in percent, in the protocol's order up to the first that passes."
        return table(heads, rows) + self.note(text) if rows else NONE

    def visible(self) -> str:
        return visible(self.protocol) + self.note("Assumed before any run.")

    # --- plots ---

    def plots(self) -> dict[str, str]:
        """File name -> SVG. No plot without its runs."""
        arms = {arm: list(self.tested(arm).values()) for arm in self.protocol.arms}
        arms = {arm: runs for arm, runs in arms.items() if runs}
        total, found = self.protocol.content["completions"], {}
        titles = {
            "reward": "reward, five rollouts",
            "entropy": "entropy, nats",
            "zero_variance": "prompts without variance",
        }
        for name, title in titles.items():
            series = {
                starred(arm): mean_curve([trailing(r["curves"][name]) for r in runs]) for arm, runs in arms.items()
            }
            series = {arm: spread(values, total) for arm, values in series.items() if values}
            if series:
                found[f"evidence_{name}.svg"] = lines_svg(series, "completions", title)
        if compared := self.compared():
            found["evidence_differences.svg"] = forest_svg(compared)
        races = {f"{starred(r['arm'])}, seed {r['seed']}": r for r in self.records.values() if r["stage"] == "race"}
        if races:
            points = {name: [(s / 60, v) for s, v in self.race_points(row)] for name, row in races.items()}
            found["evidence_race.svg"] = lines_svg(points, "minutes", "accuracy on validation")
        return found

    def pictures(self) -> str:
        return "\n\n".join(f"![{name[9:-4]}](docs/source/{name})" for name in self.plots()) or NONE

    def tables(self) -> dict[str, Callable[[], str]]:
        made = (self.runs, self.second, self.choices, self.visible, self.arms, self.comparisons, self.explored,
                self.speed, self.race, self.pictures)  # fmt: skip
        return {f"evidence_{function.__name__}": function for function in made}


def verdicts_of(text: str, count: int) -> list[int]:
    return verdicts({"answers": {"validation": {"after": text}}, "problems": {"validation": count}}, "validation")


def starred(arm: str) -> str:
    return arm.replace("bf16", "bf16*")


def steps_to(row: dict[str, Any], reward: float) -> int | None:
    """Updates until the mean of five rollouts reaches this reward."""
    means = trailing(row["curves"]["reward"])
    at = next((i for i, value in enumerate(means) if value >= reward), None)
    return None if at is None else round((at + 5) * row["steps"] / len(row["curves"]["reward"]))


def visible(protocol: Protocol) -> str:
    """Smallest visible difference by number of seeds and assumed standard deviation between seeds."""
    given, problems = protocol.content["visible"], protocol.problems["test"]
    rows = []
    for seeds in (3, 5):
        found = [smallest(seeds, problems, sd, given["discordant"], given["power"]) for sd in given["seed_sd"]]
        rows.append([f"{seeds}", *(f"{100 * value:.1f}" for value in found)])
    heads = ["seeds", *(f"{100 * sd:g} points between seeds" for sd in given["seed_sd"])]
    return table(heads, rows) + (
        f"\n\nSmallest true difference in points seen with a power of {100 * given['power']:.0f} % on {problems} "
        f"problems, of which two arms differ on {100 * given['discordant']:.0f} %."
    )


def mean_curve(curves: list[list[float]]) -> list[float]:
    length = min(map(len, curves))
    return [statistics.fmean(curve[i] for curve in curves) for i in range(length)]


def spread(values: list[float], total: int) -> list[tuple[float, float]]:
    return [(total * (i + 1) / len(values), value) for i, value in enumerate(values)]


# --- SVG ------------------------------------------------------------------------------------------

COLORS = "#1f77b4 #d62728 #2ca02c #ff7f0e #9467bd #8c564b".split()
WIDTH, HEIGHT, LEFT, BELOW = 640, 320, 60, 40


def text_svg(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def svg(parts: list[str], height: int = HEIGHT) -> str:
    box, font = f'viewBox="0 0 {WIDTH} {height}"', 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


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
            text_svg(x, bottom + 16, f"{right * i / 4:.3g}", 'text-anchor="middle"'),
            text_svg(left - 6, y + 4, f"{top * i / 4:.2g}", 'text-anchor="end"'),
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
    middle, scale, height = 420, 190 / most, 40 + 22 * len(compared)
    parts = [f'<path d="M{middle} 10V{height - 25}" stroke="#888"/>']
    for i, (title, d, _) in enumerate(compared):
        x, low, high = (middle + scale * 100 * d[side] for side in ("mean", "low", "high"))
        y = 24 + 22 * i
        parts += [
            text_svg(10, y + 4, title.replace("**", "")),
            f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{COLORS[0]}"/>',
            f'<circle cx="{x:.1f}" cy="{y}" r="3.5" fill="{COLORS[0]}"/>',
        ]
    parts.append(
        text_svg(middle, height - 8, f"points of test accuracy; the axis ends at {most:.1f}", 'text-anchor="middle"')
    )
    return svg(parts, height)
