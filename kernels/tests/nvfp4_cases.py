"""Random problems for the kernel tests, and a process with Triton's compiler."""

import itertools
import math
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


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """packed, block_scale of 16 codes times 127 scales; the next scale would be NaN."""
    packed = torch.tensor([(2 * i) | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8).repeat(127, 1)
    return packed, torch.arange(127, dtype=torch.uint8).unsqueeze(1)


def rows_for_fp8(K: int) -> torch.Tensor:
    """(7, K) bfloat16: normal, zeros, below the least scale, tiny, huge, one outlier, e4m3 numbers and their ties."""
    x = torch.randn(7, K) * torch.tensor([1, 0, 1e-38, 1e-25, 1e36, 1e-3, 1]).unsqueeze(1)
    x[5, K // 2] = -1e3
    x[6] = (0x43E0 - 8 * torch.arange(K) % 0x43E0).short().view(torch.bfloat16) * (-1) ** torch.arange(K)
    return x.bfloat16()


def check_fp8_bits(device: str, *sizes: int) -> None:
    """Kernels equal the reference in every byte: odd shapes, slices of rows, strides, both orders, factors, float16."""
    from qerl_nvfp4 import ops, reference

    def same(found, expected) -> bool:
        return torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))

    weights = (every_code_and_scale(), *(random_weight(301, K)[:2] for K in sizes), random_weight(300, 32)[:2])
    for (packed, scale), transpose in itertools.product(weights, (False, True)):
        w8 = ops.ops.dequantize_fp8(packed.to(device)[1:], scale.to(device)[1:], transpose)
        assert same(w8, reference.dequantize_fp8(packed[1:], scale[1:], transpose))
    for K, ordered, by_column in itertools.product(sizes, (False, True), (False, True)):
        factor = torch.rand(K) * 3 if by_column else None
        for x in (rows_for_fp8(K), rows_for_fp8(K).clamp(-6e4, 6e4).half(), rows_for_fp8(K + 8)[::2, 8:]):
            x8, scale = (t.to(device) for t in ops._fake_quantize_fp8(x, ordered))
            ops.quantize_fp8_into(x.to(device), x8, scale, ordered, factor if factor is None else factor.to(device))
            expected, scales = reference.quantize_fp8(x if factor is None else x.float() * factor)
            assert same(x8, reference.in_decode_order(expected) if ordered else expected) and same(scale, scales)
    for K in (*sizes, 2304):  # wide outputs, and a product that takes one
        x, norm = (torch.randn(7, 2 * K) * torch.arange(7)[:, None]).bfloat16(), 1 + torch.randn(K) * 1e-3
        weight, moved = random_weight(304, K, 0, device), x.to(device)
        halves = moved[:, :K], norm.to(device), 1e-6, moved[:, K:]
        plain = reference.rms_norm(x[:, :K], norm, 1e-6, x[:, K:])[0], reference.swiglu(x)
        for wide, expected in zip((ops.ops.rms_norm(*halves, True)[0], ops.ops.swiglu(moved)), plain, strict=True):
            y = reference.wide_parts(wide, K)[0]
            assert relative_error(y.cpu(), expected) < 1e-3 and same(wide, reference.widened(y.cpu()))
            assert torch.equal(*(ops.ops.linear(each, *weight, compute="w4a8") for each in (wide, y)))


def in_aligned_rows(scale: torch.Tensor) -> torch.Tensor:
    """The same scales in rows of whole 16 bytes, as by `align_scale_rows`, with garbage behind each row."""
    N, blocks = scale.shape
    rows = torch.full((N, -(-blocks // 16) * 16), 0x7E, dtype=scale.dtype, device=scale.device)
    rows[:, :blocks] = scale
    return rows[:, :blocks]


class Problem:
    """M tokens, a weight, a bias (large: a missing one must show), and an adapter if there is a rank."""

    def __init__(
        self, M, N, K, rank=0, splits=None, *,
        seed=0, device="cpu", dtype=torch.bfloat16, per_row=False, aligned=False, bias=True, stride=0,
    ) -> None:  # fmt: skip
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

    def exact(self, compute: str = "w4a16") -> torch.Tensor:
        from qerl_nvfp4 import reference

        bias, a, b = (None if t is None else t.double() for t in (self.bias, *self.adapter[:2]))
        return reference.linear(self.x.double(), *self.weight, bias, a, b, self.adapter[2], compute)

    def by(self, config: dict, rows: slice = slice(None), multiply=None, **options) -> torch.Tensor:
        """These rows of the product by a configuration; elements that nobody writes are NaN."""
        from qerl_nvfp4 import launch

        x = self.x[rows]
        out = torch.full((len(x), len(self.weight[0])), float("nan"), device=x.device, dtype=x.dtype)
        (multiply or launch.launch)(config, x, *self.weight, self.bias, *self.adapter, out, **options)
        return out

    def check(self, config: dict, times: int = 3, limit: float = 4e-3, **options) -> None:
        """Right, the same bits each time, and no scratch memory left changed."""
        exact, first = self.exact("w4a8" if config.get("fp8") else "w4a16"), None
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


def launchable(config: dict, N: int, K: int, M: int, sms: int, shared_memory: int = 227 * 1024) -> bool:
    """Whether a launch computes all M tokens, and waits for no program that never starts."""
    from qerl_nvfp4 import bounds, cost, select

    kernel, get = config["kernel"], config.get
    tile = get("BM"), get("P"), get("S"), get("permute", get("X"))
    if kernel == "skinny":
        return get("BM") >= M and 0 < get("grid") <= 16 * sms and select.skinny_fits(config, N, K)
    if kernel in ("wgmma", "wide"):
        known = cost.FP8 if get("fp8") else cost.WIDE if kernel == "wide" else cost.WGMMA
        return tile in known and 0 < get("grid") <= sms and cost.fits(N, K)
    if kernel == "mma":
        return K % 128 == 0 and 2 <= get("NS") <= bounds.stages(get("BM"), shared_memory) and 1 <= get("SK") <= K // 128
    split = 1 <= get("SK", 1) <= math.ceil(K / 128)
    return kernel == "dense" or (split and select.portable_shared_memory(config) <= shared_memory)


def in_a_fresh_process(file: str, state: str = "1", *options: str, **environment: str) -> None:
    """Run a file's tests marked `compiled` with Triton's compiler; this process may have its interpreter."""
    variables = os.environ | {"TRITON_INTERPRET": "0", "QERL_COMPILING": state} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "-m", "compiled", *options, file]
    result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=900)
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert re.search(r"^\d+ passed, \d+ deselected", result.stdout, re.MULTILINE), "a test was skipped"
