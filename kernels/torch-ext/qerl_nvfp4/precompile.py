"""Compile what a model will launch before it is launched: every kernel once, in parallel.

Each matrix and number of tokens goes through the launch code itself, with tensors on the meta device and Triton's warm-up in place of
the launch (launch.launcher): there is no second list of what a kernel is specialized on.  Triton keeps the binaries in its cache on disk
(TRITON_CACHE_DIR); in this process they are loaded as well, so that the first launch finds everything.
"""

import concurrent.futures
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from . import measured, ops
from .cost import SIZES
from .select import BUCKETS, choose, measured_for
from .turns import QUIET_S, one_process_at_a_time

#: numbers of tokens that between them run every kernel: what is chosen for a number changes at these edges, what a launch makes of it once between
_EDGES = sorted({*BUCKETS, *SIZES})
#: (`_tokens_of` adds those of measurements of a matrix)
TOKENS = (*(M for low, high in itertools.pairwise((0, *_EDGES)) for M in (low + 1, high)), _EDGES[-1] + 1)


class Weight(NamedTuple):
    """A packed weight (N, K) of one or several layers of `splits` rows each, and the rank of their adapters (0: none). `aligned`: whether
    its block scales are what `ops.align_scale_rows` makes of them, else contiguous."""

    N: int
    K: int
    splits: tuple[int, ...]
    rank: int = 0
    bias: bool = False
    aligned: bool = False


class Compiled(NamedTuple):
    """How many kernels are ready, and why others failed to compile, which a launch would try again."""

    kernels: int
    seconds: float
    failed: list[str]


class _Collector(concurrent.futures.Executor):
    """Takes what Triton would compile, and compiles it when all is known."""

    def __init__(self) -> None:
        self.tasks: list[tuple[concurrent.futures.Future, Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self.tasks.append((future, lambda: fn(*args, **kwargs)))
        return future

    def cancel(self) -> None:
        for future, _ in self.tasks:
            future.cancel()
            future.set_running_or_notify_cancel()  # else whoever waits for it is not told

    def run(self, device: int, threads: int, tell: Callable[[str], None]) -> list[str]:
        """Returns the errors."""
        begin, futures = time.perf_counter(), [future for future, _ in self.tasks]
        threads = max(1, min(threads, len(futures)))
        with concurrent.futures.ThreadPoolExecutor(
            threads, initializer=torch.cuda.set_device, initargs=(device,)
        ) as pool:
            for future, compile_fn in self.tasks:
                pool.submit(_compile, compile_fn).add_done_callback(functools.partial(_pass_on, future))
            _, left = concurrent.futures.wait(futures, timeout=QUIET_S)
            if left:
                tell(
                    f"Compiling {len(left)} kernels for this model and GPU on {threads} threads (first start only) ..."
                )
        if left:
            tell(f"... {time.perf_counter() - begin:.0f} s")
        errors = [future.exception() for future in futures]
        return [f"{type(error).__name__}: {error}" for error in errors if error is not None]


def _compile(compile_fn: Callable[[], Any]) -> Any:
    kernel = compile_fn()
    kernel.run  # noqa: B018  compiles the C function that launches it, which takes as long as a small kernel, and loads both
    return kernel


def _pass_on(future: concurrent.futures.Future, done: concurrent.futures.Future) -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:  # the launch raises it again, where it can be handled
        future.set_exception(error)


def precompile(
    weights: Iterable[Weight],
    tokens: Iterable[int] | None = None,
    norms: Iterable[int] = (),
    dtype: torch.dtype = torch.bfloat16,
    threads: int | None = None,
    tell: Callable[[str], None] = print,
    batch_invariant: bool = False,
    compute: str = "w4a16",
    also: Callable[[], None] = lambda: None,
) -> Compiled:
    """Compile every kernel that `linear` launches for these weights and numbers of tokens (None: all that there can be), and `rms_norm` for
    rows of `norms` elements. `batch_invariant`, `compute`: as `linear` will be called. `also` launches others of ours with tensors on the meta device.

    For the current CUDA device; without one that the kernels are made for it does nothing. `threads`: one per processor unless given.
    `tell` is called where it takes more than a second, before and after.
    """
    if not ops.is_available() or dtype not in (
        torch.bfloat16,
        torch.float16,
    ):  # other types take the plain PyTorch path
        return Compiled(0, 0.0, [])
    sizes = None if tokens is None else sorted(set(tokens))

    def launch_all() -> None:
        _launch_all(weights, sizes, norms, dtype, torch.cuda.current_device(), batch_invariant, compute == "w4a8")
        also()

    return compile_launches(launch_all, threads, tell)


def compile_launches(
    launch_all: Callable[[], None], threads: int | None = None, tell: Callable[[str], None] = print
) -> Compiled:
    """Compile what `launch_all` launches for tensors on the meta device, in parallel; arguments as above."""
    begin = time.perf_counter()
    import triton

    from .launch import only_compile

    collector, device = _Collector(), torch.cuda.current_device()
    with triton.AsyncCompileMode(collector, ignore_errors=True):
        try:
            with only_compile():
                launch_all()
        except BaseException:
            collector.cancel()  # or leaving the mode would wait for them
            raise
        # Triton's keys do not say which device of a kind it is: the processes of all of them share
        with one_process_at_a_time(triton.knobs.cache.dir, "qerl_nvfp4", f"{len(collector.tasks)} kernels", tell):
            failed = collector.run(device, threads or _processors(), tell)
    return Compiled(len(collector.tasks) - len(failed), time.perf_counter() - begin, failed)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokens_of(weight: Weight, device: int, bf16: bool, fp8: bool = False) -> tuple[int, ...]:
    """`TOKENS`, and where measurements of a matrix begin and end to answer."""
    if not bf16:
        return TOKENS
    place, step = (weight.N, weight.K, measured.padded(weight.rank), fp8), measured.STEP
    own = {key[3]: found for key, found in measured_for(device).entries.items() if (*key[:3], key[4]) == place}
    edges = {T for T in own if own.get(T + step) != own[T]} | {T - step for T in own if own.get(T - step) != own[T]}
    return tuple(sorted({*TOKENS, *edges, *(edge + 1 for edge in edges)} - {0}))


def _launch_all(
    weights, tokens: list[int] | None, norms, dtype: torch.dtype, device: int, invariant: bool, fp8: bool = False
) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16 = dtype == torch.bfloat16 and ops.use_gluon(device)
    for each in dict.fromkeys(weights):
        N, K, splits, rank, bias, aligned = each
        scale = empty(N, K // 16, dtype=torch.uint8)
        weight = empty(N, K // 2, dtype=torch.uint8), ops.align_scale_rows(scale) if aligned else scale
        divisor = empty(1, dtype=torch.float32)  # one per row runs the same kernels
        adapter = (empty(len(splits) * rank, K), empty(N, rank), splits) if rank else (None, None, None)
        for M in _tokens_of(each, device, bf16, fp8) if tokens is None else tokens:
            arguments = (empty(M, K), *weight, divisor, empty(N) if bias else None, *adapter, empty(M, N))
            if invariant:
                ops.product_in_any_batch(*arguments, fp8)
            else:
                ops.product(choose(N, K, M, device, bf16, rank, len(splits), fp8), *arguments)
    for K in norms:
        x, norm = empty(1, K), empty(K, dtype=torch.float32)
        ops._rms_norm(x, norm, 1e-6)
        ops._rms_norm(x, norm, 1e-6, x)
