"""An adapter that comes ready, on a base that its own configuration may not name: `PeftModel.from_pretrained(another_base, adapter)`.

PEFT takes any base of the same shapes without a word, and what is written afterwards names the one that the adapter was made for. Here the two are
compared where both are known; what is written names the one that is trained on.
"""

import logging
import os
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open

from . import checkpoint
from .base_identity import base_sha256
from .nvfp4.shards import read_folder

logger = logging.getLogger(__name__)


def name_base(model: PeftModel) -> None:
    """Let the configuration of the adapter name the base that it lies on.

    Raises:
        `ValueError`: it names one that is here and has other weights.
    """
    config = model.peft_config[model.active_adapter]
    named, found = config.base_model_name_or_path, cast(Any, model.config)._name_or_path
    if not found or named == found:
        return
    if named:
        same = _are_same(model, str(named), str(found))
        if same is False:
            raise ValueError(
                f"The adapter of this model was made for {named}, as its configuration says, and it lies on {found}, which has other weights of the same "
                "shapes: it would be trained, and published, as an adapter of both. Load its own base. To train it on this one all the same, say so: "
                f"model.peft_config[{model.active_adapter!r}].base_model_name_or_path = {str(found)!r}."
            )
        if same is None:
            logger.warning(
                "The adapter of this model was made for %s, as its configuration says, and it lies on %s. Nothing here says whether these are the same "
                "weights, so that is taken on trust. What this run writes names %s.",
                named,
                found,
                found,
            )
    config.base_model_name_or_path, config.revision = found, None


def _are_same(model: PeftModel, named: str, found: str) -> bool | None:
    """Whether the base that an adapter names has the weights of the model that it lies on; `None` where that cannot be told here."""
    if not os.path.isdir(named):
        return None
    if os.path.realpath(named) == os.path.realpath(found):
        return True
    recorded = checkpoint.recorded_run(named)
    then = recorded.get("settings", recorded).get("base_sha256") if recorded.get("kind") == "nvfp4_base" else None
    if then is not None and then == base_sha256(model):  # whatever it was loaded from
        return True
    return _have_same_tensors(Path(named), Path(found)) if os.path.isdir(found) else None


def _have_same_tensors(one: Path, other: Path) -> bool | None:
    """Compared as they are stored, whatever the files; `None` where a part of them is stored in another form (another dtype, packed)."""
    try:
        tensors = [read_folder(folder) for folder in (one, other)]
        same = set(tensors[0]) == set(tensors[1])
        for name in sorted(set(tensors[0]) & set(tensors[1])):
            values = []
            for infos in tensors:
                with safe_open(infos[name].file, framework="pt") as file:
                    values.append(file.get_tensor(name))
            if values[0].dtype != values[1].dtype:
                same = False
            elif not torch.equal(*values):
                return False
    except (OSError, ValueError, SafetensorError) as error:
        logger.info("%s and %s cannot be compared (%s).", one, other, error)
        return None
    return True if same else None
