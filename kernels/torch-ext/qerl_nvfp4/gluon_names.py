"""What Triton 3.6 to 3.9 call differently in Gluon, under one name for our kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core


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
_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate  # 3.8


def record(cls):
    """A kernel's record: an aggregate with a constructor of its annotated fields, in order; its `gluon.jit` functions are methods.

    Unlike those of a tuple, its constants stay constants.
    """
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else core.constexpr(value))

    __init__.__triton_builtin__ = True  # or the cache's key would want its source
    cls.__init__ = __init__
    cls.__annotations__ = dict.fromkeys(names, core.base_value)
    return _aggregate(cls)


def partitions(groups, count, *others, _semantic=None):
    """The first `count` of the groups that multiply, and the other warps, for `warp_specialize`."""
    return [*groups[: int(count)], *(each for other in others for each in other)]


partitions.__triton_builtin__ = True
