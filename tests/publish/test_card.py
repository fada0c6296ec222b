"""Cards: metadata, the facts in the text, and nothing that no run produced."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from qerl_trl.checkpoint import seal
from qerl_trl.publish import card as cards

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "trainer": "GRPO",
    "model": "someone/base",
    "base_format": "nvfp4",
    "scale_rule": "rtn",
    "aqn": True,
    "aqn_scope": "rollout",
    "aqn_schedule": "exponential",
    "aqn_sigma_start": 0.0123,
    "aqn_sigma_end": 0.000456,
    "aqn_num_stages": 7,
    "lora": {"r": 16, "alpha": 32, "targets": ["q_proj", "down_proj"]},
    "learning_rate": 3e-5,
    "num_generations": 8,
    "max_completion_length": 77,
    "temperature": 1.0,
    "loss_type": "dapo",
    "beta": 0.0,
    "seed": 5,
    "options": {"compute": "w4a8"},
    "settings_sha256": "5e77",
    "global_step": 100,
}
RESULTS = {
    "before": {"accuracy": 0.411, "interval95": [0.38, 0.44], "total": 1000, "correct": 411},
    "after": {"accuracy": 0.523, "interval95": [0.49, 0.55], "total": 1000, "correct": 523},
    "difference": {"value": 0.112, "interval95": [0.08, 0.14]},
    "steps": 100,
    "seed": 5,
    "train_seconds": 321.0,
    "device": "some CPU",
    "versions": {"trl": "1.16.0"},
    "settings": {"settings_sha256": "5e77", "global_step": 100},
    "log_history": [{"step": i, "reward": i / 10, "entropy": 1.0} for i in range(1, 5)],
}
KINDS = sorted(cards.TEMPLATES)


def facts(kind, **more):
    measured = {"mean_logit_distance": 0.0876, "kl_nats_per_token": 0.00123, "same_greedy_token": 0.987, "tokens": 321}
    full = {
        "kind": kind,
        "settings": SETTINGS,
        "results": {key: value for key, value in RESULTS.items() if key not in ("versions", "log_history", "settings")},
        "dataset": "someone/data",
        "survived": {"kept_fraction": 0.345, "error_ratio": 0.67},
        "measured": measured,
        "repo_id": "me/thing",
        "versions": {"trl": "1.16.0"},
    }
    return {**full, **more}


def header(text):
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize("kind", KINDS)
def test_metadata(kind):
    text = cards.render(facts(kind))
    data = header(text)
    assert data["library_name"] == ("peft" if kind == "adapter" else "transformers")
    assert data["base_model"] == "someone/base"
    relation = "quantized" if "nvfp4" in kind else "finetune"
    assert data["base_model_relation"] == ("adapter" if kind == "adapter" else relation)
    assert ("datasets" in data) == (kind != "nvfp4_base")
    assert {"qerl", "nvfp4"} <= set(data["tags"])
    assert ({"trl", "grpo"} <= set(data["tags"])) == (kind != "nvfp4_base")
    assert ("lora" in data["tags"]) == (kind == "adapter")
    assert ModelCard(text).data.to_dict()["pipeline_tag"] == "text-generation"  # the Hub's own parser
    assert not [word for word in ("{{", "{%", "None") if word in text] and "me/thing" in text


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_is_shown_of_the_weights_that_were_evaluated(kind):
    text = cards.render(facts(kind))
    if kind in ("adapter", "merged"):
        (result,) = header(text)["model-index"][0]["results"]
        assert result["metrics"][0]["value"] == 52.3 and result["dataset"]["type"] == "someone/data"
        assert "1000 held-out problems" in result["metrics"][0]["name"]
        assert "model-index" not in header(cards.render(facts(kind, results=None)))
    else:
        assert "model-index" not in header(text) and "52.3" not in text


TEXTS = {
    "adapter": (
        facts("adapter"),
        "0.0123 to 0.000456 in 7 stages;rank 16, alpha 32;52.3 %;41.1 %;+11.2 points;some CPU;on the quantized base"
        ";products in FP8 (W4A8)",
    ),
    "nvfp4_merged": (facts("nvfp4_merged"), "34.5 %"),
    "other base": (facts("merged_other_base"), "Not the policy that was trained;0.0876"),
    "pattern": (
        facts("adapter", settings={**SETTINGS, "lora": {"r": 2, "alpha": 4, "targets": ".*(q|v)_proj"}}),
        "alpha 4, on `.*(q|v)_proj`",
    ),
    "local": ({"kind": "adapter", "settings": {"base_format": "nvfp4", "model": "/home/me/secret/tiny"}}, "`tiny`"),
    "nothing": ({"kind": "adapter", "settings": {}}, "trained by reinforcement learning."),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_card_shows_the_known_facts_only(name):
    known, wanted = TEXTS[name]
    text = cards.render(known)
    assert not [word for word in wanted.split(";") if word not in text]
    if name in ("local", "nothing"):
        assert "base_model" not in header(text)
        assert not [word for word in ("## Evaluation", "seed", "/home/me", "None") if word in text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_names_the_trainer_and_the_base_of_the_run(kind):
    settings = {**SETTINGS, "trainer": "RLOO", "base_sha256": "0123456789abcdef" * 4, "base_revision": "c" * 40}
    text = cards.render(facts(kind, settings=settings))
    assert "ingerprint" in text and "`0123456789abcdef`" in text and f"revision `{'c' * 40}`" in text
    assert "ingerprint" not in cards.render(facts(kind))
    assert "grpo" not in text.lower() and "deepseekmath" not in text.lower()
    if kind != "nvfp4_base":
        assert "rloo" in header(text)["tags"] and "ahmadian2024back" in text
        assert "| method | RLOO with TRL and qerl-trl" in text
    if kind.startswith("nvfp4"):
        assert "QeRLRLOOTrainer(model=" in text and "QeRLRLOOConfig(" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_task_is_that_of_the_run_or_none(kind, tmp_path):
    """With another reward and data set, nothing of the example appears."""
    history = [{"step": i, "reward": i / 10, "rewards/politeness/mean": i / 20} for i in range(1, 5)]
    (tmp_path / "checkpoint-3").mkdir()
    content = {**RESULTS, "dataset": "someone/letters", "log_history": history}
    (tmp_path / "results.json").write_text(json.dumps(content))
    found = cards.facts_of_run(tmp_path / "checkpoint-3", SETTINGS)  # of the folder above
    assert found["log"]["rewards/politeness/mean"] == [pytest.approx(0.075), pytest.approx(0.175), 4]
    known = {**facts(kind), **{key: found[key] for key in ("log", "results", "dataset")}}
    text = cards.render(known)
    assert not [word for word in ("math word", "gsm8k", "correctness", "greedy") if word in text.lower()]
    if kind in ("adapter", "merged"):
        assert "| reward | 0.15 | 0.35 | 4 |" in text
        (result,) = header(text)["model-index"][0]["results"]
        assert result["task"] == {"type": "text-generation"}
        assert result["dataset"] == {"type": "someone/letters", "name": "someone/letters"}
        task = {"task": "polite letters", "split": "held", "decoding": "greedy, noise off"}
        text = cards.render({**known, "results": {**found["results"], **task}})
        (result,) = header(text)["model-index"][0]["results"]
        assert result["task"]["name"] == "polite letters" and result["dataset"]["split"] == "held"
        assert "held-out accuracy, greedy, noise off" in text


def test_evaluations_of_a_run_reach_the_card(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    protocol = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 4096, "samples": 1}
    evaluation = {"name": "math500", "dataset": "HuggingFaceH4/MATH-500", "accuracy": 0.25, "interval95": [0.2, 0.3]}
    evaluation |= {"total": 500, "protocol": protocol, "base_format": "nvfp4"}
    evaluation |= {"weights_sha256": seal.weights_sha256(tmp_path)}
    (tmp_path / "eval-math500.json").write_text(json.dumps(evaluation))
    text = cards.render(cards.facts_of_run(tmp_path, SETTINGS))
    (result,) = header(text)["model-index"][0]["results"]
    assert (result["dataset"]["type"], result["metrics"][0]["value"]) == ("HuggingFaceH4/MATH-500", 25.0)
    assert "25.0 %" in text and "temperature 0.6, top-p 0.95" in text
    assert result["metrics"][0]["name"].startswith("accuracy (%), 500 problems, temperature 0.6,")


@pytest.mark.parametrize(
    ("lora", "slot"),
    [
        ({"r": 12}, 16),
        ({"r": 8, "options": {"rank_pattern": {"q_proj": 40}}}, 64),
        ({"r": 8, "options": {"use_dora": True}}, None),
    ],
    ids=str,
)
def test_vllm_is_started_with_a_rank_that_it_takes(lora, slot):
    text = cards.render(facts("adapter", settings={**SETTINGS, "lora": {"alpha": 4, "targets": "q_proj", **lora}}))
    assert (f"--max-lora-rank {slot} " in text) if slot else ("vllm serve" not in text)


CODE = """
from qerl_trl.publish import card
from qerl_trl.support import recipes
print(card.template_folder())
print(recipes.examples_folder())
print(recipes.config_file("embedded"), recipes.task_file("letters"))
print(card.render({"kind": "adapter", "settings": {"base_format": "nvfp4"}})[:3])
"""


def test_templates_travel_in_the_wheel(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    package = tmp_path / "site" / "qerl_trl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package.parent)
    templates = [f"hub_cards/{template}" for template in {*cards.TEMPLATES.values(), "_parts.jinja"}]
    examples = [f"examples/{name}" for name in ("grpo_gsm8k.py", "configs/embedded.yaml", "tasks/letters.yaml")]
    assert all((package / name).is_file() for name in ("py.typed", *templates, *examples))
    environment = {"PYTHONPATH": str(package.parent)}
    run = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    found = f"{package}/examples"
    shipped = f"{found}/configs/embedded.yaml {found}/tasks/letters.yaml"
    assert run.stdout.splitlines() == [f"{package}/hub_cards", found, shipped, "---"]


@pytest.mark.parametrize("card", sorted((ROOT / "hub_cards/examples").glob("*.md")), ids=lambda path: path.stem)
def test_committed_examples_are_what_the_templates_give(card):
    stored = json.loads(card.with_suffix(".json").read_text())
    assert card.read_text() == cards.render(stored)
