"""What is asked of an engine is looked at before."""

import logging

import pytest

from qerl_trl.rollout import generation


@pytest.mark.parametrize(
    ("limit", "said"), [(None, None), (8, None), (7, "cut off"), (5, "longest prompt has 5 tokens")]
)
def test_prompts_have_to_fit_the_engine(limit, said, caplog):
    with caplog.at_level(logging.WARNING):
        if limit == 5:
            with pytest.raises(ValueError, match=said):
                generation.check_lengths([[1] * 5, [1]], 3, limit)
        else:
            generation.check_lengths([[1] * 5, [1]], 3, limit)
            assert (said is None) == (not caplog.records) and (said or "") in caplog.text
