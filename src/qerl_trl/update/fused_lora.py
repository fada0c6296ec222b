"""The function behind fused LoRA linears: layers with the same input, forward and backward, dense or packed.

    forward     t = x A^T       for all A of the group at once, (M, R)
                y_i = x W_i^T + b_i + t_i (s_i B_i)^T
    backward    u_i = dy_i (s_i B_i),   dA = u^T x,   dB_i = s_i dy_i^T t_i
                dx = sum_i dy_i W_i + u A

PEFT's forward casts x to float32 and back, and has three products, a scaling and an addition, each a memory pass; here:

- x A^T reads x once per group. Saved for backward are x, once per group, and t. Packed weights are decoded once per
  pass.
- s B is folded into the cast of B, with one rounding. A decoded weight is written anyway, so the added term joins the
  same product and neither y nor dx is read and written again: [x | t] [W | s B]^T if y is much wider than x, [dy | u]
  [W ; A] if dx is wider than dy. Otherwise the product of B is added in place.
- A and B are cast in every call, not once per step: two bytes written for four read, 0.1 ms per pass for the 80 million
  values of a 7B model. A cached copy would be stale after an optimizer with raw pointers (bitsandbytes), FSDP2's
  gathering, or `.data.copy_`: none of them changes a tensor's version.

With compute="w4a8" the base's products have FP8 operands (nvfp4/format.py): x is rounded once per group, and so are
all dy_i together, with one scale per token. The adapter's terms are added to the product in x's dtype.

Legend: M tokens, K inputs, N outputs (of all layers of a group together), R the ranks of a group together.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..nvfp4.linear import decode_into, fp8_backward, fp8_forward

#: the `implementation` of a group with unpacked weights
DENSE = "dense"


class Weights(NamedTuple):
    """The frozen matrices of a group: dense, or packed with scales, as in `NVFP4Linear`, also for `implementation`."""

    dense: tuple[torch.Tensor, ...]
    packed: tuple[torch.Tensor, ...]
    block_scale: tuple[torch.Tensor, ...]
    global_scale: tuple[torch.Tensor, ...]
    implementation: str
    compute: str = "w4a16"


def decoded(
    weights: Weights, dtype: torch.dtype, right: Sequence[torch.Tensor] = (), below: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode the packed matrices of a group, stacked by rows: (N, K) in `dtype`, plus optional rows and columns.

    Args:
        right: one (N_i, r_i) per matrix, appended block-diagonally as R more columns.
        below: (R, K), appended as more rows.
    """
    rows = [packed.shape[0] for packed in weights.packed]
    ranks = [b.shape[1] for b in right]
    N, K = sum(rows), weights.packed[0].shape[1] * 2
    more = 0 if below is None else below.shape[0]
    whole = torch.empty(N + more, K + sum(ranks), dtype=dtype, device=weights.packed[0].device)
    if len(ranks) > 1:
        whole[:, K:].zero_()
    column = K
    for i, part in enumerate(whole[:N].split(rows)):
        global_scale = weights.global_scale[i].view(torch.float32)
        decode_into(part[:, :K], weights.packed[i], weights.block_scale[i], global_scale, weights.implementation)
        if right:
            part[:, column : column + ranks[i]].copy_(right[i])
            column += ranks[i]
    if below is not None:
        whole[N:].copy_(below)
    return whole


# Opaque to the compiler. The unused `after` ties a decode to the backward pass: otherwise the compiler may merge it
# with the forward's, and keep the dense weight between them.
@torch.library.custom_op("qerl_trl::decoded_group", mutates_args=())
def _decoded_op(
    packed: list[torch.Tensor],
    block_scale: list[torch.Tensor],
    global_scale: list[torch.Tensor],
    implementation: str,
    dtype: torch.dtype,
    right: list[torch.Tensor],
    below: torch.Tensor | None,
    after: torch.Tensor | None,
) -> torch.Tensor:
    weights = Weights((), tuple(packed), tuple(block_scale), tuple(global_scale), implementation)
    return decoded(weights, dtype, right, below)


@_decoded_op.register_fake
def _(packed, block_scale, global_scale, implementation, dtype, right, below, after):
    rows = sum(p.shape[0] for p in packed) + (0 if below is None else below.shape[0])
    return packed[0].new_empty(rows, packed[0].shape[1] * 2 + sum(b.shape[1] for b in right), dtype=dtype)


def _traced(
    weights: Weights,
    dtype: torch.dtype,
    right: Sequence[torch.Tensor] = (),
    below: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    packed, block_scale, global_scale = list(weights.packed), list(weights.block_scale), list(weights.global_scale)
    return _decoded_op(packed, block_scale, global_scale, weights.implementation, dtype, list(right), below, after)


def _cast(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], scalings: Sequence[float], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return all A stacked (R, K), and each s B (N_i, r_i); both rounded once to `dtype`."""
    scaled = [(p * s if s != 1 else p).to(dtype) for p, s in zip(b, scalings, strict=True)]
    return _joined([p.to(dtype) for p in a], 0), scaled


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _ranks(b: Sequence[torch.Tensor]) -> list[slice]:
    """Return each layer's columns of t and u."""
    edges = [0]
    for p in b:
        edges.append(edges[-1] + p.shape[1])
    return [slice(*pair) for pair in pairwise(edges)]


def _forward(x, a, b, bias, weights: Weights) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return all y_i, and the saved tensors: x and t, or both in one tensor with t as a view. `a` and `b` are cast.

    Each y_i is a tensor of its own and no view, because models change it in place.
    """
    (M, K), columns = x.shape, _ranks(b)
    joined = bool(weights.packed) and sum(p.shape[0] for p in b) >= 2 * K
    if joined:
        both = x.new_empty(M, K + a.shape[0])
        both[:, :K].copy_(x)
        t = torch.mm(x, a.t(), out=both[:, K:])
        x = both
    else:
        t = x @ a.t()
    if weights.packed:
        matrices = decoded(weights, x.dtype, right=b if joined else ()).split([p.shape[0] for p in b])
    else:
        matrices = tuple(w.to(x.dtype) for w in weights.dense)
    ys = [F.linear(x, w, None if p is None else p.to(x.dtype)) for w, p in zip(matrices, bias, strict=True)]
    if not joined:
        for y, p, part in zip(ys, b, columns, strict=True):
            y.addmm_(t[:, part], p.t())
    return ys, x, t


def _backward_x(dys, u, a, weights: Weights) -> torch.Tensor:
    """Compute dx from u and the gradients of all y_i."""
    widths, K = [dy.shape[1] for dy in dys], a.shape[1]
    if not weights.packed:
        matrices: Sequence[torch.Tensor] = [w.to(u.dtype) for w in weights.dense]
    elif sum(widths) < 2 * K:
        return torch.cat([*dys, u], 1) @ decoded(weights, u.dtype, below=a)
    else:
        matrices = decoded(weights, u.dtype).split(widths)
    dx = dys[0] @ matrices[0]
    for dy, w in zip(dys[1:], matrices[1:], strict=True):
        dx.addmm_(dy, w)
    return dx.addmm_(u, a)


# Under torch.compile the next two replace these: out of place, so sums fuse with their consumers.


def _traced_forward(x, a, b, bias, weights: Weights) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    K, columns, widths = x.shape[1], _ranks(b), [p.shape[0] for p in b]
    t = x @ a.t()
    if not weights.packed:
        ys = [x @ w.to(x.dtype).t() for w in weights.dense]
    elif sum(widths) >= 2 * K:
        x = torch.cat([x, t], 1)
        t = x[:, K:]
        ys = list((x @ _traced(weights, x.dtype, right=b).t()).split(widths, 1))
    else:
        ys = list((x @ _traced(weights, x.dtype).t()).split(widths, 1))
    if x.shape[1] == K:
        ys = [y + t[:, part] @ p.t() for y, p, part in zip(ys, b, columns, strict=True)]
    return [y if p is None else y + p.to(y.dtype) for y, p in zip(ys, bias, strict=True)], x, t


def _traced_backward_x(dys, u, a, weights: Weights) -> torch.Tensor:
    widths, K = [dy.shape[1] for dy in dys], a.shape[1]
    if weights.packed and sum(widths) < 2 * K:
        return torch.cat([*dys, u], 1) @ _traced(weights, u.dtype, below=a, after=u)
    if weights.packed:
        matrices: Sequence[torch.Tensor] = _traced(weights, u.dtype, after=u).split(widths)
    else:
        matrices = [w.to(u.dtype) for w in weights.dense]
    dx = u @ a
    for dy, w in zip(dys, matrices, strict=True):
        dx = dx + dy @ w
    return dx


def _packed(weights: Weights) -> tuple[Any, Any, Any, str]:
    """Return the arguments of the FP8 products, with float32 global scales."""
    scales = [scale.view(torch.float32) for scale in weights.global_scale]
    return weights.packed, weights.block_scale, scales, weights.implementation


def _fp8_forward(x, a, b, bias, weights: Weights) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    t, widths = x @ a.t(), [p.shape[0] for p in b]
    ys = fp8_forward(x, *_packed(weights), adapter=(t, [p.t() for p in b])).split(widths, 1)
    if len(ys) > 1 and not torch.compiler.is_compiling():
        ys = [y.clone() for y in ys]  # no views, as in `_forward`
    return [y if p is None else y + p.to(y.dtype) for y, p in zip(ys, bias, strict=True)], x, t


def _fp8_backward_x(dys, u, a, weights: Weights) -> torch.Tensor:
    return fp8_backward(dys, *_packed(weights), adapter=(u, a))


class LoraGroup(torch.autograd.Function):
    """x (M, K) -> (M, N_i) per layer, in x's dtype. Takes scalings, implementation and compute, then S of each: A
    (r_i, K), B (N_i, r_i), biases (N_i,) or None, and the weights: dense, or packed, block scales and global scales.
    Differentiable: x, A and B."""

    @staticmethod
    def forward(ctx: Any, x, scalings, implementation, compute, *tensors):
        S = len(scalings)
        a, b, bias = tensors[:S], tensors[S : 2 * S], tensors[2 * S : 3 * S]
        weights = _weights(implementation, compute, tensors[3 * S :])
        forward = _traced_forward if torch.compiler.is_compiling() else _forward
        forward = _fp8_forward if compute == "w4a8" else forward
        a16, b16 = _cast(a, b, scalings, x.dtype)
        ys, x, t = forward(x, a16, b16, bias, weights)
        ctx.scalings, ctx.implementation, ctx.compute = scalings, implementation, compute
        # if both share a tensor, t is a part of x
        ctx.save_for_backward(x, t if x.shape[1] == a[0].shape[1] else None, *a, *b, *tensors[3 * S :])
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys):
        S, (x, t, *tensors) = len(ctx.scalings), ctx.saved_tensors
        a, b, weights = tensors[:S], tensors[S : 2 * S], _weights(ctx.implementation, ctx.compute, tensors[2 * S :])
        K, columns = a[0].shape[1], _ranks(b)
        if t is None:
            x, t = x[:, :K], x[:, K:]
        a16, b16 = _cast(a, b, ctx.scalings, x.dtype)
        u = _joined([dy @ p for dy, p in zip(dys, b16, strict=True)], 1)
        dx = None
        if ctx.needs_input_grad[0]:
            backward = _traced_backward_x if torch.compiler.is_compiling() else _backward_x
            dx = (_fp8_backward_x if ctx.compute == "w4a8" else backward)(dys, u, a16, weights)
        da = db = [None] * S
        if any(ctx.needs_input_grad[4 : 4 + 2 * S]):
            stacked = u.t() @ x
            da = [stacked[part].to(p.dtype) for part, p in zip(columns, a, strict=True)]
            each = zip(dys, columns, b, ctx.scalings, strict=True)
            db = [(dy.t() @ t[:, part]).to(p.dtype) * s for dy, part, p, s in each]
        return dx, None, None, None, *da, *db, *[None] * (S + len(tensors) - 2 * S)


def _weights(implementation: str, compute: str, tensors: Sequence[torch.Tensor]) -> Weights:
    if implementation == DENSE:
        return Weights(tuple(tensors), (), (), (), implementation)
    S = len(tensors) // 3
    packed = tuple(tensors[:S]), tuple(tensors[S : 2 * S]), tuple(tensors[2 * S :])
    return Weights((), *packed, implementation, compute)
