"""Reinforcement learning of LLMs on a frozen 4-bit (NVFP4) base, as an ordinary TRL trainer.

Names are imported on first use: `import qerl_trl` loads neither vLLM nor Triton, nor any other heavy package.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

#: public name -> module that defines it
_EXPORTS = {
    "AQNCallback": "noise.callback",
    "NVFP4Config": "nvfp4.config",
    "NVFP4Linear": "nvfp4.linear",
    "QeRLConfig": "config",
    "QeRLGRPOTrainer": "trainer",
    "QeRLRLOOConfig": "config",
    "QeRLRLOOTrainer": "trainer",
    "Script": "tasks.script",
    "Task": "tasks.task",
    "from_pretrained": "model.loading",
    "last_checkpoint": "checkpoint.seal",
    "load_adapter": "model.lora",
    "load_config": "model.loading",
    "pretrained_kwargs": "model.loading",
    "train_and_measure": "tasks.run",
}

__all__ = sorted([*_EXPORTS, "__version__"])

if TYPE_CHECKING:
    from .checkpoint.seal import last_checkpoint as last_checkpoint
    from .config import QeRLConfig as QeRLConfig
    from .config import QeRLRLOOConfig as QeRLRLOOConfig
    from .model.loading import from_pretrained as from_pretrained
    from .model.loading import load_config as load_config
    from .model.loading import pretrained_kwargs as pretrained_kwargs
    from .model.lora import load_adapter as load_adapter
    from .noise.callback import AQNCallback as AQNCallback
    from .nvfp4.config import NVFP4Config as NVFP4Config
    from .nvfp4.linear import NVFP4Linear as NVFP4Linear
    from .tasks.run import train_and_measure as train_and_measure
    from .tasks.script import Script as Script
    from .tasks.task import Task as Task
    from .trainer import QeRLGRPOTrainer as QeRLGRPOTrainer
    from .trainer import QeRLRLOOTrainer as QeRLRLOOTrainer


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
