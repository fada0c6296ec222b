"""Distance between two models on a text, and the damage of quantization by layer.

Errors of weights do not show the damage: `v_proj` is 3 % of SmolLM2-135M's weights, and a sixth of its KL. So
[`damage`] measures the layers' outputs, and the KL with one kind of layer dense.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..checkpoint import seal
from ..checkpoint.records import Measured
from ..nvfp4.architectures import DECODER
from ..nvfp4.linear import NVFP4Linear
from .quantize import REPORT_NAME


@torch.no_grad()
def logits_of(model: nn.Module, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Compute logits, float32 on the CPU, for batches of token ids (B, T)."""
    model.eval()
    return [model(batch.to(next(model.parameters()).device)).logits.float().cpu() for batch in batches]


def logit_distance(policy: list[torch.Tensor], other: list[torch.Tensor]) -> Measured:
    """Compare logits, lists of (B, T, V): mean and largest difference, KL(policy || other) in nats per token, share of
    positions with the same most likely token."""
    tokens, values = sum(a.shape[:2].numel() for a in policy), sum(a.numel() for a in policy)
    total = largest = kl = agree = 0.0
    for a, b in zip(policy, other, strict=True):
        difference = (a - b).abs()
        total += difference.sum(dtype=torch.float64).item()
        largest = max(largest, difference.max().item())
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl += (log_a.exp() * (log_a - log_b)).sum(dtype=torch.float64).item()
        agree += (a.argmax(-1) == b.argmax(-1)).sum().item()
    return {
        "mean_logit_distance": total / values,
        "max_logit_distance": largest,
        "kl_nats_per_token": kl / tokens,
        "same_greedy_token": agree / tokens,
        "tokens": tokens,
    }


@torch.no_grad()
def figures(
    source: nn.Module, others: Mapping[str, Callable], batches: Iterable[torch.Tensor], prompts: Iterable[int] = ()
) -> dict[str, dict[str, float]]:
    """Return KL(source || other) in nats per token, perplexity and entropy by name, of the source as "source".

    `others`: from token ids (1, T) to a model's output. `prompts`: how many of a batch's first tokens do not count.
    """
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in ("source", *others)}
    for batch, start in zip(batches, itertools.chain(prompts, itertools.repeat(1)), strict=False):
        ids = batch.to(next(source.parameters()).device)
        log_p = source(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
        for name, total in sums.items():
            log_q = others[name](ids).logits[0, start - 1 : -1].float().log_softmax(-1) if name in others else log_p
            said = log_q.gather(-1, ids[0, start:, None])
            parts = log_p.exp() * (log_p - log_q), -said, -log_q.exp() * log_q, torch.ones_like(said)
            total += torch.stack([part.sum(dtype=torch.float64) for part in parts]).cpu()
    return {
        name: {"kl_nats_per_token": kl / n, "perplexity": math.exp(loss / n), "entropy": entropy / n, "tokens": n}
        for name, (kl, loss, entropy, n) in ((name, total.tolist()) for name, total in sums.items())
    }


def damage(source: nn.Module, quantized: nn.Module, batches: list[torch.Tensor]) -> dict[str, Any]:
    """Measure the damage of a quantization: [`figures`] of both models, and with dense layers (`if_dense`), by kind and
    by the kinds that vLLM fuses; and each layer's |Qx - Wx|^2 / |Wx|^2 on the source's inputs x (`output_errors`).
    """
    layers = {name: layer for name, layer in quantized.named_modules() if isinstance(layer, NVFP4Linear)}
    sizes = {name: layer.in_features * layer.out_features for name, layer in layers.items()}
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
    whole = [group for group in DECODER.groups if kinds.keys() >= set(group)]
    kinds |= {" ".join(group): [name for kind in group for name in kinds[kind]] for group in whole}

    def with_dense(names: Iterable[str], ids: torch.Tensor) -> Any:
        for name in names:
            quantized.set_submodule(name, source.get_submodule(name))
        output = quantized(ids)
        for name in names:
            quantized.set_submodule(name, layers[name])
        return output

    others = {kind: functools.partial(with_dense, names) for kind, names in kinds.items()}
    found = figures(source, {"quantized": quantized, **others}, batches)
    kl = max(found["quantized"]["kl_nats_per_token"], 1e-30)
    for kind, names in kinds.items():
        weights = sum(sizes[name] for name in names)
        found[kind] |= {
            "damage_share": 1 - found[kind]["kl_nats_per_token"] / kl,
            "weight_share": weights / sum(sizes.values()),
            "extra_bytes": 2 * weights - sum(part.nbytes for name in names for part in layers[name].nvfp4),
        }
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in layers}
    hooks = [
        source.get_submodule(name).register_forward_hook(functools.partial(_add_error, sums[name], layer))
        for name, layer in layers.items()
    ]
    figures(source, {}, batches)
    for each in hooks:
        each.remove()
    errors = {name: (total[0] / total[1].clamp(min=1e-30)).item() for name, total in sums.items()}
    if_dense = {kind: found.pop(kind) for kind in kinds}
    return {**found, "if_dense": if_dense, "output_errors": errors}


def _add_error(total: torch.Tensor, quantized: NVFP4Linear, layer: nn.Linear, inputs: Any, output: Any) -> None:
    """Forward hook of the source's layer: add the squared error of the quantized layer's output, and the square."""
    change = quantized.dequantize(layer.weight.dtype) - layer.weight
    squares = [F.linear(inputs[0], weight).square().sum(dtype=torch.float64) for weight in (change, layer.weight)]
    total += torch.stack(squares).cpu()


def add_to_report(folder: Path, measured: Mapping[str, Any]) -> None:
    """Add the result of [`damage`] to the report of a finished folder, and seal it again."""
    sealed = seal.read_manifest(folder)
    content = json.loads((folder / REPORT_NAME).read_text())
    seal.write_json_atomically(folder / REPORT_NAME, {**content, "measured": measured})
    hashed = {name: file["sha256"] for name, file in sealed["files"].items() if name != REPORT_NAME}
    seal.seal(folder, sealed["run"], hashed, sealed["files"])
