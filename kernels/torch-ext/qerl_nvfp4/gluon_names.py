"""What Triton 3.6 to 3.9 call differently in Gluon, under one name for our kernels."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _known_as(owner, *names: str):
    """The attribute of the first of these names that this Triton has; the newest one stands first."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{owner.__name__} has none of {names}")


barrier = _known_as(gl, "barrier", "thread_barrier")  # 3.7
async_load = _known_as(tma, "async_load", "async_copy_global_to_shared")  # 3.8
async_store = _known_as(tma, "async_store", "async_copy_shared_to_global")  # 3.8
copy_to_shared = _known_as(async_copy, "async_load", "async_copy_global_to_shared")  # 3.8
