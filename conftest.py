"""Loaded before every other conftest: without a GPU, Triton's kernels run in its interpreter, which is decided when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
