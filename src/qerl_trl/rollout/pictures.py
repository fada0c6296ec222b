"""Whether pictures can come to an engine: one to which none can is built without the tower that sees them."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

#: the columns in which TRL looks for pictures
COLUMNS = ("image", "images")


def may_come(trainer: Any, processing_class: Any) -> bool:
    """Whether a prompt of `trainer` may hold a picture, as far as its data and what plays with the model tell; `True` where they do not.

    TRL takes pictures from a processor alone: not with a tokenizer. Tools, environments and rollout functions may show some, and so may data that
    are streamed, or made when they are read.
    """
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return False
    if any(getattr(trainer, name, None) for name in ("tools", "environments", "rollout_func")):
        return True
    held_out = trainer.eval_dataset
    data = [trainer.train_dataset, *(held_out.values() if isinstance(held_out, Mapping) else [held_out])]
    return not all(_of_text(rows) for rows in data if rows is not None)


def columns_of(data: Any) -> list[str]:
    """Those of `data` in which pictures come."""
    return sorted(set(COLUMNS) & set(getattr(data, "column_names", None) or ()))


def _of_text(data: Any) -> bool:
    """Whether the prompts are known to be text: one each, or messages whose content is a text, not a list of parts."""
    features = getattr(data, "features", None)
    if not hasattr(data, "__len__") or not isinstance(features, Mapping) or "prompt" not in features:
        return False
    if columns_of(data) or getattr(data, "format", {}).get("type") == "custom":
        return False
    prompt = features["prompt"]
    messages = prompt[0] if isinstance(prompt, list) else getattr(prompt, "feature", prompt)
    content = messages.get("content") if isinstance(messages, Mapping) else messages
    return getattr(content, "dtype", None) in ("string", "large_string")
