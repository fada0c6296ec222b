"""How far apart sampling and training are: the estimate, what counts as truncated, and what a run logs."""

import math
import types

import pytest
import torch

from qerl_trl import mismatch
from tests.test_trainer import logged, make_trainer  # noqa: F401  (a fixture)


def test_kl_of_known_log_probabilities():
    sampled = torch.zeros(1, 4)
    trained = torch.tensor([[math.log(2), 0.0, math.nan, 5.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert mismatch.kl_per_token(trained, sampled, mask).item() == pytest.approx((1 - math.log(2)) / 2)
    assert mismatch.kl_per_token(trained, sampled, torch.zeros_like(mask)).item() == 0.0


@pytest.mark.parametrize(
    ("mode", "low", "high", "ratio", "fraction"),
    [
        ("token_truncate", None, 2.0, [[2.0, 1.0, 0.5, 9.0]], 1 / 3),
        ("token_truncate", 0.5, None, [[2.0, 1.0, 0.5, 9.0]], 1 / 3),
        ("token_truncate", 0.5, 2.0, [[2.0, 1.0, 0.5, 9.0]], 2 / 3),
        ("token_mask", None, 2.0, [[0.0, 1.0, 0.5, 9.0]], 1 / 3),
        ("sequence_truncate", None, 2.0, [[2.0]], 1.0),
    ],
)
def test_truncated_fraction_counts_both_ends_of_real_tokens(mode, low, high, ratio, fraction):
    trainer = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(gather=lambda value: value),
        args=types.SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
    )
    found = mismatch.measure(
        trainer,
        None,
        {
            "completion_mask": torch.tensor([[1, 1, 1, 0]]),
            "sampling_per_token_logps": torch.zeros(1, 4),
            "old_per_token_logps": torch.tensor([[math.log(2), 0.0, math.nan, 5.0]]),
            "importance_sampling_ratio": torch.tensor(ratio),
        },
    )
    assert found.truncated_fraction == pytest.approx(fraction)
    assert found.kl == pytest.approx((1 - math.log(2)) / 2)  # the two tokens that were scored


def test_two_equal_policies_are_not_measured():
    assert mismatch.measure(None, None, {"completion_mask": torch.ones(1, 4)}) is None


def test_the_mismatch_is_measured_on_as_many_sequences_at_a_time_as_a_step(make_trainer, monkeypatch):  # noqa: F811
    trainer = make_trainer(per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=4, max_steps=3)
    sizes, logps = [], trainer._get_per_token_logps_and_entropies

    def watching(model, input_ids, *args, batch_size=None, **kwargs):
        sizes.append(batch_size or len(input_ids))
        return logps(model, input_ids, *args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", watching)
    trainer.train()
    assert logged(trainer, "rollout/mismatch_kl")
    assert set(sizes) == {2}
