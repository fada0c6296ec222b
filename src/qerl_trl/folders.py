"""Whether a file lies in the folder that it is said to be in."""

import os
from pathlib import Path


def leads_to(path: str | os.PathLike, folder: str | os.PathLike) -> Path | None:
    """Where `path` leads, symbolic links followed, if that is out of `folder`; else `None`.

    Only the Hub's cache links out of a folder rightly: from `snapshots/<revision>/` into `blobs/`.
    """
    root, place = Path(folder).resolve(), Path(path).resolve()
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    allowed = [root] if snapshots is None else [root, (snapshots.parent / "blobs").resolve()]
    return None if any(place.is_relative_to(parent) for parent in allowed) else place
