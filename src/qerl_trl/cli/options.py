"""What the commands of `qerl-trl` share: options that mean the same everywhere, and how results, notes and progress are printed."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing destination, once the new one is complete.")
]
BaseModel = Annotated[str | None, typer.Option(help="Folder or Hub id of the base. Default: what the adapter says.")]
BaseFormat = Annotated[
    str | None, typer.Option(help="nvfp4 or bf16: the base's format. Default: what the run recorded.")
]
AllowOtherBase = Annotated[
    bool,
    typer.Option("--allow-other-base", help="Take a base with other weights than the run's. The record says so."),
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code from the repository.")]


def _checked_dtype(said: str | None) -> str | None:
    if said not in (None, "bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype {said} is none of bfloat16, float16, float32.")
    return said


#: of a merge
WrittenDtype = Annotated[
    str | None,
    typer.Option(
        callback=_checked_dtype,
        help="bfloat16, float16 or float32: of what --as bf16 writes, by default bfloat16. What is computed in is what the run recorded.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:<i>.")]
NumProcesses = Annotated[
    int | None,
    typer.Option(
        help="Processes (GPUs) of a run, through accelerate launch. Default: 1, or as --accelerate-config says."
    ),
]
AccelerateConfig = Annotated[
    str | None,
    typer.Option(help="accelerate's YAML file, or the name of a shipped one: data_parallel_8, fsdp2_2, zero2_4..."),
]
DatasetName = Annotated[str | None, typer.Option("--dataset", help="Training data to name in the card.")]


def note(text: str) -> None:
    print(text, file=sys.stderr)


def print_result(content: Mapping[str, Any], as_json: bool, lines: list[str]) -> None:
    print(json.dumps(content, indent=1) if as_json else "\n".join(lines))


def weights_at(folder: Path) -> dict[str, int]:
    """The files of weights in a folder, and when each was written."""
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}


def told_of(folder: Path, before: Mapping[str, int]) -> str:
    """Of a folder that was to be written, and had the files `before`: whether it was, or what was to be in it was there."""
    return "there already" if before and weights_at(folder) == before else "written"


@contextmanager
def progress_bar(description: str) -> Iterator[Any]:
    """A progress bar in bytes, and a line every `LOG_SECONDS` where the output is a file; call with (bytes since the last call, bytes
    in total or None)."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        yield _Lines(description).update
        return
    with tqdm(desc=description, unit="B", unit_scale=True) as bar:

        def update(size: int, total: int | None = None) -> None:
            if total is not None and bar.total != total:
                bar.total = total
            bar.update(size)

        yield update


#: between two lines of progress in a log
LOG_SECONDS = 30.0


class _Lines:
    """Progress for a log: nothing for what takes less than `LOG_SECONDS`."""

    def __init__(self, description: str) -> None:
        self.description, self.done = description, 0
        self.total: int | None = None
        self.begun = self.said = time.monotonic()

    def update(self, size: int, total: int | None = None) -> None:
        self.done, self.total = self.done + size, total or self.total
        now = time.monotonic()
        if now - self.said < LOG_SECONDS:
            return
        self.said = now
        of = f" of {self.total / 1e9:.1f} GB ({self.done / self.total:.0%})" if self.total else " GB"
        note(f"{self.description}: {self.done / 1e9:.1f}{of} after {now - self.begun:.0f} s")
