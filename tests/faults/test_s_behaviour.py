"""The policy that samples is not the one that is trained: noise, wrong log-probabilities, an entropy that is steered blindly."""

import statistics

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.catalog import fault
from tests.test_trainer import logged, make_trainer  # noqa: F401  (a fixture)
from tests.tiny_models import make_tiny_model

NOISE = {"aqn_schedule": "constant", "aqn_sigma_start": 0.3, "max_steps": 1}


@fault("S.noise_uncorrected_in_transformers", recovered=True)
def test_noise_in_transformers_rollouts_is_corrected(make_trainer, tmp_path):  # noqa: F811
    """With every ratio cut to zero nothing is learned, in the saved adapter too: the ratio has entered the loss."""
    moved = {}
    for limit in (0.0, 3.0):
        trainer = make_trainer(**NOISE, output_dir=str(tmp_path / f"{limit}"), vllm_importance_sampling_clip_max=limit)
        trainer.train()
        assert logged(trainer, "sampling/importance_sampling_ratio/max")[0] <= limit
        trainer.save_model(str(tmp_path / f"adapter-{limit}"))
        saved = load_file(tmp_path / f"adapter-{limit}" / "adapter_model.safetensors")
        moved[limit] = sum(float(t.abs().sum()) for name, t in saved.items() if "lora_B" in name)
        assert all(torch.isfinite(t).all() for t in saved.values())
    assert moved[0.0] == 0.0 < moved[3.0]


@pytest.fixture(scope="module")
def peaked(tmp_path_factory, tiny_tokenizer):
    """Folder of a tiny model that knows one sentence by heart, so that noise makes it less sure (a random one is unsure anyway)."""
    folder = tmp_path_factory.mktemp("peaked")
    model = make_tiny_model("qwen2", dtype=torch.float32)
    ids = torch.tensor([tiny_tokenizer("say one two six ten " * 2)["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@fault("S.entropy_open_loop", recovered=True)
def test_sigma_is_steered_by_the_entropy_that_it_moves(make_trainer, peaked):  # noqa: F811
    """At learning rate 0 the clean policy never comes nearer to the target: an open loop drives sigma to its bound and past the target."""
    low, high, target = 0.01, 10.0, 0.5
    trainer = make_trainer(
        model=peaked,
        base_format="bf16",
        learning_rate=0.0,
        max_steps=24,
        max_completion_length=16,
        aqn_schedule="entropy_target",
        aqn_entropy_target=target,
        aqn_sigma_start=high,
        aqn_sigma_end=low,
        rollout_mismatch_threshold=None,
    )
    trainer.train()
    sigma, sampled, clean = (logged(trainer, key) for key in ("aqn/sigma", "rollout/entropy", "entropy"))
    assert all(low <= value <= high for value in sigma) and max(sigma) < 0.3 * high
    assert abs(sampled[0] - target) > 0.4 * target
    assert statistics.mean(sampled[-10:]) == pytest.approx(target, rel=0.35)
    assert len(sampled) == 24 and max(clean) < target
