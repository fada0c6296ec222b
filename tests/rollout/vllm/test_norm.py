"""Norms of single models of vLLM, made to carry noise. The rest of norm.py: tests/e2e/engine."""

import copy

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.model_executor.models.commandr import LayerNorm as CohereLayerNorm
from vllm.model_executor.models.nemotron import NemotronLayerNorm1P

from qerl_trl.rollout.vllm.norm import find_norms, make_noisy

WIDTH = 32


class Own(nn.Module):
    """A model with one norm of each class, and layers that must not change."""

    def __init__(self):
        super().__init__()
        self.plain_norm, self.nemotron_norm = nn.LayerNorm(WIDTH), NemotronLayerNorm1P(WIDTH)
        self.cohere_norm = CohereLayerNorm(WIDTH)
        self.head_norm, self.bare_norm = CohereLayerNorm((2, WIDTH)), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, 2)
        for parameter in self.parameters():
            parameter.data.normal_(1.0, 0.1)


def test_norms_in_float32_compute_as_before():
    torch.manual_seed(0)
    model = Own().bfloat16()
    before = copy.deepcopy(model)
    make_noisy(model)

    def exact(name, x):
        """In float64, rounded once."""
        norm, offset = before.get_submodule(name).double(), float(name == "nemotron_norm")
        bias = getattr(norm, "bias", None)
        return nn.functional.layer_norm(x.double(), (WIDTH,), norm.weight + offset, bias, 1e-5).bfloat16()

    assert sorted(find_norms(model, str)) == ["cohere_norm", "nemotron_norm", "plain_norm"]
    x, residual = torch.randn(4, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16()
    with torch.compiler.set_stance("force_eager"):  # Cohere's is under torch.compile, which needs a C++ compiler
        for name, norm in find_norms(model, str).items():
            assert norm.weight.dtype == torch.float32 and isinstance(norm, type(before.get_submodule(name)))
            y = norm(x)[0] if name == "cohere_norm" else norm(x)
            torch.testing.assert_close(y, exact(name, x), rtol=2**-8, atol=1e-6)
        y, total = model.nemotron_norm(x, residual)
        assert torch.equal(total, x + residual)  # rounded as vLLM's own is
        torch.testing.assert_close(y, exact("nemotron_norm", x.float() + residual.float()), rtol=2**-8, atol=1e-6)
    assert dict(model.named_parameters()).keys() == dict(before.named_parameters()).keys()
    assert model.head_norm.weight.dtype == model.linear.weight.dtype == torch.bfloat16
