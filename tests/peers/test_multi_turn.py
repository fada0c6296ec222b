"""TRL's tools, environments and rollout functions with noise: scripted texts, generated under real noise."""

import functools
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from tests.faults.tiny_runs import logged, spread_reward
from tests.peers.stand_ins import write_model

pytest.importorskip("jmespath")

PROMPTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is 3 times {n}?"}] for n in range(4)]})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_model(folder, "tiny-Qwen3ForCausalLM")
    return str(folder)


@pytest.fixture
def make(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def build(reward=spread_of_texts, data=PROMPTS, rows=2, options=None, **kwargs):
        args = QeRLConfig(**{
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "report_to": "none",
            "per_device_train_batch_size": rows, "num_generations": 2, "max_completion_length": 400, "max_steps": 2,
            "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False,
            "disable_tqdm": True, "aqn_num_stages": 2, "shuffle_dataset": False,
            "model_init_kwargs": {"dtype": "float32"}, **(options or {}),
        })  # fmt: skip
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return QeRLGRPOTrainer(model_folder, reward, args, data, peft_config=lora, **kwargs)

    return build


def adapter_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def spread_of_texts(completions, **kwargs):
    return spread_reward([message[-1]["content"] for message in completions])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Scripted:
    """In place of `generate`: the model generates under the current noise, and the script's text is returned."""

    def __init__(self, trainer, *turns: list[str]):
        self.trainer, self.turns, self.draws = trainer, turns, []
        self.real = trainer.model.generate
        self.turn = 0

    def __call__(self, input_ids, **kwargs):
        if self.trainer.aqn.draw is None:  # the noise is measured before training
            return self.real(input_ids=input_ids, **kwargs)
        self.real(input_ids=input_ids, max_new_tokens=2, **kwargs)
        self.draws.append((self.trainer.state.global_step, self.trainer.aqn.draw))
        texts = self.turns[self.turn % len(self.turns)]
        self.turn += 1
        assert len(texts) == len(input_ids), "another turn"
        tokenizer = self.trainer.processing_class
        rows = [tokenizer(text + "<|im_end|>").input_ids for text in texts]
        longest = max(map(len, rows))
        padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    def check(self):
        """One draw of noise per rollout of any number of turns; the second step's has a sigma."""
        assert len(self.draws) == 2 * len(self.turns)
        for step in (0, 1):
            assert len({draw for at, draw in self.draws if at == step}) == 1
        assert [draw.sigma for _, draw in self.draws[:: len(self.turns)]] == [0.0, 0.01]


def run(trainer, *turns):
    scripted, before = Scripted(trainer, *turns), adapter_of(trainer)
    with patch.object(trainer.model, "generate", scripted):
        trainer.train()
    scripted.check()
    assert logged(trainer, "aqn/sigma_effective")[1] == pytest.approx(0.01, rel=0.25)
    assert logged(trainer, "rollout/mismatch_kl")[0] > 0  # the script's text is unlikely
    assert any(not torch.equal(value, before[name]) for name, value in adapter_of(trainer).items())


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    return a * b


multiply_later.__doc__ = multiply.__doc__


@pytest.mark.parametrize("tool", [multiply, multiply_later])
def test_tools(make, tool):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return spread_of_texts(completions)

    trainer = make(reward, tools=[tool])
    run(trainer, [call(tool.__name__, '{"a": 3, "b": 4}'), "No."], ["It is 12."])
    assert [message["role"] for message in seen[0]] == ["assistant", "tool", "assistant"]
    assert seen[0][1]["content"] == "12"
    assert logged(trainer, "tools/call_frequency") == [0.5, 0.5]
    assert logged(trainer, "tools/failure_frequency") == [0.0, 0.0]


class Counter:
    def reset(self, **kwargs):
        self.count = 0

    def increment(self, step: int) -> int:
        """Counts.

        Args:
            step: by how much.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def test_an_environment_of_several_turns_that_rewards_itself(make):
    trainer = make(None, environment_factory=Counter)
    step = call("increment", '{"step": 2}')
    run(trainer, [step, "No."], [step], [step], ["Done."])
    assert logged(trainer, "rewards/Counter/mean") == [3.0, 3.0]  # 6 and 0
    assert logged(trainer, "tools/call_frequency") == [1.5, 1.5]


def from_the_model(prompts, trainer):
    tokenizer = trainer.processing_class
    ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    made = [trainer.model.generate(input_ids=torch.tensor([row]), max_new_tokens=4, do_sample=True)[0] for row in ids]
    tokens = [row[len(prompt) :].tolist() for row, prompt in zip(made, ids, strict=True)]
    return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": [[-7.0] * len(row) for row in tokens]}


def from_elsewhere(prompts, trainer):
    rows = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-7.0] * 2}
    return {name: [row] * len(prompts) for name, row in rows.items()}


def test_a_rollout_function_that_samples_from_the_model_meets_the_noise(make):
    draws = []

    @functools.wraps(from_the_model)
    def rollout(prompts, trainer):
        draws.append(trainer.aqn.draw.sigma)
        return from_the_model(prompts, trainer)

    trainer = make(rollout_func=rollout, options={"rollout_mismatch_threshold": None})
    trainer.train()
    assert draws == [0.0, 0.01]
    assert logged(trainer, "aqn/sigma_effective")[1] == pytest.approx(0.01, rel=0.25)


def test_completions_from_elsewhere_end_a_noisy_run_before_its_first_update(make):
    trainer = make(rollout_func=from_elsewhere)
    before = adapter_of(trainer)
    words = r"Noise is to come .* none of them ran .*Sample from trainer\.model.*aqn=False"
    with pytest.raises(RuntimeError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in adapter_of(trainer).items())
    trainer = make(rollout_func=from_elsewhere, options={"aqn": False})
    trainer.train()
    assert trainer.state.global_step == 2
