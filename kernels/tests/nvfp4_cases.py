"""Random problems for the kernel tests, and a process with Triton's compiler."""

import os
import re
import subprocess
import sys

import torch

#: "" in a process where Triton's interpreter replaces its compiler
COMPILING = os.environ.get("QERL_COMPILING", "")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||a - e|| / ||e||; NaN (an element nobody wrote) never passes a comparison."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def random_weight(N: int, K: int, seed: int = 0, device: str = "cpu", per_row: bool = False):
    """packed, block_scale (bytes), global_scale with normal, subnormal and zero block scales and every code."""
    g = torch.Generator(device).manual_seed(seed)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=g, device=device)
    scale = torch.randint(0x20, 0x70, (N, K // 16), dtype=torch.uint8, generator=g, device=device)
    scale[:, ::5] &= 0x07  # subnormal, some of them zero
    scale[0, 0] = 0
    scale[-1, -1] = 0x7E
    shape = (N,) if per_row else (1,)
    global_scale = torch.exp2(torch.randint(3, 9, shape, generator=g, device=device).float())
    if per_row:
        global_scale *= 1.0 + torch.rand(shape, generator=g, device=device)
    return packed, scale, global_scale


def in_aligned_rows(scale: torch.Tensor) -> torch.Tensor:
    """The same scales in rows of whole 16 bytes, as by `align_scale_rows`, with garbage behind each row."""
    N, blocks = scale.shape
    rows = torch.full((N, -(-blocks // 16) * 16), 0x7E, dtype=scale.dtype, device=scale.device)
    rows[:, :blocks] = scale
    return rows[:, :blocks]


class Problem:
    """M tokens, a weight, a bias (large: a missing one must show), and an adapter if there is a rank."""

    def __init__(
        self,
        M,
        N,
        K,
        rank=0,
        splits=None,
        *,
        seed=0,
        device="cpu",
        dtype=torch.bfloat16,
        per_row=False,
        aligned=False,
        bias=True,
        stride=0,
    ) -> None:
        g = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=g, device=device) * scale).to(dtype)

        packed, scale, gs = random_weight(N, K, seed, device, per_row)
        self.weight = packed, in_aligned_rows(scale) if aligned else scale, gs
        x = normal(M, K + stride)
        x[:, K:] = float("nan")
        self.x = x[:, :K]
        self.bias = normal(N, scale=30) if bias else None
        shards = len(splits or (N,))
        self.adapter = (normal(shards * rank, K, scale=0.5), normal(N, rank), splits) if rank else (None, None, None)

    def exact(self, fp8: bool = False) -> torch.Tensor:
        """In float64. `fp8`: of x and weights rounded to e4m3, once; the adapter of x itself."""
        from qerl_nvfp4 import reference

        bias, a, b = (None if t is None else t.double() for t in (self.bias, *self.adapter[:2]))
        if fp8:
            packed, scale, gs = self.weight
            unit = torch.ones(1, device=packed.device)
            coded = reference.dequantize(packed, scale, unit, torch.float32) / 8  # exact
            x8, token_scale = reference.quantize_fp8(self.x)
            y = (x8.double() * token_scale[:, None]) @ coded.to(torch.float8_e4m3fn).double().T * (8 / gs.double())
            y = y if bias is None else y + bias
            return y if a is None else y + reference.lora(self.x.double(), a, b, self.adapter[2])
        return reference.linear(self.x.double(), *self.weight, bias, a, b, self.adapter[2])

    def by(self, config: dict, rows: slice = slice(None), multiply=None, **options) -> torch.Tensor:
        """These rows of the product by a configuration; elements that nobody writes are NaN."""
        from qerl_nvfp4 import launch

        x = self.x[rows]
        out = torch.full((len(x), len(self.weight[0])), float("nan"), device=x.device, dtype=x.dtype)
        (multiply or launch.launch)(config, x, *self.weight, self.bias, *self.adapter, out, **options)
        return out

    def check(self, config: dict, times: int = 3, limit: float = 4e-3, **options) -> None:
        """Right, the same bits each time, and no scratch memory left changed."""
        exact, first = self.exact(config.get("fp8", False)), None
        for _ in range(times):
            y = self.by(config, **options)
            assert relative_error(y, exact) < limit
            first = y if first is None else first
            assert torch.equal(y, first), "results depend on timing"
            assert not leftovers()

    def linear(self, rows: slice = slice(None), **options) -> torch.Tensor:
        import qerl_nvfp4

        return qerl_nvfp4.linear(self.x[rows], *self.weight, self.bias, *self.adapter, **options)


def leftovers() -> list[str]:
    """Scratch memory that launches left changed: counters not zero, cells not empty; waits for the device."""
    from qerl_nvfp4 import launch

    found = []
    for (device, place, name), buffer in launch._scratch.items():
        if buffer.dtype != torch.int32:
            continue  # every launch writes it before it reads it
        wrong = buffer != (-1 if name in ("pieces", "cells") else 0)
        if name == "ticket":  # the upper half says which of the two buffers of cells is next
            wrong = (buffer & 0xFFFF) != 0
        elif name == "cells":  # of the two buffers the next launch's is empty
            turn = int(launch._scratch[device, place, "ticket"][0]) >> 16 & 1
            wrong = wrong.view(2, -1)[turn]
        if wrong.any():
            at = wrong.flatten().nonzero()[:4].flatten().tolist()
            found.append(f"{name} of {'graphs' if place == -1 else 'a stream'} at {at}")
    return found


def in_a_fresh_process(file: str, state: str = "1", *options: str, **environment: str) -> None:
    """Run a file's tests marked `compiled` with Triton's compiler; this process may have its interpreter."""
    variables = os.environ | {"TRITON_INTERPRET": "0", "QERL_COMPILING": state} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "-m", "compiled", *options, file]
    result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=900)
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert re.search(r"^\d+ passed, \d+ deselected", result.stdout, re.MULTILINE), "a test was skipped"
