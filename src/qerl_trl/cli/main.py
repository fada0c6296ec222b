"""The command line `qerl-trl`: commands and error handling. Heavy imports are inside the commands: `--help` is instant.

Exit codes: 0 done; 1 failed (a file, the hub, a run); 2 bad request (option or input). Results go to standard output
(as JSON with `--json`), everything else to standard error.
"""

import sys
import traceback
from typing import Annotated

import typer

from .. import __version__
from ..support import secrets
from . import evaluate, make, plan, train

#: error types raised on purpose
MEANT = (ValueError, RuntimeError, OSError, ImportError)
#: modules that raise them: this package, and the configurations checking the user's input
_HERE = ("qerl_trl.", "qerl_nvfp4.", "trl.trainer.grpo_config", "trl.trainer.rloo_config", "transformers.training_args")
#: exit code after Ctrl-C, a shell convention
INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    # accept --max_new_tokens and --max-new-tokens: TRL's options use the first spelling, these the second
    context_settings={
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
    pretty_exceptions_enable=False,  # its tracebacks can show local variables, the Hub token among them
)


def _version(asked: bool) -> None:
    if asked:
        print(f"qerl-trl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Reinforcement learning of LLMs on a frozen 4-bit (NVFP4) base: train, measure, merge, quantize, publish."""


# order of `--help`
app.command()(make.quantize)
app.command()(make.merge)
app.command()(make.push)
_TO_THE_EXAMPLE = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(cls=train.TrainCommand, context_settings=_TO_THE_EXAMPLE)(train.train)
app.command(cls=train.SpreadCommand, context_settings=_TO_THE_EXAMPLE)(train.arms)
app.command(name="eval")(evaluate.evaluate)
app.command()(evaluate.report)
app.command()(plan.plan)
app.command()(plan.tune)


@app.command()
def doctor(as_json: train.AsJson = False) -> None:
    """Show versions, GPU, selected kernels, and problems with their remedy. Exit code 1 if something will not work."""
    from . import doctor as diagnosis

    found = diagnosis.examine()
    train.print_result(found.as_dict(), as_json, found.lines())
    if any(problem.fatal for problem in found.problems):
        raise typer.Exit(1)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code: 2 for wrong input, 1 for other failures, 130 for Ctrl-C; `None` to show the traceback."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ImportError | OSError):
        return 1
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    if not isinstance(error, MEANT) or not any(name.startswith(_HERE) for name in raised_in):
        return None
    return 2 if isinstance(error, ValueError) else 1


def tell(message: object) -> None:
    """Print a command's final message without secrets; for an error also its notes."""
    said = "\n".join([str(message), *getattr(message, "__notes__", ())])
    print(f"qerl-trl: {secrets.redact(said)}", file=sys.stderr, flush=True)


def main() -> None:
    """Run a command; errors raised on purpose become one message and an exit code."""
    try:
        app()
    except MEANT as error:
        if (code := exit_code(error)) is None:
            raise
        tell(error)
        sys.exit(code)
    except KeyboardInterrupt:
        tell("Interrupted. Every destination has its old or its new content. Repeat the command to continue.")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
