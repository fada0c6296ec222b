import pytest

from qerl_trl import QeRLConfig, QeRLRLOOConfig
from qerl_trl.run import banner


@pytest.mark.parametrize("config", [QeRLConfig, QeRLRLOOConfig])
def test_differences_from_trl_are_listed_unless_the_user_chose_them(config, tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    found = banner.unlike_trl(config(**common))
    assert found[0].startswith("the base is frozen in nvfp4") and "aqn=False" in found[1]
    mode = "vllm_importance_sampling_mode token_truncate (TRL: sequence_mask)"
    assert found[2:] == ["learning_rate 1e-05 (TRL: 1e-06)", *[mode] * (config is QeRLConfig)]
    private = "what is pushed is private (undo: hub_private_repo=False)"
    assert private in banner.unlike_trl(config(**common, push_to_hub=True))
    assert banner.unlike_trl(config(**common, base_format="full", aqn=False, learning_rate=1e-6)) == []
