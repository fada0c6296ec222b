"""NVFP4 weight-only kernels: 4-bit frozen weights, 16-bit activations.

    y = linear(x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits)

See reference.py for the number format and the meaning of every argument.
"""

from .reference import dequantize, linear, linear_backward, quantize, rms_norm


def is_available(device=None) -> bool:
    """Whether the fast kernels can run on `device`."""
    return False


def describe(device=None) -> str:
    """One line: which path is used on `device`, and why."""
    return "qerl_nvfp4: plain PyTorch, slow: it dequantizes the whole weight at every call"


__all__ = ["dequantize", "describe", "is_available", "linear", "linear_backward", "quantize", "rms_norm"]
