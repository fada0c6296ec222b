"""An error that nobody catches, in a command or in a script that trains: what is printed of it, and the code with which the process ends.

One that was raised to be read (an option that there is not, a damaged folder, a gradient that is not finite) is one message. One that nobody
foresaw is a traceback, without which it cannot be mended.
"""

import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

from . import redaction

#: what we raise on purpose
MEANT = (ValueError, RuntimeError, OSError, ImportError)
#: as a shell counts it: 128, and the number of the signal
INTERRUPTED = 130
_OURS = ("qerl_trl", "qerl_nvfp4")
#: once this module runs, the request has been read and the trainer is built
_RUN = "qerl_trl.tasks.run"


def exit_code(error: BaseException) -> int | None:
    """The code to end with after an error whose message is all one needs: 2 for the user's input, 1 for a state, 130 for Ctrl-C. `None`: show its
    traceback.

    A message is what we raise with a `raise` statement, and what libraries say of what was asked for: until training has begun, their `ValueError`,
    `ImportError` and `OSError`. Whatever has passed through a file of the user's own (a reward, a task) keeps its traceback, which has the line.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, MEANT):
        return None
    steps = list(traceback.walk_tb(error.__traceback__))
    first = next((i for i, (frame, _) in enumerate(steps) if _is_ours(frame)), 0)
    if not steps or any(_is_users(frame) for frame, _ in steps[first:]):
        return None
    frame, line = steps[-1]
    named = isinstance(
        error, (ImportError, OSError)
    )  # also where the interpreter raises them, they say what they are about
    said = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    running = any(step.f_globals.get("__name__") == _RUN for step, _ in steps)
    of_the_request = not running and (named or (said and isinstance(error, ValueError)))
    if not of_the_request and not (said and _is_ours(frame)):
        return None
    return 2 if isinstance(error, ValueError) else 1


def tell(message: object, file: TextIO | None = None) -> None:
    """Print what a process ends with, without secrets; where there are several processes, which one it is. Of an error also its notes, which
    say what was saved and how to go on."""
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    rank = f", rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}" if several else ""
    text = _interrupted(message) if isinstance(message, KeyboardInterrupt) else str(message)
    said = "\n".join([text, *getattr(message, "__notes__", ())])
    print(f"qerl-trl{rank}: {redaction.redact(said)}", file=file or sys.stderr, flush=True)


def _interrupted(error: KeyboardInterrupt) -> str:
    """With the line of the user's own code that was called from elsewhere (a reward, a tool), where there was one: what hung may be there."""
    steps = list(traceback.walk_tb(error.__traceback__))
    steps = steps[next((i for i, (frame, _) in enumerate(steps) if not _starts(frame)), 0) :]
    called = next((i for i, (frame, _) in enumerate(steps) if not _is_users(frame)), len(steps))
    inside = [step for step in steps[called:] if _is_users(step[0])]
    if not inside:
        return "Interrupted."
    frame, line = inside[-1]
    return f"Interrupted in {frame.f_code.co_filename}, line {line} ({frame.f_code.co_name})."


def tell_in_scripts() -> None:
    """From now on, an error that nobody catches ends this process as it ends a command. Where a debugger or a notebook has its hook, that one
    stays."""
    redaction.mask_tracebacks()
    if sys.excepthook is redaction.print_masked:
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    code = exit_code(error)
    if code is None:
        redaction.print_masked(kind, error, trace)
        return
    # a process group calls the hook that was there before with another sys.stderr, which it prints only if the hook returns
    file = sys.__stderr__ or sys.stderr
    if file.isatty():
        print(file=file)  # the bar of a run ends without a newline
    tell(error, file)
    sys.exit(code)  # the interpreter ends with the code of a hook that exits


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS


def _starts(frame: FrameType) -> bool:
    """Whether its code is what runs a module (`python -m`)."""
    return frame.f_code.co_filename.startswith("<frozen ")


def _is_users(frame: FrameType) -> bool:
    """Whether its code is neither ours, nor Python's, nor an installed package's."""
    file = frame.f_code.co_filename
    if _is_ours(frame) or file.startswith("<"):
        return False
    installed = sysconfig.get_paths()
    return not any(
        Path(file).is_relative_to(installed[where]) for where in ("stdlib", "platstdlib", "purelib", "platlib")
    )
