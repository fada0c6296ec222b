"""Evaluation: intervals, protocols, the check that an adapter acts, and the calls of the engines."""

import dataclasses
import json
import math
import sys
import types

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig

from qerl_trl.tasks.evaluation import (
    PROTOCOLS,
    Accuracy,
    Protocol,
    check_adapter_applied,
    evaluate,
    load_problems,
    paired_difference,
    prompt_texts,
    sampled_accuracy,
    solve,
    transformers_engine,
    vllm_engine,
)
from tests.architectures import dense_model
from tests.faults.tiny_runs import make_policy

GSM8K = PROTOCOLS["gsm8k"]


def test_wilson_interval():
    low, high = Accuracy(5, 10).interval  # R: prop.test(5, 10, correct = FALSE)
    assert (low, high) == (pytest.approx(0.2365931, abs=1e-6), pytest.approx(0.7634069, abs=1e-6))
    assert Accuracy(0, 20).interval[0] == 0.0 and Accuracy(20, 20).interval[1] == 1.0
    assert str(Accuracy(1, 4)) == "25.0 % [4.6, 69.9] (1 of 4)"


def test_clustered_interval_is_wider_than_that_of_independent_completions():
    """The eight completions of a problem agree: as much is known as from one of each."""
    found = sampled_accuracy([[True] * 8] * 30 + [[False] * 8] * 30)
    half = 1.96 * math.sqrt(0.25 / 59)
    assert (found["accuracy"], found["correct"]) == (0.5, 240)
    assert found["interval95"] == pytest.approx([0.5 - half, 0.5 + half], abs=1e-4)


@pytest.mark.parametrize(("row", "solved"), [([False, False], 0), ([True, False, False], 7)])
def test_problems_that_all_went_alike_count_as_one_completion_each(row, solved):
    """Twenty failures do not prove that nothing is solved; shares of a third differ from their mean by rounding."""
    low, high = sampled_accuracy([row] * 20)["interval95"]
    assert (low, high) == Accuracy(solved, 20).interval and high - low > 0.1


def test_paired_difference():
    mean, low, high = paired_difference([True, False, False, True], [True, True, False, True])
    assert mean == 0.25 < high
    assert low == pytest.approx(0.25 - 1.96 * math.sqrt(0.25 / 4), abs=1e-3)
    value, low, high = paired_difference([False] * 20, [False] * 20)  # few problems: not certain
    assert value == 0 and low == pytest.approx(-high) and 0.05 < high < 0.12


@pytest.mark.parametrize(("question", "answer"), [("question", "answer"), ("problem", "solution")])
def test_problems_of_a_file_or_folder(tmp_path, question, answer):
    rows = [{question: f"{i} + {i}?", answer: f"so it is\n#### {2 * i}", "extra": 1} for i in range(5)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for place in (tmp_path, tmp_path / "test.jsonl"):
        data = load_problems(Protocol(str(place), system_prompt="think"), limit=3)
        assert sorted(data.column_names) == ["answer", "prompt"] and len(data) == 3
        assert data[1]["prompt"] == [{"role": "system", "content": "think"}, {"role": "user", "content": "1 + 1?"}]


def test_evaluate_repeats_problems_and_reports(tmp_path):
    rows = [{"question": f"q{i}", "answer": f"{i}"} for i in range(4)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = []

    def generate(dataset):
        asked.extend(row[-1]["content"] for row in dataset["prompt"])
        return [f"#### {0 if i % 3 else row[-1]['content'][1:]}" for i, row in enumerate(dataset["prompt"])]

    result = evaluate(Protocol(str(tmp_path), samples=3), generate, limit=2, seed=7)
    assert asked == ["q0"] * 3 + ["q1"] * 3
    assert result["verdicts"] == [[True, True, True], [True, False, False]]
    assert result["accuracy"] == pytest.approx((1 + 1 / 3) / 2) and result["total"] == 2
    assert json.loads(json.dumps(result))["protocol"]["samples"] == 3 and result["without_an_answer"] == 0
    exact = Protocol(str(tmp_path), grader="exact")
    whole = evaluate(exact, lambda data: ["0"] * 4, answer_format="whole")
    assert whole["verdicts"] == [[True], [False], [False], [False]] and whole["answer_format"] == "whole"


def test_an_adapter_that_changes_nothing_is_refused(tiny_model_dir):
    with pytest.raises(RuntimeError, match="changes no logit"):
        check_adapter_applied(make_policy(tiny_model_dir("qwen2"), size=0.0))
    check_adapter_applied(make_policy(tiny_model_dir("qwen2")))
    check_adapter_applied(AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2")))  # no adapter: nothing to check


@pytest.fixture(scope="module")
def problems():
    prompts = [[{"role": "user", "content": "x" * n}] for n in (3, 9, 1, 5)]
    return Dataset.from_dict({"prompt": prompts, "answer": ["1"] * 4})


@pytest.fixture
def model(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), dtype=torch.float32)


def test_greedy_answers_do_not_depend_on_the_batch_nor_on_the_models_generation_config(model, tiny_tokenizer, problems):
    assert prompt_texts(tiny_tokenizer, problems["prompt"][:1], {}) == ["u:xxx<eos>a:"]
    one = solve(model, tiny_tokenizer, problems, 8, batch_size=1, progress=False)
    assert len(set(one)) > 1
    model.generation_config.repetition_penalty = 1.8  # Qwen2.5-Instruct ships 1.05 to 1.1
    model.generation_config.no_repeat_ngram_size = 1
    settings = GenerationConfig(do_sample=False, max_new_tokens=8)
    before = settings.to_dict()
    for config in (None, settings):
        assert solve(model, tiny_tokenizer, problems, 8, generation_config=config, progress=False) == one
    assert settings.to_dict() == before


def test_sampling_is_seeded_and_greedy_at_temperature_zero(model, tiny_tokenizer, problems):
    hot = Protocol("x", temperature=1.5, max_new_tokens=8)
    runs = [transformers_engine(model, tiny_tokenizer, hot, seed=s, progress=False)(problems) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    cold = transformers_engine(model, tiny_tokenizer, Protocol("x", temperature=0, max_new_tokens=8), progress=False)
    assert cold(problems) == solve(model, tiny_tokenizer, problems, 8, progress=False)


class FakeVLLM(types.ModuleType):
    """Records the calls of vLLM; the adapter changes the first token's log-probability unless `dead`."""

    def __init__(self):
        super().__init__("vllm")
        self.calls, self.dead = [], False
        fake = self

        class SamplingParams:
            def __init__(self, **kwargs):
                self.__dict__.update(kwargs)

            def clone(self):
                return SamplingParams(**self.__dict__)

        class LLM:
            def __init__(self, **kwargs):
                fake.options = kwargs

            def generate(self, prompts, params, lora_request=None, use_tqdm=True):
                logprob = -1.0 if lora_request is None or fake.dead else -2.0
                output = types.SimpleNamespace(token_ids=[1, 2], cumulative_logprob=logprob)
                return [types.SimpleNamespace(outputs=[output])]

            def chat(self, prompts, params, lora_request=None, **template):
                fake.calls.append(([p.seed for p in params], lora_request, template))
                fake.ends = [p.stop_token_ids for p in params]
                return [types.SimpleNamespace(outputs=[types.SimpleNamespace(text="#### 1")]) for _ in prompts]

        self.SamplingParams, self.LLM = SamplingParams, LLM


@pytest.fixture
def vllm(monkeypatch):
    module, request = FakeVLLM(), types.ModuleType("vllm.lora.request")
    request.LoRARequest = lambda *args: args
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.lora", types.ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    return module


@pytest.fixture
def adapter(tmp_path) -> str:
    (tmp_path / "adapter_config.json").write_text('{"r": 12}')
    return str(tmp_path)


def test_vllm_gets_the_adapter_and_one_seed_a_completion(vllm, problems, adapter, tiny_model_dir):
    protocol = dataclasses.replace(GSM8K, chat_template_kwargs={"enable_thinking": False})
    generate = vllm_engine(str(tiny_model_dir("qwen2")), protocol, adapter, seed=5, chat_template="the run's")
    assert generate(problems) == ["#### 1"] * 4
    assert vllm.options["enable_lora"] is True and vllm.options["max_lora_rank"] == 16
    assert not {"chat_template", "language_model_only"} & vllm.options.keys()
    template = {"chat_template": "the run's", "chat_template_kwargs": {"enable_thinking": False}}
    assert vllm.calls == [([5, 6, 7, 8], ("adapter", 1, adapter), template)]


def test_vllm_ends_completions_where_the_run_did(vllm, problems, adapter, tmp_path, tiny_model_dir, tiny_tokenizer):
    AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2")).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    vllm_engine(str(tmp_path / "base"), GSM8K, adapter)(problems)
    assert vllm.ends == [[1, 7]] * 4


def test_vllm_builds_no_vision_tower_for_problems_in_text(vllm, tmp_path):
    dense_model("gemma3").save_pretrained(tmp_path)
    vllm_engine(str(tmp_path), GSM8K)
    assert vllm.options["language_model_only"] is True


def test_vllm_that_ignores_the_adapter_is_an_error(vllm, adapter, tiny_model_dir):
    vllm.dead = True
    with pytest.raises(RuntimeError, match="not applied"):
        vllm_engine(str(tiny_model_dir("qwen2")), GSM8K, adapter)
