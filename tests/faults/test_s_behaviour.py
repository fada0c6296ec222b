"""The policy that samples is not the one that is trained: noise, wrong log-probabilities, an entropy that is steered blindly."""

import torch
from safetensors.torch import load_file

from tests.faults.catalog import fault
from tests.test_trainer import logged, make_trainer  # noqa: F401  (a fixture)

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
