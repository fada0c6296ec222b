"""The engine's packed layers: their tensors."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from qerl_nvfp4 import ops
from qerl_trl.nvfp4.format import quantize
from qerl_trl.rollout.vllm import compile_ahead
from qerl_trl.rollout.vllm.linear import NVFP4Method

N, RANK, SPLITS = 192, 16, [128, 64]


@pytest.mark.parametrize("K", [896, 288, 512, 128, 272])
def test_scale_rows_are_copied_only_for_alignment(K):
    """Where a row is no multiple of 16 bytes and Hopper's kernels take the shape; the codes stay the trainer's."""
    found = quantize(torch.randn(N, K).bfloat16())
    packed, scale = found.packed, found.block_scale.view(torch.uint8)
    a, b = torch.randn(len(SPLITS) * RANK, K).bfloat16(), torch.randn(N, RANK).bfloat16()
    layer = SimpleNamespace(adapter_a=a, adapter_b=b, qerl_splits=SPLITS, bias=None)
    NVFP4Method.set_weights(layer, packed, found.block_scale.view(torch.float8_e4m3fn), found.global_scale)
    copied = K in (896, 1152, 288)
    assert layer.qerl_ready and layer.weight_packed.data_ptr() == packed.data_ptr()
    assert (layer.weight_scale.data_ptr() == scale.data_ptr()) != copied
    assert layer.weight_scale.dtype == torch.uint8 and torch.equal(layer.weight_scale, scale)
    assert layer.weight_scale.stride() == ((K + 255) // 256 * 16 if copied else K // 16, 1)
    sizes = {"output_size_per_partition": N, "input_size_per_partition": K}
    assert compile_ahead._weight(SimpleNamespace(**sizes, **vars(layer))).aligned
    meta = torch.empty(N, K // 16, dtype=torch.uint8, device="meta")
    assert ops.align_scale_rows(meta).stride() == layer.weight_scale.stride(), "not the kernel compiled ahead"
