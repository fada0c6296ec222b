"""Checks of model names and file locations, and files next to a model's weights."""

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
    """Refuse a model's name that is no folder and no valid Hub id, before the Hub's own message on its form.

    Raises:
        `ValueError`: it is neither.
    """
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
    """Add the model's name to transformers' errors, also without access to the Hub.

    Args:
        files: files to read, sufficient without the Hub.

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
    """Target of `path`, symbolic links followed, if outside of `folder`; else `None`. Only the Hub's cache may link out
    of a folder: from `snapshots/<revision>/` into `blobs/`."""
    root, place = Path(folder).resolve(), Path(path).resolve()
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    allowed = [root] if snapshots is None else [root, (snapshots.parent / "blobs").resolve()]
    return None if any(place.is_relative_to(parent) for parent in allowed) else place


def hub_commit(folder: str | os.PathLike) -> str | None:
    """The Hub's commit of a folder in its cache, perhaps incomplete; `None` for any other folder."""
    path = Path(folder).absolute()
    return path.name if path.parent.name == "snapshots" else None


def note_commit(
    config: "PretrainedConfig",
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    files: Sequence[str] = (),
) -> None:
    """Record the Hub's commit in the configuration of a newly loaded model; newer transformers do not.

    Args:
        revision, cache_dir: of the load. An unknown revision (`None`) is resolved only if the cache has just one.
        files: known files of the load; their paths contain the commit.
    """
    from huggingface_hub import constants

    name = config.name_or_path or ""
    if not name or os.path.isdir(name) or getattr(config, "_commit_hash", None) is not None:
        return
    found = [folder.name for file in files[:1] for folder in Path(file).absolute().parents if hub_commit(folder)][:1]
    if not found:
        repository = Path(cache_dir or constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
        ref = repository / "refs" / (revision or "")
        wanted = "*" if revision is None else ref.read_text().strip() if ref.is_file() else revision
        found = [folder.name for folder in repository.glob(f"snapshots/{wanted}")]
    if len(found) == 1:  # else manifests are not compared, and cards have no commit
        config._commit_hash = found[0]


def reads_for_its_machine() -> bool:
    """Whether this process reads and compares folders for its machine (local rank 0). A single process always does,
    even with a stale LOCAL_RANK."""
    return os.environ.get("LOCAL_RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def beside(config: "PretrainedConfig", name: str) -> Path | None:
    """The file `name` of a model's folder, or of its Hub revision, downloaded if not cached; `None` if unavailable."""
    source, commit = config.name_or_path or "", getattr(config, "_commit_hash", None)
    if os.path.isdir(source):
        return path if (path := Path(source, name)).is_file() else None
    if commit is None:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(source, name, revision=commit))
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        logger.info("No %s of %s at %s (%s).", name, source, commit, type(error).__name__)
        return None
