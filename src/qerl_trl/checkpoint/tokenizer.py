"""Which tokenizer a run has, by its content: vocabulary, merges, added and special tokens, chat template. The same after it was saved and loaded."""

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

WHOLE = "tokenizer_content_sha256"
#: letters, numbers, blanks, other scripts and marks
_TEXT = "The norm's weights: 12 + 34.5 = 46.5?\n\tIf x < 0:  \u00c4\u00df \u4e2d\u6587 \U0001f642 </s><|im_start|>user"
#: in what the tokenizers library writes, before its last and largest part
_VOCABULARY = '"vocab":'


def text_tokenizer(processing_class: Any) -> Any:
    """The tokenizer itself, or a processor's."""
    return getattr(processing_class, "tokenizer", processing_class)


def recorded(processing_class: Any) -> dict[str, str]:
    """What a run and an export record of their tokenizer."""
    tokenizer = text_tokenizer(processing_class)
    template = getattr(processing_class, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    # a special token that is set by hand becomes an added one only when it is saved and loaded
    named = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    special = sorted(set(map(str, tokenizer.all_special_tokens)))
    added = sorted(set(map(str, tokenizer.get_added_vocab())) - set(named.values()))
    whole = [
        template,
        list(tokenizer(_TEXT)["input_ids"]),
        named,
        special,
        added,
        _vocabulary(tokenizer, set(named.values())),
    ]
    return {WHOLE: hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()}


def _vocabulary(tokenizer: Any, named: set[str]) -> Any:
    """Vocabulary and merges: of 150,000 tokens the text as it is written, because parsing it takes most of a second."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return hashlib.sha256(backend.to_str().partition(_VOCABULARY)[2].encode()).hexdigest()
    vocabulary = sorted((index, str(token)) for token, index in tokenizer.get_vocab().items() if token not in named)
    pieces = getattr(getattr(tokenizer, "sp_model", None), "serialized_model_proto", bytes)()
    return [vocabulary, [" ".join(pair) for pair in getattr(tokenizer, "bpe_ranks", {})], pieces.hex()]


def recorded_of_written(tokenizer: Any, run: Mapping[str, Any]) -> dict[str, str]:
    """As [`recorded`], of the tokenizer that an export writes; a warning where it is another one than `run` recorded."""
    found = recorded(tokenizer)
    if run.get(WHOLE, found[WHOLE]) != found[WHOLE]:
        logger.warning(
            "The exported tokenizer (%s) is not the one that the run was trained with. Leave tokenizer= out to export the run's own.",
            tokenizer.name_or_path or type(tokenizer).__name__,
        )
    return found


def warn_of_tokens(model: Any, processing_class: Any) -> None:
    """Warn of tokens that the model has no embedding for, and of embeddings that stock PEFT does not find by itself."""
    from .fingerprint import stored_vocabulary  # loads torch, which comparing records does not need

    tokens = len(text_tokenizer(processing_class))
    rows, stored = model.config.get_text_config().vocab_size, stored_vocabulary(model)
    if tokens > rows:
        what = "a text with one of the others ends in an error"
    elif stored is not None and rows not in (stored, tokens):
        what = "AutoPeftModel, which resizes to the tokenizer, cannot load the adapter (qerl_trl.load_adapter can)"
    else:
        return
    logger.warning(
        "The tokenizer has %d tokens, the model %d embeddings: %s. Call model.resize_token_embeddings(%d) before training.",
        *(tokens, rows, what, tokens),
    )
