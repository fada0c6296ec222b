"""Bytes of gated delta nets: the layers of Qwen3-Next and Qwen3.5 with a state in place of keys and values.

K and V are the widths of a head's keys and values, n the value heads (queries and keys are repeated for them), w = 2 K
key_heads + V n the width of the causal convolution, and C the tokens of a chunk.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: tokens of a chunk, in transformers' own code and in flash-linear-attention
CHUNK = 64
#: a block of vLLM's cache is one state, or keys and values of as many bytes or more, in multiples of these tokens
_ALIGNED = 16


@dataclasses.dataclass(frozen=True)
class DeltaNets:
    """Sizes of `layers` decoder layers. `state_bytes`: per number of a state in vLLM, but for the convolution."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int = 2

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "DeltaNets | None":
        """Read the sizes from a text decoder's configuration; None without gated delta nets."""
        from ..nvfp4.architectures import delta_net_layers

        layers = delta_net_layers(config)
        if not layers:
            return None
        text: Any = config.get_text_config(decoder=True)
        heads = text.linear_num_key_heads, text.linear_num_value_heads
        dims = text.linear_key_head_dim, text.linear_value_head_dim, text.linear_conv_kernel_dim
        state_bytes = 4 if getattr(text, "mamba_ssm_dtype", None) == "float32" else 2
        return cls(len(layers), *heads, *dims, state_bytes)

    @property
    def convolved(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    def activation_bytes(self, kernels: bool) -> int:
        """Count one layer's activations kept for its backward pass, in bytes per token, in bf16 with a frozen base:

            convolution  4 w      (its output before and after the activation)
            norm         14 V n   (of the output, gated; float32 except 2 bytes)
            rule         2 n (2 K + V + C) + 22 n    (`kernels`, flash-linear-attention: q, k, v, a matrix per chunk)
                         n (32 K + 12 V + 20 C + K V / 16) + 37 n    (float32: 8 q and k, 3 v, 5 matrices, a state)

        Traced by tests/memory/test_delta_nets.py; flash-linear-attention 0.6 was read, as it needs a GPU. Temporaries
        of the backward pass are less than the MLP's share (6 f), freed by then.
        """
        k, v = self.key_dim, self.value_dim
        rule = 2 * (2 * k + v + CHUNK) + 22 if kernels else 32 * k + 12 * v + 20 * CHUNK + k * v // 16 + 37
        return 4 * self.convolved + self.value_heads * (14 * v + rule)

    def cached_bytes(self, dtype_bytes: int = 2) -> int:
        """Count one sequence's cache in transformers' generate: float32 states, and the convolution's last inputs."""
        return self.layers * (4 * self.state + dtype_bytes * self.kernel * self.convolved)

    def blocks(self, width: int, attending: int, length: int, processes: int, dtype_bytes: int) -> tuple[int, int]:
        """Return (bytes of a block of vLLM's cache, blocks of a sequence of `length` tokens), without prefix caching.

        As in `_get_kv_cache_groups_uniform_page_size` and `_align_hybrid_block_size` of vLLM 0.25 to 0.31: a group has
        as many layers as the rarer kind, a block one page per layer of a group, and a sequence one page of states.

        Args:
            width: keys' width on one of the tensor-parallel `processes`.
            attending: number of layers with keys and values, of `dtype_bytes` per number.
        """
        token = 2 * dtype_bytes * width
        page = (self.state_bytes * self.state + 2 * (self.kernel - 1) * self.convolved) // processes
        tokens = _ALIGNED * -(-page // (_ALIGNED * token))
        group = self._group(attending)
        return group * tokens * token, self.state_blocks(attending) + -(-attending // group) * -(-length // tokens)

    def state_blocks(self, attending: int) -> int:
        """Return the number of blocks for the states of one sequence, at any length."""
        return -(-self.layers // self._group(attending))

    def _group(self, attending: int) -> int:
        few, many = sorted((attending, self.layers))
        return many if many < 1.5 * few else few
