"""The numbers of the noise: pinned bits, equal on every device, normal, and independent of each part of their key."""

import hashlib
import math
from statistics import NormalDist

import pytest
import torch

from qerl_trl.noise import generator
from qerl_trl.noise.generator import standard_noise, standard_noises

CPU = torch.device("cpu")


def reference(seed: int, step: int, generation: int, name: str, numel: int) -> list[float]:
    """The definition in the module's docstring, in Python's integers."""
    quantiles = [round(2**20 * NormalDist().inv_cdf((i + 0.5) / 2**16)) for i in range(2**16)]
    scale = torch.tensor(1 / math.sqrt(2 * sum(t * t for t in quantiles) / 2**16)).float()
    key = hashlib.blake2b(f"{seed}:{step}:{generation}:{name}".encode(), digest_size=16).digest()
    keys = (int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"))
    numbers = []
    for i in range(numel):
        word = i // 2 * generator.GOLDEN
        for k in keys:
            word = (word + k) % 2**64
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
            word ^= word >> 31
        half = word >> 32 * (i % 2)
        total = quantiles[half % 2**16] + quantiles[(half >> 16) % 2**16]
        numbers.append(float(torch.tensor(total).float() * scale))
    return numbers


def test_values_are_pinned_and_draw_from_no_global_state():
    """Other versions, machines and processes must agree: resuming and vLLM's workers depend on it."""
    state = torch.get_rng_state()
    noise = standard_noise(0, 7, 1, "model.layers.0.input_layernorm", 5)
    assert (noise.dtype, noise.device) == (torch.float32, CPU)
    assert [value.hex() for value in noise.tolist()] == [
        "0x1.bf88fc0000000p-1",
        "-0x1.7851e80000000p-1",
        "0x1.59c7e20000000p-1",
        "0x1.6d9fca0000000p+0",
        "-0x1.489a6e0000000p-1",
    ]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("key", [(0, 0, 0, "a"), (42, 1234, 3, "model.layers.7.post_attention_layernorm")])
def test_equals_the_definition(key):
    assert standard_noise(*key, 301).tolist() == reference(*key, 301)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits():
    names, sizes = [f"model.layers.{i}.input_layernorm" for i in range(57)], [3584] * 56 + [129]
    for step in range(20):
        on_gpu = standard_noises(3, step, 1, names, sizes, torch.device("cuda"))
        assert torch.equal(on_gpu.cpu(), standard_noises(3, step, 1, names, sizes, CPU))


def test_unit_normal_and_independent_of_each_part_of_the_key():
    n = 400_000
    keys = [(0, 0, 0, "a"), (1, 0, 0, "a"), (0, 1, 0, "a"), (0, 0, 1, "a"), (0, 0, 0, "b"), (0, 11, 0, "a")]
    z = torch.stack([standard_noise(*key, n) for key in keys]).double()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (z.pow(power).mean(1) - expected).abs().max() < 5 * math.sqrt(variance / n)
    for values in (z, z.square()):
        correlation = torch.corrcoef(values) - torch.eye(len(keys), dtype=torch.float64)
        assert correlation.abs().max() < 5 / math.sqrt(n)
    # Kolmogorov-Smirnov: 1 in 1000 sound generators is above
    cdf = 0.5 * (1 + torch.erf(z[0].sort().values / math.sqrt(2)))
    places = torch.arange(n, dtype=torch.float64) / n
    assert max((cdf - places).max(), (places + 1 / n - cdf).max()) < 1.95 / math.sqrt(n)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 2, 3, 4, 5], [7], [128, 64, 128]], ids=str)
def test_together_as_one_by_one(sizes):
    names = [f"norm{i}" for i in range(len(sizes))]
    together = standard_noises(1, 2, 3, names, sizes, CPU)
    assert torch.equal(together, torch.cat([standard_noise(1, 2, 3, n, s) for n, s in zip(names, sizes, strict=True)]))
