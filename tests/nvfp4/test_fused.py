"""One storage and one global scale for q/k/v and gate/up."""

import copy

import pytest
import torch
from torch import nn

from qerl_trl import from_pretrained
from qerl_trl.model import loading
from qerl_trl.nvfp4 import fused
from qerl_trl.nvfp4.architectures import DECODER
from qerl_trl.nvfp4.format import MIN_BLOCK_SCALE
from qerl_trl.nvfp4.fused import fuse_storage
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.nvfp4.models import assert_fused, nvfp4_layers, same_state

QKV = DECODER.groups[0]


def test_fused_storage_survives_copies_casts_and_fusing_again(quantized):
    twin = copy.deepcopy(quantized)
    assert_fused(twin.to(torch.bfloat16).to("cpu"))
    assert same_state(twin, quantized)
    before = {name: layer.weight_packed.data_ptr() for name, layer in nvfp4_layers(twin).items()}
    assert fuse_storage(twin) == 4
    assert before == {name: layer.weight_packed.data_ptr() for name, layer in nvfp4_layers(twin).items()}


def attention(scales: list[float]) -> nn.Module:
    """A module with q_proj, k_proj, v_proj of these magnitudes."""
    module, generator = nn.Module(), torch.Generator().manual_seed(0)
    for name, scale, rows in zip(QKV, scales, (32, 16, 16), strict=True):
        layer = nn.Linear(64, rows, bias=False)
        layer.weight.data = torch.randn(rows, 64, generator=generator) * scale
        layer.weight.data[0, :16] = 0
        setattr(module, name, NVFP4Linear.from_linear(layer))
    return module


def test_sharing_a_global_scale_over_a_large_gap_is_exact():
    model = attention([1.0, 0.01, 2.0**-10])
    before = [getattr(model, name).dequantize(torch.float32) for name in QKV]
    assert fuse_storage(model) == 1
    for name, expected in zip(QKV, before, strict=True):
        assert torch.equal(getattr(model, name).dequantize(torch.float32), expected)


def test_blocks_too_small_for_the_shared_scale_are_rounded_not_blown_up():
    """2^-16 times smaller: some block scales would fall below 2^-6. Values stay within half a step of 2^-6 / g."""
    model = attention([1.0, 2.0**-16, 1.0])
    before = model.k_proj.dequantize(torch.float32)
    fuse_storage(model)
    error = (model.k_proj.dequantize(torch.float32) - before).abs()
    assert 0 < error.max() <= MIN_BLOCK_SCALE / model.k_proj.global_scale
    assert error.max() / before.abs().max() < 0.2


@pytest.mark.parametrize("family", ["qwen2", "phi3", "packed"])
def test_the_matrices_of_a_checkpoint_are_those_of_the_loaded_model(tiny_model_dir, packed_model_dir, family):
    folder = packed_model_dir("compressed-tensors") if family == "packed" else tiny_model_dir(family)
    found = loading.matrices_of_checkpoint(folder)
    assert len(found) == 4 and found == fused.packed_matrices(from_pretrained(folder))
    assert all(matrix.number == 2 for matrix in found), "layers"
    assert any(len(matrix.rows) == 3 for matrix in found) == (family != "phi3")
