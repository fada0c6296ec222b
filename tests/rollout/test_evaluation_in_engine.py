"""Held-out problems answered by the running engine, on the embedded model in float32, against transformers' greedy generation."""

import pytest

PROBLEMS = 24


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_engine_answers_as_transformers_does(evaluation, when):
    assert evaluation[when]["equal"] == PROBLEMS
    assert evaluation[when]["different"] > PROBLEMS // 2


def test_during_training_with_the_adapter_of_that_moment(evaluation):
    assert [entry["equal"] for entry in evaluation["during"]] == [PROBLEMS, PROBLEMS]
    assert evaluation["logged"] == [entry["metric"] for entry in evaluation["during"]]


def test_noise_is_off_and_comes_back(evaluation):
    assert evaluation["noise while answering"] and set(map(tuple, evaluation["noise while answering"])) == {(0.0, 0.0)}
    assert evaluation["sigma"][0] == 0 and evaluation["sigma"][1] > 0.1  # the rollout after an evaluation is noisy


def test_an_evaluation_that_hangs_ends_the_run(evaluation):
    assert evaluation["hanging"].startswith("RolloutError") and "rollout_timeout" in evaluation["hanging"]


def test_each_process_answers_its_share(evaluation_of_two):
    assert evaluation_of_two["processes"] == 2
    assert evaluation_of_two["answers"] == evaluation_of_two["expected"]
