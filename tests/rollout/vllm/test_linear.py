"""The engine's packed layers: their tensors and their products."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from qerl_nvfp4 import ops, reference
from qerl_trl.nvfp4.format import quantize
from qerl_trl.rollout.vllm import compile_ahead
from qerl_trl.rollout.vllm.linear import NVFP4Method
from qerl_trl.rollout.weights import summary

N, RANK, SPLITS = 192, 16, [128, 64]


def layer_of(K: int) -> tuple[SimpleNamespace, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer with an adapter, and the trainer's tensors."""
    torch.manual_seed(K)
    found = quantize(torch.randn(N, K).bfloat16())
    a, b = torch.randn(len(SPLITS) * RANK, K).bfloat16(), torch.randn(N, RANK).bfloat16()
    layer = SimpleNamespace(adapter_a=a, adapter_b=b, qerl_splits=SPLITS, bias=None, skip_bias_add=False)
    scale = found.block_scale.view(torch.float8_e4m3fn)
    NVFP4Method.set_weights(layer, found.packed, scale, found.global_scale)
    return layer, found.packed, found.block_scale.view(torch.uint8), found.global_scale


@pytest.mark.parametrize("K", [896, 288, 512, 128, 272])
def test_scale_rows_are_copied_only_for_alignment(K):
    """Where a row is no multiple of 16 bytes and Hopper's kernels take the shape; the codes stay the trainer's."""
    layer, packed, scale, _ = layer_of(K)
    copied = K in (896, 1152, 288)
    assert layer.qerl_ready and layer.weight_packed.data_ptr() == packed.data_ptr()
    assert (layer.weight_scale.data_ptr() == scale.data_ptr()) != copied
    assert layer.weight_scale.dtype == torch.uint8 and torch.equal(layer.weight_scale, scale)
    assert layer.weight_scale.stride() == ((K + 255) // 256 * 16 if copied else K // 16, 1)
    sizes = {"output_size_per_partition": N, "input_size_per_partition": K}
    assert compile_ahead._weight(SimpleNamespace(**sizes, **vars(layer))).aligned
    meta = torch.empty(N, K // 16, dtype=torch.uint8, device="meta")
    assert ops.align_scale_rows(meta).stride() == layer.weight_scale.stride(), "not the kernel compiled ahead"


@pytest.mark.parametrize("K", [896, 512])
def test_products_and_checksums_do_not_depend_on_alignment(K):
    layer, packed, scale, global_scale = layer_of(K)
    x = torch.randn(5, K, dtype=torch.float32)
    layer.adapter_a, layer.adapter_b = layer.adapter_a.float(), layer.adapter_b.float()
    y = NVFP4Method(["q", "k"], RANK).apply(layer, x)
    expected = x @ reference.dequantize(packed, scale, global_scale, torch.float32).T
    expected += reference.lora(x, layer.adapter_a, layer.adapter_b, SPLITS)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-3)
    for rows in (slice(0, 128), slice(128, 192)):
        divisor = float(global_scale)
        mine = summary("nvfp4", packed[rows], scale[rows], divisor=divisor)
        assert summary("nvfp4", layer.weight_packed[rows], layer.weight_scale[rows], divisor=divisor) == mine
