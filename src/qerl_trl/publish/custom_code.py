"""A model with code of its own (`trust_remote_code`): where that is, by `auto_map` in its configuration.

The code is not exported and not published. An entry "user/name--module.Class" names a repository that has it, and is loaded from any folder;
"module.Class" is a file beside the configuration.
"""

import logging
import os
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from .names import is_hub_id

if TYPE_CHECKING:  # it imports PEFT, which `qerl-trl quantize` does without
    from .run import TrainedPolicy

logger = logging.getLogger(__name__)


def auto_map(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "auto_map", None) or {}


def keep_named(config: Any) -> None:
    """Let saving `config` keep the repository that it names: by itself it copies its own file, and names the copy instead."""
    if "--" in str(auto_map(config).get("AutoConfig")):
        config._auto_class = None


def copy_none(config: Any) -> None:
    """Let saving `config` copy no code at all."""
    config._auto_class = None


def left_behind(entries: dict[str, Any]) -> dict[str, Any]:
    """Those of an auto_map that name a file beside it, and no repository."""
    return {role: name for role, name in entries.items() if any("--" not in part for part in _parts(name))}


def named(entries: dict[str, Any], repo: str) -> dict[str, Any]:
    """An auto_map whose files are those of the repository `repo`, as transformers has it of a model that was loaded by its Hub id."""

    def of_repo(name: str | None) -> str | None:
        return name if not name or "--" in name else f"{repo}--{name}"

    return {
        role: [of_repo(part) for part in name] if isinstance(name, (list, tuple)) else of_repo(name)
        for role, name in entries.items()
    }


def warn(policy: "TrainedPolicy", folder: str | os.PathLike) -> None:
    """Say of a model with code of its own that it will not be loaded from `folder` alone, unless its configuration names where that code is."""
    config = policy.transformers_model.config
    loaded_by = str(getattr(config, "_name_or_path", ""))
    repo = loaded_by if is_hub_id(loaded_by) else None
    warn_of(auto_map(config), folder, "before the export, model.config.auto_map", "export again", repo)


def warn_of(
    entries: dict[str, Any], folder: str | os.PathLike, where: str, again: str, repo: str | None = None
) -> None:
    """As [`warn`], of an auto_map.

    Args:
        where: it can be told in which repository the code is.
        again: what is to be done then.
        repo: Hub id of that repository, where it is known.
    """
    if not (missing := left_behind(entries)):
        return
    files = sorted({f"{part.split('.')[0]}.py" for name in missing.values() for part in _parts(name)})
    logger.warning(
        "This model is made by code of its own (%s; auto_map in its configuration), which is not exported whole and of which nothing is uploaded: nobody "
        "can load %s by itself. Name the repository that has the code %s = %s, and %s; or copy these files by hand, into the folder and into the "
        "repository on the Hub.",
        ", ".join(files),
        folder,
        where,
        named(missing, repo or "user/name"),
        again,
    )


def _parts(name: Any) -> list[str]:
    """The classes of an entry, of a tokenizer two."""
    return [part for part in (name if isinstance(name, (list, tuple)) else [name]) if part]
