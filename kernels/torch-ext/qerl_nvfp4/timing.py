"""Timing on a GPU: CUDA graph replays over rotating copies of the weights, so that every call reads cold memory as a model does."""

import math
import statistics

import torch

from .ops import align_scale_rows


def copies_needed(nbytes: int, l2_bytes: int, limit: int = 24) -> int:
    """Copies of a weight that together are several times the second-level cache; of a small one at most `limit`, about its size."""
    return max(2, min(limit, math.ceil(5 * l2_bytes / nbytes)))


def time_us(call, copies: int, repeats: int = 7, at_least: int = 16) -> float:
    """Median microseconds of `call(i)`, i = 0 .. copies - 1, from replays of one captured graph."""
    return times_us([call], copies, repeats, at_least)[0]


def times_us(calls: list, copies: int, repeats: int = 7, at_least: int = 16) -> list[float]:
    """The same for several calls in turns: large products draw so much power that the clock falls while they are timed."""
    count = copies * max(1, round(at_least / copies))
    graphs = []
    for call in calls:
        call(0)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(count):
                call(i % copies)
    times = [[] for _ in calls]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(1 + repeats):
        for graph, found in zip(graphs, times, strict=True):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / count)
    return [statistics.median(found[1:]) for found in times]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def random_weight(N: int, K: int, seed: int, device: str = "cuda"):
    """packed, block_scale (bytes) with normal values, in rows that every kernel can read, as an engine holds them."""
    g = torch.Generator(device=device).manual_seed(seed)
    packed = torch.randint(0, 256, (N, K // 2), device=device, dtype=torch.uint8, generator=g)
    scale = torch.randint(0x28, 0x70, (N, K // 16), device=device, dtype=torch.uint8, generator=g)
    return packed, align_scale_rows(scale)
