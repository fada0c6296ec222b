"""What happens when a kernel does not compile: a slower one takes its place, which is said once, with the reason.

Triton compiles a kernel at its first launch.  A Triton that was not tried, a card with less shared memory, or a driver that knows an
older PTX may refuse it then.  Such a failure comes before anything of that kernel has run, so another one can do the work; it is
remembered for that GPU, and that variant of the kernel is not tried on it again.  Errors of a launch itself are never caught here.
"""

import traceback
import warnings
from collections.abc import Callable

import torch
import triton
from triton.errors import TritonError
from triton.runtime.errors import InterpreterError

COMPILE_ERRORS = (TritonError, RuntimeError, ValueError, TypeError, AssertionError, AttributeError, KeyError)

refused: dict[tuple[int, tuple], str] = {}  # (GPU, variant of a kernel) that did not compile -> why
_said: set[tuple[int, str, str]] = set()


def gpu(index: int | None) -> int:
    """Of a device's index; None, that of the meta device: the current GPU's, or -1 where there is none (Triton's interpreter)."""
    if index is not None:
        return index
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def refused_on(index: int | None) -> dict[tuple, str]:
    """Variants of kernels that did not compile for a GPU -> why."""
    return {variant: reason for (place, variant), reason in refused.items() if place == gpu(index)}


def of_the_compiler(error: BaseException) -> bool:
    """Whether an error comes from compiling or loading a kernel, not from launching it or from what surrounds it."""
    if isinstance(error, TritonError):  # compilation, ptxas, shared memory or registers that a card does not have
        return not isinstance(error, InterpreterError)
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith(("triton.compiler", "triton.backends.nvidia.compiler")) for name in modules)


def attempt(call: Callable[[], None], variant: Callable[[], tuple], instead: str, index: int | None) -> bool:
    """Run `call`, which launches kernels on the GPU of this index; False if this variant (kernel's name first) cannot be compiled for it, now
    or at an earlier try.

    `variant` is asked only when something was refused before, or is now: launches are many.
    """
    if refused and (gpu(index), variant()) in refused:
        return False
    try:
        call()
    except COMPILE_ERRORS as error:
        if not of_the_compiler(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]
        (name, *_), place = variant(), gpu(index)
        refused[place, variant()] = reason
        if (place, name, reason) not in _said:
            _said.add((place, name, reason))
            where = f"GPU {place}" if place >= 0 else "this machine"
            warnings.warn(
                f"qerl_nvfp4: the {name} kernel does not compile with Triton {triton.__version__} on {where} ({reason}). "
                f"{instead} is used instead, which is right but slower. These kernels are made for Triton 3.6 to 3.9.",
                RuntimeWarning,
                stacklevel=2,
            )
        return False
    return True


def forget() -> None:
    """Try everything again, and say again what fails."""
    refused.clear()
    _said.clear()
