from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.config import QeRLArguments
from qerl_trl.nvfp4.linear import has_nvfp4
from qerl_trl.trainer import QeRLMixin
from tests.tiny_models import make_tiny_config
from tests.trainers import adapter_of, logged, settings, spread_reward


@dataclass(repr=False)
class QeRLGMPOConfig(QeRLArguments, GMPOConfig):
    pass


class QeRLGMPOTrainer(QeRLMixin, GMPOTrainer):
    _config_class = QeRLGMPOConfig


class Passing(QeRLGRPOTrainer):
    """A subclass that passes on its arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Between(QeRLGMPOTrainer):
    def __init__(self, model, reward_funcs, **kwargs):
        super().__init__(model, reward_funcs, **kwargs)


@pytest.mark.parametrize("trainer_class", [QeRLGMPOTrainer, Passing, Between])
def test_the_mixin_works_with_other_trainers_and_subclasses(make_trainer, tmp_path, trainer_class):
    trainer = make_trainer(trainer_class=trainer_class, args=settings(tmp_path, trainer_class._config_class))
    assert has_nvfp4(trainer.model)
    before = adapter_of(trainer)
    trainer.train()
    assert all(not torch.equal(value, before[name]) for name, value in adapter_of(trainer).items())
    assert logged(trainer, "aqn/sigma") == [0.0, 0.01]


@pytest.mark.parametrize("several", [False, True], ids=["one", "list"])
def test_a_reward_model_by_name_with_an_nvfp4_checkpoint(
    make_trainer, packed_model_dir, tiny_tokenizer, tmp_path, several
):
    """The policy's configuration was given to the reward model: another architecture, and quantized."""
    judge = tmp_path / "judge"
    config = make_tiny_config("llama", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    tiny_tokenizer.save_pretrained(judge)
    rewards = [str(judge), spread_reward] if several else str(judge)
    trainer = make_trainer(model=str(packed_model_dir("compressed-tensors")), reward=rewards)
    model = trainer.reward_funcs[0]
    assert type(model).__name__ == "LlamaForSequenceClassification" and not has_nvfp4(model)
    assert trainer.reward_func_names == ["judge", "spread_reward"][: 1 + several]
    assert trainer.args.model_init_kwargs == {"dtype": "float32"}
    trainer.train()
    assert all("rewards/judge/mean" in entry for entry in trainer.state.log_history[:2])
