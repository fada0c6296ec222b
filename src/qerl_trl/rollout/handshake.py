"""Whether a server runs the trainer's model: its settings, and every linear layer, embedding and norm by name and checksum.

Checksums add up over tensor-parallel shards, so the trainer need not know how the server cuts a matrix. The worker's half is vllm/worker.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from ..nvfp4.linear import NVFP4Linear
from ..support.names import canonical_name
from .spec import LOGPROBS_MODE, EngineSpec, active_adapter, linear_layers, rollout_layers, trained_norms
from .weights import WeightSummary, summary

_WORDS = {"nvfp4": "NVFP4", "dense": "dense"}


def trainer_summaries(model: nn.Module, names: Iterable[str]) -> dict[str, WeightSummary]:
    """The trainer's frozen weights that have a name in `names`, and all of its linear layers."""
    summaries: dict[str, WeightSummary] = {}
    head = cast(PreTrainedModel, model).get_output_embeddings()  # PeftModel passes it on
    for name, layer in linear_layers(model).items():
        if isinstance(layer, NVFP4Linear):
            summaries[name] = summary(
                "nvfp4", layer.weight_packed, layer.weight_scale, divisor=float(layer.global_scale)
            )
        else:
            summaries[name] = summary("embedding" if layer is head else "dense", layer.weight)
        if layer.bias is not None:
            summaries[f"{name}.bias"] = summary("bias", layer.bias)
    wanted = set(names) - set(trained_norms(model)) - set(summaries)
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and canonical_name(name) in wanted:
            summaries[canonical_name(name)] = summary("norm" if weight.ndim == 1 else "embedding", weight)
    return summaries


def differences(spec: EngineSpec, model: nn.Module, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a server runs otherwise than the trainer, in words; empty if it can generate for it.

    Args:
        spec, model: the trainer's.
        ranks: answers of `qerl_describe`, one per tensor-parallel rank.
    """
    first, found = ranks[0], []
    if first["dtype"] != spec.dtype:
        found.append(f"it computes in {first['dtype']}, the trainer in {spec.dtype}")
    if first["logprobs_mode"] != LOGPROBS_MODE:
        found.append(f"its log-probabilities are {first['logprobs_mode']}, not {LOGPROBS_MODE}")
    if spec.max_model_len is not None and first["max_model_len"] < spec.max_model_len:
        found.append(f"its longest sequence is {first['max_model_len']} tokens, the trainer's {spec.max_model_len}")
    if spec.batch_invariant and not first["batch_invariant"]:
        found.append("it was started without batch-invariant kernels, and vllm_batch_invariant=True asks for them")
    groups: dict[str, list[str]] = defaultdict(list)
    rule = first["options"].get("scale_rule", "rtn")
    causes = {"norm": "another checkpoint, or an earlier run trained them on this server"}
    if spec.scale_rule not in (None, rule):
        causes["nvfp4"] = f"scale_rule={rule!r} there, {spec.scale_rule!r} in the trainer"
    theirs = {name: [WeightSummary(*rank["weights"][name]) for rank in ranks] for name in first["weights"]}
    mine = trainer_summaries(model, theirs)
    for name, weight in mine.items():
        kind = _WORDS.get(weight.kind, weight.kind)
        if name not in theirs:
            if weight.kind == "nvfp4":
                groups["it has no layer for"].append(name)
        elif (there := theirs[name][0].kind) != weight.kind:
            groups[f"{_WORDS.get(there, there)} there and {kind} in the trainer:"].append(name)
        elif not _same(weight, theirs[name]):
            groups[f"other {kind} weights ({causes.get(weight.kind, 'another checkpoint')}):"].append(name)
    for name, shards in theirs.items():
        if name not in mine and shards[0].kind in _WORDS:
            groups["layers that the trainer's model does not have:"].append(name)
    adapter, buffers = active_adapter(model), first["adapter_ranks"]
    for name, layer in rollout_layers(model).items():
        if name not in buffers:
            groups["no adapter buffers in"].append(name)
        elif buffers[name] < (rank := layer.r[adapter]):
            groups[f"adapter buffers of rank {buffers[name]}, but the trainer's adapter has rank {rank}, in"].append(
                name
            )
    return found + [f"{text} {_listed(names)}" for text, names in groups.items()]


def _same(mine: WeightSummary, shards: list[WeightSummary]) -> bool:
    """Whether the shards are the weight, or several copies of it (replicated norms; k and v on more ranks than heads)."""
    copies, rest = divmod(sum(shard.numel for shard in shards), mine.numel)
    if rest or any(abs(shard.divisor - mine.divisor) > 1e-6 * mine.divisor for shard in shards):
        return False
    sums = [sum(parts) for parts in zip(*(shard.sums for shard in shards), strict=True)]
    return sums == [copies * value for value in mine.sums]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
