"""Loading a model from a folder that was sealed: it is used as it was sealed, or refused.

Where a manifest lies beside a model, [`begin`] compares at once which files there are, their sizes, and the content of everything small
(configuration, tokenizer, index); the weights are hashed in a thread meanwhile. [`finish`] waits for that and raises: at the end of
[`from_pretrained`], or where training begins. A folder without a manifest is loaded as it is. A model from the Hub is compared with the
manifest that was published with it once its files are here ([`begin_loaded`]).
"""

import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn
from transformers import PreTrainedModel

from ..checkpoint import seal
from ..nvfp4 import config
from ..nvfp4.headers import check_finite_module
from ..nvfp4.shards import weight_files
from ..support.files import beside, hub_commit, note_commit, reads_for_its_machine

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: files up to this size are hashed before anything is loaded
_AT_ONCE_BYTES = 1 << 24


class _Hashing(threading.Thread):
    """Reads a sealed folder again, whole."""

    def __init__(self, folder: Path, partial: bool = False) -> None:
        super().__init__(name=f"hashing {folder}", daemon=True)
        self.folder, self.partial = folder, partial
        self.problems: list[str] = []

    def run(self) -> None:
        try:
            self.problems = seal.problems(self.folder, partial=self.partial)
        except OSError as error:
            self.problems = [str(error)]
        if self.problems:
            logger.error("%s", _message(self.folder, self.problems))


#: by folder and the state of its files
_begun: dict[tuple, _Hashing] = {}


def begin(model: str | os.PathLike) -> None:
    """Compare the folder `model` with its manifest, its weights in the background. Without one only its index is looked at,
    and nothing of a Hub id.

    Raises:
        `ValueError`: an index is none; a file is missing, has another size or, if it is small, another content, or what decides about
            answers lies there unsealed.
    """
    folder = Path(model)
    if folder.is_dir():
        weight_files(folder)
    if not (folder / seal.MANIFEST_NAME).is_file() or not reads_for_its_machine():
        return
    _compare(folder, partial=hub_commit(folder) is not None, closed=True)


def begin_loaded(model: nn.Module, **source: Any) -> None:
    """As [`begin`], for a model that was just loaded, by whomever: its folder, or those of its files that are in the Hub's cache, if a manifest
    was published with them. `source`: `revision` and `cache_dir`, for [`note_commit`], of one that was loaded by its name.

    Raises:
        `ValueError`: as [`begin`], for a folder with a manifest; of the Hub, a small file has another content than was sealed.
    """
    config = getattr(model, "config", None)
    if config is not None:
        note_commit(config, **source)
    if config is None or not reads_for_its_machine():
        return
    if (manifest := beside(config, seal.MANIFEST_NAME)) is None:
        return
    folder, here = manifest.parent, os.path.isdir(config.name_or_path or "")
    _compare(folder, partial=not here or hub_commit(folder) is not None, closed=here)


def _compare(folder: Path, partial: bool, closed: bool) -> None:
    """Compare what is small in a sealed folder at once, and begin to hash the rest; nothing where that was begun before.

    Args:
        partial: some of its files may be missing.
        closed: nothing that decides about a model may have been added.
    """
    if (key := _key(folder)) in _begun:
        return
    wrong = seal.problems(folder, _AT_ONCE_BYTES, partial)
    if closed and not wrong:
        wrong = seal.added(folder)
    if wrong:
        raise ValueError(_message(folder, wrong))
    _begun[key] = _Hashing(folder, partial)
    _begun[key].start()


def _key(folder: Path) -> tuple:
    stamps = ((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file())
    return (str(folder.resolve()), *sorted(stamps))


def finish(model: nn.Module | None = None, **source: Any) -> None:
    """Wait for what [`begin`] began, and look at every value of `model`, of which `source` says what it says to [`begin_loaded`].

    Raises:
        `ValueError`: a weight file has another content than was sealed, or a tensor is not finite.
    """
    name = type(model).__name__
    if model is not None:
        begin_loaded(model, **source)
        name = getattr(getattr(model, "config", None), "name_or_path", "") or name
    for key, hashing in list(_begun.items()):
        hashing.join()
        if hashing.problems:
            del _begun[key]
            raise ValueError(_message(hashing.folder, hashing.problems))
    if model is not None:
        check_finite_module(model, lambda _: name)


def _message(folder: Path, wrong: list[str]) -> str:
    return (
        f"{folder} is not as it was sealed: {'; '.join(wrong)}. Export or download it again. If the change was meant, remove "
        f"{seal.MANIFEST_NAME} there: it is loaded unverified then."
    )


def _of_sealed(load: Callable[_P, _T]) -> Callable[_P, _T]:
    """`load`, whose first argument is a folder or a Hub id, with the check of the folder before it."""

    @functools.wraps(load)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        begin(str(args[0] if args else kwargs["model_id"]))
        return load(*args, **kwargs)

    return checked


load_config = _of_sealed(config.load_config)
pretrained_kwargs = _of_sealed(config.pretrained_kwargs)


@functools.wraps(config.from_pretrained)
def from_pretrained(model_id: str | os.PathLike, *args: Any, **kwargs: Any) -> PreTrainedModel:
    begin(model_id)
    model = config.from_pretrained(model_id, *args, **kwargs)
    begin_loaded(model)
    finish()
    return model
