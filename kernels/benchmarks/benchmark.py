"""Kernel Hub benchmark (`kernels benchmark .`), verified against plain PyTorch. The full comparison is compare.py."""

import torch
from kernels.benchmark import Benchmark


def weight(N: int, K: int, device: str):
    packed = torch.randint(0, 256, (N, K // 2), device=device, dtype=torch.uint8)
    scale = torch.randint(0x28, 0x70, (N, K // 16), device=device, dtype=torch.uint8)
    return packed, scale, torch.tensor([2048.0], device=device)


def dense(packed, scale, global_scale):
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    unit = scale.view(torch.float8_e4m3fn).float() / global_scale
    return table[codes.int()] * unit.repeat_interleave(16, 1)


class LinearBenchmark(Benchmark):
    """o_proj of Qwen2.5-7B at 1, 16 and 64 tokens."""

    seed = 0

    def setup(self):
        self.weight = weight(3584, 3584, self.device)
        self.x = torch.randn(64, 3584, device=self.device, dtype=torch.bfloat16)

    def run(self, M: int):
        self.out = self.kernel.linear(self.x[:M], *self.weight)

    def check(self, M: int):
        return (self.x[:M].float() @ dense(*self.weight).T).bfloat16()

    def benchmark_decode_1(self):
        self.run(1)

    def verify_decode_1(self):
        return self.check(1)

    def benchmark_decode_16(self):
        self.run(16)

    def verify_decode_16(self):
        return self.check(16)

    def benchmark_decode_64(self):
        self.run(64)

    def verify_decode_64(self):
        return self.check(64)


class DequantizeBenchmark(Benchmark):
    seed = 0

    def setup(self):
        self.weight = weight(3584, 18944, self.device)

    def benchmark_base(self):
        self.out = self.kernel.dequantize(*self.weight)

    def verify_base(self):
        return dense(*self.weight).bfloat16()
