"""What a server says about the model it runs, compared with the trainer's: every linear layer, embedding and norm, by name.

Both sides describe a weight by the same few numbers (`WeightSummary`). They add up over tensor-parallel shards, so the trainer needs to know
nothing of how the server cuts a matrix. The worker's half is vllm/describe.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..names import canonical_name
from ..noise.generator import sample as noise_sample
from ..nvfp4.linear import NVFP4Linear
from .adapter import active_adapter, linear_layers, rollout_layers, trained_norms
from .spec import LOGPROBS_MODE, EngineSpec

_WORDS = {"nvfp4": "NVFP4", "dense": "dense"}
#: elements whose bytes are counted at a time; each takes 4 bytes while it is counted
_CHUNK = 2**26


class WeightSummary(NamedTuple):
    """One weight, or one rank's shard of it.

    kind: "nvfp4" or "dense" for a linear layer's, else "bias", "norm" or "embedding" (the head too).
    numel: elements (of the packed bytes for NVFP4), without padding.
    sums: sums of squared byte values (`checksum`); for NVFP4 those of the codes, then those of the block scales.
    divisor: NVFP4's global scale, else 0.
    """

    kind: str
    numel: int
    sums: list[int]
    divisor: float = 0.0


def checksum(tensor: torch.Tensor) -> list[int]:
    """Sums of the squared byte values of a tensor, one per byte of its elements (two for bf16).

    Shards of rows or columns add up to the whole matrix's sums, and zeros that pad a shard add nothing. Blind to an exchange of
    elements within a tensor, which the probe sees; enough to tell other weights, another scale rule, another dtype.
    """
    bytes_EB = tensor.detach().contiguous().view(torch.uint8).view(-1, tensor.element_size())
    squares = torch.arange(256, dtype=torch.int64, device=tensor.device) ** 2
    return [
        sum(int((torch.bincount(part.int(), minlength=256) * squares).sum()) for part in column.split(_CHUNK))
        for column in bytes_EB.unbind(1)
    ]


def packed_summary(packed: torch.Tensor, scale: torch.Tensor, divisor: float) -> WeightSummary:
    """Of packed (N, K/2), block scales (N, K/16) and the global scale."""
    return WeightSummary("nvfp4", packed.numel(), [*checksum(packed), *checksum(scale)], divisor)


def plain_summary(kind: str, weight: torch.Tensor) -> WeightSummary:
    """Of a weight that is not packed; norms as float32, whatever dtype either side keeps them in."""
    return WeightSummary(kind, weight.numel(), checksum(weight.float() if kind == "norm" else weight))


def trainer_summaries(model: nn.Module, names: Iterable[str]) -> dict[str, WeightSummary]:
    """The trainer's frozen weights that have a name in `names`, and all of its linear layers."""
    names = set(names)
    summaries: dict[str, WeightSummary] = {}
    head = cast(PreTrainedModel, model).get_output_embeddings()  # PeftModel passes it on
    for name, layer in linear_layers(model).items():
        if isinstance(layer, NVFP4Linear):
            summaries[name] = packed_summary(layer.weight_packed, layer.weight_scale, float(layer.global_scale))
        else:
            summaries[name] = plain_summary("embedding" if layer is head else "dense", layer.weight)
        if layer.bias is not None:
            summaries[f"{name}.bias"] = plain_summary("bias", layer.bias)
    trained = trained_norms(model)
    for name, module in model.named_modules():
        name, weight = canonical_name(name), module._parameters.get("weight")
        if weight is None or name in summaries or name not in names - set(trained):
            continue
        summaries[name] = plain_summary("norm" if weight.ndim == 1 else "embedding", weight)
    return summaries


def check_form(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Whether answers of `qerl_describe` have the form that `differences` reads.

    Raises:
        `ValueError`: names the field, and what was expected of it.
    """
    kinds = {
        "weights": dict,
        "adapter_ranks": dict,
        "options": dict,
        "dtype": str,
        "logprobs_mode": str,
        "max_model_len": int,
        "noise": str,
    }
    for number, rank in enumerate(ranks):
        if "weights" not in rank:
            continue  # `differences` says it
        for field, kind in kinds.items():
            if not isinstance(rank.get(field), kind):
                raise ValueError(f"{field!r} of rank {number} is {rank.get(field)!r:.100}, expected a {kind.__name__}")
        for name, values in rank["weights"].items():
            if not _is_summary(values):
                raise ValueError(
                    f"weight {name!r} of rank {number} is {values!r:.100}, expected [kind, elements, sums, divisor]"
                )
        for name, size in rank["adapter_ranks"].items():
            if not isinstance(size, int):
                raise ValueError(f"the adapter's rank in {name!r} of rank {number} is {size!r:.100}, expected a number")
        if set(rank["weights"]) != set(ranks[0].get("weights", ())):
            unlike = sorted(set(rank["weights"]) ^ set(ranks[0].get("weights", ())))
            raise ValueError(f"rank {number} and rank 0 hold other weights: {_listed(unlike)}")


def _is_summary(values: Any) -> bool:
    if not isinstance(values, list | tuple) or len(values) != len(WeightSummary._fields):
        return False
    kind, numel, sums, divisor = values
    return (
        isinstance(kind, str)
        and isinstance(numel, int)
        and isinstance(divisor, int | float)
        and isinstance(sums, list)
        and all(isinstance(value, int) for value in sums)
    )


def differences(spec: EngineSpec, model: nn.Module, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a server runs otherwise than the trainer, in words; empty if it can generate for it.

    Args:
        spec, model: the trainer's.
        ranks: answers of `qerl_describe`, one per tensor-parallel rank.
    """
    first = ranks[0]
    if "weights" not in first:
        return ["it runs another version of qerl-trl, whose answer cannot be compared"]
    found = []
    if first["dtype"] != spec.dtype:
        found.append(f"it computes in {first['dtype']}, the trainer in {spec.dtype}")
    if first["logprobs_mode"] != LOGPROBS_MODE:
        found.append(f"its log-probabilities are {first['logprobs_mode']}, not {LOGPROBS_MODE}")
    if spec.max_model_len is not None and first["max_model_len"] < spec.max_model_len:
        found.append(f"its longest sequence is {first['max_model_len']} tokens, the trainer's {spec.max_model_len}")
    if spec.batch_invariant and not first["options"].get("batch_invariant"):
        found.append(
            "its products depend on what else is in the batch, and the trainer was told otherwise (vllm_batch_invariant)"
        )
    if first["noise"] != noise_sample(torch.device("cpu")):
        found.append(
            "it draws other noise from the same key (another version of qerl-trl, or a device that computes otherwise)"
        )
    theirs = {name: [WeightSummary(*rank["weights"][name]) for rank in ranks] for name in first["weights"]}
    found += _weight_differences(spec, trainer_summaries(model, theirs), theirs, first["options"])
    return found + _adapter_differences(model, first["adapter_ranks"])


def _weight_differences(
    spec: EngineSpec,
    mine: Mapping[str, WeightSummary],
    theirs: Mapping[str, list[WeightSummary]],
    options: Mapping[str, Any],
) -> list[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    rule = options.get("scale_rule", "rtn")
    causes = {
        "norm": "another checkpoint, or an earlier run trained them on this server",
        "nvfp4": "another checkpoint",
    }
    if spec.scale_rule not in (None, rule):
        causes["nvfp4"] = f"scale_rule={rule!r} there, {spec.scale_rule!r} in the trainer"
    for name, summary in mine.items():
        shards = theirs.get(name)
        if shards is None:
            if summary.kind == "nvfp4":
                groups["it has no layer for"].append(name)
        elif shards[0].kind != summary.kind:
            there, here = (_WORDS.get(kind, kind) for kind in (shards[0].kind, summary.kind))
            groups[f"{there} there and {here} in the trainer:"].append(name)
        elif not _same(summary, shards):
            cause = causes.get(summary.kind, "another checkpoint")
            groups[f"other {_WORDS.get(summary.kind, summary.kind)} weights ({cause}):"].append(name)
    for name, shards in theirs.items():
        if name not in mine and shards[0].kind in _WORDS:
            groups["layers that the trainer's model does not have:"].append(name)
    return [f"{text} {_listed(names)}" for text, names in groups.items()]


def _same(mine: WeightSummary, shards: list[WeightSummary]) -> bool:
    """Whether the shards are the weight, or several copies of it (replicated norms; k and v on more ranks than heads)."""
    copies, rest = divmod(sum(shard.numel for shard in shards), mine.numel)
    if rest or any(abs(shard.divisor - mine.divisor) > 1e-6 * mine.divisor for shard in shards):
        return False
    sums = [sum(parts) for parts in zip(*(shard.sums for shard in shards), strict=True)]
    return sums == [copies * value for value in mine.sums]


def _adapter_differences(model: nn.Module, ranks: Mapping[str, int]) -> list[str]:
    adapter, found = active_adapter(model), []
    layers = rollout_layers(model)
    missing = [name for name in layers if name not in ranks]
    small = [name for name, layer in layers.items() if ranks.get(name, layer.r[adapter]) < layer.r[adapter]]
    if missing:
        found.append(f"no adapter buffers in {_listed(missing)}")
    if small:
        found.append(
            f"adapter buffers of rank {min(ranks[name] for name in small)}, but the trainer's adapter has rank "
            f"{max(layers[name].r[adapter] for name in small)}, in {_listed(small)}"
        )
    return found


def _listed(names: Sequence[str]) -> str:
    """Three of them by name, and how many there are."""
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
