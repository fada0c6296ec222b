"""Which safetensors files make up a checkpoint folder, and, before they are copied or published, that none of them lies elsewhere.

A folder may come from anywhere: an index or a symbolic link in it could name any file that this user may read.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..folders import leads_to
from .headers import TensorInfo, read_headers

INDEX_NAME = "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of the checkpoint in `folder`, by name. Reads the index and the files' headers.

    Raises:
        `ValueError`: no safetensors, an index that disagrees with its files, a damaged header.
    """
    files, index, weight_map = _weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}" if missing else "has no *.safetensors file"
        raise ValueError(f"{folder} {what}. Download it again, or convert it to safetensors (save_pretrained).")
    tensors = read_headers(files)
    _check_index(index, weight_map, tensors)
    return tensors


def check_weight_files(folder: Path) -> None:
    """Refuse a folder whose index is none. Reads the index."""
    _weight_files(folder)


def _weight_files(folder: Path) -> tuple[list[Path], Path, dict[str, str]]:
    """(files, the index, what it says)."""
    index, whole = folder / INDEX_NAME, folder / "model.safetensors"
    weight_map = _weight_map(index) if index.is_file() and not whole.is_file() else {}  # as transformers chooses
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if weight_map:
        files = [folder / name for name in sorted(set(weight_map.values()))]
    return files, index, weight_map


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("a file has no name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(
            f"{index} is no index of safetensors files ({type(error).__name__}: {error}). Download it again."
        ) from error
    return weight_map


def _check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse an index that names tensors where they are not."""
    wrong = [
        name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != Path(file).name
    ]
    if wrong:
        raise ValueError(
            f"{index} says that {weight_map[wrong[0]]} holds {wrong[0]!r}, which it does not ({len(wrong)} such tensors): the index is of "
            "other files, or a file is. Download the checkpoint again."
        )


def check_inside(folder: str | Path, files: Iterable[str | Path]) -> None:
    """Refuse files that are not in `folder`, symbolic links followed."""
    for file in files:
        if (place := leads_to(file, folder)) is not None:
            raise ValueError(
                f"{file} leads out of {folder}, to {place}: an index or a symbolic link in a checkpoint must not name other files of this "
                "machine. If it is meant, name the folder that holds the files themselves, or copy them here."
            )
