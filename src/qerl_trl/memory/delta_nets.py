"""Bytes of gated delta nets, the layers of Qwen3-Next and Qwen3.5 that carry a state in place of keys and values.

K and V are the widths of a head's keys and values, n the value heads (queries and keys are repeated for them), w = 2 K key_heads + V n what the
causal convolution runs over, and C the tokens of a chunk.
"""

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from ..nvfp4.architectures import delta_net_layers

#: tokens of a chunk, in transformers' own code and in flash-linear-attention
CHUNK = 64
#: a block of vLLM's cache holds one state or the keys and values of as many tokens as are at least as long, in steps of this many
_ALIGNED = 16


@dataclasses.dataclass(frozen=True)
class DeltaNets:
    """Of `layers` decoder layers. `state_bytes`: of one number of the state as vLLM keeps it (the convolution's inputs are as the model)."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int = 2

    @classmethod
    def of(cls, config: PretrainedConfig) -> "DeltaNets | None":
        """Of a text decoder's configuration; None where it has none."""
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
        """What one keeps for its backward pass, per token, in bf16 with a frozen base:

            convolution  4 w                 (its output before and after the activation)
            norm         14 V n              (of the output, gated; in float32 but for 2)
            rule         2 n (2 K + V + C)   by flash-linear-attention, with `kernels`: q, k, v and a matrix per chunk, and 22 n of numbers per head
                         n (32 K + 12 V + 20 C + K V / 16)   by transformers' own code, all in float32: 8 times q and k in some form, 3 times v,
                         5 matrices and a state per chunk, and 37 n

        Traced (tests/memory/test_delta_nets.py) but for what flash-linear-attention 0.6 keeps, which was read: it needs a GPU. What is made on
        the way back is less than the MLP's share (6 f), which has been given back when a delta net is reached.
        """
        k, v = self.key_dim, self.value_dim
        rule = 2 * (2 * k + v + CHUNK) + 22 if kernels else 32 * k + 12 * v + 20 * CHUNK + k * v // 16 + 37
        return 4 * self.convolved + self.value_heads * (14 * v + rule)

    def cached_bytes(self, dtype_bytes: int = 2) -> int:
        """What transformers' generate keeps of a sequence: states in float32, and the convolution's last inputs."""
        return self.layers * (4 * self.state + dtype_bytes * self.kernel * self.convolved)

    def blocks(self, width: int, attending: int, length: int, processes: int, dtype_bytes: int) -> tuple[int, int]:
        """(bytes of a block of vLLM's cache, blocks of a sequence of `length` tokens): `_get_kv_cache_groups_uniform_page_size` and
        `_align_hybrid_block_size` of vLLM 0.25 to 0.31, without prefix caching. Layers are put into groups of as many as the rarer kind has; a
        block has a page for each layer of a group, of which states take one per sequence.

        Args:
            width: of keys, on one of so many tensor parallel `processes`.
            attending: layers that keep keys and values, of numbers of `dtype_bytes`.
        """
        token = 2 * dtype_bytes * width
        page = (self.state_bytes * self.state + 2 * (self.kernel - 1) * self.convolved) // processes
        tokens = _ALIGNED * -(-page // (_ALIGNED * token))
        group = self._group(attending)
        return group * tokens * token, self.state_blocks(attending) + -(-attending // group) * -(-length // tokens)

    def state_blocks(self, attending: int) -> int:
        """Blocks of a sequence that hold states, however short it is."""
        return -(-self.layers // self._group(attending))

    def _group(self, attending: int) -> int:
        few, many = sorted((attending, self.layers))
        return many if many < 1.5 * few else few
