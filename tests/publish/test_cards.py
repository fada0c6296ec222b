"""Cards: metadata, the facts in the text, and nothing that no run produced."""

import json
import re
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
    full = {
        "kind": kind,
        "settings": SETTINGS,
        "results": {key: value for key, value in RESULTS.items() if key not in ("versions", "log_history", "settings")},
        "dataset": "someone/data",
        "survived": {"kept_fraction": 0.345, "error_ratio": 0.67},
        "measured": {
            "mean_logit_distance": 0.0876,
            "kl_nats_per_token": 0.00123,
            "same_greedy_token": 0.987,
            "tokens": 321,
        },
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
    assert data["base_model_relation"] == {"adapter": "adapter"}.get(
        kind, "quantized" if "nvfp4" in kind else "finetune"
    )
    assert ("datasets" in data) == (kind != "nvfp4_base")
    assert {"qerl", "nvfp4"} <= set(data["tags"])
    assert ({"trl", "grpo"} <= set(data["tags"])) == (kind != "nvfp4_base")
    assert ("lora" in data["tags"]) == (kind == "adapter")
    assert ModelCard(text).data.to_dict()["pipeline_tag"] == "text-generation"  # the Hub's own parser
    assert "{{" not in text and "{%" not in text
    assert "None" not in text
    assert "me/thing" in text


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_model_index_comes_from_results_only(kind):
    metric = header(cards.render(facts(kind)))["model-index"][0]["results"][0]
    assert metric["metrics"][0]["value"] == 52.3
    assert "1000 held-out problems" in metric["metrics"][0]["name"]
    assert metric["dataset"]["type"] == "someone/data"
    assert "model-index" not in header(cards.render(facts(kind, results=None)))


@pytest.mark.parametrize("kind", ["merged_other_base", "nvfp4_base", "nvfp4_merged"])
def test_no_accuracy_for_weights_that_were_not_evaluated(kind):
    text = cards.render(facts(kind))
    assert "model-index" not in header(text)
    assert "52.3" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_a_fact(kind):
    """Change all facts to other numbers: no number of the first rendering may stay, but those of the template itself."""
    bare = cards.render(
        {
            "kind": kind,
            "settings": {"trainer": "GRPO", "base_format": "nvfp4"},
            "survived": {"kept_fraction": 0, "error_ratio": 0},
        }
    )
    text = cards.render(facts(kind))
    own = set(re.findall(r"\d+(?:\.\d+)?", bare))
    known = set(
        re.findall(
            r"\d+(?:\.\d+)?", json.dumps(facts(kind)) + "52.3 41.1 38.0 44.0 49.0 55.0 11.2 8.0 14.0 34.5 0.67 98.7 95"
        )
    )
    known |= {"321", "0.0876", "0.00123", "3e-05", "05"}
    assert set(re.findall(r"\d+(?:\.\d+)?", text)) - own - known == set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_named_by_its_content(kind):
    settings = {**SETTINGS, "base_sha256": "0123456789abcdef" * 4, "base_revision": "c" * 40}
    text = cards.render(facts(kind, settings=settings))
    assert "ingerprint" in text and "`0123456789abcdef`" in text and f"revision `{'c' * 40}`" in text
    assert "ingerprint" not in cards.render(facts(kind))


def test_the_text_tells_what_the_run_was():
    text = cards.render(facts("adapter"))
    for expected in (
        "0.0123 to 0.000456 in 7 stages",
        "rank 16, alpha 32",
        "52.3 %",
        "41.1 %",
        "+11.2 points",
        "some CPU",
    ):
        assert expected in text, expected
    assert "optimized on the quantized base" in text
    assert "34.5 %" in cards.render(facts("nvfp4_merged"))
    assert "Not the policy that was trained" in cards.render(facts("merged_other_base"))
    assert "0.0876" in cards.render(facts("merged_other_base"))


def test_missing_facts_leave_their_lines_out():
    text = cards.render({"kind": "adapter", "settings": {"base_format": "nvfp4", "model": "/home/me/secret/tiny"}})
    assert "## Evaluation" not in text
    assert "seed" not in text
    assert "base_model" not in header(text)
    assert "/home/me" not in text
    assert "`tiny`" in text


RLOO = {**SETTINGS, "trainer": "RLOO", "model": "someone/base"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_of_another_trainer_names_that_one(kind):
    text = cards.render(facts(kind, settings=RLOO))
    assert "grpo" not in text.lower()
    assert "deepseekmath" not in text.lower()
    if kind != "nvfp4_base":
        assert "rloo" in header(text)["tags"]
        assert "| method | RLOO with TRL and qerl-trl" in text
        assert "ahmadian2024back" in text
    if kind.startswith("nvfp4"):
        assert "QeRLRLOOTrainer(model=" in text and "QeRLRLOOConfig(" in text


def test_a_card_of_an_unknown_trainer_names_none():
    settings = {key: value for key, value in SETTINGS.items() if key != "trainer"}
    text = cards.render(facts("adapter", settings=settings))
    assert "grpo" not in text.lower() and "rloo" not in text.lower()
    assert "| method | reinforcement learning with TRL and qerl-trl" in text
    assert header(text)["tags"] == ["trl", "qerl", "nvfp4", "lora"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_task_is_what_the_run_says_or_nothing(kind, tmp_path):
    """Another reward and another data set than the example's: nothing of the example appears."""
    history = [{"step": i, "reward": i / 10, "rewards/politeness/mean": i / 20} for i in range(1, 5)]
    content = {**RESULTS, "dataset": "someone/letters", "log_history": history}
    (tmp_path / "results.json").write_text(json.dumps(content))
    found = cards.facts_of_run(tmp_path, SETTINGS)
    assert found["log"]["rewards/politeness/mean"] == [pytest.approx(0.075), pytest.approx(0.175), 4]
    text = cards.render({**facts(kind), "log": found["log"], "results": found["results"], "dataset": found["dataset"]})
    for word in ("math word", "gsm8k", "correctness", "greedy"):
        assert word not in text.lower(), word
    if kind in ("adapter", "merged"):
        (result,) = header(text)["model-index"][0]["results"]
        assert result["task"] == {"type": "text-generation"}
        assert result["dataset"] == {"type": "someone/letters", "name": "someone/letters"}
        told = {**found["results"], "task": "polite letters", "split": "held", "decoding": "greedy, noise off"}
        text = cards.render({**facts(kind), "results": told, "dataset": "someone/letters"})
        (result,) = header(text)["model-index"][0]["results"]
        assert result["task"]["name"] == "polite letters" and result["dataset"]["split"] == "held"
        assert "held-out accuracy, greedy, noise off" in text


def test_targets_may_be_one_pattern():
    text = cards.render(
        facts("adapter", settings={**SETTINGS, "lora": {"r": 2, "alpha": 4, "targets": ".*(q|v)_proj"}})
    )
    assert "alpha 4, on `.*(q|v)_proj`" in text


@pytest.mark.parametrize(
    ("lora", "slot"),
    [
        ({"r": 16}, 16),
        ({"r": 12}, 16),
        ({"r": 8, "options": {"rank_pattern": {"q_proj": 40}}}, 64),
        ({"r": 8, "options": {"use_dora": True}}, None),
        ({"r": 8, "options": {"modules_to_save": ["lm_head"]}}, None),
        ({"r": 1000}, None),
    ],
    ids=str,
)
def test_vllm_is_started_with_a_rank_that_it_takes(lora, slot):
    text = cards.render(facts("adapter", settings={**SETTINGS, "lora": {"alpha": 4, "targets": "q_proj", **lora}}))
    assert (f"--max-lora-rank {slot} " in text) if slot else ("vllm serve" not in text)


def test_an_adapter_of_which_nothing_is_known():
    text = cards.render({"kind": "adapter", "settings": {}})
    assert "None" not in text
    assert "trained by reinforcement learning." in text


def test_facts_of_a_finished_run(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "results.json").write_text(json.dumps({**RESULTS, "dataset": "openai/gsm8k"}))
    found = cards.facts_of_run(tmp_path / "checkpoint-3", SETTINGS)
    assert found["results"]["after"]["accuracy"] == 0.523
    assert found["dataset"] == "openai/gsm8k"
    assert found["log"]["reward"] == [pytest.approx(0.15), pytest.approx(0.35), 4]
    text = cards.render(found)
    assert "| reward | 0.15 | 0.35 | 4 |" in text


def test_evaluations_of_a_run_reach_the_card(tmp_path):
    evaluation = {
        "name": "math500",
        "dataset": "HuggingFaceH4/MATH-500",
        "accuracy": 0.25,
        "interval95": [0.2, 0.3],
        "total": 500,
    }
    evaluation["protocol"] = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 4096, "samples": 1}
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    evaluation |= {"weights_sha256": seal.weights_sha256(tmp_path), "base_format": "nvfp4"}
    (tmp_path / "eval-math500.json").write_text(json.dumps(evaluation))
    found = cards.facts_of_run(tmp_path, SETTINGS)
    text = cards.render(found)
    result = header(text)["model-index"][0]["results"][0]
    assert (result["dataset"]["type"], result["metrics"][0]["value"]) == ("HuggingFaceH4/MATH-500", 25.0)
    assert "25.0 %" in text and "temperature 0.6, top-p 0.95" in text
    evaluation["protocol"]["temperature"] = 0.0
    (tmp_path / "eval-math500.json").write_text(json.dumps(evaluation))
    text = cards.render(cards.facts_of_run(tmp_path, SETTINGS))
    assert "| greedy, up to 4096 tokens" in text and "top-p" not in text
    assert header(text)["model-index"][0]["results"][0]["metrics"][0]["name"].startswith(
        "accuracy (%), 500 problems, greedy,"
    )


def test_templates_travel_in_the_wheel(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for template in {*cards.TEMPLATES.values(), "_parts.jinja"}:
        assert f"qerl_trl/hub_cards/{template}" in names
    examples = ("grpo_gsm8k.py", "configs/embedded.yaml", "tasks/letters.yaml")
    assert {"qerl_trl/py.typed", *(f"qerl_trl/examples/{name}" for name in examples)} <= names
    code = (
        "from qerl_trl.support import recipes as run; from qerl_trl.publish import card as cards; print(cards.template_folder()); print(run.examples_folder());"
        "from qerl_trl.support.recipes import config_file, task_file; print(config_file('embedded'), task_file('letters'));"
        "print(cards.render({'kind': 'adapter', 'settings': {'base_format': 'nvfp4'}})[:3])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    )
    templates, examples, shipped, text = run.stdout.splitlines()
    assert shipped.split() == [f"{examples}/configs/embedded.yaml", f"{examples}/tasks/letters.yaml"]
    assert Path(templates) == tmp_path / "site/qerl_trl/hub_cards"
    assert Path(examples) == tmp_path / "site/qerl_trl/examples"
    assert text == "---"


@pytest.mark.parametrize("card", sorted((ROOT / "hub_cards/examples").glob("*.md")), ids=lambda path: path.stem)
def test_committed_examples_are_what_the_templates_give(card):
    stored = json.loads(card.with_suffix(".json").read_text())
    assert card.read_text() == cards.render(stored)
