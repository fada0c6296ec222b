"""The settings of a run that decide its trajectory and its result, as data.

Stored in a checkpoint's manifest and the run's folder, compared on resume ([`differences`]), and shown on a card.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import logging
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import LoraConfig
from torch import nn

from ..nvfp4.config import auto_class_of
from ..nvfp4.linear import compute_dtype
from ..support.names import text_tokenizer
from ..support.trl import OnlineTrainer
from . import fingerprint
from .records import LoraSettings, RecordedArguments, RunSettings, versions

logger = logging.getLogger(__name__)

#: digests of the user's functions: a difference is recorded as a change, with a warning
SOURCES = ("rewards_sha256", "rollouts_sha256")
#: recorded, and may differ on resume, with a warning
_MAY_DIFFER = {"max_steps", "num_train_epochs", "versions", *SOURCES}
#: recorded next to the settings
_NOT_SETTINGS = {"settings_sha256", "global_step", "merged_onto", "changed", "base_revision", "auto_class"}
#: split of a rollout and a step into micro-batches: may differ at the same total sizes
_SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
#: conversion of the loaded weights to the base: its fingerprint depends on it
_FORM = ("base_format", "scale_rule", "modules_to_not_convert")
#: arguments without effect on the trajectory: output, logging, evaluation, uploads, memory, placement, limits of checks
_INCIDENTAL = re.compile(
    r"output_dir|overwrite_output_dir|resume_from_checkpoint|allow_other_settings|run_name|project|debug|do_.*"
    r"|report_to|trackio_.*|disable_tqdm|log_.*|logging_.*|num_completions_to_print|include_.*|skip_memory_metrics"
    r"|save_.*|enable_jit_checkpoint|load_best_model_at_end|metric_for_best_model|greater_is_better|restore_callback.*"
    r"|push_to_hub|hub_.*|.*eval_.*|batch_eval_metrics|num_generations_eval|prediction_loss_only|bf16_full_eval"
    r"|fp16_full_eval|model_init_kwargs|trust_remote_code|use_cpu|local_rank|ddp_.*|fsdp|fsdp_config|deepspeed|ds3_.*"
    r"|parallelism_config|accelerator_config|dataloader_.*|generation_batch_size|pad_to_multiple_of|use_cache|tf32"
    r"|(gradient|activation)_checkpointing.*|padding_free|compile_layers|torch_compile.*|torch_empty_cache_steps"
    r"|full_determinism|share_weights|vllm_(?!importance|structured|engine_kwargs).*|rollout_probe(?:_steps)?"
    r"|rollout_timeout|reward_timeout|rollout_mismatch_threshold|zero_advantage_patience"
)
#: keys of `vllm_engine_kwargs` with an effect on sampling; the others are memory, placement and graphs
_SAMPLING_ENGINE = ("dtype", "kv_cache_dtype", "quantization", "hf_overrides")
#: rows of the training data in its fingerprint
_FINGERPRINT_ROWS = 10_000
#: cached fingerprints: each checkpoint records one
_datasets: "weakref.WeakKeyDictionary[Dataset, str]" = weakref.WeakKeyDictionary()
TOKENIZER = "tokenizer_content_sha256"
#: letters, numbers, blanks, other scripts and marks
_TEXT = "The norm's weights: 12 + 34.5 = 46.5?\n\tIf x < 0:  \u00c4\u00df \u4e2d\u6587 \U0001f642 </s><|im_start|>user"
#: separates the last and largest part of the tokenizers library's output
_VOCABULARY = '"vocab":'


def may_differ(name: str) -> bool:
    """Return whether a run may be resumed with another value of this argument without `allow_other_settings`."""
    return name in _MAY_DIFFER or _INCIDENTAL.fullmatch(name) is not None


def _acting(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with their effective values: TRL copies most to its own attributes, and reads those (#46)."""
    plain = {
        n: own[n] for n in given if isinstance(own.get(n, ...), bool | int | float | str | None) and n != "use_vllm"
    }
    low, high = own.get("epsilon_low"), own.get("epsilon_high")
    epsilon = {} if low is None else {"epsilon": low, "epsilon_high": None if high == low else high}
    return given | plain | {n: v for n, v in epsilon.items() if n in given}


def run_settings(trainer: OnlineTrainer) -> RunSettings:
    """Collect the settings that a resumed run must share, and those of interest to readers of its results."""
    settings: RunSettings = {"trainer": trainer._name.removeprefix("QeRL-")}
    args = trainer.args
    acts = _acting(vars(args), vars(trainer)) | {"world_size": args.world_size}
    for name in RecordedArguments.__annotations__:
        if (value := acts.get(name)) is not None:
            settings[name] = value  # type: ignore[literal-required]  # the names above are keys of RunSettings
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings["model"] = model.config.name_or_path
    if (revision := fingerprint.base_revision(model)) is not None:
        settings["base_revision"] = revision
    if trainer.base_sha256 is not None:
        settings["base_sha256"] = trainer.base_sha256
    settings["base_config"] = fingerprint.base_config(model)
    settings |= cast(RunSettings, recorded_tokenizer(trainer.processing_class))
    text = text_tokenizer(trainer.processing_class)
    settings["special_tokens"] = {"eos": list(trainer.eos_token_ids or [text.eos_token_id]), "pad": text.pad_token_id}
    settings["dtype"] = str(compute_dtype(model)).removeprefix("torch.")
    if is_peft_model(model):
        settings["lora"] = lora_settings(model.peft_config[model.active_adapter])
    settings["rewards"] = list(trainer.reward_func_names)
    settings["rollouts"] = sorted(name for name, _ in rollouts_of(trainer))
    settings |= cast(RunSettings, trainer.sources)
    if (data := dataset_sha256(trainer.train_dataset)) is not None:
        settings["dataset_sha256"] = data
    fields = {f.name: f for f in dataclasses.fields(args) if f.name not in RecordedArguments.__annotations__}
    options = _not_defaults(acts, {name: f for name, f in fields.items() if not _INCIDENTAL.fullmatch(name)})
    engine = {k: v for k, v in options.pop("vllm_engine_kwargs", {}).items() if k in _SAMPLING_ENGINE}
    settings["options"] = options | trainer.given_optimizers | ({"vllm_engine_kwargs": engine} if engine else {})
    free = {*_MAY_DIFFER, *_NOT_SETTINGS, *({"model"} if "base_sha256" in settings else ())}
    settings["settings_sha256"] = sha256({k: v for k, v in settings.items() if k not in free})
    settings["versions"] = versions()
    settings["auto_class"] = loaded_by(model)
    return settings


def loaded_by(model: Any) -> str:
    """Return the name of transformers' class to load a model, with or without an adapter."""
    own = model.get_base_model() if is_peft_model(model) else model
    return auto_class_of(own.config, type(own).__name__).__name__


def lora_settings(lora: LoraConfig) -> LoraSettings:
    targets: Any = lora.target_modules  # a string is a regular expression
    targets = targets if isinstance(targets, str) else sorted(targets or ())
    found: LoraSettings = {"r": lora.r, "alpha": lora.lora_alpha, "targets": targets}
    if options := _lora_options(lora):
        found["options"] = options
    return found


def _lora_options(lora: LoraConfig) -> dict[str, Any]:
    known = (
        "r lora_alpha target_modules peft_type task_type base_model_name_or_path revision inference_mode auto_mapping "
        "peft_version"
    )
    return _not_defaults(vars(lora), {f.name: f for f in dataclasses.fields(lora) if f.name not in known.split()})


def _not_defaults(values: Mapping[str, Any], fields: dict[str, dataclasses.Field]) -> dict[str, Any]:
    """Return the fields' values other than their defaults, as JSON."""
    found = {}
    for name, field in fields.items():
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = values.get(name, default)
        if value is not None and value != default and not (value == [] and default in (None, "")):
            found[name] = json.loads(json.dumps(value, default=_as_json))
    return found


def _as_json(value: Any) -> Any:
    """Convert an enumeration to its value, a set to a sorted list, a configuration object to its fields."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.value if isinstance(value, enum.Enum) else type(value).__name__


def dataset_sha256(dataset: Any) -> str | None:
    """Hash a dataset by content: columns, length, a transform's source, and rows (of more than 10,000, so
    many spread over all). Independent of folder and machine. Without pictures and sound; `None` for streamed data."""
    if not isinstance(dataset, Dataset):
        return None
    if (known := _datasets.get(dataset)) is not None:
        return known
    plain = [name for name, kind in sorted(dataset.features.items()) if not hasattr(kind, "decode_example")]
    count = min(len(dataset), _FINGERPRINT_ROWS)
    rows = [index * (len(dataset) - 1) // max(count - 1, 1) for index in range(count)]
    sample = dataset.select_columns(plain).with_format("arrow")[rows].to_pydict() if plain else {}
    transform = dataset.format["format_kwargs"].get("transform")
    written = None if transform is None else source_sha256(transform)
    _datasets[dataset] = found = sha256([sorted(dataset.column_names), len(dataset), written, sample])
    return found


def config_differences(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """List differences of two configurations of a base, a line each; none without a record."""
    return [] if then is None else _compared("base_config", then, now)


class Differences(NamedTuple):
    """One line each, "name: value then, value now". `refused`: makes another run. `reported`: it may be resumed."""

    refused: list[str]
    reported: list[str]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """Compare a run's record with the settings of the run resuming it.

    Every difference is refused, except in `_MAY_DIFFER`. Without `settings_sha256`, only recorded keys are compared.
    The base is identified by its fingerprint; its name counts if a fingerprint is missing, or the conversion differs.
    """
    both = set(then) & set(now)
    names = (both if "settings_sha256" not in then else set(then) | set(now)) - _NOT_SETTINGS
    known = "base_sha256" in both and not any(then.get(name) != now.get(name) for name in _FORM)
    free = _MAY_DIFFER | ({"model"} if known else set()) | ({*_SPLIT} if _sizes(then) == _sizes(now) else set())
    found = Differences([], [])
    for name in sorted(names if known else names - {"base_sha256"}):
        lines = found.reported if name in free else found.refused
        lines += _compared(name, then.get(name), json.loads(json.dumps(now.get(name), default=str)))
    return found


def _sizes(settings: Mapping[str, Any]) -> list[int]:
    """Return a process's completions per step, and per rollout."""
    micro, *counts = (settings.get(name) or 1 for name in _SPLIT)
    return [micro * count for count in counts]


def _compared(name: str, then: Any, now: Any) -> list[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        inner = sorted(set(then) | set(now))
        return [line for key in inner for line in _compared(f"{name}.{key}", then.get(key), now.get(key))]
    if then == now:
        return []
    if name == "dataset_sha256":
        return ["dataset_sha256: the training data changed"]
    if name == TOKENIZER:
        return [f"{name}: the tokenizer changed (vocabulary, merges, added or special tokens, template)"]
    if name.startswith(SOURCES):
        return [f"{name}: its source changed"] if then and now else []
    if name == "base_sha256":
        return [f"base_sha256: the base model has other weights ({then[:12]} then, {now[:12]} now)"]
    shown = ["not set" if value is None else repr(value) for value in (then, now)]
    # each process draws its own numbers
    why = " processes: sampling, shuffle and dropout draw other numbers" if name == "world_size" else ""
    return [f"{name.removeprefix('options.')}: {shown[0]} then, {shown[1]} now{why}"]


def sources_of(trainer: OnlineTrainer) -> dict[str, dict[str, str]]:
    """Hash the reward functions, and all sources of completions other than the model."""
    rewards = zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
    return {"rewards_sha256": digests(rewards), "rollouts_sha256": digests(rollouts_of(trainer))}


def rollouts_of(trainer: OnlineTrainer) -> Iterator[tuple[str, Any]]:
    """Yield name and function of all sources of completions other than the model (TRL's `GRPOTrainer`)."""
    if (function := getattr(trainer, "rollout_func", None)) is not None:
        yield "rollout_func", function
    for name, factory in (getattr(trainer, "environment_factories", None) or {}).items():
        yield f"environment{'' if name is None else f' {name}'}", factory
    for tool in getattr(trainer, "tools", None) or []:
        yield f"tool {getattr(tool, '__name__', type(tool).__name__)}", tool


def digests(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Name -> digest of the source, if available; a second function of the same name has its number appended."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    for name, function in named:
        seen[name] = seen.get(name, 0) + 1
        if (digest := source_sha256(function)) is not None:
            found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = digest
    return found


def source_sha256(function: Any) -> str | None:
    """Hash a function's source, or its class's for a callable object; `None` for a model or without source."""
    while isinstance(function := inspect.unwrap(function), functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return None
    is_written = inspect.isroutine(function) or inspect.isclass(function)
    try:
        return sha256(inspect.getsource(function if is_written else type(function)))
    except (OSError, TypeError):  # defined interactively, or built in
        return None


def sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def recorded_tokenizer(processing_class: Any) -> dict[str, str]:
    """Compute a tokenizer's record in a run or an export: a digest of its content."""
    tokenizer = text_tokenizer(processing_class)
    template = processing_class.chat_template or tokenizer.chat_template
    # a special token set by hand becomes an added one only after saving and loading
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
    return {TOKENIZER: hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()}


def _vocabulary(tokenizer: Any, named: set[str]) -> Any:
    """Return vocabulary and merges as JSON, or a digest of their serialized text: parsing it would take a second."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return hashlib.sha256(backend.to_str().partition(_VOCABULARY)[2].encode()).hexdigest()
    vocabulary = sorted((index, str(token)) for token, index in tokenizer.get_vocab().items() if token not in named)
    pieces = getattr(getattr(tokenizer, "sp_model", None), "serialized_model_proto", bytes)()
    return [vocabulary, [" ".join(pair) for pair in getattr(tokenizer, "bpe_ranks", {})], pieces.hex()]


def recorded_of_written(tokenizer: Any, run: Mapping[str, Any]) -> dict[str, str]:
    """Compute [`recorded_tokenizer`] of an export's tokenizer; warn if `run` recorded another."""
    found = recorded_tokenizer(tokenizer)
    if run.get(TOKENIZER, found[TOKENIZER]) != found[TOKENIZER]:
        logger.warning(
            "The exported tokenizer (%s) is not the one that the run was trained with. Leave tokenizer= out to export "
            "the run's own.",
            tokenizer.name_or_path or type(tokenizer).__name__,
        )
    return found
