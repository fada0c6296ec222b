"""What is asked of an engine is looked at before."""

import logging

import pytest

from qerl_trl.rollout import generation


@pytest.mark.parametrize(("limit", "said"), [(None, ""), (8, ""), (7, "cut off"), (5, "cut off")])
def test_completions_that_do_not_fit_the_engine_are_named(limit, said, caplog):
    with caplog.at_level(logging.WARNING):
        generation.check_lengths([[1] * 5, [1]], 3, limit)
    assert bool(said) == bool(caplog.records) and said in caplog.text
