"""Results of the example: separate for each arm, and not lost to later failures."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from qerl_trl.checkpoint import seal
from qerl_trl.cli import main as cli
from qerl_trl.cli import train
from qerl_trl.publish import hub
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import WEIGHTS, contents
from tests.hub_server import REPO, TOKEN


@fault("R6.arms_share_folder", recovered=True)
def test_arms_one_after_the_other_share_nothing(example, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "launch", lambda command, log: example.main(command[2:]) or 0)
    words = ["arms", "embedded", "--arms", "nvfp4", "bf16-no-noise", "--seeds", "1", "--output_dir", str(tmp_path)]
    outcome = CliRunner().invoke(cli.app, [*words, *example.small])
    assert outcome.exit_code == 0, outcome.exception
    for folder, base, noise in (("nvfp4-1", "nvfp4", True), ("bf16-no-noise-1", "bf16", False)):
        results = json.loads((tmp_path / folder / "results.json").read_text())
        assert (results["steps"], results["arm"]["base_format"], results["arm"]["aqn"]) == (1, base, noise)
        assert seal.recorded_run(tmp_path / folder)["base_format"] == base
    assert "| seed | nvfp4 | bf16-no-noise | bf16-no-noise - nvfp4 |" in outcome.stdout


@fault("R6.other_eval_problems")
def test_other_problems_are_refused_before_any_training(example, measured, tmp_path):
    run = shutil.copytree(measured, tmp_path / "run")
    before = contents(run)
    with raises(ValueError, "before.json", "6 problems then, 4 now", "--eval_problems 6", "another output_dir"):
        example(run, eval_problems=4, max_steps=2)
    with raises(ValueError, "before.json", "6 problems both times, but others", "same problems"):
        example(run, system_prompt="Be brief.", max_steps=2, allow_other_settings="true")
    assert contents(run) == before


@fault("R6.finished_run_again", recovered=True)
def test_a_finished_run_is_measured_again_and_the_arm_is_the_one_that_was_trained(example, measured, tmp_path):
    run = shutil.copytree(measured, tmp_path / "run")
    first = json.loads((run / "results.json").read_text())
    again = example(run)
    assert {**again, "command": 0} == {**first, "command": 0}
    assert (run / WEIGHTS).read_bytes() == (measured / WEIGHTS).read_bytes()
    # with another arm's arguments nothing is trained, so nothing is reported as theirs
    other = example(run, aqn="false", allow_other_settings="true")
    assert other["arm"]["aqn"] is True and other["steps"] == 1


@fault("R7.upload_interrupted", recovered=True)
def test_results_are_written_before_the_network_is_touched(example, server, tmp_path):
    run = tmp_path / "run"
    push = {"push_to_hub": "true", "hub_strategy": "end", "hub_model_id": REPO, "hub_token": TOKEN}
    with pytest.raises(ValueError, match="hub_base_model"):  # before anything is trained
        example(run, **push)
    assert server.requests == [] and not list(run.glob("*.json"))
    push["hub_base_model"] = "someone/base"
    server.fail["POST .*/commit/.*"] = 403
    with pytest.raises(hub.HubError, match=f"qerl-trl push adapter {run} {REPO}"):
        example(run, **push)
    results = json.loads((run / "results.json").read_text())
    assert results["after"]["total"] == 6 and results["steps"] == 1
    assert seal.problems(run) == []
    server.fail.clear()
    again = example(run, **push)
    assert again["after"] == results["after"]
    assert WEIGHTS in server.repos[REPO]["files"]
