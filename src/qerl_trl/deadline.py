"""A limit on how long a block of code may take, in any thread: `with deadline(60, lambda: RolloutError("...")): ...`

A watchdog thread waits beside the block. When the time is up it interrupts the block and goes on doing so until the block has ended:

- in the main thread by SIGALRM, which ends a wait of the operating system too. No interval timer is involved, so code inside that sets
  one of its own (`signal.alarm`, as graders of mathematics do) neither disarms the limit nor is disturbed by it;
- in any other thread by an asynchronous exception, which Python raises at the next bytecode of that thread. A call into C that never
  comes back cannot be ended there: `interrupt` is called first, and may make it come back (by closing the connection it waits on).

A block that ends after its time raises in any case, also when it caught what interrupted it.
"""

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: seconds between two interruptions of a block that has not ended yet
_AGAIN = 5.0


class _Expired(BaseException):
    """Interrupts a thread that is not the main one; never leaves `deadline`."""


@contextmanager
def deadline(
    seconds: float | None, error: Callable[[], Exception], interrupt: Callable[[], object] | None = None
) -> Iterator[None]:
    """Raise `error()` when the block takes longer than `seconds`. May be nested.

    Args:
        seconds: `None` or 0 for no limit.
        interrupt: called by the watchdog when the time is up, outside of the main thread.
    """
    if not seconds:
        yield
        return
    if threading.current_thread() is threading.main_thread():
        inside = _interrupting_the_main_thread(seconds, error)
    else:
        inside = _interrupting_this_thread(seconds, error, interrupt)
    with inside as expired:
        yield
        if expired.is_set():  # interrupted, and the block went on
            raise error()


@contextmanager
def _interrupting_the_main_thread(seconds: float, error: Callable[[], Exception]) -> Iterator[threading.Event]:
    expired, ended = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if expired.is_set():
            if not ended.is_set():
                raise error()
        elif callable(before):  # somebody else's alarm
            before(number, frame)

    def watch() -> None:
        if not ended.wait(seconds):
            expired.set()
            while not ended.is_set():
                signal.pthread_kill(main, signal.SIGALRM)
                ended.wait(_AGAIN)

    before = signal.signal(signal.SIGALRM, on_alarm)
    watchdog = threading.Thread(target=watch, name="deadline", daemon=True)
    watchdog.start()
    try:
        yield expired
    finally:
        ended.set()
        watchdog.join()
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _interrupting_this_thread(
    seconds: float, error: Callable[[], Exception], interrupt: Callable[[], object] | None
) -> Iterator[threading.Event]:
    expired, ended, lock = threading.Event(), threading.Event(), threading.Lock()
    thread = ctypes.c_ulong(threading.get_ident())

    def watch() -> None:
        if not ended.wait(seconds):
            expired.set()
            if interrupt is not None:
                interrupt()
            while not ended.is_set():
                with lock:
                    if not ended.is_set():
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Expired))
                ended.wait(_AGAIN)

    watchdog = threading.Thread(target=watch, name="deadline", daemon=True)
    watchdog.start()
    try:
        try:
            yield expired
        finally:
            with lock:
                ended.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that was sent and not raised yet
    except _Expired:
        raise error() from None
    except Exception as caused:
        if expired.is_set():  # `interrupt` made the call fail
            raise error() from caused
        raise
