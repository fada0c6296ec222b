"""What is exported, as typed JSON: the record that a manifest keeps of an export, and the facts that its card shows.

Both are read back from files: a key that is absent was not known.
"""

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:  # torch, which comparing runs does without, and PEFT, which `qerl-trl quantize` does without
    from .fingerprint import FingerprintRow
    from .settings import RunSettings

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


class Survived(TypedDict):
    """How much of the adapter's change the rounding of a merge kept; see `export.save_merged_nvfp4`."""

    kept_fraction: float
    error_ratio: float


class Measured(TypedDict):
    """How far a model is from the trained policy; see `distance.logit_distance`."""

    mean_logit_distance: float
    max_logit_distance: float
    kl_nats_per_token: float
    same_greedy_token: float
    tokens: int


class ExportBase(TypedDict):
    kind: Kind
    settings: "RunSettings"
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
    accuracy: float
    interval95: list[float]
    correct: int
    total: int


class Difference(TypedDict):
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
    settings: "RunSettings"
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
    settings: "RunSettings"
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
    curves: str  # path of a PNG; not kept in the file
    has_curves: bool
    folder: str
    repo_id: str
    base_model: str
    base_packed: bool  # whether the Hub's copy of the base is stored in quantized layers
    title: str
    extra_tags: list[str]
