"""Checkpoints that are whole or not there: seal, verify, find.

`Trainer` writes a checkpoint file by file into its final folder, so a run that is killed meanwhile leaves a folder that
looks like a checkpoint. Here the last file written is a manifest with the size and SHA-256 of every other file; a folder
without it, or that disagrees with it, is not a checkpoint. Older checkpoints are rotated out only after the new one is
sealed, so at every moment there is a whole one to resume from.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from . import redaction

logger = logging.getLogger(__name__)

MANIFEST_NAME = "qerl_manifest.json"


def seal(folder: str | os.PathLike, run: Mapping | None = None, hashed: dict[str, str] | None = None) -> None:
    """Write the manifest of `folder`, atomically and last.

    Args:
        folder: a finished checkpoint.
        run: JSON-serializable description of the run, compared on resume (see [`run_differences`]).
        hashed: SHA-256 of files (relative names) that were hashed when they were complete; the others are hashed here.
    """
    folder, hashed = Path(folder), hashed or {}
    names = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME
    )
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": hashed.get(name) or sha256(folder / name)}
        for name in names
    }
    write_json_atomically(folder / MANIFEST_NAME, {"files": files, "run": run or {}})


def discard(folder: str | os.PathLike) -> None:
    """Remove an older folder of the same name, manifest first, so that a half-removed one is not taken for whole."""
    folder = Path(folder)
    if folder.is_dir():
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder)


def problems(folder: str | os.PathLike) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty if it is whole. Reads every byte once."""
    folder = Path(folder)
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        return [f"{MANIFEST_NAME} is missing: the run that wrote it was stopped before it was complete"]
    try:
        files = json.loads(manifest_path.read_text())["files"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        return [f"{MANIFEST_NAME} is unreadable ({error})"]
    found = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written")
        elif sha256(path) != expected["sha256"]:
            found.append(f"{name} has other content than was written (SHA-256 differs)")
    return found


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The newest whole checkpoint in `output_dir`, or `None`. Damaged newer ones are skipped with a warning each."""
    # here, because it imports PEFT, which imports bitsandbytes where it is installed; `qerl-trl quantize` needs neither
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return None
    pattern = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
    steps = sorted(
        (int(m.group(1)) for p in output_dir.iterdir() if p.is_dir() and (m := pattern.match(p.name))), reverse=True
    )
    for step in steps:
        folder = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        wrong = problems(folder)
        if not wrong:
            return str(folder)
        logger.warning("Skipping %s: %s. Looking for an older checkpoint.", folder, "; ".join(wrong))
    return None


def to_resume(resume_from_checkpoint: str | bool | None, output_dir: str | os.PathLike) -> str | None:
    """The whole checkpoint that `Trainer.train(resume_from_checkpoint)` means, `None` for a fresh start.

    Raises:
        `ValueError`: there is none in `output_dir`, or the one that was named is damaged.
    """
    if resume_from_checkpoint is True:
        newest = last_checkpoint(output_dir)
        if newest is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but there is no whole checkpoint in {output_dir}. Start without it, or give the path "
                "of a checkpoint."
            )
        return newest
    if not resume_from_checkpoint:
        return None
    verify(resume_from_checkpoint)
    return resume_from_checkpoint


def verify(folder: str | os.PathLike) -> None:
    """Check a checkpoint that the user named.

    A folder without a manifest may come from TRL's own trainer: accepted with a warning.

    Raises:
        `ValueError`: the folder is not there or is damaged; names the files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(folder)!r} is not a folder.")
    if not (folder / MANIFEST_NAME).is_file():
        logger.warning(
            "%s has no %s: it was written by another trainer, or the run was killed while writing it. Resuming from it "
            "unverified, because it was named explicitly.",
            folder,
            MANIFEST_NAME,
        )
        return
    if wrong := problems(folder):
        raise ValueError(
            f"Checkpoint {folder} is damaged: {'; '.join(wrong)}. Resume from an older one, or pass "
            "resume_from_checkpoint=True to take the newest whole one."
        )


def run_differences(folder: str | os.PathLike, run: Mapping) -> list[str]:
    """Settings in which the sealed checkpoint and `run` differ, one line each."""
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        return []
    saved = json.loads(path.read_text()).get("run", {})
    return [f"{key}: {saved[key]!r} then, {run[key]!r} now" for key in saved if key in run and saved[key] != run[key]]


def write_json_atomically(path: Path, content: Mapping | list) -> None:
    """Write beside, flush to disk, rename. Secrets are masked, whoever put them there."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(redaction.redact(json.dumps(content, indent=2, sort_keys=True)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
