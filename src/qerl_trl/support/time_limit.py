"""A limit on the duration of a block: `with deadline(60, lambda: RolloutError("...")): ...`

A watchdog thread interrupts the main thread by SIGALRM, repeatedly until the block has ended. No interval timer is
set, so code inside may set one (`signal.alarm`, as graders of mathematics do).
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: seconds between two interruptions of a running block
_AGAIN = 5.0


@contextmanager
def deadline(seconds: float | None, error: Callable[[], Exception]) -> Iterator[None]:
    """Context manager: raises `error()` if the block exceeds `seconds`, even if it catches that. May be nested.

    Args:
        seconds: `None` or 0 for no limit. Only the main thread has a limit: Python runs signal handlers there only.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    expired, ended = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if expired.is_set():
            if not ended.is_set():
                raise error()
        elif callable(before):  # someone else's handler
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
        yield
        if expired.is_set():
            raise error()
    finally:
        ended.set()
        watchdog.join()
        signal.signal(signal.SIGALRM, before)
