"""A run's output folder: one process at a time, one set of settings, and sealed at the end of the run.

    <output_dir>/
      .qerl_lock               locked by the training process (`lock`)
      checkpoint-<step>/       each sealed (checkpoint/seal.py)
      adapter_model.safetensors, trainer_state.json, ...   of the last `save_model`
      qerl_manifest.json       the seal of those: sizes, hashes, settings, step (`seal`)

The newest seal identifies the owner: a run with other settings is refused before training ([`settle`]).
"""

import errno
import fcntl
import functools
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint import seal
from ..checkpoint import settings as identity
from ..checks import environment
from ..memory.formulas import model_bytes, optimizer_bytes

logger = logging.getLogger(__name__)

LOCK_NAME = seal.LOCK_NAME
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: safetensors and torch.save lose the error's number, and the latter mostly its text too
_FULL_TEXT = re.compile(
    rf"\(os error ({'|'.join(map(str, sorted(_FULL)))})\)|No space left|PytorchStreamWriter failed"
    r"|unexpected pos \d+ vs \d+",
    re.IGNORECASE,
)
#: folder -> descriptor of its lock, kept until this process ends
_locks: dict[str, int] = {}


def lock(output_dir: str | os.PathLike) -> None:
    """Keep other processes from training into `output_dir` for the life of this one. Repeatable.

    Raises:
        `RuntimeError`: another process has it (unnoticed on a file system without locks).
    """
    folder = Path(output_dir).resolve()
    if str(folder) in _locks:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (folder / LOCK_NAME).read_text(errors="replace").strip() or "an unknown process"
        os.close(descriptor)
        raise RuntimeError(
            f"Another run is writing to {folder}: {holder}. Wait for its end, or choose another output_dir."
        ) from error
    except OSError as error:  # a network file system without locks
        logger.info("%s cannot be locked against a second run (%s).", folder, error)
        return
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T %Z')}\n".encode())
    _locks[str(folder)] = descriptor


def _forget_locks() -> None:
    """Release the locks in a forked child, or they would outlive the parent."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)


def resumable(output_dir: str | os.PathLike) -> str | None:
    """Return the folder to resume a run in `output_dir` from: its newest whole checkpoint, or `output_dir` itself if
    it has a later step; `None` for a fresh start."""
    newest, folder = seal.last_checkpoint(output_dir), Path(output_dir)
    ended = seal.recorded_run(folder).get("global_step", -1)
    if ended < 0 or not (folder / TRAINER_STATE_NAME).is_file():
        return newest
    if newest is not None and (seal.order_of(folder) < seal.order_of(newest) or ended == step_of(newest)):
        return newest
    return newest if seal.problems(folder) else str(folder)


def to_resume(resume_from_checkpoint: str | bool | None, output_dir: str | os.PathLike) -> str | None:
    """Return the whole checkpoint for `Trainer.train(resume_from_checkpoint)`, `None` for a fresh start.

    Raises:
        `ValueError`: `output_dir` has none, or the named folder is damaged or no checkpoint.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        found, what = resumable(output_dir), f"finds no whole checkpoint in {output_dir}"
    else:
        seal.verify(resume_from_checkpoint)
        found, kind = resume_from_checkpoint, seal.recorded_run(resume_from_checkpoint).get("kind")
        what = f"is an export ({kind})" if kind else f"is no checkpoint: it has no {TRAINER_STATE_NAME}"
        if kind is not None or not Path(found, TRAINER_STATE_NAME).is_file():
            found = None
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint={resume_from_checkpoint!r} {what}. Name a checkpoint-<step>, or leave it out. To "
            "train an export's adapter: model=qerl_trl.load_adapter(model, folder, is_trainable=True)."
        )
    return found


def step_of(folder: str | os.PathLike) -> int:
    """Return the completed steps of a checkpoint or a sealed run folder."""
    return json.loads(Path(folder, TRAINER_STATE_NAME).read_text())["global_step"]


def settle(output_dir: str | os.PathLike, resume: str | None, settings: Mapping[str, Any], allowed: bool) -> list[str]:
    """Compare `settings` with those of the resumed run, or for a new run with those of the folder's owner.

    Returns:
        Differences permitted by `allowed` (`allow_other_settings`), one line each, including earlier ones.

    Raises:
        `ValueError`: the folder, or the checkpoint, belongs to a run with other settings. `allowed` does not cover the
        folder if the checkpoint is elsewhere: its files belong to another run.
    """
    elsewhere = resume is None or not _lies_in(resume, output_dir)
    # a run's pushed adapter may be next to its checkpoints
    own = None if resume is None else settings if elsewhere else seal.recorded_settings(Path(resume))
    if held := _held(Path(output_dir), own, settings if elsewhere else None):
        raise ValueError(
            f"output_dir={str(output_dir)!r} {held}. Choose another output_dir, or remove this one (qerl-trl train: "
            "--overwrite)."
        )
    source = _owner(Path(output_dir)) if elsewhere else None
    unsealed = sorted(p.name for p in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if elsewhere and source is None and unsealed:
        logger.warning(
            "output_dir=%s holds checkpoints of another trainer: %s. This run replaces them, and with "
            "save_total_limit removes them. Choose another output_dir if they are needed.",
            output_dir,
            ", ".join(unsealed),
        )
    source = Path(resume) if resume is not None else source
    then = seal.recorded_settings(source) if source is not None else {}
    found = identity.differences(then, settings)
    if found.refused and not allowed:
        raise ValueError(
            f"{resume} belongs to a run with other settings: {'; '.join(found.refused)}. Choose another output_dir for "
            "a new run, or resume with allow_other_settings=True."
        )
    for line in found.reported + found.refused:
        logger.warning("Resuming %s with other settings: %s", source, line)
    if resume is None:
        if source is not None:
            logger.warning(
                "output_dir=%s has an earlier start of this run, and training starts over. Pass "
                "resume_from_checkpoint=True to resume instead.",
                output_dir,
            )
        return []
    written = [line for line in found.reported if line.startswith(identity.SOURCES)]
    return list(dict.fromkeys([*then.get("changed", []), *written, *found.refused]))


def clear(output_dir: str | os.PathLike, settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Remove the files of a run with other settings from its folder: its checkpoints, its saved model, and `names`."""
    folder = Path(output_dir)
    source = _owner(folder)
    if source is None or not identity.differences(seal.recorded_settings(source), settings).refused:
        return
    logger.info("The run with other settings in %s is removed (--overwrite).", folder)
    for path in (*folder.glob("checkpoint-[0-9]*"), *folder.glob(".checkpoint-[0-9]*.replaced")):
        seal.discard(path)
    for name in (seal.MANIFEST_NAME, *seal.sealed_files(folder), *names):
        (folder / name).unlink(missing_ok=True)


def require_own(
    folder: str | os.PathLike, settings: Mapping[str, Any], changed: Iterable[str] = (), resumed: bool = False
) -> None:
    """Refuse to save a run's result over that of another run, or an export.

    Args:
        changed: permitted differences of settings.
        resumed: the run was resumed in the folder, which may contain its pushed adapter.

    Raises:
        `ValueError`: the folder has either.
    """
    own, others = (settings, None) if resumed else (None, settings)
    if held := _held(Path(folder), own, others, changed):
        raise ValueError(f"{folder} {held}. Save this run in another folder: save_model('<folder>').")


def _held(
    folder: Path, own: Mapping[str, Any] | None, others: Mapping[str, Any] | None, changed: Iterable[str] = ()
) -> str | None:
    """Describe foreign content: an export, except the adapter of a run with the settings `own`; or the newest seal of a
    run with other settings than `others`, if given. `None` without any."""
    if (kind := _others_export(folder, own, changed)) is not None:
        return f"holds an export ({kind})"
    if others is None or (source := _owner(folder)) is None:
        return None
    if not seal.recorded_run(source):
        return f"holds the result of an unknown run ({'; '.join(seal.problems(source)) or 'its manifest is damaged'})"
    refused = identity.differences(seal.recorded_settings(source), others).refused
    refused = [line for line in refused if line not in changed]
    return f"belongs to a run with other settings: {'; '.join(refused)}" if refused else None


def _others_export(
    folder: str | os.PathLike, settings: Mapping[str, Any] | None, changed: Iterable[str] = ()
) -> str | None:
    """Return the kind of an export, except an adapter of the run with these settings, up to `changed` ones."""
    kind, then = seal.recorded_run(folder).get("kind"), seal.recorded_settings(Path(folder))
    if kind != "adapter" or settings is None or "settings_sha256" not in then:
        return kind
    return kind if set(identity.differences(then, settings).refused) - {*changed} else None


def _lies_in(resume: str, output_dir: str | os.PathLike) -> bool:
    """Return whether a checkpoint is in the folder, or is the folder itself."""
    named = Path(resume)
    return Path(output_dir).resolve() in (named.resolve(), named.resolve().parent, named.parent.resolve())


def _owner(output_dir: Path) -> Path | None:
    """Return the folder of the newest readable manifest; else `output_dir`, if its manifest is damaged."""
    sealed = [path.parent for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{seal.MANIFEST_NAME}")]
    sealed += [output_dir] if (output_dir / seal.MANIFEST_NAME).is_file() else []
    readable = [folder for folder in sealed if seal.recorded_run(folder)]
    return max(readable, key=_age, default=output_dir if output_dir in sealed else None)


def _age(folder: Path) -> tuple[int, int]:
    return seal.order_of(folder), (folder / seal.MANIFEST_NAME).stat().st_mtime_ns


@contextmanager
def sealing(
    folder: str | os.PathLike, settings: Mapping[str, Any], wanted: bool = True, since: int = 0
) -> Iterator[None]:
    """Seal the files written into `folder` by this block (of subfolders only a tokenizer's templates), at its end.

    Args:
        wanted: whether this process writes.
        since: as in [`seal.next_order`].
    """
    if not wanted:
        yield
        return
    folder = Path(folder)
    order = seal.next_order(folder, since)
    (folder / seal.MANIFEST_NAME).unlink(missing_ok=True)
    before = _stamps(folder)
    yield
    written = [name for name, stamp in _stamps(folder).items() if before.get(name) != stamp]
    if any(name.endswith((".safetensors", ".bin")) for name in written):
        seal.seal(folder, settings, names=written, order=order)
    else:
        logger.warning(
            "No weights were written to %s (sharded state is saved in checkpoints only), so it has no manifest.", folder
        )


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    if not folder.is_dir():
        return {}
    files = [path for path in folder.iterdir() if path.is_file()]
    # the tokenizer's templates, in a folder of their own
    files += [folder / name for name in seal.tokenizer_files(folder) if "/" in name]
    # the card is rewritten later
    kept = [path for path in files if not path.name.startswith(".") and path.name != "README.md"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino) for path in kept}


def check_disk(args: TrainingArguments, model: nn.Module) -> None:
    """Raise `RuntimeError` if the disk has no room for one checkpoint of this run."""
    if args.should_save and args.output_dir is not None:
        sizes = model_bytes(model)
        resumable = args.save_strategy != "no" and not args.save_only_model
        optimizer = optimizer_bytes(str(args.optim), sizes) if resumable else 0
        environment.tell(environment.disk(Path(args.output_dir), sizes.trained + optimizer))


def full_is_named(method: Callable) -> Callable:
    """Decorate a writing method of a trainer to remove a partial checkpoint if the disk is full.

    Raises:
        `OSError`: the disk is full; names the last whole checkpoint and what to do.
    """

    @functools.wraps(method)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if not _is_full(error):
                raise
            raise _full(self.args.output_dir, self.state.global_step, self._saved) from error

    return writing


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or _FULL_TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _full(output_dir: str, step: int, saved: str | None) -> OSError:
    begun = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
    if begun.is_dir() and not (begun / seal.MANIFEST_NAME).is_file():
        seal.discard(begun)
    resume = f"resume with the same command from {saved}" if saved else "start again"
    free = environment.size_text(shutil.disk_usage(output_dir).free)
    return OSError(
        errno.ENOSPC,
        f"There was no room to write step {step} to {output_dir}: {free} are free. Free space there, "
        f"or keep fewer checkpoints (save_total_limit=1); then {resume}.",
    )
