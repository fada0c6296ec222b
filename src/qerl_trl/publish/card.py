"""Model cards, rendered from the templates in `hub_cards/templates` and the recorded facts of a run.

The facts ([`records.Facts`]) are stored as `qerl_card.json` next to the card, to render it again once the repository is
known. Every number and name (trainer, rewards, data, task) in a card comes from them; unrecorded facts are left out.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2
import yaml

from ..checkpoint import records, seal
from ..rollout.vllm.plugin import slot_of

if TYPE_CHECKING:  # these modules import PEFT, which `qerl-trl quantize` does not need
    from ..checkpoint.records import LoraSettings, RunSettings
    from .load import Exportable

#: kind -> template
TEMPLATES: dict[records.Kind, str] = {
    "adapter": "adapter.md.jinja",
    "merged": "merged.md.jinja",
    "merged_other_base": "merged.md.jinja",
    "nvfp4_base": "nvfp4.md.jinja",
    "nvfp4_merged": "nvfp4.md.jinja",
}
#: trainer -> (class, its configuration) for a base's usage example
_TRAINER_CLASSES = {"GRPO": ("QeRLGRPOTrainer", "QeRLConfig"), "RLOO": ("QeRLRLOOTrainer", "QeRLRLOOConfig")}
#: `base_model_relation` of the Hub's model tree
_RELATIONS = {
    "adapter": "adapter",
    "merged": "finetune",
    "merged_other_base": "finetune",
    "nvfp4_base": "quantized",
    "nvfp4_merged": "quantized",
}


def template_folder() -> Path:
    """Return the template folder: in the installed package, or at the top of a source checkout."""
    package = Path(__file__).resolve().parents[1]
    return folder if (folder := package / "hub_cards").is_dir() else package.parents[1] / "hub_cards" / "templates"


# --- facts ------------------------------------------------------------------------------------------------------------


def facts_of_run(folder: str | os.PathLike, settings: "RunSettings", dataset: str | None = None) -> records.Facts:
    """Collect facts of a run's adapter from its files; [`write`] adapts them to other exports.

    Args:
        folder: checkpoint or output folder of the run, with its figures ([`figures_of_run`]).
        settings: the run's recorded settings.
        dataset: Hub id or name of the training data; default: from results.json.
    """
    kind: records.Kind = "merged" if settings.get("base_format") == "full" else "adapter"
    facts: records.Facts = {"kind": kind, "settings": settings.copy(), **figures_of_run(Path(folder), settings)}
    facts["dataset"] = dataset or facts.get("dataset")
    return facts


def facts_of_quantization(folder: Path, export: records.Export) -> records.Facts:
    """Collect facts of the NVFP4 base being written by `qerl-trl quantize` into `folder`: errors and sizes."""
    from .quantize import summary

    return {
        "kind": export["kind"],
        "settings": export["settings"],
        "quantization": summary(folder, export["source_bytes"]).figures(),
        "exported_with": export["exported_with"],
    }


def facts_of(exported: "Exportable", dataset: str | None = None) -> records.Facts:
    """Collect facts of a live trainer (its settings and log), or of a rebuilt policy."""
    from ..checkpoint.settings import loaded_by
    from .load import is_trainer, trained_policy_of

    policy = trained_policy_of(exported)
    settings = policy.settings.copy()
    settings.setdefault("auto_class", loaded_by(policy.transformers_model))
    if not is_trainer(exported):
        return {"kind": "adapter", "settings": settings, "dataset": dataset}
    args = exported.args
    facts = facts_of_run(args.output_dir or ".", settings, dataset)
    facts["versions"] = records.versions()
    facts["log"] = log_summary(exported.state.log_history)
    facts["hardware"] = records.hardware(args)
    return facts


def write(folder: Path, facts: records.Facts, export: records.Export) -> None:
    """Write README.md and the facts into an unfinished export."""
    facts = facts.copy()
    facts["kind"], facts["exported_with"] = export["kind"], export["exported_with"]
    if "survived" in export:
        facts["survived"] = export["survived"]
    if "measured" in export:
        facts["measured"] = export["measured"]
    if facts["kind"] == "nvfp4_base":  # not trained
        for key in ("results", "evaluations", "log", "versions", "dataset"):
            facts.pop(key, None)  # type: ignore[misc]  # keys of Facts, in a loop
    facts.setdefault("folder", folder.name.removeprefix(".").removesuffix(".partial"))
    seal.write_json_atomically(folder / records.FACTS_NAME, _public(facts))
    (folder / "README.md").write_text(render(read_facts(folder) or {}))  # reads the file, as a later render does


def read_facts(folder: Path) -> records.Facts | None:
    """Read the facts next to a card; `None` without any."""
    path = folder / records.FACTS_NAME
    return json.loads(path.read_text()) if path.is_file() else None


def _public(facts: records.Facts) -> records.Facts:
    """Return the facts without local paths."""
    facts = json.loads(json.dumps(facts))
    settings = facts.get("settings", {})
    if settings.get("model"):
        settings["model"] = records.public_name(settings["model"])
    if dataset := facts.get("dataset"):
        facts["dataset"] = records.public_name(dataset)
    for each in facts.get("evaluations") or []:
        if each.get("dataset"):
            each["dataset"] = records.public_name(each["dataset"])
        each["protocol"]["dataset"] = each["dataset"]
    return facts


# --- rendering --------------------------------------------------------------------------------------------------------


@functools.cache
def _templates(folder: Path) -> jinja2.Environment:
    """Return the template environment of a folder. Cached: every checkpoint of a run has a card."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    return environment


def render(facts: records.Facts) -> str:
    """Render the card as Markdown with its YAML header."""
    model = facts["settings"].get("model") or ""
    base = facts.get("base_model") or (model if records.is_hub_id(model) else None)
    facts = _public(facts)
    name = facts.get("repo_id") or facts.get("folder") or "path/to/this/folder"
    title = facts.get("title") or name.split("/")[-1]
    trainer_class, config_class = _TRAINER_CLASSES.get(facts["settings"].get("trainer", ""), _TRAINER_CLASSES["GRPO"])
    context = {
        **dict.fromkeys(records.Facts.__annotations__),
        **_lenient(facts),
        "title": title,
        "name": name,
        "base": base,
        "base_name": base or facts["settings"].get("model") or "the base model",
        "exported_with": facts.get("exported_with") or {},
        "trained": facts["kind"] != "nvfp4_base",
        "trainer_class": trainer_class,
        "config_class": config_class,
        "auto_class": facts["settings"].get("auto_class") or "AutoModelForCausalLM",
        "slot": _slot(facts["settings"].get("lora")),
    }
    text = _templates(template_folder()).get_template(TEMPLATES[facts["kind"]]).render(context)
    return f"---\n{_header(facts, base, title)}---\n\n{text.strip()}\n"


def _slot(lora: "LoraSettings | None") -> int | None:
    """Return vLLM's `max_lora_rank` for an adapter; `None` if vLLM cannot serve it, or its settings are unknown."""
    options = (lora or {}).get("options", {})
    if lora is None or options.get("use_dora") or options.get("modules_to_save"):
        return None
    return slot_of(max(lora["r"], *options.get("rank_pattern", {}).values(), 0))


def _model_index(facts: records.Facts) -> list[dict[str, Any]]:
    """Return results for the card's metadata: from `qerl-trl eval`, and the run's held-out accuracy."""
    found = []
    for each in facts.get("evaluations") or []:
        protocol = each["protocol"]
        decoding = f"temperature {protocol['temperature']:g}" if protocol["temperature"] else "greedy"
        how = f"{decoding}, {protocol['samples']} completion(s) per problem"
        whole = ", all that is said is the answer" if each.get("answer_format") == "whole" else ""
        metric = f"accuracy (%), {each['total']} problems, {how}{whole}"
        found.append(_measured(each.get("task"), each["dataset"], protocol.get("split"), each["accuracy"], metric))
    results, dataset = facts.get("results") or {}, facts.get("dataset")
    if dataset and (after := results.get("after")):
        how = f", {results['decoding']}" if results.get("decoding") else ""
        metric = f"accuracy (%), {after['total']} held-out problems{how}"
        found.append(_measured(results.get("task"), dataset, results.get("split"), after["accuracy"], metric))
    return found


def _measured(task: str | None, dataset: str, split: str | None, accuracy: float, metric: str) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation", **({"name": task} if task else {})},
        "dataset": {"type": dataset, "name": dataset, **({"split": split} if split else {})},
        "metrics": [{"type": "accuracy", "value": round(100 * accuracy, 2), "name": metric}],
    }


class _Facts(dict):
    """Dictionary with None for missing keys: templates can ask for any fact, misspelt variables still fail."""

    def __missing__(self, key: str) -> None:
        return None


def _lenient(value: Any) -> Any:
    if isinstance(value, list):
        return [_lenient(each) for each in value]
    return _Facts({key: _lenient(each) for key, each in value.items()}) if isinstance(value, dict) else value


def _header(facts: records.Facts, base: str | None, title: str) -> str:
    kind, settings, dataset = facts["kind"], facts["settings"], facts.get("dataset")
    trained = kind != "nvfp4_base"
    trainer = settings.get("trainer")
    tags = [
        *(["trl"] if trained else []),
        *([trainer.lower().replace(" ", "-")] if trained and trainer else []),
        "qerl",
        *(["nvfp4"] if kind.startswith("nvfp4") or settings.get("base_format") == "nvfp4" else []),
        *(["lora"] if kind == "adapter" else []),
        *(["compressed-tensors"] if kind.startswith("nvfp4") else []),
    ]
    header: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    if base is not None:
        header["base_model"] = base
        header["base_model_relation"] = _RELATIONS[kind]
    header["pipeline_tag"] = "text-generation"
    if trained and dataset and records.is_hub_id(dataset):
        header["datasets"] = [dataset]
    header["tags"] = tags + [tag for tag in facts.get("extra_tags", []) if tag not in tags]
    # results of the adapter on its base, equal to the merge
    measured = _model_index(facts) if kind in ("adapter", "merged") else []
    if measured:
        header["model-index"] = [{"name": title, "results": measured}]
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)


# --- figures: evaluation and training results -------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-\d+")
#: logged quantities on a card
_LOGGED = re.compile(r"reward|rewards/.+/mean|entropy|aqn/sigma|rollout/mismatch_kl")


def figures_of_run(folder: Path, settings: "RunSettings") -> records.Facts:
    """Collect the facts in the files of `folder`: a run's folder, or a checkpoint in one.

    Args:
        settings: the run's recorded settings, `global_step` included.
    """
    found: records.Facts = {}
    # a checkpoint's figures are one level up; above a run's folder are those of other runs
    places = [folder, folder.parent] if _CHECKPOINT.fullmatch(folder.resolve().name) else [folder]
    results = next((place / records.RESULTS_NAME for place in places if (place / records.RESULTS_NAME).is_file()), None)
    content = None if results is None else _read(results)
    if results is not None and content is not None and (other := _of_another_run(content, settings)) is not None:
        _warn(f"{results} belongs to another run than {folder}: {other}. Its figures are left out of the card.")
        content = None
    if content is not None:
        found = {"dataset": content.get("dataset"), "versions": content.get("versions")}
        steps, now = content.get("steps"), settings.get("global_step")
        if steps != now:
            _warn(
                f"{results} was measured after {steps} steps, and {folder} has {now}: its figures are left out of the "
                "card."
            )
        else:
            found["results"] = cast(records.Results, known(content, records.Results))
            found["log"] = log_summary(content.get("log_history") or [])
    found["evaluations"] = _evaluations(folder, settings)
    return found


def _of_another_run(content: Mapping[str, Any], settings: "RunSettings") -> str | None:
    theirs = content.get("settings") or {}
    if theirs.get("settings_sha256") is None:
        return "it does not record the settings of its training"
    for name in ("settings_sha256", "base_sha256"):
        then, now = theirs.get(name), cast(Mapping[str, Any], settings).get(name)
        if then != now:
            return f"{name} {str(then)[:12]} there, {str(now)[:12]} here"
    return None


def _evaluations(folder: Path, settings: "RunSettings") -> list[records.Evaluation]:
    weights = functools.cache(lambda: seal.weights_sha256(folder))  # only read for a comparison
    found = []
    for path in sorted(folder.glob(records.EVALUATIONS)):
        content = _read(path)
        if content is None:
            continue
        if (why := _of_another_model(content, settings, weights)) is not None:
            _warn(f"{path} {why}: it is left out of the card of {folder}. Measure again with qerl-trl eval.")
            continue
        found.append(cast(records.Evaluation, known(content, records.Evaluation)))
    return found


def _of_another_model(
    content: Mapping[str, Any], settings: "RunSettings", weights: Callable[[], str | None]
) -> str | None:
    measured, trained_on = content.get("weights_sha256"), settings.get("base_format")
    if measured is None:
        return "does not say which weights it measured"
    if measured != weights():
        return "measured other weights than the folder has"
    if trained_on in ("nvfp4", "bf16") and content.get("base_format") != trained_on:
        return f"measured the adapter on a base in {content.get('base_format')}, and it was trained on {trained_on}"
    if trained_on != "full" and content.get("base_sha256") != settings.get("base_sha256"):
        return "measured the adapter on another base than the run's"
    return None


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any] | None:
    """Read a file of figures; `None`, with a warning, if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        _warn(f"{path} is damaged ({error}): its figures are left out of the card. Run its command again.")
        return None


@functools.cache
def _warn(text: str) -> None:
    """Warn once: a run with pushes during training writes a card for every checkpoint."""
    logger.warning(text)


def known(content: Mapping[str, Any], record: Any) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key in record.__annotations__}


def log_summary(history: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Summarize logged quantities: first and last value, each the mean of up to ten entries, and their number."""
    logged: dict[str, list[float]] = {}
    for entry in history:
        for key, value in entry.items():
            if isinstance(value, (int, float)) and _LOGGED.fullmatch(key):
                logged.setdefault(key, []).append(value)
    summary = {}
    for key, values in logged.items():
        if len(values) >= 2:
            n = min(10, len(values) // 2)
            summary[key] = [sum(values[:n]) / n, sum(values[-n:]) / n, len(values)]
    return summary
