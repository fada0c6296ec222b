"""Which figures a card shows: those that were measured of what it describes. Whatever else lies there is named, and left out."""

import json
import logging
import shutil

import pytest

from qerl_trl.checkpoint import seal
from qerl_trl.publish import card as cards
from tests.cli.test_main import call
from tests.faults import doors
from tests.faults.catalog import fault
from tests.publish import test_cards
from tests.publish.test_hub import REPO, server  # noqa: F401  (a fixture)

SETTINGS = {**test_cards.SETTINGS, "base_sha256": "ba5e"}
RESULTS = {
    **test_cards.RESULTS,
    "settings": {name: SETTINGS[name] for name in ("settings_sha256", "base_sha256", "global_step")},
}

EVALUATION = {
    "name": "gsm8k", "dataset": "openai/gsm8k", "accuracy": 0.987, "interval95": [0.97, 0.99], "total": 1000, "seed": 1, "engine": "vllm",
    "protocol": {"temperature": 0.0, "samples": 1, "split": "test", "dataset": "openai/gsm8k", "max_new_tokens": 5, "top_p": 1.0},
    "base_format": "nvfp4", "base_sha256": "ba5e",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, caplog):
    """Of a run with an adapter; what is in it is written by the test."""
    caplog.set_level(logging.WARNING)
    made = tmp_path / "runs" / "run"
    made.mkdir(parents=True)
    (made / "adapter_config.json").write_text("{}")
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    return made


def write(folder, content, name="results.json"):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


def shown(folder, settings=SETTINGS):
    """The card's text, of what the folder gives."""
    return cards.render(cards.facts_of_run(folder, settings))


OTHERS = {
    "settings": (
        {"settings": {**RESULTS["settings"], "settings_sha256": "0ther"}},
        "settings_sha256 0ther there, 5e77 here",
    ),
    "base": ({"settings": {**RESULTS["settings"], "base_sha256": "0ther"}}, "base_sha256 0ther there, ba5e here"),
    "base unknown": ({"settings": {"settings_sha256": "5e77"}}, "base_sha256 None there"),
    "nothing said": ({"settings": None}, "does not say with which settings"),
}


@fault("S.card_of_another_run", recovered=True)
@pytest.mark.parametrize(("change", "said"), OTHERS.values(), ids=OTHERS)
def test_results_of_another_run(change, said, folder, caplog):
    path = write(folder, {**RESULTS, **change, "dataset": "someone/else"})
    facts = cards.facts_of_run(folder, SETTINGS)
    assert not {"results", "log"} & set(facts) and facts["dataset"] is None
    assert "52.3" not in cards.render(facts)
    assert f"{path} is of another run than {folder}" in caplog.text and said in caplog.text
    assert cards.facts_of_run(folder, SETTINGS, dataset="my/own")["dataset"] == "my/own"
    assert caplog.text.count("is of another run") == 1  # a run that pushes while it trains has many cards


@fault("S.card_of_another_run", recovered=True)
def test_results_one_level_up_are_a_checkpoints_only(folder, caplog):
    """runs/results.json beside runs/run is of something else, whatever it says."""
    write(folder.parent, RESULTS)
    facts = cards.facts_of_run(folder, SETTINGS)
    assert not {"results", "log"} & set(facts) and not caplog.text


@fault("S.card_of_another_run", recovered=True)
def test_a_checkpoint_shows_no_figures_of_the_end(folder, caplog):
    write(folder, {**RESULTS, "dataset": "someone/data"})
    for step in (50, 100):
        shutil.copytree(folder, folder / f"checkpoint-{step}", ignore=lambda *_: {"results.json", "checkpoint-50"})
        facts = cards.facts_of_run(folder / f"checkpoint-{step}", {**SETTINGS, "global_step": step})
        assert ("results" in facts) is ("log" in facts) is (step == 100)
        assert facts["dataset"] == "someone/data"
        assert ("52.3" in cards.render(facts)) is (step == 100)
    assert f"was measured after 100 steps, and {folder / 'checkpoint-50'} has 50" in caplog.text


@fault("S.card_of_another_run", recovered=True)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"after": ', "is damaged"),
    ],
)
def test_damaged_results(content, said, folder, caplog):
    path = write(folder, content)
    assert "52.3" not in shown(folder)
    assert f"{path} {said}" in caplog.text and "Run its command again" in caplog.text


@fault("S.card_of_another_run", recovered=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights_sha256": "0ther"}, "measured other weights than are there"),
        ({"weights_sha256": None}, "does not say which weights it measured"),
        ({"base_format": "bf16"}, "measured the adapter on a base in bf16, and it was trained on nvfp4"),
        ({"base_sha256": "0ther"}, "measured the adapter on another base"),
    ],
)
def test_an_evaluation_of_something_else(change, said, folder, caplog):
    good = {**EVALUATION, "weights_sha256": seal.weights_sha256(folder)}
    write(folder, {**good, "accuracy": 0.25}, "eval-good.json")
    path = write(folder, {**good, **change}, "eval-gsm8k.json")
    text = shown(folder)
    assert "98.7" not in text and "25.0 %" in text
    assert str(path) in caplog.text and said in caplog.text and "eval-good" not in caplog.text


@fault("S.card_of_another_run", recovered=True)
def test_an_evaluation_before_the_run_went_on(folder, caplog):
    write(folder, {**EVALUATION, "weights_sha256": seal.weights_sha256(folder)}, "eval-gsm8k.json")
    assert "98.7" in shown(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"other weights")
    assert "98.7" not in shown(folder) and "measured other weights" in caplog.text


def test_what_weights_are_told_apart_by(tmp_path):
    assert seal.weights_sha256(tmp_path) is None
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"a")
    whole = seal.weights_sha256(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = seal.weights_sha256(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"b")
    assert seal.weights_sha256(tmp_path) == adapter
    (tmp_path / "adapter_config.json").unlink()
    assert len({whole, adapter, seal.weights_sha256(tmp_path)}) == 3


# --- at the product ---------------------------------------------------------------------------------------------------------------


@fault("S.card_of_another_run", recovered=True)
@pytest.mark.parametrize("by", ["merge", "push", "the trainer"])
def test_a_run_with_figures_of_another_beside_its_own(by, server, tmp_path, caplog):  # noqa: F811
    """What `eval` measured of it is shown; what somebody else left there, in the card and in its metadata, is not."""
    run, problems = tmp_path / "runs/run", tmp_path / "problems.jsonl"
    trainer = doors.trained(run)
    problems.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    code, _, err = call("eval", run, "--data", problems, "--max-new-tokens", 2)
    assert code == 0, err
    foreign = {**RESULTS, "after": {**RESULTS["after"], "accuracy": 0.987}, "dataset": "someone/else"}
    write(run, foreign)
    write(run.parent, foreign)
    write(run, {**EVALUATION, "accuracy": 0.987}, "eval-gsm8k.json")
    if by == "merge":
        code, _, err = call("merge", run, tmp_path / "out")
        card = (tmp_path / "out/README.md").read_text()
    elif by == "push":
        code, _, err = call("push", "adapter", run, REPO, "--base-model", "someone/base")
        card = server.text(REPO)["README.md"]
    else:
        trainer.save_adapter(tmp_path / "runs/adapter")
        card = (tmp_path / "runs/adapter/README.md").read_text()
    assert code == 0, err
    assert "98.7" not in card and "someone/else" not in card and "openai/gsm8k" not in card
    assert "| problems" in card and "model-index" in card
    for name in ("results.json", "eval-gsm8k.json"):
        assert f"{run / name} " in caplog.text
