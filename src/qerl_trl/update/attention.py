"""Attention over a packed row: sequences one after the other, each token attending to its own sequence only.

One function, registered with transformers under [`NAME`] and set once on the trainer's model. Arguments of the model's
call ([`Segments`]) describe the sequences; transformers passes them to every attention layer, also in a recomputation.
Without them (generation, evaluation, pictures) it is transformers' `sdpa`, with the same masks.

    Segment s has queries cu_q[s]..cu_q[s+1] and keys cu_k[s]..cu_k[s+1], both ending with the same token, so query i of
    n_q sees keys up to i + n_k - n_q ("bottom right" causal), with a sliding window of W only the last W of them.

**Shared prompts.** A segment may read keys of other segments: `keys` has the token in the row of each key. A prompt
shared by many completions is computed once, and read by all of them (packing.py builds the row).

[`reference`] is the definition, in PyTorch; on a GPU `torch.nn.attention.varlen` computes it without masks or padding.

Shapes: T tokens of a row, K keys, S segments, H query heads, G key and value heads, D head size.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "qerl_varlen"
#: whether `varlen_attn` of this PyTorch needs a flag for grouped heads; 2.11 takes them without
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
#: largest head size of PyTorch's flash attention
_LARGEST_HEAD = 256

_in_packed_call: ContextVar[bool] = ContextVar("in_packed_call", default=False)
#: tokens of the longest sequence that will be packed, during a trial
_in_trial: ContextVar[float | None] = ContextVar("in_trial", default=None)


class CannotPack(Exception):
    """Raised for a model that attention over a packed row does not support."""


class Segments(NamedTuple):
    """Description of a row for a model's call; the first four have transformers' own names.

    `cu_seq_lens_q`, `cu_seq_lens_k`: (S + 1,) int32, starts of each segment's queries and keys. `max_length_q`,
    `max_length_k`: upper bounds of segment lengths. `packed_keys`: (K,) int64, token of each key; `None`: the row's.
    """

    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor
    max_length_q: int
    max_length_k: int
    packed_keys: torch.Tensor | None


@contextmanager
def packed_call() -> Iterator[None]:
    """Context manager in which models make no mask, because their call has [`Segments`]."""
    token = _in_packed_call.set(True)
    try:
        yield
    finally:
        _in_packed_call.reset(token)


@contextmanager
def trial(longest: int | None = None) -> Iterator[None]:
    """Context manager that makes window masks [`_Window`], to detect layers with a window in their mask only.

    Args:
        longest: tokens of the longest sequence to pack, the limit for windows; unknown by default.
    """
    token = _in_trial.set(math.inf if longest is None else longest)
    try:
        yield
    finally:
        _in_trial.reset(token)


class _Window(torch.Tensor):
    """Replacement of a mask in a trial: the number of keys that a query sees."""


def register() -> None:
    """Register [`NAME`] with transformers. Other models are unaffected."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    if not _in_packed_call.get():
        return sdpa_mask(*args, **kwargs)
    window, longest = kwargs.get("local_size"), _in_trial.get()
    return None if window is None or longest is None or window >= longest else torch.tensor(window).as_subclass(_Window)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    packed_keys: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute an attention layer, as a function of transformers' `AttentionInterface`.

    Args:
        query: (1, H, T, D), key and value (1, G, T, D), after rotation.

    Returns:
        (1, T, H, D), and no weights.

    Raises:
        [`CannotPack`]: a packed row with a mask, dropout, a bias, sinks, or non-causal attention.
    """
    if cu_seq_lens_q is None:
        own = query, key, value, attention_mask, dropout, scaling
        return sdpa_attention_forward(module, *own, **kwargs)
    assert cu_seq_lens_k is not None and max_length_q is not None and max_length_k is not None
    if (reason := _why_not(module, attention_mask, dropout, kwargs)) is not None:
        raise CannotPack(reason)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed_keys is not None:
        k, v = (_Gather.apply(x, packed_keys) for x in (k, v))
    compute = _varlen if query.is_cuda else reference
    window = kwargs.get("sliding_window")
    out = compute(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scaling, window)
    return out.unsqueeze(0), None


def _why_not(module: Any, mask: torch.Tensor | None, dropout: float, asked: dict[str, Any]) -> str | None:
    """Return why a packed row cannot serve this layer's call, or None."""
    if isinstance(mask, _Window):
        if asked.get("sliding_window") != int(mask):
            return "its layers take their sliding window from the attention mask alone"
    elif mask is not None:
        return "it makes attention masks of its own"
    if dropout:
        return "it drops attention weights (attention_dropout)"
    causal = asked.get("is_causal")
    if not (causal if causal is not None else getattr(module, "is_causal", True)):
        return "its attention is not causal"
    for name in ("position_bias", "s_aux"):
        if asked.get(name) is not None:
            return f"its attention adds {name}"
    return None


class _Gather(torch.autograd.Function):
    """Compute `rows[index]`; gradients of repeatedly read rows are added in float32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows[index]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.count, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention by its definition: segment by segment, with a mask.

    Args:
        q: (T, H, D). k, v: (K, G, D). cu_q, cu_k, max_q, max_k: see [`Segments`].
        scale: of the scores, D^-0.5 by default. window: maximum keys per query, itself included.

    Returns:
        (T, H, D of v).
    """
    out = []
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        place_q = torch.arange(q1 - q0, device=q.device)[:, None] + (k1 - k0) - (q1 - q0)
        place_k = torch.arange(k1 - k0, device=q.device)[None, :]
        seen = place_k <= place_q
        if window is not None:
            seen &= place_k > place_q - window
        one, keys, values = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        sdpa = nn.functional.scaled_dot_product_attention
        out.append(sdpa(one, keys, values, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


def fast_kernel_is_missing(device: torch.device) -> str | None:
    """Return why attention over a packed row would be slow or impossible on `device`; `None` if it is fast."""
    if device.type != "cuda":
        return f"there is no fast kernel for it on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"flash attention needs a GPU of compute capability 8.0 or newer, this one has {major}.{minor}"
    return None


def _varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale=None, window=None) -> torch.Tensor:
    """Compute [`reference`] with `torch.nn.attention.varlen.varlen_attn`, in bfloat16 or float16.

    Raises:
        [`CannotPack`]: head sizes or dtypes unsupported by this PyTorch's kernel.
    """
    size = q.shape[-1]
    dtype = v.dtype
    if dtype not in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    fits = v.shape[-1] == size <= _LARGEST_HEAD and size % 8 == 0
    if not fits or dtype not in (torch.bfloat16, torch.float16):
        raise CannotPack(f"flash attention does not support head sizes {size} and {v.shape[-1]} in {dtype}")
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
    if _TAKES_GROUPS and q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    return cast(torch.Tensor, varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options))
