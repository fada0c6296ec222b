"""A card shows the figures measured of its model; others next to it are named and left out."""

import json
import logging

import pytest

from qerl_trl.checkpoint import seal
from qerl_trl.publish import card as cards
from tests.faults.catalog import fault

OF = {"settings_sha256": "5e77", "base_sha256": "ba5e", "global_step": 100}
SETTINGS = {"base_format": "nvfp4", "model": "some/base", **OF}
HISTORY = [{"step": 1, "reward": 0.1}, {"step": 100, "reward": 0.5}]
AFTER = {"accuracy": 0.523, "correct": 134, "interval95": [0.4, 0.6], "total": 256}
RESULTS = {"before": AFTER, "after": AFTER, "steps": 100, "settings": OF, "dataset": "someone/data"}
RESULTS |= {"log_history": HISTORY}
PROTOCOL = {"temperature": 0.0, "samples": 1, "split": "test", "dataset": "openai/gsm8k", "max_new_tokens": 5}
EVALUATION = {"name": "gsm8k", "dataset": "openai/gsm8k", "accuracy": 0.987, "interval95": [0.97, 0.99], "total": 1000}
EVALUATION |= {"seed": 1, "engine": "vllm", "protocol": {**PROTOCOL, "top_p": 1.0}}
EVALUATION |= {"base_format": "nvfp4", "base_sha256": "ba5e"}


@pytest.fixture
def folder(tmp_path, caplog):
    """A run with an adapter."""
    caplog.set_level(logging.WARNING)
    made = tmp_path / "runs" / "run"
    made.mkdir(parents=True)
    (made / "adapter_config.json").write_text("{}")
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    return made


def write(folder, content, name="results.json"):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


OTHERS = {
    "settings": ({**OF, "settings_sha256": "0ther"}, "settings_sha256 0ther there, 5e77 here"),
    "base": ({**OF, "base_sha256": "0ther"}, "base_sha256 0ther there, ba5e here"),
    "nothing": (None, "does not record the settings"),
}


@fault("R7.card_of_another_run", recovered=True)
@pytest.mark.parametrize(("of", "words"), OTHERS.values(), ids=OTHERS)
def test_results_of_another_run(of, words, folder, caplog):
    path = write(folder, {**RESULTS, "settings": of})
    facts = cards.facts_of_run(folder, SETTINGS)
    assert not {"results", "log"} & set(facts) and facts["dataset"] is None and "52.3" not in cards.render(facts)
    assert f"{path} belongs to another run than {folder}" in caplog.text and words in caplog.text
    assert cards.facts_of_run(folder, SETTINGS, dataset="my/own")["dataset"] == "my/own"
    assert caplog.text.count("belongs to another run") == 1  # a run that pushes while it trains has many cards
    path = write(folder, '{"after": ')
    assert "52.3" not in cards.render(cards.facts_of_run(folder, SETTINGS))
    assert f"{path} is damaged" in caplog.text and "Run its command again" in caplog.text


@fault("R7.card_of_another_run", recovered=True)
def test_a_checkpoint_shows_no_figures_of_the_end(folder, caplog):
    write(folder, RESULTS)
    for step in (50, 100):
        (folder / f"checkpoint-{step}").mkdir()
        facts = cards.facts_of_run(folder / f"checkpoint-{step}", {**SETTINGS, "global_step": step})
        assert ("results" in facts) is ("log" in facts) is ("52.3" in cards.render(facts)) is (step == 100)
        assert facts["dataset"] == "someone/data"
    assert f"was measured after 100 steps, and {folder / 'checkpoint-50'} has 50" in caplog.text


@fault("R7.card_of_another_run", recovered=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights_sha256": "0ther"}, "measured other weights than the folder has"),
        ({"weights_sha256": None}, "does not say which weights it measured"),
        ({"base_format": "bf16"}, "measured the adapter on a base in bf16, and it was trained on nvfp4"),
        ({"base_sha256": "0ther"}, "measured the adapter on another base"),
    ],
)
def test_an_evaluation_of_something_else(change, said, folder, caplog):
    good = {**EVALUATION, "weights_sha256": seal.weights_sha256(folder)}
    write(folder, {**good, "accuracy": 0.25}, "eval-good.json")
    path = write(folder, {**good, **change}, "eval-gsm8k.json")
    text = cards.render(cards.facts_of_run(folder, SETTINGS))
    assert "98.7" not in text and "25.0 %" in text
    assert str(path) in caplog.text and said in caplog.text and "eval-good" not in caplog.text
