"""Kernel tests: the interpreter on a CPU, the real kernels on a GPU (marker `gpu`), compilation for sm_90 anywhere."""

import os
import sys

import pytest
import torch

os.environ["QERL_NVFP4_TUNED"] = "0"  # what is shipped is tested; test_kernels_measured.py turns it on for itself
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported


@pytest.fixture(autouse=True)
def no_kernel_was_replaced():
    """A kernel that does not compile falls back to a slower one, which gives the right result: tests must see it all
    the same.
    """
    yield
    if "qerl_nvfp4.fallback" in sys.modules:
        assert not sys.modules["qerl_nvfp4.fallback"].refused


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
