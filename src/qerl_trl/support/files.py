"""Check model names and file locations, and find files next to a model's weights."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


def check_name(model: str | os.PathLike) -> None:
    """Raise `ValueError` for a model name that is neither a folder nor a valid Hub id, before the Hub's client does."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if os.path.isdir(model):
        return
    try:
        validate_repo_id(str(model))
    except HFValidationError as error:
        raise ValueError(f"{model} is neither a folder here nor a Hub id (user/name).") from error


@contextmanager
def named_in_errors(model: str | os.PathLike, files: str = "its files") -> Iterator[None]:
    """Context manager that adds the model's name to transformers' errors, also without access to the Hub.

    Args:
        files: names the files that suffice without the Hub, for the message.

    Raises:
        `ValueError`: as [`check_name`].
        `OSError`: as raised inside, with the name.
    """
    check_name(model)
    try:
        yield
    except OSError as error:
        raise OSError(f"{model} cannot be loaded: {error} Without a network, name a folder with {files}.") from error


def leads_to(path: str | os.PathLike, folder: str | os.PathLike) -> Path | None:
    """Return where `path` leads, symbolic links followed, if outside of `folder`; else `None`. Only the Hub's cache may
    link out of a folder: from `snapshots/<revision>/` into `blobs/`."""
    root, place = Path(folder).resolve(), Path(path).resolve()
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    allowed = [root] if snapshots is None else [root, (snapshots.parent / "blobs").resolve()]
    return None if any(place.is_relative_to(parent) for parent in allowed) else place


def hub_commit(folder: str | os.PathLike) -> str | None:
    """Return the commit of a folder in the Hub's cache, perhaps incomplete; `None` for any other folder."""
    path = Path(folder).absolute()
    return path.name if path.parent.name == "snapshots" else None


def commit_of(config: "PretrainedConfig") -> str | None:
    """Return the Hub's commit of a loaded model; `None` for a folder, or if unknown."""
    return getattr(config, "_commit_hash", None)


def note_commit(
    config: "PretrainedConfig",
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    files: Sequence[str] = (),
) -> None:
    """Record the Hub's commit in the configuration of a newly loaded model, as newer transformers do not.

    Args:
        revision, cache_dir: as at the load. Without a revision (`None`), a cache with just one counts.
        files: files known to be loaded; their paths contain the commit.
    """
    from huggingface_hub import constants

    name = config.name_or_path or ""
    if not name or os.path.isdir(name) or commit_of(config) is not None:
        return
    found = [folder.name for file in files[:1] for folder in Path(file).absolute().parents if hub_commit(folder)][:1]
    if not found:
        repository = Path(cache_dir or constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
        ref = repository / "refs" / (revision or "")
        wanted = "*" if revision is None else ref.read_text().strip() if ref.is_file() else revision
        found = [folder.name for folder in repository.glob(f"snapshots/{wanted}")]
    if len(found) == 1:  # otherwise no manifest is compared, and cards lack the commit
        config._commit_hash = found[0]


def reads_for_its_machine() -> bool:
    """Whether this process reads and compares folders for its machine, as local rank 0. A single process always does,
    even with a stale LOCAL_RANK."""
    return os.environ.get("LOCAL_RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def beside(config: "PretrainedConfig", name: str) -> Path | None:
    """Find file `name` in a model's folder or Hub revision, downloaded if not cached; `None` if unavailable."""
    source, commit = config.name_or_path or "", commit_of(config)
    if os.path.isdir(source):
        return path if (path := Path(source, name)).is_file() else None
    if commit is None:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(source, name, revision=commit))
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        logger.info("No %s was found in %s at %s (%s).", name, source, commit, type(error).__name__)
        return None
