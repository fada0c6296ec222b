"""How much GPU memory the KV cache of a colocated engine may take: what is free, minus what training will need.

Estimates, in bytes, all stated in the plan's text. They err on the large side; `vllm_gpu_memory_utilization` overrides them.
"""

from dataclasses import dataclass

import torch
from torch import nn

GIB = 2**30
#: CUDA context growth, cuBLAS workspaces, captured graphs, fragmentation
RESERVE = 3 * GIB


@dataclass(frozen=True)
class MemoryPlan:
    """What goes where on one GPU, in bytes. `kv` is what the engine gets."""

    total: int
    base: int
    copy: int
    optimizer: int
    activations: int
    engine: int
    wanted: int
    kv: int
    kv_sleeps: bool

    def __str__(self) -> str:
        parts = {
            "in use (base, adapter, context)": self.base,
            **({"vLLM's copy of the weights": self.copy} if self.copy else {}),
            "optimizer and gradients": self.optimizer,
            "training activations": self.activations,
            "engine activations and reserve": self.engine,
            f"KV cache{', asleep while training' if self.kv_sleeps else ''}": self.kv,
        }
        text = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        return f"GPU memory plan, GiB of {self.total / GIB:.1f}: {text} (all sequences at full length want {self.wanted / GIB:.1f})"


def plan_kv_cache(
    model: nn.Module,
    free: int,
    total: int,
    max_sequences: int,
    max_length: int,
    train_tokens: int,
    engine_tokens: int,
    kv_sleeps: bool,
    copy: int = 0,
    gradient_checkpointing: bool = True,
    tensor_parallel_size: int = 1,
) -> MemoryPlan:
    """Plan the KV cache of one GPU.

    Args:
        model: the trainer's model, in memory already; its config gives the shapes.
        free, total: bytes of the GPU now.
        max_sequences, max_length: of the engine; the KV cache never needs more than their product.
        train_tokens: tokens of one training micro-batch, prompts included.
        engine_tokens: `max_num_batched_tokens` of the engine.
        kv_sleeps: the engine sleeps while training, so its cache (and its copy of the weights) may use the training's share.
        copy: bytes of weights that the engine will hold beside the trainer's.

    Raises:
        `RuntimeError`: less is left than two sequences of full length need.
    """
    config = model.config.get_text_config()
    hidden, layers, vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", 4 * hidden)
    per_token = 2 * layers * max(1, kv_heads // tensor_parallel_size) * head_dim * 2
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = trainable * 4 * 3  # fp32: gradient, two moments
    # checkpointing keeps one (tokens, hidden) a layer and recomputes one layer; logits in fp32 three times (out, softmax, grad)
    one_layer = train_tokens * (8 * hidden + 4 * inner) * 2
    activations = train_tokens * hidden * 2 * layers + one_layer if gradient_checkpointing else one_layer * layers
    activations += train_tokens * vocab * 4 * 3
    # one dequantized fused matrix as scratch, activations of a full prefill step, logits of every sequence
    engine = (
        2 * inner * hidden * 2 + engine_tokens * (4 * hidden + 4 * inner) * 2 + max_sequences * vocab * 4 * 3 + RESERVE
    )
    wanted = max_sequences * (max_length + 32) * per_token
    training = 0 if kv_sleeps else optimizer + activations
    kv = min(wanted, free - copy - engine - training)
    plan = MemoryPlan(total, total - free, copy, optimizer, activations, engine, wanted, max(kv, 0), kv_sleeps)
    if kv < min(wanted, 2 * max_length * per_token):
        raise RuntimeError(
            f"{plan}. Too little is left for the rollout. Lower per_device_train_batch_size or the completion length, set "
            "vllm_enable_sleep_mode=True (the cache is then freed while training), or give vllm_gpu_memory_utilization to "
            "override the plan."
        )
    return plan


def frozen_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that are not trained: what a second copy of the base takes."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)


def current_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of `device`, counting as free what PyTorch has cached but not in use."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
