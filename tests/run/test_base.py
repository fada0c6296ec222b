from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.config import QeRLArguments
from qerl_trl.nvfp4.linear import has_nvfp4
from qerl_trl.run.base import by_name
from qerl_trl.trainer import QeRLMixin
from tests.test_trainer import LORA, PROMPTS, adapter_of, logged, make_trainer, settings, spread_reward  # noqa: F401
from tests.tiny_models import make_tiny_config


def test_every_argument_has_its_name():
    def function(model, reward=None, *, beta=1, **others):
        pass

    given = by_name(function, "m", "r", beta=2, gamma=3)
    assert given == {"model": "m", "reward": "r", "beta": 2, "gamma": 3}
    with pytest.raises(TypeError, match="too many positional"):
        by_name(function, 1, 2, 3)


@dataclass(repr=False)
class QeRLGMPOConfig(QeRLArguments, GMPOConfig):
    pass


class QeRLGMPOTrainer(QeRLMixin, GMPOTrainer):
    _config_class = QeRLGMPOConfig


class Passing(QeRLGRPOTrainer):
    """A subclass that only hands on what it gets."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Between(QeRLMixin, GMPOTrainer):
    _config_class = QeRLGMPOConfig

    def __init__(self, model, reward_funcs, **kwargs):
        super().__init__(model, reward_funcs, **kwargs)


@pytest.mark.parametrize(
    ("trainer_class", "config"),
    [(QeRLGMPOTrainer, QeRLGMPOConfig), (Passing, None), (Between, QeRLGMPOConfig)],
    ids=["TRL's GMPO", "a subclass with **kwargs", "both"],
)
def test_the_mixin_goes_before_trainers_that_take_anything(
    tiny_model_dir, tiny_tokenizer, tmp_path, trainer_class, config
):
    """At 843f908: TypeError, an unexpected keyword argument 'kwargs'."""
    args = settings(tmp_path, **({"config": config} if config else {}))
    trainer = trainer_class(
        str(tiny_model_dir("qwen2")),
        spread_reward,
        args=args,
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer,
        peft_config=LORA,
    )
    assert has_nvfp4(trainer.model)
    before = adapter_of(trainer)
    trainer.train()
    assert all(not torch.equal(value, before[name]) for name, value in adapter_of(trainer).items())
    assert logged(trainer, "aqn/sigma") == [0.0, 0.01]


@pytest.fixture
def reward_model(tmp_path, tiny_tokenizer):
    torch.manual_seed(0)
    config = make_tiny_config("llama", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    tiny_tokenizer.save_pretrained(tmp_path / "judge")
    return str(tmp_path / "judge")


@pytest.mark.parametrize("several", [False, True], ids=["one", "list"])
def test_a_reward_model_by_name_beside_an_nvfp4_checkpoint(
    make_trainer,  # noqa: F811
    packed_model_dir,
    reward_model,
    several,
):
    """At 843f908 the policy's configuration was given to the reward model: another architecture, and quantized."""
    trainer = make_trainer(
        model=str(packed_model_dir("compressed-tensors")),
        reward=[reward_model, spread_reward] if several else reward_model,
    )
    judge = trainer.reward_funcs[0]
    assert type(judge).__name__ == "LlamaForSequenceClassification" and not has_nvfp4(judge)
    assert trainer.reward_func_names == ["judge", "spread_reward"][: 1 + several]
    assert trainer.args.model_init_kwargs == {"dtype": "float32"}
    trainer.train()
    assert all("rewards/judge/mean" in entry for entry in trainer.state.log_history[:2])
