"""Import vLLM with what it has compiled: `python -m qerl_trl.rollout.vllm.imported` ends with 1 and the reason where that fails."""

import importlib
import importlib.util

import torch

from .plugin import broken_vllm

#: vLLM itself only logs that one of these cannot be loaded, and fails at the first product
_KERNELS = ("vllm._C_stable_libtorch", "vllm._C")


def import_vllm() -> None:
    """
    Raises:
        `ImportError`: vLLM, or its CUDA kernels, cannot be loaded; names the versions and the remedy.
    """
    try:
        importlib.import_module("vllm.entrypoints.llm")
        compiled = next((name for name in _KERNELS if importlib.util.find_spec(name)), None)
        if torch.version.cuda is not None and compiled is not None:
            importlib.import_module(compiled)
    except Exception as error:
        raise broken_vllm(error) from error


if __name__ == "__main__":
    import_vllm()
