"""What a run is, as data: the settings that decide its trajectory and its result.

A checkpoint's manifest and the run's folder keep them, a run that is started again is compared with them ([`differences`]: which settings
refuse, which only warn), and a card shows them.
"""

import dataclasses
import json
import logging
import re
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, cast

from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import LoraConfig

from . import base_identity, report, tokenizer_identity
from .nvfp4.config import auto_class_of
from .nvfp4.linear import compute_dtype
from .redaction import cleaned
from .sources import plainly, rewards_of, rollouts_of, sha256, source_sha256
from .upstream import OnlineTrainer

logger = logging.getLogger(__name__)

_FIELDS = """base_format scale_rule aqn aqn_schedule aqn_sigma_start aqn_sigma_end aqn_num_stages aqn_scope aqn_seed
    aqn_entropy_target seed data_seed learning_rate max_steps num_train_epochs per_device_train_batch_size
    gradient_accumulation_steps num_generations steps_per_generation num_iterations temperature max_completion_length
    loss_type beta world_size modules_to_not_convert""".split()
#: recorded, but free to differ when a run goes on: with a warning. A longer run stretches the schedules of learning rate and noise
_MAY_DIFFER = {"max_steps", "num_train_epochs", "versions", "rewards_sha256", "rollouts_sha256", "held_sha256"}
#: of these, what is recorded as changed when a run goes on with others: a mended function is allowed, and is another one
SOURCES = ("rewards_sha256", "rollouts_sha256", "held_sha256")
#: what is recorded beside the settings themselves
_NOT_SETTINGS = {
    "settings_sha256",
    "global_step",
    "merged_onto",
    "changed",
    "base_revision",
    "auto_class",
    "dataset_columns",
}
#: not in the records of older versions
_NEWER = {"base_config", "tokenizer_content_sha256", "rollouts", "rollouts_sha256", "special_tokens"}
#: not in the options of records that have no `special_tokens`
_NEWER_OPTIONS = {"off_policy_mask_threshold", "cache_implementation", "vllm_engine_kwargs"}
#: how a rollout and a step are cut into backward passes: free to differ where neither gets another size
_CUT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
#: how the base is made of what is loaded: it differs with them
_FORM = ("base_format", "scale_rule", "modules_to_not_convert")
#: arguments without a say in the trajectory: where and when is written, logged, evaluated and pushed, memory and placement, limits of checks.
#: The base is known by its own settings, not by how it was loaded
_INCIDENTAL = re.compile(
    r"output_dir|overwrite_output_dir|resume_from_checkpoint|allow_other_settings|run_name|project|debug|do_.*|report_to|trackio_.*|disable_tqdm"
    r"|log_.*|logging_.*|num_completions_to_print|include_.*|skip_memory_metrics|save_.*|enable_jit_checkpoint|load_best_model_at_end"
    r"|metric_for_best_model|greater_is_better|restore_callback.*|push_to_hub|hub_.*|.*eval_.*|batch_eval_metrics|num_generations_eval"
    r"|prediction_loss_only|bf16_full_eval|fp16_full_eval|model_init_kwargs|trust_remote_code|use_cpu|local_rank|ddp_.*|fsdp|fsdp_config"
    r"|deepspeed|ds3_.*|parallelism_config|accelerator_config|dataloader_.*|generation_batch_size|pad_to_multiple_of|use_cache|tf32"
    r"|(gradient|activation)_checkpointing.*|padding_free|compile_layers|torch_compile.*|torch_empty_cache_steps|full_determinism|share_weights"
    r"|vllm_(?!importance|structured|engine_kwargs).*|rollout_probe(?:_steps)?|rollout_timeout|reward_timeout|rollout_mismatch_threshold|zero_advantage_patience"
)
#: of `vllm_engine_kwargs`, what is memory, placement, graphs and logs; all else (a cache in 8 bits, another dtype) makes another sampler
_INCIDENTAL_ENGINE = re.compile(
    r"enforce_eager|.*cudagraph.*|compilation_config|max_(num_seqs|num_batched_tokens|model_len|parallel_loading_workers|num_partial_prefills"
    r"|seq_len_to_capture)|gpu_memory_utilization|kv_cache_memory_bytes|num_gpu_blocks_override|swap_space|cpu_offload_.*|block_size"
    r"|enable_(prefix_caching|chunked_prefill|sleep_mode|log_.*)|async_scheduling|.*parallel_size|distributed_.*|disable_custom_all_reduce"
    r"|disable_log_.*|download_dir|load_format|use_tqdm.*|mm_processor_cache.*|limit_mm_per_prompt|show_hidden_.*|otlp_.*|hf_token"
)
#: arguments that act as they were when the trainer was built, and of which it has no attribute with the same value
AT_BUILD = re.compile(
    r"aqn.*|base_format|scale_rule|modules_to_not_convert|updates_per_rollout|fused_lora|vllm_engine_kwargs"
    r"|rollout_mismatch.*|vllm_structured_.*|generation_kwargs|cache_implementation|transformers_continuous_.*config"
    r"|reward_weights|router_aux_loss_coef|entropy_coef|max_tool_calling_iterations|per_device_train_batch_size|bf16|fp16"
    r"|disable_dropout|cast_lm_head_to_fp32|sync_ref_model|.*liger.*|label_names|reward_timeout|zero_advantage_patience"
)
#: rows of the training data that its fingerprint reads
_FINGERPRINT_ROWS = 10_000
#: fingerprints that were computed: a run says it with each checkpoint
_datasets: "weakref.WeakKeyDictionary[Dataset, dict[str, str]]" = weakref.WeakKeyDictionary()


def may_differ(name: str) -> bool:
    """Whether a run may go on with another value of this argument without `allow_other_settings`."""
    return name in _MAY_DIFFER or _INCIDENTAL.fullmatch(name) is not None


class LoraSettings(TypedDict, total=False):
    r: int
    alpha: int
    targets: list[str] | str  # names, or one regular expression
    options: dict[
        str, Any
    ]  # of `LoraConfig`, where they are not its defaults: use_rslora, use_dora, modules_to_save, ...


class RunSettings(TypedDict, total=False):
    """JSON. A key is absent where the run has no such setting, and everywhere for a model that no run is known of."""

    trainer: str  # the algorithm: "GRPO", "RLOO"
    model: str  # the base: Hub id or folder
    base_revision: str  # the Hub's commit of it, where it came from there
    base_sha256: (
        str  # fingerprint of its weights as they were loaded (`base_identity`); absent where no process had it whole
    )
    base_config: dict[str, Any]  # what its configuration says of its forward (`base_identity`)
    tokenizer_content_sha256: str  # of all of the tokenizer (`tokenizer_identity`)
    special_tokens: dict[str, Any]  # with which a completion ends, and what is behind it
    dtype: str  # compute dtype
    base_format: str
    scale_rule: str
    modules_to_not_convert: list[str]
    lora: LoraSettings
    aqn: bool
    aqn_schedule: str
    aqn_sigma_start: float
    aqn_sigma_end: float
    aqn_num_stages: int
    aqn_scope: str
    aqn_seed: int
    aqn_entropy_target: float
    seed: int
    data_seed: int
    learning_rate: float
    max_steps: int
    num_train_epochs: float
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    temperature: float
    max_completion_length: int
    loss_type: str
    beta: float
    world_size: int
    rewards: list[str]  # names of the reward functions
    rewards_sha256: dict[
        str, str
    ]  # of each one's own source, of a reward model's weights; absent where there is neither
    rollouts: list[str]  # what completions are made with beside the model: a rollout function, environments, tools
    rollouts_sha256: dict[str, str]  # of each one's own source
    held_sha256: dict[
        str, dict[str, str]
    ]  # of what each one of both held when it was given, and a scheduler, by attribute
    dataset_sha256: str  # of a sample of the training data; absent for streamed data
    dataset_columns: dict[str, str]  # the same of each column, and of what they have in common
    options: dict[str, Any]  # every further argument that decides the trajectory and is not at its default
    settings_sha256: str  # of all settings that may not differ when the run goes on
    changed: list[str]  # differences that were allowed on the way (`allow_other_settings`)
    versions: dict[str, str]
    auto_class: str  # of transformers, which loads the model that is trained
    # added by an export
    global_step: int
    merged_onto: str  # format of the base that the exported model was built on


def acting(trainer: OnlineTrainer) -> Any:
    """`trainer.args` with the values that act: most are read when the trainer is built, and not again."""
    args, own = object.__new__(type(trainer.args)), vars(trainer)
    vars(args).update(vars(trainer.args))  # copy.copy leaves tokens out
    found = {
        f.name: own[f.name]
        for f in dataclasses.fields(args)
        if f.name in own and f.name != "use_vllm" and not may_differ(f.name)
    }
    found["epsilon"] = own["epsilon_low"]
    for name, default in (("epsilon_high", own["epsilon_low"]), ("chat_template_kwargs", {})):
        if found[name] == default != getattr(args, name):  # what TRL makes of None
            found[name] = None
    vars(args).update(found | trainer.at_build)
    return args


def undo_edits(trainer: OnlineTrainer) -> None:
    """Set `trainer.args` back to the values that act."""
    given, acts = vars(trainer.args), vars(acting(trainer))
    if edited := {name: (value, acts[name]) for name, value in given.items() if value != acts[name]}:
        shown = cleaned(edited)
        why = "trainer.args has values that do not act: %s. Set arguments before the trainer is built."
        logger.warning(why, ", ".join(f"{name}={value!r} ({acts!r} acts)" for name, (value, acts) in shown.items()))
        given.update(acts)


def run_settings(trainer: OnlineTrainer) -> RunSettings:
    """What must agree for a resumed run to continue the same trajectory, and what a reader of its results wants to know."""
    settings: RunSettings = {"trainer": trainer._name.removeprefix("QeRL-")}
    args = acting(trainer)
    for name in _FIELDS:
        if (value := getattr(args, name, None)) is not None:
            settings[name] = value  # type: ignore[literal-required]  # the names above are keys of RunSettings
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings["model"] = getattr(model.config, "_name_or_path", "")
    if (revision := base_identity.base_revision(model)) is not None:
        settings["base_revision"] = revision
    if trainer.base_sha256 is not None:
        settings["base_sha256"] = trainer.base_sha256
    settings["base_config"] = base_identity.base_config(model)
    settings |= cast(RunSettings, tokenizer_identity.recorded(trainer.processing_class))
    settings["special_tokens"] = _special_tokens(trainer)
    settings["dtype"] = str(compute_dtype(model)).removeprefix("torch.")
    if is_peft_model(model):
        settings["lora"] = lora_settings(model.peft_config[model.active_adapter])
    rewards, rollouts, sources = list(rewards_of(trainer)), list(rollouts_of(trainer)), trainer.sources
    settings["rewards"] = list(trainer.reward_func_names)
    settings["rewards_sha256"] = sources.digests(rewards)
    settings["rollouts"] = sorted(name for name, _ in rollouts)
    settings["rollouts_sha256"] = sources.digests(rollouts)
    schedulers = [(name, given) for name, given in trainer.given_optimizers().items() if name == "lr_scheduler"]
    settings["held_sha256"] = sources.held([*rewards, *rollouts, *schedulers])
    if (columns := _columns_sha256(trainer.train_dataset)) is not None:
        settings["dataset_sha256"], settings["dataset_columns"] = sha256(columns), columns
    decisive = {f.name: f for f in dataclasses.fields(args) if not _INCIDENTAL.fullmatch(f.name)}
    settings["options"] = _not_defaults(args, {n: f for n, f in decisive.items() if n not in _FIELDS})
    settings["options"] = _of_the_policy(settings["options"]) | _given_as_objects(trainer, args)
    free = {*_MAY_DIFFER, *_NOT_SETTINGS, *({"model"} if "base_sha256" in settings else ())}
    settings["settings_sha256"] = sha256({k: v for k, v in settings.items() if k not in free})
    settings["versions"] = report.versions()
    settings["auto_class"] = loaded_by(model)
    return settings


def loaded_by(model: Any) -> str:
    """Name of transformers' class that loads a model, which may have an adapter."""
    own = model.get_base_model() if is_peft_model(model) else model
    return auto_class_of(own.config, type(own).__name__).__name__


def _given_as_objects(trainer: OnlineTrainer, args: Any) -> dict[str, Any]:
    """What decides the trajectory and is no argument: an optimizer or a scheduler that was given ready, and a precision of the environment
    (`accelerate launch --mixed_precision`)."""
    found: dict[str, Any] = {}
    for name, given in trainer.given_optimizers().items():
        own = {key: plainly(value) for key, value in getattr(given, "defaults", {}).items()}
        found[name] = {"class": f"{type(given).__module__}.{type(given).__qualname__}", **own}
    said = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    if (precision := getattr(args, "mixed_precision", said)) != said:
        found["mixed_precision"] = precision
    return found


def _of_the_policy(options: dict[str, Any]) -> dict[str, Any]:
    """Without what of the engine, or of a cache, is memory and speed alone."""
    engine = options.pop("vllm_engine_kwargs", {})
    if numeric := {name: value for name, value in engine.items() if not _INCIDENTAL_ENGINE.fullmatch(name)}:
        options["vllm_engine_kwargs"] = numeric
    if options.get("cache_implementation") != "quantized":
        options.pop("cache_implementation", None)
    return options


def _special_tokens(trainer: OnlineTrainer) -> dict[str, Any]:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # of a processor
    ends = getattr(trainer, "eos_token_ids", None)
    return {"eos": [tokenizer.eos_token_id] if ends is None else list(ends), "pad": tokenizer.pad_token_id}


def lora_settings(lora: LoraConfig) -> LoraSettings:
    targets: Any = lora.target_modules  # a string is a regular expression
    targets = targets if isinstance(targets, str) else sorted(targets or ())
    found: LoraSettings = {"r": lora.r, "alpha": lora.lora_alpha, "targets": targets}
    if options := _lora_options(lora):
        found["options"] = options
    return found


def _lora_options(lora: LoraConfig) -> dict[str, Any]:
    known = "r lora_alpha target_modules peft_type task_type base_model_name_or_path revision inference_mode auto_mapping peft_version"
    return _not_defaults(lora, {f.name: f for f in dataclasses.fields(lora) if f.name not in known.split()})


def _not_defaults(values: Any, fields: dict[str, dataclasses.Field]) -> dict[str, Any]:
    """The fields' values, as JSON, where they are set to something else than their default."""
    found = {}
    for name, field in fields.items():
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(values, name, default)
        if value is not None and value != default and not (value == [] and default in (None, "")):
            found[name] = json.loads(json.dumps(value, default=_as_json))
    return found


def _as_json(value: Any) -> Any:
    """An enumeration's value, a set in order, a configuration object as its fields."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return getattr(value, "value", type(value).__name__)


def dataset_sha256(dataset: Any) -> str | None:
    """Fingerprint of a dataset by content: its columns, its length, and its rows; of more than 10,000 that many, spread over it, first and
    last included. A transform that is applied when rows are read counts by how it is written.

    The same data from another folder, cache or machine has the same one. Pictures and sound are not read; streamed data have none.
    """
    return None if (columns := _columns_sha256(dataset)) is None else sha256(columns)


def _columns_sha256(dataset: Any) -> dict[str, str] | None:
    """The same column by column; under no name, what they have in common."""
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
    found = {name: sha256(sample.get(name)) for name in dataset.column_names} | {"": sha256([len(dataset), written])}
    _datasets[dataset] = found
    return found


def config_differences(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """One line for each, of what configurations of a base say of its forward; none where an older version recorded nothing."""
    return [] if then is None else _compared("base_config", then, now)


class Differences(NamedTuple):
    """One line each, "name: value then, value now". `refused`: the run would be another one. `reported`: it may go on."""

    refused: list[str]
    reported: list[str]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """Compare what a run recorded with the settings of the run that wants to go on in its place.

    Whatever is recorded refuses, except for `_MAY_DIFFER`. A record of an older version, without `settings_sha256`, is compared in what
    it has. The base is known by its fingerprint; its name is compared where one side has none, or forms its base in another way.
    """
    if "special_tokens" not in then and "options" in now:
        now = {
            **now,
            "options": {
                k: v for k, v in now["options"].items() if k not in _NEWER_OPTIONS or k in then.get("options", {})
            },
        }
    both = set(then) & set(now)
    names = (both if "settings_sha256" not in then else set(then) | set(now)) - _NOT_SETTINGS - (_NEWER - set(then))
    known = "base_sha256" in both and not any(then.get(name) != now.get(name) for name in _FORM)
    free = _MAY_DIFFER | {"model"} if known else _MAY_DIFFER
    found = Differences([], [])
    if _sizes(then) == _sizes(now):
        free = free | {*_CUT}
    columns, had = now.get("dataset_columns") or {}, then.get("dataset_columns") or {}
    if had and had.items() < columns.items():
        names -= {"dataset_sha256"}
        found.reported.append(
            f"dataset_sha256: the training data have further columns ({', '.join({*columns} - {*had})})"
        )
    for name in sorted(names if known else names - {"base_sha256"}):
        lines = found.reported if name in free else found.refused
        lines += _compared(name, then.get(name), json.loads(json.dumps(now.get(name), default=str)))
    return found


def _sizes(settings: Mapping[str, Any]) -> list[int]:
    """Completions of a process for a step, and for a rollout."""
    micro, *counts = (settings.get(name) or 1 for name in _CUT)
    return [micro * count for count in counts]


def _compared(name: str, then: Any, now: Any) -> list[str]:
    if name in SOURCES:
        then, now = then or {}, now or {}
    if isinstance(then, dict) and isinstance(now, dict):
        inner = sorted(set(then) | set(now))
        return [line for key in inner for line in _compared(f"{name}.{key}", then.get(key), now.get(key))]
    if then == now:
        return []
    if name == "dataset_sha256":
        return ["dataset_sha256: the training data are others than then"]
    if name == "tokenizer_content_sha256":
        return [
            f"{name}: the tokenizer is another one than then (vocabulary, merges, added or special tokens, template)"
        ]
    if name.startswith(SOURCES):
        known = then is not None and now is not None  # not in records of older versions
        if name.startswith("held_sha256"):
            _, *owner, attribute = name.split(".")
            return (
                [f"{name}: {attribute!r} of {'.'.join(owner)} is another one than when the run began"] if owner else []
            )
        what = "this reward function" if name.startswith("rewards") else "what completions are made with"
        line = f"{name}: {what} is written in another way than then, or has other values bound to it"
        return [line] if known else []
    if name == "base_sha256":
        return [f"base_sha256: the base model has other weights than then ({then[:12]} then, {now[:12]} now)"]
    shown = ["not set" if value is None else repr(value) for value in (then, now)]
    # what each process draws for itself
    why = " processes: sampling, shuffle and dropout draw other numbers" if name == "world_size" else ""
    return [f"{name.removeprefix('options.')}: {shown[0]} then, {shown[1]} now{why}"]
