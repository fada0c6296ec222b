"""Log-probabilities of the noisy policy, and TRL's importance ratio from them with transformers' generation."""

import pytest
import torch
from trl import GRPOTrainer

from qerl_trl import QeRLGRPOTrainer, QeRLRLOOConfig, QeRLRLOOTrainer
from tests.faults.tiny_runs import logged
from tests.run.test_base import QeRLGMPOConfig, QeRLGMPOTrainer
from tests.trainers import settings

NOISE = {"aqn_schedule": "constant", "aqn_sigma_start": 0.3, "max_steps": 1}
RATIO = "sampling/importance_sampling_ratio/mean"


def by_hand(model, batch, temperature):
    """Log-probabilities (B, T) of the completions from plain logits, without TRL."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, batch["prompt_ids"].size(1) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]


@pytest.fixture
def seen(monkeypatch) -> list[tuple]:
    """(batch, noisy and clean log-probabilities by hand) of each micro-batch, as TRL's loss gets them."""
    seen, loss = [], GRPOTrainer._compute_loss

    def watching(trainer, model, batch):
        with trainer.aqn.noisy():
            noisy = by_hand(trainer.model, batch, trainer.temperature)
        seen.append((batch, noisy, by_hand(trainer.model, batch, trainer.temperature)))
        return loss(trainer, model, batch)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watching)
    return seen


def test_noisy_rollouts_are_corrected_by_the_ratio_of_the_two_policies(make_trainer, seen):
    trainer = make_trainer(**NOISE, temperature=0.7)
    trainer.train()
    ((batch, noisy, clean),) = seen
    mask = batch["completion_mask"].bool()
    ratio = (clean - noisy).exp()
    assert (ratio[mask] - 1).abs().max() > 0.01  # the noise moves the policy
    expected = ratio.clamp(max=trainer.vllm_importance_sampling_clip_max)
    torch.testing.assert_close(batch["importance_sampling_ratio"][mask], expected[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch["sampling_per_token_logps"][mask], noisy[mask], rtol=1e-4, atol=1e-5)
    assert logged(trainer, RATIO) == pytest.approx([expected[mask].mean().item()])
    d = (clean - noisy)[mask]
    assert logged(trainer, "rollout/mismatch_kl") == pytest.approx([(d.expm1() - d).mean().item()], rel=1e-3)
    assert logged(trainer, "rollout/truncated_fraction") == [pytest.approx((ratio[mask] > 3).float().mean().item())]
    assert trainer.use_vllm is False


def test_the_ratio_enters_the_loss(make_trainer):
    trainer = make_trainer(**NOISE, vllm_importance_sampling_clip_max=0.0)
    trainer.train()
    assert logged(trainer, "grad_norm") == [0.0]


@pytest.mark.parametrize("options", [{"aqn_sigma_start": 0.0}, {"aqn_scope": "policy"}], ids=["no-noise", "policy"])
def test_without_a_difference_nothing_more_is_computed(make_trainer, options):
    trainer = make_trainer(**NOISE | options)
    calls, logps = [], trainer._get_per_token_logps_and_entropies

    def counting(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return logps(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counting
    trainer.train()
    assert calls == [True]  # the loss's own
    assert not logged(trainer, RATIO)


NO_CORRECTION = {"vllm_importance_sampling_correction": False}


@pytest.mark.parametrize(
    ("trainer_class", "config", "options", "why"),
    [
        (QeRLGRPOTrainer, None, {}, None),
        (QeRLGRPOTrainer, None, NO_CORRECTION, "vllm_importance_sampling_correction=False"),
        (QeRLRLOOTrainer, QeRLRLOOConfig, {}, "has no importance sampling correction"),
        (QeRLRLOOTrainer, QeRLRLOOConfig, {"aqn_scope": "policy"}, None),
        (QeRLGMPOTrainer, QeRLGMPOConfig, {"aqn": False}, None),
    ],
)
def test_uncorrected_noise_is_warned_of_once(make_trainer, tmp_path, caplog, trainer_class, config, options, why):
    config = {"config": config} if config else {}
    trainer = make_trainer(trainer_class=trainer_class, args=settings(tmp_path, **config, **NOISE | options))
    trainer.train()
    if why is not None:
        assert logged(trainer, "rollout/mismatch_kl")[0] > 0 and not logged(trainer, RATIO)
    trainer.train()
    warned = [record.message for record in caplog.records if "as if the clean policy had drawn them" in record.message]
    assert len(warned) == (why is not None)
    for text in warned:
        assert text.startswith(f"{trainer_class.__name__} ") and why in text and "aqn_scope='policy'" in text
