"""A model with code of its own (`trust_remote_code`): where that is, by `auto_map` in its configuration.

The code is not exported and not published. An entry "user/name--module.Class" names a repository that has it, and is loaded from any folder;
"module.Class" is a file beside the configuration.
"""

import logging
import os
from typing import Any

from transformers import PretrainedConfig

from .names import is_hub_id
from .run import TrainedPolicy

logger = logging.getLogger(__name__)


def auto_map(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "auto_map", None) or {}


def keep_named(config: Any) -> None:
    """Let saving `config` keep the repository that it names: by itself it copies its own file, and names the copy instead."""
    if "--" in str(auto_map(config).get("AutoConfig")):
        config._auto_class = None


def warn(policy: TrainedPolicy, folder: str | os.PathLike) -> None:
    """Say of a model with code of its own that it will not be loaded from `folder` alone, unless its configuration names where that code is."""
    config = policy.transformers_model.config
    missing = {role: name for role, name in auto_map(config).items() if "--" not in str(name)}
    if not missing:
        return
    classes = [name for names in missing.values() for name in (names if isinstance(names, (list, tuple)) else [names])]
    files = sorted({f"{name.split('.')[0]}.py" for name in classes if name})
    named = str(getattr(config, "_name_or_path", ""))
    repo = named if is_hub_id(named) else "user/name"
    entries = {role: f"{repo}--{name}" for role, name in missing.items() if isinstance(name, str)}
    logger.warning(
        "This model is made by code of its own (%s; auto_map in its configuration), which is not exported whole and of which nothing is uploaded: nobody "
        "can load %s by itself. Name the repository that has the code before the export, model.config.auto_map = %s, and export again; or copy these files "
        "by hand, into the folder and into the repository on the Hub.",
        ", ".join(files),
        folder,
        entries,
    )
