"""Ignore generation_config.json during rollouts, and find the end tokens of a completion.

`generate` takes unset options (repetition penalty, suppressed tokens, `min_p`) from generation_config.json. TRL scores
without them, so rollouts by transformers would come from another policy than the trained one.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError
from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import logging

from ..checkpoint.seal import write_json_atomically
from ..support.names import text_tokenizer, unwrap

logger = logging.get_logger(__name__)

#: fields with no effect on the policy: special tokens, caches, compilation
_KEPT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "use_cache",
    "cache_implementation", "cache_config", "disable_compile", "compile_config", "prefill_chunk_size",
    "transformers_version",
}  # fmt: skip
#: fields always set by TRL's arguments: ignored without a warning
_SAID = {"do_sample", "temperature", "top_p", "top_k", "repetition_penalty"}


@contextmanager
def of_the_model_alone(model: nn.Module) -> Iterator[None]:
    """Ignore generation_config.json in the block, except for `_KEPT`. Warns once about ignored fields."""
    inner = unwrap(model) if isinstance(model, nn.Module) else model
    holder: Any = getattr(inner, "get_base_model", lambda: inner)()  # inside PEFT, not imported
    before: GenerationConfig | None = getattr(holder, "generation_config", None)
    if before is None:
        yield
        return
    plain, said = copy.deepcopy(before), before.to_diff_dict()
    left = [n for n in said if n not in _KEPT and not n.startswith(("_", "output_", "return_")) and said[n] is not None]
    for name in left:
        setattr(plain, name, None)
    if unknown := [f"{name}={said[name]}" for name in left if name not in _SAID]:
        logger.warning_once(
            "The model's generation_config.json sets %s, which TRL ignores when it scores completions, so the rollout "
            "ignores it too. Set it in generation_kwargs to use it.",
            ", ".join(unknown),
        )
    holder.generation_config = plain
    try:
        yield
    finally:
        holder.generation_config = before


def end_tokens(model: Any, processing_class: Any, **template: Any) -> list[int]:
    """Return the token ids that end a completion: of the tokenizer, the model, and an answer in the chat template.
    `model`: a model, or the result of [`stored`]. `template`: further arguments of the chat template."""
    tokenizer = text_tokenizer(processing_class)
    config = model.config.get_text_config(decoder=True)
    own = _listed(model.generation_config.eos_token_id) or _listed(getattr(config, "eos_token_id", None))
    ends = [*_listed(getattr(tokenizer, "eos_token_id", None)), *own]  # an exported model may lack one
    turn = _turn_end(processing_class, tokenizer, template)
    if turn is not None and turn not in ends:
        ends.append(turn)
        logger.info("Completions also end at the chat template's %s.", tokenizer.convert_ids_to_tokens(turn))
    return [token for token in dict.fromkeys(ends) if token < config.vocab_size]  # vLLM refuses larger ids


def _listed(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _turn_end(processing_class: Any, tokenizer: Any, template: dict[str, Any]) -> int | None:
    """Find the special token right after the text of an answer, if any."""
    if not (template.get("chat_template") or getattr(processing_class, "chat_template", None)):
        return None
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "it-is-2"}]
    try:
        said, _, rest = processing_class.apply_chat_template(turns, tokenize=False, **template).rpartition("it-is-2")
    except (TemplateError, TypeError, ValueError):  # a template for other kinds of messages
        return None
    known = tokenizer.added_tokens_decoder.items() if said else ()
    return next((token for token, added in known if added.special and rest.lstrip().startswith(added.content)), None)


def settle_ends(trainer: Any) -> None:
    """Set [`end_tokens`] and those of `generation_kwargs` on a trainer, its engine and its saved configurations."""
    model: Any = unwrap(trainer.model)
    args, given = trainer.args, trainer.args.generation_kwargs or {}
    ends = end_tokens(model, trainer.processing_class, **(args.chat_template_kwargs or {}))
    ends += [*_listed(given.get("eos_token_id")), *_listed(given.get("stop_token_ids"))]
    trainer.eos_token_ids = model.generation_config.eos_token_id = list(dict.fromkeys(ends))
    if not args.use_vllm:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids


def stored(folder: Any, config: PretrainedConfig, revision: str | None = None) -> Any:
    """Return an object with `config` and the `generation_config` of a folder or Hub id, or one made from `config`."""
    try:
        generation = GenerationConfig.from_pretrained(folder, revision=revision or "main")
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    return SimpleNamespace(config=config, generation_config=generation)


def save_generation_config(folder: str | Path, model: Any, processing_class: Any) -> None:
    """Save generation_config.json with all [`end_tokens`]; one that transformers refuses is saved unchanged."""
    if (generation := copy.deepcopy(model.generation_config)) is None:
        return
    generation.eos_token_id = end_tokens(model, processing_class) or None
    try:
        generation.save_pretrained(folder)
    except ValueError:
        write_json_atomically(Path(folder, "generation_config.json"), generation.to_diff_dict())
