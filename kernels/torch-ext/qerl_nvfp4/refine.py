"""Measure, on this GPU, what may be fastest for the matrices of one model, and keep it in the user's cache (measured.py).

For each matrix and number of tokens a few candidates are compared: what is selected without any measurement, the same with x left in its
natural order, and what the cost model (cost.py) prices within `MARGIN` of the cheapest; on GPUs and shapes for which the model has no
prices, neighbours of the heuristic's choice.  All of them are compiled in parallel first.  Each is compared with the reference before it is timed, and the fastest once more, whole, after
that; one that is wrong or fails is named and never chosen.  What is selected without a measurement stays where nothing is faster by `GAIN`.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from . import bounds, cost, measured, ops, select, tune
from .launch import forget_scratch
from .precompile import Weight, compile_launches

MARGIN = 1.3  # of the price: the model's error on shapes outside its fit is about half of it
MOST = 6  # candidates of one number of tokens
GAIN = 1.01  # a difference below is noise, and another kernel to compile
SKINNY = ((4, 1, 2), (4, 1, 4), (8, 1, 2), (2, 2, 2))  # WK, WN, R
COSTS = (2, 3, 5, 8)  # K steps that a piece of x A^T counts as, tried for the fastest layout


class Refined(NamedTuple):
    """What was measured of one matrix."""

    N: int
    K: int
    entries: list[dict]  # as measured.py keeps them; "shipped" and "shipped_us": what was selected before
    unmeasured: list[int]  # numbers of tokens for which time was up, or every candidate failed

    def faster(self) -> list[dict]:
        """Entries whose kernel is another one than what was selected before."""
        return [e for e in self.entries if e["config"] != e["shipped"]]

    def text(self) -> str:
        """One line: how many were measured, and what was gained."""
        line = f"{self.N} x {self.K}: {len(self.entries)} numbers of tokens measured"
        gains = [(e["shipped_us"] / e["us"], e["tokens"]) for e in self.faster() if e["shipped_us"]]
        if gains:
            most, at = max(gains)
            line += f", {len(gains)} got another kernel, up to {most - 1:.0%} faster (at {at})"
        elif self.entries:
            line += ", what is shipped is the fastest"
        if self.unmeasured:
            line += f"; {len(self.unmeasured)} not measured, what is shipped stays"
        return line


def near(weight: Weight, M: int, device: int | None = None) -> list[dict]:
    """Candidates for M tokens, what is selected without measurements first; each is complete, also for an adapter."""
    N, K, splits, rank, *_ = weight
    name, sms, capability = select.device_properties(device)
    now = select.explain(N, K, M, device, True, rank, len(splits), own=False)[0]
    prices = cost.priced(N, K, M, sms, rank * len(splits)) if capability[0] == 9 and M > 16 else []
    card = bounds.card_of(name, capability, sms)
    if card is not None and M > 16:
        prices = bounds.priced(card, N, K, M, select.shared_memory_limit(device))
    found = [config for us, config in prices if us <= MARGIN * prices[0][0]][: MOST - 1]
    if capability[0] == 9 and cost.can_be_natural(now):
        twin = {key: value for key, value in now.items() if key != "natural"}
        found = [twin if now.get("natural") else twin | {"natural": True}, *found][: MOST - 1]
    if M <= 16:
        found = skinny_near(N, K, M, sms)
    if not found:
        found = portable_near(N, K, M, device)
    return list({repr(sorted(c.items())): c for c in (now, *found)}.values())


def skinny_near(N: int, K: int, M: int, sms: int) -> list[dict]:
    """Layouts of the kernel for up to 16 tokens, with as many programs as are resident and one less per multiprocessor."""
    found = []
    for WK, WN, R in SKINNY:
        config = {"kernel": "skinny", "BM": 8 if M <= 8 else 16, "WK": WK, "WN": WN, "R": R}
        resident = 16 // (WK * WN)
        if select.skinny_fits(config, N, K):
            found += [config | {"grid": sms * i} for i in range(max(1, resident - 1), resident + 1)]
    return found


def portable_near(N: int, K: int, M: int, device: int | None) -> list[dict]:
    """Neighbours of the heuristic's choice for the kernel of every GPU, and the dense path."""
    _, sms, capability = select.device_properties(device)
    found, limit = [], select.shared_memory_limit(device)
    if M <= 256:
        first = select.portable_heuristic(N, K, M, sms, capability[0] == 9, limit)
        most = math.ceil(K / first["BK"])
        found = [
            first,
            first | {"BN": 192 - first["BN"]},  # 64 or 128
            first | {"SK": min(most, 2 * first["SK"])},
            first | {"SK": max(1, first["SK"] // 2)},
            first | {"NS": max(1, first["NS"] - 1)},
            first | {"NW": 8},
        ]
        found = [config for config in found if select.portable_shared_memory(config) <= limit]
    if M >= 32:
        found.append({"kernel": "dense"})
    return found


def compile_ahead(work: Iterable[tuple[Weight, dict[int, list[dict]]]], tell: Callable[[str], None]) -> None:
    """Compile all candidates, {number of tokens: configurations} of each weight, in parallel; what fails is left to `measure`."""

    def launch_all() -> None:
        empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
        for (N, K, splits, rank, *_), candidates in work:
            scale = ops.align_scale_rows(empty(N, K // 16, dtype=torch.uint8))  # as they are measured
            packed = empty(N, K // 2, dtype=torch.uint8), scale
            adapter = (empty(len(splits) * rank, K), empty(N, rank), splits) if rank else (None, None, None)
            for M, configs in candidates.items():
                for config in configs:
                    arguments = (empty(M, K), *packed, empty(1, dtype=torch.float32), None, *adapter, empty(M, N))
                    try:
                        ops.product(config, *arguments)
                    except tune.FAILURES as failure:  # measured, it fails again and is named
                        tell(f"not compiled ahead: {config} for {N} x {K}: {type(failure).__name__} {failure}"[:300])

    compile_launches(launch_all, tell=tell)


def measure(
    weight: Weight, candidates: dict[int, list[dict]], l2: int, deadline: float, device: str = "cuda"
) -> Refined:
    """Time the candidates, {number of tokens: configurations, what is shipped first}, of one matrix until `deadline` (`time.time()`).

    `l2`: bytes of the second-level cache, beside which the copies of the matrix have to be large.
    """
    N, K, splits, rank, *_ = weight
    matrix = tune.Matrix(N, K, splits if len(splits) > 1 else None, l2, max(rank, 1), device)
    entries, unmeasured = [], []
    for M in sorted(candidates, key=lambda M: (-(M & -M), M)):  # what time leaves undone is spread
        configs = candidates[M]
        timed = matrix.time(configs, M, bool(rank), deadline) if time.time() < deadline else []
        known = {repr(config): us for us, config in timed}
        if timed and timed[0][1]["kernel"] == "skinny" and rank:
            more = [timed[0][1] | {"cost": c} for c in COSTS]
            timed = sorted([*timed, *matrix.time(more, M, True, deadline)], key=lambda t: t[0])
        best = fastest(matrix, timed, configs[0], M, bool(rank))
        if best is None:
            unmeasured.append(M)
            continue
        us, config = best
        before = known.get(repr(configs[0]))
        entries.append(
            {
                **{"N": N, "K": K, "rank": measured.padded(rank), "tokens": M, "config": config, "us": round(us, 2)},
                **{"shipped": configs[0], "shipped_us": None if before is None else round(before, 2)},
            }
        )
    return Refined(N, K, sorted(entries, key=lambda e: e["tokens"]), sorted(unmeasured))


def fastest(matrix: tune.Matrix, timed: list, shipped: dict, M: int, adapter: bool) -> tuple[float, dict] | None:
    """(microseconds, configuration): the first of `timed` that is still right after all the launches that timed it."""
    own = next((us for us, config in timed if config == shipped), math.inf)
    if timed and own <= GAIN * timed[0][0]:
        timed = [(own, shipped), *timed]
    x, out = matrix.problem(M)
    expected = matrix.expected(x, adapter)
    for us, config in timed:
        call = matrix.call(config, x, out, adapter)
        if matrix.error(call, out, expected) < tune.TOLERANCE and bool(torch.isfinite(out).all()):
            return us, config
        print(f"# WRONG after it was timed: {matrix.N}x{matrix.K} M={M} {config}", flush=True)
        forget_scratch()
    return None


def why_not(device: int | None = None) -> str:
    """Why nothing can be measured here; "": it can."""
    if not ops.is_available(device):
        return ops.describe(device)
    if not ops.use_gluon(torch.cuda.current_device() if device is None else device):
        return f"this Triton lacks what the kernels are written with ({ops.missing_from_gluon()}); install Triton 3.6 to 3.9"
    return ""


def refine(
    weights: Iterable[Weight],
    tokens: Iterable[int] = range(measured.STEP, 513, measured.STEP),
    seconds: float = 90.0,
    tell: Callable[[str], None] = print,
) -> list[Refined]:
    """Measure the matrices of a model on the current CUDA device and add what is fastest to the user's cache, matrix by matrix.

    Args:
        weights: the matrices (`precompile.Weight`), with the rank of their adapters.
        tokens: numbers of tokens, multiples of `measured.STEP`.
        seconds: when to stop, compilation included. What is not measured by then stays as it is selected without.
        tell: called before and after what takes more than a second: compiling, and each matrix.

    Raises:
        `ValueError`: a number of tokens is no multiple of `measured.STEP`. `RuntimeError`: nothing can be measured here.
        `OSError`: the cache's folder cannot be written.
    """
    sizes, deadline = sorted(set(tokens)), time.time() + seconds
    odd = [M for M in sizes if M <= 0 or M % measured.STEP]
    if odd or not sizes:
        raise ValueError(
            f"tokens {odd or sizes}: a measurement answers for {measured.STEP} numbers of tokens, so give multiples of {measured.STEP}."
        )
    if reason := why_not():
        raise RuntimeError(f"There is nothing to tune: {reason}.")
    device = torch.cuda.current_device()
    name, sms, _ = select.device_properties(device)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    where = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter
    distinct: dict[tuple[int, int], Weight] = {}
    for weight in sorted(weights, key=lambda w: len(w.splits)):  # of two alike that with more shards
        distinct[weight.N, weight.K] = weight._replace(rank=measured.padded(weight.rank))
    work = [(w, {M: near(w, M, device) for M in sizes}) for w in sorted(distinct.values(), key=lambda w: -w.N * w.K)]
    compile_ahead(work, tell)
    left, done = sum(w.N * w.K for w, _ in work), []
    for weight, candidates in work:
        # large ones take longer, but not in proportion: launches and captures of small ones take as long
        share = 0.5 * weight.N * weight.K / left + 0.5 / (len(work) - len(done))
        left -= weight.N * weight.K
        now = time.time()
        tell(f"Measuring {weight.N} x {weight.K}, {len(candidates)} numbers of tokens ...")
        found = measure(weight, candidates, l2, now + share * (deadline - now), where)
        done.append(found)
        if found.entries:
            measured.write(name, sms, found.entries)
        torch.cuda.empty_cache()
    select.forget_measured()
    return done
