"""Which tokenizer or processor a run has, by its content: vocabulary, merges, added and special tokens, normalization, chat template, pictures' sizes.

The same after it was saved and loaded, by whatever name; another one where any text could become other tokens, or any tokens another text.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

WHOLE = "tokenizer_content_sha256"
#: letters, numbers, blanks, other scripts and marks
_TEXT = "The norm's weights: 12 + 34.5 = 46.5?\n\tIf x < 0:  \u00c4\u00df \u4e2d\u6587 \U0001f642 </s><|im_start|>user"
#: what a processor writes of itself, beside what it does
_NAMES = re.compile(r"^_|_type$|processor_class|^device$")
#: of what a tokenizer does, without its vocabulary
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
#: written beside what acts, with a say in offsets alone
_OFFSETS = "trim_offsets"
#: in what the tokenizers library writes, before the last and largest part, and inside it, before the largest part of that; nothing that it
#: quotes has a quote without a backslash
_MODEL, _VOCABULARY = ',"model":{', '"vocab":'


def recorded(processing_class: Any) -> dict[str, str]:
    """What a run and an export record of their tokenizer."""
    from .sources import sha256  # it loads torch, which who compares records has no need of

    tokenizer = getattr(processing_class, "tokenizer", processing_class)  # of a processor
    template = getattr(processing_class, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    # its own words for them: what is set by hand becomes an added token only when it is saved and loaded
    named = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    whole = [
        template,
        list(tokenizer(_TEXT)["input_ids"]),
        named,
        sorted(set(map(str, tokenizer.all_special_tokens))),
        bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        bool(getattr(tokenizer, "split_special_tokens", False)),
        _content(tokenizer, set(named.values())),
        _of_pictures(processing_class),
    ]
    return {WHOLE: sha256(whole)}


def _of_pictures(processing_class: Any) -> dict[str, Any]:
    """How a processor cuts pictures, of which there are as many tokens. Its class has several names, by what is installed."""
    pictures = getattr(processing_class, "image_processor", None)
    settings = {} if pictures is None else pictures.to_dict()
    return _without_defaults({name: part for name, part in settings.items() if not _NAMES.search(name)})


def recorded_of_written(tokenizer: Any, run: Mapping[str, Any]) -> dict[str, str]:
    """As [`recorded`], of the tokenizer that an export writes; a warning where it is another one than `run` recorded."""
    found = recorded(tokenizer)
    if run.get(WHOLE, found[WHOLE]) != found[WHOLE]:
        logger.warning(
            "The tokenizer that is written (%s) is another one than the run was trained with (vocabulary, merges, added or special tokens, or chat "
            "template): whoever loads this asks in other tokens than it learned from. If that is not meant, leave tokenizer= out, and keep the "
            "tokenizer's files in the run's folder; or transformers reads the saved files otherwise than the first ones (legacy: true of older Llama and "
            "Mistral tokenizers): train with the tokenizer as it is after save_pretrained and from_pretrained.",
            tokenizer.name_or_path or type(tokenizer).__name__,
        )
    return found


def warn_of_tokens(model: Any, processing_class: Any) -> None:
    """Warn of tokens that the model has no embedding for, and of embeddings that stock PEFT does not find by itself."""
    from .base_identity import stored_vocabulary  # it loads torch, too

    tokens = len(getattr(processing_class, "tokenizer", processing_class))
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


def _content(tokenizer: Any, named: set[str]) -> list[Any]:
    """Vocabulary and merges by their text as it is written, since of 150,000 tokens it takes most of a second to read it; all else by its meaning."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _of_python(tokenizer, named)
    steps, _, model = backend.to_str().rpartition(_MODEL)
    options, _, large = model.partition(_VOCABULARY)
    written = json.loads(f"{steps}}}")
    added = [token for token in written["added_tokens"] if not (token["content"] in named and _is_plain(token))]
    # how a batch was last padded and cut stands there too, and says nothing of the tokenizer
    acting = [*(written.get(name) for name in _STEPS), _acting(written.get("post_processor"))]
    settings = json.loads(f"{{{options.rstrip(',')}}}")
    return [hashlib.sha256(large.encode()).hexdigest(), *map(_without_defaults, (settings, added, acting))]


def _is_plain(token: dict[str, Any]) -> bool:
    return token["special"] and not any(token[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized"))


def _acting(step: Any) -> Any:
    """A post-processor without what adds no token: releases of transformers differ in whether they write it."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Sequence":
        kept = [part for part in map(_acting, step["processors"]) if part is not None]
        return kept[0] if len(kept) == 1 else kept or None
    idle = step["type"] == "ByteLevel" or (step["type"] == "TemplateProcessing" and not step["special_tokens"])
    return None if idle else step


def _without_defaults(value: Any) -> Any:
    """An option that is off is as one that an older release does not know."""
    if isinstance(value, dict):
        return {key: _without_defaults(part) for key, part in value.items() if part and key != _OFFSETS}
    return [_without_defaults(part) for part in value] if isinstance(value, list) else value


def _of_python(tokenizer: Any, named: set[str]) -> list[Any]:
    """Of a tokenizer without such a file."""
    vocabulary = sorted((index, str(token)) for token, index in tokenizer.get_vocab().items() if token not in named)
    merges = [" ".join(pair) for pair in getattr(tokenizer, "bpe_ranks", {})]
    pieces = getattr(getattr(tokenizer, "sp_model", None), "serialized_model_proto", bytes)()
    return [type(tokenizer).__name__, vocabulary, merges, pieces.hex()]
