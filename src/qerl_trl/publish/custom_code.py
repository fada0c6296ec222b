"""A model with code of its own (`trust_remote_code`), by `auto_map` in its configuration. The code itself is never exported.

An entry "user/name--module.Class" names a repository that has it, and is loaded from any folder; "module.Class" is a file in the same folder.
"""

import logging
import os
from typing import Any

from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


def auto_map(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "auto_map", None) or {}


def copy_none(config: Any) -> None:
    """Keep `config.save_pretrained` from copying the code, and from naming the copy in the place of the repository."""
    config._auto_class = None


def named(entries: dict[str, Any], repo: str) -> dict[str, Any]:
    """An auto_map whose files are those of the repository `repo`."""

    def of_repo(name: Any) -> Any:
        if isinstance(name, (list, tuple)):
            return [of_repo(part) for part in name]
        return name if not name or "--" in name else f"{repo}--{name}"

    return {role: of_repo(name) for role, name in entries.items()}


def warn(entries: dict[str, Any], folder: str | os.PathLike) -> None:
    """Say of a model whose auto_map names files, and no repository, that `folder` cannot be loaded without them."""
    parts = [
        part for name in entries.values() for part in (name if isinstance(name, (list, tuple)) else [name]) if part
    ]
    if files := sorted({f"{part.split('.')[0]}.py" for part in parts if "--" not in part}):
        logger.warning(
            "The code of this model (%s) is not exported, so %s cannot be loaded alone. Name the repository that has it in auto_map of the "
            "configuration (%s), or copy the files.",
            ", ".join(files),
            folder,
            named(entries, "user/name"),
        )
