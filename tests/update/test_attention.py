"""Attention over a packed row: unsupported layers, and on a GPU the kernel against the reference.

The reference itself is compared with padded attention in test_packing.py.
"""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from qerl_trl.update import attention
from qerl_trl.update.attention import CannotPack, Segments, reference

HEADS, GROUPS, SIZE = 4, 2, 32
#: (earlier tokens of the row that it reads, own tokens) of each segment
TWO = [(0, 5), (0, 9)]


class Layer(nn.Module):
    is_causal = True
    num_key_value_groups = HEADS // GROUPS


def packed(case, dtype=torch.float32, device="cpu", heads=(HEADS, GROUPS), size=SIZE, longest=64):
    """Random q (T, H, D), k and v (T, G, D) of a row, and its [`Segments`]."""
    generator = torch.Generator().manual_seed(0)
    starts_q, starts_k, keys = [0], [0], []
    for before, own in case:
        begin = starts_q[-1]
        keys += [*range(before), *range(begin, begin + own)]
        starts_q.append(begin + own)
        starts_k.append(len(keys))
    total = starts_q[-1]
    q, k, v = (
        torch.randn(total, count, size, generator=generator).to(device, dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    starts = (torch.tensor(starts, dtype=torch.int32, device=device) for starts in (starts_q, starts_k))
    index = torch.tensor(keys, device=device) if len(keys) > total else None
    return q, k, v, Segments(*starts, longest, longest, index)


def through_the_interface(q, k, v, segments, **kwargs):
    interface = AttentionInterface()[attention.NAME]
    row = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, weights = interface(Layer(), *row, None, scaling=q.shape[-1] ** -0.5, **segments._asdict(), **kwargs)
    assert weights is None
    return out[0]


@pytest.fixture(autouse=True)
def registered():
    attention.register()


def test_gradients_of_a_shared_key_are_added_in_float32():
    rows = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(300, dtype=torch.long)
    attention._Gather.apply(rows, index).sum().backward()
    assert rows.grad[0].item() == 300  # bfloat16 counts to 256 only


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"is_causal": False}, "causal"), ({"s_aux": torch.zeros(1)}, "s_aux"), ({"dropout": 0.1}, "attention_dropout")],
)
def test_unsupported_attention_is_refused(change, reason):
    q, k, v, segments = packed(TWO)
    with pytest.raises(CannotPack, match=reason):
        through_the_interface(q, k, v, segments, **change)


@pytest.mark.parametrize("flag", [False, True])
def test_grouped_heads_are_not_repeated(monkeypatch, flag):
    given = {}
    monkeypatch.setattr(attention, "_TAKES_GROUPS", flag)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v, *_, **options: given.update(options, k=k, v=v) or q)
    q, k, v, segments = packed(TWO, torch.bfloat16, heads=(4, 2))
    attention._varlen(q, k, v, *segments[:4])
    assert torch.equal(given["k"], k) and torch.equal(given["v"], v) and given.get("enable_gqa", False) is flag


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (28, 4)], ids=["plain", "grouped"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "case", [[(0, 700), (0, 33)], [(0, 500), (255, 300), (255, 1), (0, 64)]], ids=["own", "shared"]
)
def test_the_kernel_computes_the_reference(case, window, size, heads):
    assert attention.fast_kernel_is_missing(torch.device("cuda", 0)) is None
    q, k, v, segments = packed(case, torch.bfloat16, "cuda", heads, size, longest=768)
    out = through_the_interface(q, k, v, segments, sliding_window=window)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    index = segments.packed_keys
    keys = [x if index is None else x[index] for x in exact[1:]]
    right = reference(exact[0], *keys, *segments[:4], size**-0.5, window)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).cuda()
    gradients = torch.autograd.grad((out.float() * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((right * weight).sum(), exact)
    for name, a, b in zip("oqkv", (out, *gradients), (right, *expected), strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < 0.01, (name, error)  # bfloat16 rounds by 0.2 to 0.4 %
