"""What is known about architectures beyond their module classes: one table of data, read by trainer, engine and exporter.

`DECODER` is the row of every architecture that we know (Qwen 2 and 3, Llama, Mistral, Gemma 2 and 3, Phi-3): transformers names the
projections alike. Phi-3's checkpoints hold q|k|v and gate|up as one matrix each, under the names `qkv_proj` and `gate_up_proj`; there the
groups match nothing. An architecture that differs gets a row of its own.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row.

    Args:
        fused: vLLM's layer -> the checkpoint's linears that it runs as one matrix, in row order. They share one storage and one global
            scale, so they are packed all or none. The same as `packed_modules_mapping` of vLLM's class.
        heads: names of output heads. They are never quantized: TRL computes log-probabilities from their weight.
    """

    fused: Mapping[str, tuple[str, ...]]
    heads: tuple[str, ...]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self.fused.values())


DECODER = Architecture(
    fused=MappingProxyType({"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}),
    heads=("lm_head", "score"),
)
