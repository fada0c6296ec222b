"""The format against its own definition, and against compressed-tensors' code."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_nvfp4 import reference
from qerl_trl.nvfp4.format import (
    E2M1_VALUES,
    SCALE_RULES,
    decode_e2m1,
    decode_fp8,
    decode_scale,
    dequantize,
    encode_e2m1,
    pack,
    power_of_two_global_scale,
    quantize,
    quantize_fp8,
    rescale,
    unpack,
)

SEEDS = st.integers(0, 2**31)
RULES = st.sampled_from(SCALE_RULES)


def random_matrix(rows: int, columns: int, seed: int, scale: float = 0.02, dtype=torch.float32) -> torch.Tensor:
    """Normal weights; every third row is 100 times smaller, so that block scales spread over many exponents."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    matrix[::3] *= 0.01
    return matrix.to(dtype)


def nearest_code(value: float) -> int:
    """E2M1 by definition: nearest of the eight magnitudes, ties to the even code, saturating."""
    size = min(abs(value), 6.0)
    distance = [(abs(size - magnitude), code % 2, code) for code, magnitude in enumerate(E2M1_VALUES)]
    return min(distance)[2] + (8 if math.copysign(1, value) < 0 else 0)


def test_every_code_decodes_to_its_value_and_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist() == [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    assert torch.equal(encode_e2m1(values), codes)  # code 8 is minus zero


def test_encoding_is_nearest():
    """Fifty floats on each side of every threshold (ties included), a grid over the range, and values outside of it."""
    thresholds = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    bits = thresholds.view(torch.int32).unsqueeze(-1) + torch.arange(-50, 51, dtype=torch.int32)
    near = bits.clamp(min=0).view(torch.float32).flatten()
    values = torch.cat([near, torch.linspace(0, 8, 1001), torch.tensor([1e30])])
    for x in (values, -values):
        before = x.clone()
        assert encode_e2m1(x).tolist() == list(map(nearest_code, x.tolist()))
        assert torch.equal(x, before)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=32))
def test_pack_and_unpack_are_inverse(packed):
    tensor = torch.tensor([packed], dtype=torch.uint8)
    codes = unpack(tensor)
    assert codes[0, ::2].tolist() == [byte & 15 for byte in packed]  # the even column is the low nibble
    assert torch.equal(pack(codes), tensor)


@given(st.floats(2.0**-80, 2.0**100, width=32))
def test_global_scale_is_the_largest_power_of_two_that_fits(amax):
    scale = power_of_two_global_scale(amax).item()
    assert math.frexp(scale)[0] == 0.5
    assert scale * amax <= 2688 < 2 * scale * amax


@pytest.mark.parametrize(("amax", "scale"), [(0.65625, 4096), (2688.0, 1), (2.625, 1024), (0.0, 1)])
def test_global_scale_at_exact_powers_and_zero(amax, scale):
    assert power_of_two_global_scale(amax).item() == scale


@given(st.integers(0, 3), SEEDS)
def test_rescaling_within_range_is_exact(shift, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(0x08 + 8 * 3, 0x7F, (4, 6), dtype=torch.uint8, generator=generator)
    packed = torch.randint(0, 256, (4, 48), dtype=torch.uint8, generator=generator)
    old, new = torch.tensor([4096.0]), torch.tensor([4096.0 / 2**shift])
    moved, exact = rescale(scales, old, new)
    assert exact
    before, after = (dequantize(packed, *pair, torch.float32) for pair in ((scales, old), (moved, new)))
    assert torch.equal(before, after)


@pytest.mark.parametrize(("scale", "old", "new"), [(0x08, 8.0, 1.0), (0x37, 1000.0, 999.0)])
def test_rescaling_below_the_smallest_scale_or_by_no_power_of_two_is_not_exact(scale, old, new):
    moved, exact = rescale(torch.tensor([[scale]], dtype=torch.uint8), torch.tensor([old]), torch.tensor([new]))
    assert not exact and moved.item() >= 0x08


@given(seed=SEEDS, rule=RULES, exponent=st.integers(-30, 11))
@settings(max_examples=40, deadline=None)
def test_a_dequantized_matrix_quantizes_to_itself(seed, rule, exponent):
    """With rtn this is a law; the other rules may find a scale with the same values, so the values are compared."""
    quantized = quantize(random_matrix(6, 64, seed, 2.0**exponent), rule)
    dense = dequantize(*quantized, torch.float32)
    again = quantize(dense, rule, quantized.global_scale)
    assert torch.equal(dequantize(*again, torch.float32), dense)
    assert torch.equal(dequantize(*quantized, torch.bfloat16).float(), dense)  # exact in bfloat16


def block_errors(weight: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return (dense.double() - weight.double()).square().view(len(weight), -1, 16).sum(-1)


def test_the_sweep_finds_the_best_of_its_candidates():
    weight = random_matrix(8, 64, 7)
    rtn, swept = quantize(weight, "rtn"), quantize(weight, "neighbor_sweep")
    blocks, errors = weight.double().view(8, -1, 16), []
    for offset in range(-8, 9):
        scale = (rtn.block_scale.to(torch.int16) + offset).clamp(0x08, 0x7E).to(torch.uint8)
        unit = (decode_scale(scale).double() / rtn.global_scale).unsqueeze(-1)
        dense = decode_e2m1(encode_e2m1((blocks / unit).float()), torch.float64) * unit
        errors.append(block_errors(weight, dense.view(8, 64)))
    found = block_errors(weight, dequantize(*swept, torch.float64))
    torch.testing.assert_close(found, torch.stack(errors).amin(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rule", "expected"), [("rtn", 0.00905), ("four_over_six", 0.00757), ("neighbor_sweep", 0.0066)]
)
def test_error_of_gaussian_weights(rule, expected):
    """Normalized squared error measured when the rules were chosen: 0.0090, 16 % and 27 % less."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    error = (dequantize(*quantize(weight, rule), torch.float32) - weight).square().mean() / weight.square().mean()
    assert error.item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_zeros_stay_zeros_and_block_scales_are_normal_numbers(rule):
    weight = random_matrix(4, 64, 0)
    weight[1], weight[2] = 0, weight[2] * 1e-9
    quantized = quantize(weight, rule)
    assert not dequantize(*quantized)[1].any()
    assert ((quantized.block_scale >= 0x08) & (quantized.block_scale <= 0x7E)).all()
    assert not dequantize(*quantize(torch.zeros(2, 16), rule)).any()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_result_does_not_depend_on_chunks_or_the_layout_in_memory(rule, monkeypatch):
    weight = random_matrix(37, 64, 3)
    whole = quantize(weight, rule)
    monkeypatch.setattr("qerl_trl.nvfp4.format._CHUNK_WEIGHTS", {"cpu": 130})
    pieces = quantize(weight.t().contiguous().t(), rule)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    chunked = dequantize(*whole)
    monkeypatch.undo()
    assert torch.equal(chunked, dequantize(*whole))


def test_a_global_scale_for_each_row():
    packed, block_scale, _ = quantize(random_matrix(6, 32, 1))
    scales = torch.tensor([100.0, 200.0, 300.0, 400.0, 500.0, 600.0])
    rows = [(packed[i : i + 1], block_scale[i : i + 1], scales[i : i + 1]) for i in range(6)]
    alone = torch.cat([dequantize(*row, torch.float32) for row in rows])
    assert torch.equal(dequantize(packed, block_scale, scales, torch.float32), alone)


@pytest.mark.parametrize("global_scale", [None, torch.tensor([1.0])], ids=["own scale", "given scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(value, global_scale):
    weight = torch.zeros(4, 16)
    weight[3, 5] = value
    with pytest.raises(ValueError, match=f"{str(value).strip('-')}: NVFP4 has neither NaN nor infinity"):
        quantize(weight, global_scale=global_scale)


@pytest.fixture(scope="module")
def compressor():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    scheme = QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **NVFP4A16)
    return BaseCompressor.get_value_from_registry("nvfp4-pack-quantized"), scheme


@pytest.mark.parametrize("global_scale", [2048.0, 5381.123, 37.7], ids=str)
def test_dequantization_is_compressed_tensors_own_bit_for_bit(compressor, global_scale):
    """All 254 finite E4M3 patterns (subnormals and negative ones too) times all 256 bytes."""
    code, scheme = compressor
    patterns = torch.tensor([pattern for pattern in range(256) if pattern & 0x7F != 0x7F], dtype=torch.uint8)
    packed = torch.arange(256, dtype=torch.uint8).repeat(len(patterns), 1)
    block_scale, divisor = patterns.unsqueeze(-1).repeat(1, 32), torch.tensor([global_scale])
    stored = {"weight_packed": packed, "weight_scale": block_scale.view(torch.float8_e4m3fn)}
    theirs = code.decompress({**stored, "weight_global_scale": divisor}, scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(dequantize(packed, block_scale, divisor).view(torch.int16), theirs.view(torch.int16))


def test_fp8_operands():
    """All finite E4M3 patterns times all codes; rows of activations with zeros, tiny and huge values."""
    patterns = torch.tensor([pattern for pattern in range(256) if pattern & 0x7F != 0x7F], dtype=torch.uint8)
    packed, block_scale = torch.arange(256, dtype=torch.uint8).repeat(254, 1), patterns.unsqueeze(-1).repeat(1, 32)
    exact = decode_e2m1(unpack(packed)) * decode_scale(block_scale).repeat_interleave(16, 1) / 8  # exact in float32
    w8 = decode_fp8(packed, block_scale)
    assert torch.equal(w8.view(torch.uint8), exact.to(torch.float8_e4m3fn).view(torch.uint8))
    turned = decode_fp8(packed, block_scale, transpose=True)
    assert turned.is_contiguous() and torch.equal(turned.view(torch.uint8).t(), w8.view(torch.uint8))
    x = (random_matrix(4, 64, 0) * torch.tensor([[0.0], [1e-36], [1.0], [1e36]])).bfloat16()
    x8, scale = quantize_fp8(x)
    amax = x.float().abs().amax(1).clamp(min=2.0**-100).numpy()
    assert torch.equal(scale, torch.from_numpy(amax / np.float32(448)))
    scaled = torch.from_numpy(x.float().numpy() * (np.float32(448) / amax)[:, None])
    assert torch.equal(x8.view(torch.uint8), scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    assert not x8.isnan().any() and x8[2:].float().abs().amax() == 448
    kernels = reference.dequantize_fp8(packed, block_scale), *reference.quantize_fp8(x)
    for mine, theirs in zip((w8, x8, scale), kernels, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_rtn_writes_the_bytes_of_compressed_tensors(compressor):
    """Same global scale, float32 weights (it floors small scales differently; none is that small here)."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    code, scheme = compressor
    weight = random_matrix(64, 256, 11)
    global_scale = generate_gparam(weight.min(), weight.max())
    blocks = weight.view(64, -1, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    given = {"weight": weight.clone(), "weight_scale": scale, "weight_global_scale": global_scale}
    with torch.compiler.set_stance("force_eager"):
        theirs = code.compress(given, scheme)
    ours = quantize(weight, "rtn", global_scale)
    assert torch.equal(ours.block_scale, theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.packed, theirs["weight_packed"])


@pytest.mark.gpu
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_cuda_gives_the_same_bytes(rule):
    weight = random_matrix(257, 512, 13, dtype=torch.bfloat16)
    cpu, gpu = quantize(weight, rule), quantize(weight.cuda(), rule)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(cpu, gpu, strict=True))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(dequantize(*cpu, dtype), dequantize(*gpu, dtype).cpu())
