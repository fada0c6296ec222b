from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from qerl_trl.config import QeRLArguments
from qerl_trl.nvfp4.linear import has_nvfp4
from qerl_trl.trainer import QeRLMixin
from tests.faults.tiny_runs import logged, spread_reward
from tests.tiny_models import make_tiny_config
from tests.trainers import settings
from tests.update.models import adapter_of


@dataclass(repr=False)
class QeRLGMPOConfig(QeRLArguments, GMPOConfig):
    pass


class QeRLGMPOTrainer(QeRLMixin, GMPOTrainer):
    _config_class = QeRLGMPOConfig


def test_the_mixin_works_with_other_trainers(make_trainer, tmp_path):
    trainer = make_trainer(trainer_class=QeRLGMPOTrainer, args=settings(tmp_path, QeRLGMPOConfig))
    assert has_nvfp4(trainer.model)
    before = adapter_of(trainer)
    trainer.train()
    assert all(not torch.equal(value, before[name]) for name, value in adapter_of(trainer).items())
    assert logged(trainer, "aqn/sigma") == [0.0, 0.01]


def test_a_reward_model_by_name_with_an_nvfp4_checkpoint(make_trainer, packed_model_dir, tiny_tokenizer, tmp_path):
    """The policy's configuration was given to the reward model: another architecture, and quantized."""
    judge = tmp_path / "judge"
    config = make_tiny_config("llama", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    tiny_tokenizer.save_pretrained(judge)
    trainer = make_trainer(model=str(packed_model_dir("compressed-tensors")), reward=[str(judge), spread_reward])
    model = trainer.reward_funcs[0]
    assert type(model).__name__ == "LlamaForSequenceClassification" and not has_nvfp4(model)
    assert trainer.reward_func_names == ["judge", "spread_reward"]
    assert trainer.args.model_init_kwargs == {"dtype": "float32"}
    trainer.train()
    assert all("rewards/judge/mean" in entry for entry in trainer.state.log_history[:2])
