"""Model cards, rendered from the templates in `hub_cards/templates` and from facts that a run wrote down.

A card's facts are a plain dictionary, kept as `qerl_card.json` beside the card, so that it can be rendered again when the repository is
known. Every number in a card is one of these facts; what no run measured is left out, not guessed.
"""

import json
import os
from pathlib import Path
from typing import Any

import jinja2
import yaml

from . import checkpoint, report

FACTS_NAME = "qerl_card.json"
#: kind -> template
TEMPLATES = {
    "adapter": "adapter.md.jinja",
    "merged": "merged.md.jinja",
    "merged_other_base": "merged.md.jinja",
    "nvfp4_base": "nvfp4.md.jinja",
    "nvfp4_merged": "nvfp4.md.jinja",
}
_EVALUATION_FACTS = ("name", "dataset", "accuracy", "interval95", "total", "protocol", "engine", "seed")
#: `base_model_relation` of the Hub's model tree
_RELATIONS = {
    "adapter": "adapter",
    "merged": "finetune",
    "merged_other_base": "finetune",
    "nvfp4_base": "quantized",
    "nvfp4_merged": "quantized",
}
_TITLES = {
    "adapter": "LoRA adapter",
    "merged": "merged model",
    "merged_other_base": "adapter merged onto the unquantized base",
    "nvfp4_base": "NVFP4 base",
    "nvfp4_merged": "merged and re-quantized to NVFP4",
}


def template_folder() -> Path:
    """Where the templates are: inside the installed package, or at the top of a source checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "hub_cards", here.parents[1] / "hub_cards" / "templates"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"The card templates are in neither {here / 'hub_cards'} nor a source checkout. Reinstall qerl-trl."
    )


# --- facts ------------------------------------------------------------------------------------------------------------------------


def facts_of_run(folder: str | os.PathLike, run: dict[str, Any], dataset: str | None = None) -> dict[str, Any]:
    """Facts of an export from what its run left behind.

    Args:
        folder: checkpoint or output folder of the run; `results.json` and `curves.png` are looked for there and one level up.
        run: what the export says about itself (the manifest's `run`).
        dataset: Hub id or name of the training data; default: what results.json says.
    """
    settings = dict(run.get("settings", {}))
    facts: dict[str, Any] = {
        "kind": run["kind"],
        "settings": settings,
        **{key: run[key] for key in ("survived", "measured", "quantization", "exported_with") if key in run},
    }
    results, curves = _find(folder, "results.json"), _find(folder, "curves.png")
    if results is not None:
        content = json.loads(results.read_text())
        facts["results"] = {
            key: content[key]
            for key in ("before", "after", "difference", "steps", "seed", "train_seconds", "device")
            if key in content
        }
        facts["versions"] = content.get("versions")
        dataset = dataset or content.get("dataset")
        facts["log"] = _log_summary(content.get("log_history", []))
    facts["evaluations"] = [
        {key: value for key, value in json.loads(path.read_text()).items() if key in _EVALUATION_FACTS}
        for path in sorted(Path(folder).glob("eval-*.json"))
    ]
    if curves is not None and run["kind"] != "nvfp4_base":
        facts["curves"] = str(curves)
    facts["dataset"] = dataset
    return facts


def facts_of_quantization(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Facts of an NVFP4 base that `qerl-trl quantize` is writing into `folder`: its error report and sizes."""
    from .offline import REPORT_NAME

    layers = json.loads((folder / REPORT_NAME).read_text())["layers"]
    worst = max(layers, key=lambda layer: layer["nmse"])
    weights = sum(layer["weights"] for layer in layers)
    quantization = {
        "weights": weights,
        "layers": len(layers),
        "nmse": sum(layer["nmse"] * layer["weights"] for layer in layers) / weights,
        "worst_nmse": worst["nmse"],
        "worst_layer": worst["name"],
        "source_bytes": run["source_bytes"],
        "written_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    }
    return {
        "kind": run["kind"],
        "settings": run["settings"],
        "quantization": quantization,
        "exported_with": run["exported_with"],
    }


def _find(folder: str | os.PathLike, name: str) -> Path | None:
    folder = Path(folder)
    return next((path for path in (folder / name, folder.parent / name) if path.is_file()), None)


def facts_of(source: Any, dataset: str | None = None) -> dict[str, Any]:
    """Facts of a live trainer (its settings and log), or of an [`policy.Source`]."""
    from .policy import source_of

    policy = source_of(source)
    facts: dict[str, Any] = {"kind": "adapter", "settings": dict(policy.settings), "dataset": dataset}
    if hasattr(source, "accelerator"):
        found = facts_of_run(source.args.output_dir, {"kind": "adapter", "settings": policy.settings}, dataset)
        facts = {**facts, **found, "versions": report.versions()}
        facts["log"] = _log_summary(source.state.log_history)
        facts["hardware"] = report.device_name(source.args.device) + (
            f" x {source.args.world_size}" if source.args.world_size > 1 else ""
        )
    return facts


def _log_summary(history: list[dict[str, Any]]) -> dict[str, list[float]]:
    """First and last logged value of the few quantities a card shows, each the mean of up to ten entries."""
    summary = {}
    for key in ("reward", "rewards/correctness_reward/mean", "entropy", "aqn/sigma", "rollout/mismatch_kl"):
        values = [entry[key] for entry in history if isinstance(entry.get(key), (int, float))]
        if len(values) >= 2:
            n = min(10, len(values) // 2)
            summary[key] = [sum(values[:n]) / n, sum(values[-n:]) / n, len(values)]
    return summary


def write(folder: Path, facts: dict[str, Any], run: dict[str, Any]) -> None:
    """Put README.md, the facts and the curves into an export that is being made and that `run` describes."""
    facts = {**facts, **{key: run[key] for key in ("kind", "survived", "measured", "exported_with") if key in run}}
    curves = facts.pop("curves", None)
    if facts["kind"] == "nvfp4_base":  # nothing was trained
        curves = None
        for key in ("results", "evaluations", "log", "versions", "dataset"):
            facts.pop(key, None)
    if curves is not None and Path(curves).is_file():
        (folder / "curves.png").write_bytes(Path(curves).read_bytes())
        facts["has_curves"] = True
    facts.setdefault("folder", folder.name.removeprefix(".").removesuffix(".partial"))
    checkpoint.write_json_atomically(folder / FACTS_NAME, _public(facts))
    (folder / "README.md").write_text(render(read_facts(folder)))  # as it will be rendered again from the file


def read_facts(folder: Path) -> dict[str, Any] | None:
    """The facts beside a card, `None` without them."""
    path = folder / FACTS_NAME
    return json.loads(path.read_text()) if path.is_file() else None


def _public(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without paths of this machine."""
    from .policy import public_name

    facts = json.loads(json.dumps(facts))
    settings = facts.get("settings", {})
    if settings.get("model"):
        settings["model"] = public_name(settings["model"])
    for holder in (facts, *(facts.get("evaluations") or [])):
        if holder.get("dataset"):
            holder["dataset"] = public_name(holder["dataset"])
    for each in facts.get("evaluations") or []:
        each["protocol"]["dataset"] = each["dataset"]
    return facts


# --- rendering --------------------------------------------------------------------------------------------------------------------


def render(facts: dict[str, Any]) -> str:
    """The card as markdown with its YAML header.

    Raises:
        `ValueError`: unknown kind.
    """
    if facts.get("kind") not in TEMPLATES:
        raise ValueError(f"There is no card for kind={facts.get('kind')!r}; known are {', '.join(TEMPLATES)}.")
    from .policy import is_hub_id

    raw_model = facts.get("settings", {}).get("model") or ""
    base = facts.get("base_model") or (raw_model if is_hub_id(raw_model) else None)
    facts = _public(facts)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    name = facts.get("repo_id") or facts.get("folder") or "path/to/this/folder"
    dataset = facts.get("dataset")
    context = {
        "title": facts.get("title") or name.split("/")[-1],
        "subtitle": _TITLES[facts["kind"]],
        "name": name,
        "base": base,
        "base_name": base or facts["settings"].get("model") or "the base model",
        "dataset": dataset,
        "dataset_is_public": bool(dataset and is_hub_id(dataset)),
        "settings": _lenient(facts["settings"]),
        **{
            key: _lenient(facts.get(key))
            for key in (
                "kind",
                "results",
                "log",
                "versions",
                "survived",
                "measured",
                "quantization",
                "has_curves",
                "hardware",
                "evaluations",
            )
        },
        "exported_with": facts.get("exported_with") or {},
    }
    text = environment.get_template(TEMPLATES[facts["kind"]]).render(context)
    return f"---\n{_header(facts, base, context)}---\n\n{text.strip()}\n"


def _model_index(facts: dict[str, Any], dataset: str | None) -> list[dict[str, Any]]:
    """Results for the card's metadata: what `qerl-trl eval` measured, and the held-out accuracy of the run itself."""
    found = []
    for each in facts.get("evaluations") or []:
        protocol = each["protocol"]
        how = f"temperature {protocol['temperature']:g}, {protocol['samples']} completion(s) a problem"
        found.append((each["dataset"], each["accuracy"], f"accuracy (%), {each['total']} problems, {how}"))
    after = (facts.get("results") or {}).get("after")
    if after and dataset:
        found.append((dataset, after["accuracy"], f"accuracy (%), {after['total']} held-out problems, greedy"))
    return [
        {
            "task": {"type": "text-generation", "name": "math word problems"},
            "dataset": {"type": name, "name": name, "split": "test"},
            "metrics": [{"type": "accuracy", "value": round(100 * value, 2), "name": metric}],
        }
        for name, value, metric in found
    ]


class _Facts(dict):
    """A dictionary whose missing keys are None, so that templates can ask for any fact (and misspelt variables still fail)."""

    def __missing__(self, key):
        return None


def _lenient(value: Any) -> Any:
    if isinstance(value, list):
        return [_lenient(each) for each in value]
    return _Facts({key: _lenient(each) for key, each in value.items()}) if isinstance(value, dict) else value


def _header(facts: dict[str, Any], base: str | None, context: dict[str, Any]) -> str:
    kind, settings = facts["kind"], facts["settings"]
    trained = kind != "nvfp4_base"
    tags = [
        *(["trl", "grpo", "qerl"] if trained else ["qerl"]),
        *(["nvfp4"] if kind.startswith("nvfp4") or settings.get("base_format") == "nvfp4" else []),
        *(["lora"] if kind == "adapter" else []),
        *(["compressed-tensors"] if kind.startswith("nvfp4") else []),
    ]
    header: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    if base is not None:
        header["base_model"] = base
        header["base_model_relation"] = _RELATIONS[kind]
    header["pipeline_tag"] = "text-generation"
    if trained and context["dataset_is_public"]:
        header["datasets"] = [context["dataset"]]
    header["tags"] = tags + [tag for tag in facts.get("extra_tags", []) if tag not in tags]
    # what was measured: the adapter on its base, and the merge that equals it
    measured = _model_index(facts, context["dataset"]) if kind in ("adapter", "merged") else []
    if measured:
        header["model-index"] = [{"name": context["title"], "results": measured}]
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
