"""Which safetensors files make up a checkpoint folder, and, before they are copied or published, that none of them lies elsewhere."""

import json
from collections.abc import Iterable
from pathlib import Path

from ..support.files import leads_to
from .headers import TensorInfo, read_headers

INDEX_NAME = "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of the checkpoint in `folder`, by name. Reads the index and the files' headers.

    Raises:
        `ValueError`: no safetensors, a missing shard, a damaged index or header.
    """
    files = weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}" if missing else "has no *.safetensors file"
        raise ValueError(f"{folder} {what}. Download it again, or convert it to safetensors (save_pretrained).")
    return read_headers(files)


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load: one whole, those that the index names, or all.

    Raises:
        `ValueError`: the index is damaged.
    """
    index, whole = folder / INDEX_NAME, folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON's errors are ValueErrors
        raise ValueError(f"{index} is no index of safetensors files ({error}). Download it again.") from error


def check_inside(folder: str | Path, files: Iterable[str | Path]) -> None:
    """Refuse files that are not in `folder`, symbolic links followed: an index or a link could name any file of the user."""
    for file in files:
        if (place := leads_to(file, folder)) is not None:
            raise ValueError(
                f"{file} leads out of {folder}, to {place}: an index or a symbolic link in a checkpoint must not name other files of this "
                "machine. Name the folder that holds the files themselves, or copy them here."
            )
