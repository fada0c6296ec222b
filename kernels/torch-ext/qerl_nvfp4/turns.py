"""Processes of one machine that would compile the same code: the first one does, the others wait and find it in the cache on disk.

A lock on a file, not a barrier: the system lets go of it when its holder ends, however that ends, so nobody waits for a process that died, and
a process that has nothing to compile takes no part.
"""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

QUIET_S = 1.0  # of waiting about which nothing is said: to load what an earlier start has compiled takes less
LONGEST_S = 900.0  # of waiting; after that a process compiles for itself
_ASK_AGAIN_S = 0.05


@contextlib.contextmanager
def one_process_at_a_time(
    folder: str | os.PathLike,
    name: str,
    what: str,
    tell: Callable[[str], None] = print,
    longest: float = LONGEST_S,
    everywhere: bool = False,
) -> Iterator[None]:
    """Among the processes of this machine that fill the cache in `folder` with the same code.

    Args:
        folder: of the cache; it is made.
        name: of the file that is locked, the same for all that compile the same code.
        what: is compiled; the lines that are told begin with "Waiting for another process of this machine to compile".
        longest: seconds to wait at most.
        everywhere: among those of other machines that see the folder, too; a cache that is only read back is filled by each.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that cannot be written to: there is no cache to wait for either
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder, f"{name}.lock" if everywhere else f"{name}.{platform.node()}.lock")
            if fcntl is not None:
                file = stack.enter_context(path.open("a+"))
                _wait(file, what, tell, longest)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing is not enough where a fork has the file too
        yield


def _wait(file, what: str, tell: Callable[[str], None], longest: float) -> None:
    """Until this process has the lock; it has it until `file` is closed. Raises `OSError` where the file system has no locks."""
    begin, said = time.monotonic(), False
    while not _locked(file):
        waited = time.monotonic() - begin
        if waited > longest:
            tell(f"... {waited:.0f} s; it is not ready yet, so this process compiles {what} too")
            return
        if waited > QUIET_S and not said:
            file.seek(0)
            pid = file.read().strip()
            holder = f"process {pid}" if pid else "another process"
            tell(
                f"Waiting for {holder} of this machine to compile {what} (first start only, {longest:.0f} s at most) ..."
            )
            said = True
        time.sleep(_ASK_AGAIN_S)
    file.truncate(0)
    file.write(f"{os.getpid()}")
    file.flush()
    if said:
        tell(f"... waited {time.monotonic() - begin:.0f} s")


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
