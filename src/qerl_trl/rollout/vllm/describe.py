"""The worker's half of the handshake (rollout/handshake.py): what this rank holds, weight by weight."""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ...noise.generator import sample as noise_sample
from ..handshake import WeightSummary, packed_summary, plain_summary
from .linear import DenseMethod
from .state import RolloutState


def describe(state: RolloutState, config: VllmConfig) -> dict[str, Any]:
    """Answer of `qerl_describe`: settings, adapter buffers, and `WeightSummary` per weight under the checkpoint's names. JSON-able."""
    weights: dict[str, WeightSummary] = {}
    for name, (layer, shard) in state.shards.items():
        start = sum(layer.qerl_splits[:shard])
        rows = slice(start, start + layer.qerl_splits[shard])
        if isinstance(layer.quant_method, DenseMethod):
            weights[name] = plain_summary("dense", layer.weight[rows])
        else:
            divisor = layer.weight_global_scale.flatten()
            divisor = divisor[start] if divisor.numel() > 1 else divisor[0]
            weights[name] = packed_summary(layer.weight_packed[rows], layer.weight_scale[rows], float(divisor))
        if getattr(layer, "bias", None) is not None:
            weights[f"{name}.bias"] = plain_summary("bias", layer.bias[rows])
    for name, module in state.model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            # vLLM pads the vocabulary with zeros, which add nothing to the sums
            weight = module.get_parameter("weight")
            summary = plain_summary("embedding", weight)
            weights[state.original(name)] = summary._replace(
                numel=module.shard_indices.num_org_elements * weight.shape[1]
            )
    weights |= {name: plain_summary("norm", weight) for name, weight in state.clean_norms().items()}
    options = config.additional_config if isinstance(config.additional_config, dict) else {}
    return {
        "weights": weights,
        "adapter_ranks": {name: int(slot.layer.adapter_b.shape[1]) for name, slot in state.slots.items()},
        "options": options.get("qerl", {}),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "max_model_len": int(config.model_config.max_model_len),
        "noise": noise_sample(next(state.model.parameters()).device),
    }
