"""Checkpoints, whole or absent: seal, verify, find.

`Trainer` writes a checkpoint file by file into its final folder, so a killed run leaves one that looks complete. The
last file written is therefore a manifest with the size and SHA-256 of every other file; a folder without it, or
different from it, is no checkpoint. Older checkpoints are removed after the new one is sealed. The newest one is the
one sealed last, at any step: a run may go back.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

from ..support import secrets

if TYPE_CHECKING:
    from .records import RunSettings, Survived

logger = logging.getLogger(__name__)

MANIFEST_NAME = "qerl_manifest.json"
#: locked by the process training in a folder (run/folder.py)
LOCK_NAME = ".qerl_lock"
#: files that define a model, not allowed unsealed in its folder
_DECISIVE = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "pytorch_model*.bin", "generation_config.json",
    "adapter_config.json", "adapter_model*.bin",
)  # fmt: skip
#: the same for a tokenizer or processor, if one was sealed; allowed in a folder without one
_OF_THE_TOKENIZER = (
    "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.json", "tokenizer_config.json", "added_tokens.json",
    "special_tokens_map.json", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "*processor_config.json",
)  # fmt: skip
_OPTIMIZERS = ("optimizer.pt*", "optimizer.bin", "optimizer_*", "rank*-optimizer.pt", "global_step*")


class SealedFile(TypedDict):
    """An entry of a manifest."""

    bytes: int
    sha256: str


class Recorded(TypedDict, total=False):
    """The record sealed with a folder: `identity.RunSettings` (of a checkpoint, a run) or `publish.records.Export`."""

    kind: str  # of an export only
    settings: "RunSettings"  # of an export only
    survived: "Survived"  # of an export only
    global_step: int  # of a checkpoint or a run, as all below
    base_sha256: str
    changed: list[str]


class Manifest(TypedDict):
    """`qerl_manifest.json`. `files`: by relative name; `order`: number of the seal in a run; `sha256`: of the rest."""

    files: dict[str, SealedFile]
    run: Recorded
    order: NotRequired[int]
    sha256: str


def seal(
    folder: str | os.PathLike,
    run: Mapping | None = None,
    hashed: dict[str, str] | None = None,
    names: Iterable[str] | None = None,
    order: int | None = None,
) -> None:
    """Write the manifest of `folder`, atomically and last.

    Args:
        folder: a finished checkpoint.
        run: JSON-serializable description of the run, compared on resume (`identity.differences`).
        hashed: known SHA-256 of complete files (relative names); the others are hashed here.
        names: the covered files; all of them by default.
        order: of a checkpoint or a run's folder ([`next_order`]).
    """
    folder, hashed = Path(folder), hashed or {}
    if names is None:
        names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in names if Path(name).name != MANIFEST_NAME)
    files: dict[str, SealedFile] = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": hashed.get(name) or sha256(folder / name)}
        for name in names
    }
    write_json_atomically(folder / MANIFEST_NAME, manifest(files, run or {}, order))


def manifest(files: Mapping[str, SealedFile], run: Mapping, order: int | None = None) -> Manifest:
    """Build the content of a manifest, as [`read_manifest`] returns it."""
    content = {"files": files, "run": run} | ({} if order is None else {"order": order})
    content = json.loads(secrets.redact(json.dumps(content)))
    return content | {"sha256": _own_sha256(content)}


def _own_sha256(content: Mapping) -> str:
    """Hash a manifest's other entries, to detect edits."""
    others = {name: content[name] for name in ("files", "run", "order") if name in content}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def discard(folder: str | os.PathLike) -> None:
    """Remove a folder, manifest first, so that a partly removed one is not taken for a checkpoint."""
    folder = Path(folder)
    if folder.is_dir():
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder)


def make_room(folder: str | os.PathLike) -> None:
    """Clear the place of a new checkpoint. A whole one of the same step is kept aside until [`replaced`]."""
    folder = Path(folder)
    if folder.is_dir() and not problems(folder):
        discard(_aside(folder))
        os.rename(folder, _aside(folder))
    discard(folder)


def replaced(folder: str | os.PathLike) -> None:
    """Remove the replaced checkpoint, after the new one is sealed."""
    discard(_aside(Path(folder)))


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def problems(folder: str | os.PathLike, read_up_to: float = math.inf, partial: bool = False) -> list[str]:
    """List defects of a checkpoint, one sentence each; empty if it is whole.

    Args:
        read_up_to: bytes; larger files are not hashed, only their size is compared.
        partial: some files may be missing, as in the Hub's cache, and the card may be edited.
    """
    folder = Path(folder)
    if not (folder / MANIFEST_NAME).is_file():
        return [f"{MANIFEST_NAME} is missing: the run was stopped before the folder was complete"]
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return [str(error)]
    found = []
    for name, expected in files.items():
        if partial and name == "README.md":
            continue
        path = folder / name
        if not path.is_file():
            found += [] if partial else [f"{name} is missing"]
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written")
        elif expected["bytes"] <= read_up_to and sha256(path) != expected["sha256"]:
            found.append(f"{name} has other content than was written (SHA-256 differs)")
    return found


def added(folder: str | os.PathLike) -> list[str]:
    """List model files added to a sealed folder, one sentence each. Call it if [`problems`] found none."""
    sealed = read_manifest(folder)["files"]
    found = [name for name in _found(folder, _DECISIVE) if name not in sealed]
    if "tokenizer_config.json" in sealed:
        found += [name for name in tokenizer_files(folder) if name not in sealed]
    return [f"{name} was added after it was sealed" for name in sorted(found)]


def tokenizer_files(folder: str | os.PathLike) -> list[str]:
    """Return the names of tokenizer and processor files in `folder`."""
    return _found(folder, _OF_THE_TOKENIZER)


def _found(folder: str | os.PathLike, patterns: Iterable[str]) -> list[str]:
    found = {str(p.relative_to(folder)) for pattern in patterns for p in Path(folder).glob(pattern) if p.is_file()}
    return sorted(found)


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """Read the manifest of `folder`. All names are inside the folder.

    Raises:
        `ValueError`: not written by [`seal`]. `OSError`: there is none.
    """
    try:
        content = json.loads(Path(folder, MANIFEST_NAME).read_bytes())
        files = content["files"]
        sized = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
        outside = [name for name in sized if Path(name).is_absolute() or ".." in Path(name).parts]
        if outside or content["sha256"] != _own_sha256(content):
            raise ValueError(f"it was changed after it was written, or names files outside of the folder: {outside}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(f"{MANIFEST_NAME} is unreadable ({type(error).__name__}: {error})") from error
    return content


def recorded_run(folder: str | os.PathLike) -> Recorded:
    """Return the record of the run that sealed `folder`; empty without a readable manifest."""
    try:
        return read_manifest(folder)["run"]
    except (OSError, ValueError):
        return {}


def recorded_settings(folder: str | os.PathLike) -> Recorded:
    """Return the run's settings recorded in a run's folder or an export; empty if unknown."""
    found = recorded_run(folder)
    return cast(Recorded, found.get("settings", {})) if "kind" in found else found


def sealed_files(folder: str | os.PathLike) -> set[str]:
    """Return the names of the files in `folder`'s manifest; none without a readable manifest."""
    try:
        return set(read_manifest(folder)["files"])
    except (OSError, ValueError):
        return set()


def weights_sha256(folder: str | os.PathLike) -> str | None:
    """Hash the weights in a folder: of its adapter, else all files of its model. `None` without any."""
    folder = Path(folder)
    files = [folder / "adapter_model.safetensors"]
    if not (folder / "adapter_config.json").is_file():
        files = sorted(folder.glob("*.safetensors"))
    digests = {path.name: sha256(path) for path in files if path.is_file()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest() if digests else None


def of_a_run(folder: str | os.PathLike) -> list[str]:
    """List contents of `folder` specific to a run: checkpoints, state, and the lock of a live run."""
    folder = Path(folder)
    found = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    found += ["trainer_state.json"] if (folder / "trainer_state.json").is_file() else []
    return found + ([LOCK_NAME] if _is_locked(folder / LOCK_NAME) else [])


def _is_locked(file: Path) -> bool:
    try:
        with open(file) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # missing, or a file system without locks
        return False
    return False


def keeps_optimizer(folder: str | os.PathLike) -> bool:
    """Return whether a checkpoint has an optimizer's state, by `Trainer` alone, with FSDP or with DeepSpeed."""
    return any(any(Path(folder).glob(form)) for form in _OPTIMIZERS)


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """Return the newest whole checkpoint in `output_dir` by seal order, or `None`. Warns of each newer damaged one."""
    whole = next((folder for folder in reversed(_by_age(output_dir)) if _is_whole(folder)), None)
    return None if whole is None else str(whole)


def _is_whole(folder: Path) -> bool:
    """Return whether a checkpoint is whole; log a warning if not."""
    wrong = problems(folder)
    if wrong:
        logger.warning("Skipping %s: %s. Looking for an older checkpoint.", folder, "; ".join(wrong))
    return not wrong


def _by_age(output_dir: str | os.PathLike) -> list[Path]:
    """Checkpoint folders in `output_dir`, the newest last: by seal order, then unsealed ones by step."""
    # imports PEFT, and so an installed bitsandbytes; `qerl-trl quantize` needs neither
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+|\.{PREFIX_CHECKPOINT_DIR}-\d+\.replaced")
    output_dir = Path(output_dir)
    folders = output_dir.iterdir() if output_dir.is_dir() else ()
    found = [folder for folder in folders if folder.is_dir() and pattern.fullmatch(folder.name)]

    def age(folder: Path) -> tuple[float, int, bool]:
        step = int("".join(filter(str.isdecimal, folder.name)))
        return order_of(folder) or math.inf, step, not folder.name.startswith(".")

    return sorted(found, key=age)


def order_of(folder: str | os.PathLike) -> int:
    """Return a sealed folder's number among all seals of its run; 0 without a readable manifest."""
    try:
        return read_manifest(folder).get("order", 0)
    except (OSError, ValueError):
        return 0


def next_order(output_dir: str | os.PathLike, since: int = 0) -> int:
    """Return the number of the next seal in a run's folder. `since`: number of the resumed checkpoint."""
    return 1 + max(since, order_of(output_dir), *map(order_of, _by_age(output_dir)))


def rotate(output_dir: str | os.PathLike, limit: int | None, keep: Iterable[str | os.PathLike]) -> None:
    """Remove the oldest checkpoints, unsealed ones first, down to `limit` (`save_total_limit`; None or 0: any number).

    Args:
        keep: checkpoints to keep at any age: the one just sealed, the best one.
    """
    if not limit or limit < 0:
        return
    kept = {Path(folder).resolve() for folder in keep}
    folders = sorted((each for each in _by_age(output_dir) if not each.name.startswith(".")), key=order_of)
    removable = [folder for folder in folders if folder.resolve() not in kept]
    for folder in removable[: max(0, len(folders) - limit)]:
        try:
            discard(folder)
        except OSError as error:
            logger.warning(
                "Checkpoint %s exceeds save_total_limit=%d, but cannot be deleted: %s. Delete it.", folder, limit, error
            )


def verify(folder: str | os.PathLike) -> None:
    """Check a checkpoint named by the user. A folder without a manifest may be from TRL's own trainer: warn only.

    Raises:
        `ValueError`: it is damaged; names the files.
    """
    folder = Path(folder)
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


def write_json_atomically(path: Path, content: Mapping | list) -> None:
    """Write a temporary file, flush to disk, rename. All secrets are masked."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(secrets.redact(json.dumps(content, indent=2, sort_keys=True)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
