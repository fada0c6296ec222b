"""Which tokenizer or processor a run has, by its content: vocabulary, merges, added and special tokens, normalization, chat template, pictures' sizes.

The same after it was saved and loaded, by whatever name; another one where any text could become other tokens, or any tokens another text.
"""

import hashlib
import json
import logging
import re
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .sources import sha256

logger = logging.getLogger(__name__)

SAMPLE, WHOLE = "tokenizer_sha256", "tokenizer_whole_sha256"
#: letters, numbers, blanks, other scripts and marks
_TEXT = "The norm's weights: 12 + 34.5 = 46.5?\n\tIf x < 0:  \u00c4\u00df \u4e2d\u6587 \U0001f642 </s><|im_start|>user"
#: what a processor writes of itself, beside what it does
_NAMES = re.compile(r"^_|_type$|processor_class|^device$")
#: of what a tokenizer does, without its vocabulary
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
#: written beside what acts, with a say in offsets alone
_OFFSETS = "trim_offsets"
#: the last state of each tokenizer's backend, and its digest: a run says it with each checkpoint
_backends: "weakref.WeakKeyDictionary[Any, tuple[str, Future[str]]]" = weakref.WeakKeyDictionary()


def read_ahead(processing_class: Any) -> None:
    """Compute in a thread what [`recorded`] will ask for, since a large vocabulary takes a while; nothing where there is no such file of it."""
    tokenizer = _tokenizer_of(processing_class)
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        _of_backend(tokenizer, _named(tokenizer))


def recorded(processing_class: Any) -> dict[str, str]:
    """What a run and an export record of their tokenizer.

    `tokenizer_sha256` is of the chat template and of the tokens of one text, all that records of older versions have;
    `tokenizer_whole_sha256` is of everything.
    """
    tokenizer = _tokenizer_of(processing_class)
    template = getattr(processing_class, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    sample = [template, list(tokenizer(_TEXT)["input_ids"])]
    named = _named(tokenizer)
    whole = [
        *sample,
        named,
        sorted(set(map(str, tokenizer.all_special_tokens))),
        bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        bool(getattr(tokenizer, "split_special_tokens", False)),
        _backend_sha256(tokenizer, named),
        _of_pictures(processing_class),
    ]
    return {SAMPLE: sha256(sample), WHOLE: sha256(whole)}


def _of_pictures(processing_class: Any) -> dict[str, Any]:
    """How a processor cuts pictures, of which there are as many tokens. Its class has several names, by what is installed."""
    pictures = getattr(processing_class, "image_processor", None)
    settings = {} if pictures is None else pictures.to_dict()
    return _without_defaults({name: part for name, part in settings.items() if not _NAMES.search(name)})


def recorded_of_written(tokenizer: Any, run: Mapping[str, Any]) -> dict[str, str]:
    """As [`recorded`], of the tokenizer that an export writes; told where it is another one than `run` recorded (an older version in `SAMPLE` alone)."""
    found = recorded(tokenizer)
    known = [name for name in (WHOLE, SAMPLE) if name in run][:1]
    if any(run[name] != found[name] for name in known):
        logger.warning(
            "The tokenizer that is written (%s) is another one than the run was trained with (vocabulary, merges, added or special tokens, or chat "
            "template): whoever loads this asks in other tokens than it learned from. If that is not meant, leave tokenizer= out, and keep the "
            "tokenizer's files in the run's folder; or transformers reads the saved files otherwise than the first ones (legacy: true of older Llama and "
            "Mistral tokenizers): train with the tokenizer as it is after save_pretrained and from_pretrained.",
            tokenizer.name_or_path or type(tokenizer).__name__,
        )
    return found


def _tokenizer_of(processing_class: Any) -> Any:
    return getattr(processing_class, "tokenizer", processing_class)  # of a processor


def _named(tokenizer: Any) -> dict[str, str]:
    """Its own words for special tokens: what is set by hand becomes an added token only when it is saved and loaded."""
    return {role: str(token) for role, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}


def _backend_sha256(tokenizer: Any, named: dict[str, str]) -> str:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return sha256(_of_python(tokenizer, set(named.values())))
    return _of_backend(tokenizer, named).result()


def _of_backend(tokenizer: Any, named: dict[str, str]) -> "Future[str]":
    """The digest of its backend as it is now. Only what was read of it goes to the thread: two may not use a backend at the same time."""
    content, special = tokenizer.backend_tokenizer.to_str(), set(named.values())
    state = hashlib.sha256(f"{sorted(special)}{content}".encode()).hexdigest()
    if (known := _backends.get(tokenizer)) is not None and known[0] == state:
        return known[1]
    with_one = ThreadPoolExecutor(1, "tokenizer")
    found = with_one.submit(lambda: sha256(_of_file(json.loads(content), special)))
    with_one.shutdown(wait=False)
    _backends[tokenizer] = state, found
    return found


def _of_file(content: dict[str, Any], named: set[str]) -> list[Any]:
    """Of what tokenizer.json holds. How a batch was last padded and cut stands there too, and says nothing of the tokenizer."""
    model = content["model"]
    large = [_in_order(model.pop("vocab")), model.pop("merges", None)]
    added = [token for token in content["added_tokens"] if not (token["content"] in named and _is_plain(token))]
    steps = [*(content.get(name) for name in _STEPS), _acting(content.get("post_processor"))]
    return [large, _without_defaults(model), _without_defaults(added), _without_defaults(steps)]


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
    vocabulary = {str(token): index for token, index in tokenizer.get_vocab().items() if token not in named}
    merges = [" ".join(pair) for pair in getattr(tokenizer, "bpe_ranks", {})]
    pieces = getattr(getattr(tokenizer, "sp_model", None), "serialized_model_proto", bytes)()
    return [type(tokenizer).__name__, _in_order(vocabulary), merges, pieces.hex()]


def _in_order(vocabulary: Any) -> Any:
    """By number: of 150,000 tokens this is written in a tenth of the time that they take by name. Some models have a list already."""
    if not isinstance(vocabulary, dict):
        return vocabulary
    return [sorted(vocabulary, key=vocabulary.__getitem__), sorted(vocabulary.values())]
