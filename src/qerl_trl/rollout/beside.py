"""A call of an engine in a thread of its own, beside the trainer's: how it ends, whose random numbers it draws, whose turn it is."""

import atexit
import contextlib
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: seconds after which Python takes the turn from a thread that another one waits for; its own is 5 ms. A decode loop beside a thread that never waits
#: takes 0.36 s alone, 3.5 s at 5 ms, 1.2 s at 1 ms and 0.8 s at this (a stand-in for both, 2 CPU cores)
TURN = 0.0005
#: seconds that a request may take to end when the interpreter does
_PATIENCE = 10.0
_alive: "weakref.WeakSet[Request]" = weakref.WeakSet()


class Request(threading.Thread):
    """A call in a thread of its own.

    Args:
        around: a context in which it runs there.
    """

    def __init__(self, call: Callable[[], Any], around: contextlib.AbstractContextManager[Any]) -> None:
        super().__init__(name="rollout ahead", daemon=True)
        self._call, self._around = call, around
        self._answer: Future[Any] = Future()
        self.seconds = 0.0
        _alive.add(self)
        self.start()

    def run(self) -> None:
        began = time.perf_counter()
        try:
            with self._around:
                answer = self._call()
        except BaseException as error:  # raised again in the thread that waits
            self._answer.set_exception(error)
        else:
            self.seconds = time.perf_counter() - began
            self._answer.set_result(answer)

    def answer(self) -> Any:
        """Wait for it; raises what it raised."""
        while self.is_alive():  # a limit of time (deadline.py) ends this wait in any thread, between two turns
            self.join(1.0)
        return self._answer.result()

    def stop(self) -> None:
        """End it, as soon as Python has a turn in its thread, before the interpreter takes itself apart around it."""
        if self.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))
            self.join(_PATIENCE)


@atexit.register
def _stop_all() -> None:
    for request in list(_alive):
        request.stop()


class OwnGenerator(TorchFunctionMode):
    """In this thread, numbers that nobody gave a generator for come from one of its own: vLLM's sampler on a CPU draws some from torch's and
    throws them away where it has seeds, and the trainer draws from torch's meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.exponential_ and kwargs.get("generator") is None:
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


class _ShortTurns:
    """How many want short turns, and what the others had before."""

    def __init__(self) -> None:
        self._lock, self._wanted, self._before = threading.Lock(), 0, 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, in any thread, Python changes threads after `TURN` at the latest: an engine computes little between two kernels, and would wait for a
        whole turn of the trainer each time. May be nested, and entered by several threads."""
        with self._lock:
            if not self._wanted:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(TURN, self._before))
            self._wanted += 1
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if not self._wanted:
                    sys.setswitchinterval(self._before)


short_turns = _ShortTurns()
