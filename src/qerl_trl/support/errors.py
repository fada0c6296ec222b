"""What a command ends with: one message and an exit code for an error raised on purpose, a traceback for any other."""

import sys
import traceback

from . import secrets

#: kinds of errors that are raised on purpose
MEANT = (ValueError, RuntimeError, OSError, ImportError)
#: where they are raised: this package, and the configurations that check what a user writes
_HERE = ("qerl_trl.", "qerl_nvfp4.", "trl.trainer.grpo_config", "trl.trainer.rloo_config", "transformers.training_args")
#: exit code after Ctrl-C, as a shell counts it
INTERRUPTED = 130


def exit_code(error: BaseException) -> int | None:
    """2 for the user's input, 1 for a state, 130 for Ctrl-C; `None` where the traceback is to be shown: a `ValueError` or `RuntimeError` that
    was raised elsewhere."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ImportError | OSError):
        return 1
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    if not isinstance(error, MEANT) or not any(name.startswith(_HERE) for name in raised_in):
        return None
    return 2 if isinstance(error, ValueError) else 1


def tell(message: object) -> None:
    """Print what a command ends with, without secrets; of an error also its notes."""
    said = "\n".join([str(message), *getattr(message, "__notes__", ())])
    print(f"qerl-trl: {secrets.redact(said)}", file=sys.stderr, flush=True)
