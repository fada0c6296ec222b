"""How models and data sets are named in what is published."""

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


def public_name(model: str) -> str:
    """A Hub id (or any other name) as it is; a path shortened to its last part: it is private, and nobody else has the folder."""
    return Path(model).name if os.path.exists(model) or os.path.isabs(model) else model


def is_hub_id(model: str) -> bool:
    """Whether `model` names a Hub repository (`user/name`) and not a folder here."""
    return bool(_HUB_ID.match(model)) and not os.path.isdir(model)
