"""Evaluation: intervals, protocols, that the adapter is really applied, and the engines' calls."""

import dataclasses
import json
import math
import random
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig

from qerl_trl.tasks import evaluation
from qerl_trl.tasks.evaluation import (
    PROTOCOLS,
    Accuracy,
    Protocol,
    check_adapter_applied,
    evaluate,
    grade,
    load_problems,
    paired_difference,
    sampled_accuracy,
    solve,
    transformers_engine,
    vllm_engine,
)
from tests.architectures import dense_model
from tests.publish.test_export import make_policy

ROOT = Path(__file__).resolve().parents[2]


def test_problems_that_all_went_alike_by_a_third_have_an_interval():
    """Shares of a third differ from their mean by a rounding."""
    low, high = evaluation.sampled_accuracy([[True, False, False]] * 10)["interval95"]
    assert low < 0.2 and high > 0.5


def test_wilson_interval_of_known_cases():
    low, high = Accuracy(5, 10).interval  # R: prop.test(5, 10, correct = FALSE)
    assert (low, high) == (pytest.approx(0.2365931, abs=1e-6), pytest.approx(0.7634069, abs=1e-6))
    assert Accuracy(0, 20).interval[0] == 0.0
    assert Accuracy(20, 20).interval[1] == 1.0
    assert str(Accuracy(1, 4)) == "25.0 % [4.6, 69.9] (1 of 4)"


def test_intervals_cover_the_truth():
    generator = random.Random(0)
    hits = 0
    for _ in range(400):
        result = Accuracy(sum(generator.random() < 0.3 for _ in range(150)), 150)
        low, high = result.interval
        hits += low <= 0.3 <= high
    assert 0.92 <= hits / 400 <= 0.98


def test_clustered_interval_is_wider_than_pretending_independence():
    generator = random.Random(1)
    rows = []
    for _ in range(60):  # problems are easy or hard: the eight completions of one agree
        p = generator.choice([0.05, 0.95])
        rows.append([generator.random() < p for _ in range(8)])
    clustered = sampled_accuracy(rows)
    pooled = Accuracy(sum(map(sum, rows)), 480)
    assert clustered["accuracy"] == pytest.approx(pooled.value)
    width = clustered["interval95"][1] - clustered["interval95"][0]
    assert width > 2 * (pooled.interval[1] - pooled.interval[0])
    assert sampled_accuracy([[True], [False]])["correct"] == 1
    none = sampled_accuracy([[False, False]] * 20)["interval95"]
    assert (
        none == list(Accuracy(0, 20).interval) and none[1] > 0.1
    )  # twenty failures do not prove that nothing is solved


def test_paired_difference():
    before, after = [True, False, False, True], [True, True, False, True]
    mean, low, high = paired_difference(before, after)
    assert mean == 0.25
    assert low == pytest.approx(0.25 - 1.96 * math.sqrt(0.25 / 4), abs=1e-3)
    assert high > mean
    with pytest.raises(ValueError, match="zip"):
        paired_difference([True], [])


def test_papers_protocol():
    assert set(PROTOCOLS) == {"gsm8k", "math500", "amc23", "aime24", "aime25"}
    for protocol in PROTOCOLS.values():
        assert (protocol.temperature, protocol.top_p, protocol.max_new_tokens) == (0.6, 0.95, 4096)
    assert "####" in PROTOCOLS["gsm8k"].system_prompt
    assert "boxed" in PROTOCOLS["math500"].system_prompt


@pytest.mark.parametrize(
    ("question", "answer"), [("question", "answer"), ("problem", "answer"), ("problem", "solution")]
)
def test_problems_from_a_file_or_folder(tmp_path, question, answer):
    rows = [{question: f"{i} + {i}?", answer: f"so it is\n#### {2 * i}", "extra": 1} for i in range(5)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for where in (tmp_path, tmp_path / "test.jsonl"):
        data = load_problems(Protocol(str(where), system_prompt="think"), limit=3)
        assert data.column_names == ["answer", "prompt"] or set(data.column_names) == {"answer", "prompt"}
        assert len(data) == 3
        assert data[1]["prompt"] == [{"role": "system", "content": "think"}, {"role": "user", "content": "1 + 1?"}]


def test_wrong_columns_are_named(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="columns a, but not one of prompt"):
        load_problems(Protocol(str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("work\n#### 12", "#### 12", True),
        ("work\n#### 1,200", "1200", True),
        ("12 is what I say first\n#### 13", "12", False),
        ("#### 12 or 13", "12", False),
        ("the answer is \\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{\\frac{1}{2}} and x", "\\frac{2}{4}", True),
        ("\\boxed{3}", "\\frac{1}{3}", False),
        ("no answer 12", "12", False),
    ],
)
def test_answers_are_checked_whole(text, gold, right):
    assert grade([text], Dataset.from_dict({"answer": [gold]})) == [right]


def test_evaluate_repeats_problems_and_reports(tmp_path):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(4)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen = []

    def generate(dataset):
        seen.extend(row[-1]["content"] for row in dataset["prompt"])
        return [f"#### {0 if i % 3 else row[-1]['content'][1:]}" for i, row in enumerate(dataset["prompt"])]

    result = evaluate(Protocol(str(tmp_path), samples=3), generate, limit=2, seed=7)
    assert seen == ["q0"] * 3 + ["q1"] * 3
    assert result["verdicts"] == [[True, True, True], [True, False, False]]
    assert result["accuracy"] == pytest.approx((1 + 1 / 3) / 2)
    assert result["total"] == 2
    assert json.loads(json.dumps(result))["protocol"]["samples"] == 3
    assert result["without_an_answer"] == 0
    said = ["0"] * 4
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({"question": "?", "answer": f"{i}"}) for i in range(4)))
    whole = evaluate(Protocol(str(tmp_path), grader="exact"), lambda data: said, answer_format="whole")
    assert whole["verdicts"] == [[True], [False], [False], [False]] and whole["answer_format"] == "whole"
    marked = evaluate(Protocol(str(tmp_path), grader="exact"), lambda data: said)
    assert marked["without_an_answer"] == 4 and marked["accuracy"] == 0


def test_adapter_that_changes_nothing_is_refused(tiny_model_dir):
    with pytest.raises(RuntimeError, match="changes no logit"):
        check_adapter_applied(make_policy(tiny_model_dir("qwen2"), size=0.0))
    check_adapter_applied(make_policy(tiny_model_dir("qwen2"), size=0.05))
    check_adapter_applied(AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2")))  # no adapter: nothing to check


@pytest.fixture(scope="module")
def problems():
    prompts = [[{"role": "user", "content": "x" * n}] for n in (3, 9, 1, 5)]
    return Dataset.from_dict({"prompt": prompts, "answer": ["1"] * 4})


def test_greedy_answers_do_not_depend_on_the_batch(tiny_model_dir, tiny_tokenizer, problems):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), dtype=torch.float32)
    one = solve(model, tiny_tokenizer, problems, 8, batch_size=1, progress=False)
    many = solve(model, tiny_tokenizer, problems, 8, batch_size=4, progress=False)
    assert one == many
    assert len(set(one)) > 1


def test_the_models_own_generation_config_changes_no_greedy_answer(tiny_model_dir, tiny_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"))
    problems = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("2+2?", "one two")]})
    plain = solve(model, tiny_tokenizer, problems, max_new_tokens=24, progress=False)
    model.generation_config.repetition_penalty = 1.8  # Qwen2.5-Instruct ships 1.05 to 1.1
    model.generation_config.no_repeat_ngram_size = 1
    assert solve(model, tiny_tokenizer, problems, max_new_tokens=24, progress=False) == plain
    settings = GenerationConfig(do_sample=False, max_new_tokens=24)
    before = settings.to_dict()
    solve(model, tiny_tokenizer, problems, 24, generation_config=settings, progress=False)
    assert settings.to_dict() == before


def test_sampling_is_seeded_and_greedy_at_temperature_zero(tiny_model_dir, tiny_tokenizer, problems):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), dtype=torch.float32)
    hot = Protocol("x", temperature=1.5, max_new_tokens=8)
    runs = [transformers_engine(model, tiny_tokenizer, hot, seed=s, progress=False)(problems) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    cold = transformers_engine(model, tiny_tokenizer, Protocol("x", temperature=0, max_new_tokens=8), progress=False)
    assert cold(problems) == solve(model, tiny_tokenizer, problems, 8, progress=False)


class FakeVLLM(types.ModuleType):
    """Records how vLLM is called; the adapter changes the first token's log-probability unless `dead`."""

    def __init__(self, dead=False):
        super().__init__("vllm")
        self.calls = calls = []

        class SamplingParams:
            def __init__(self, **kwargs):
                self.__dict__.update(kwargs)

            def clone(self):
                return SamplingParams(**self.__dict__)

        class LLM:
            def __init__(self, **kwargs):
                calls.append(("LLM", kwargs))

            def generate(self, prompts, params, lora_request=None, use_tqdm=True):
                logprob = -1.0 if lora_request is None or dead else -2.0
                output = types.SimpleNamespace(token_ids=[1, 2], cumulative_logprob=logprob)
                return [types.SimpleNamespace(outputs=[output])]

            def chat(self, prompts, params, lora_request=None, **template):
                calls.append(("ends", *(p.stop_token_ids for p in params)))
                calls.append(("chat", [p.seed for p in params], lora_request, template))
                return [types.SimpleNamespace(outputs=[types.SimpleNamespace(text="#### 1")]) for _ in prompts]

        self.SamplingParams, self.LLM = SamplingParams, LLM


@pytest.fixture
def fake_vllm(monkeypatch):
    def install(**kwargs):
        module = FakeVLLM(**kwargs)
        request = types.ModuleType("vllm.lora.request")
        request.LoRARequest = lambda *args: args
        monkeypatch.setitem(sys.modules, "vllm", module)
        monkeypatch.setitem(sys.modules, "vllm.lora", types.ModuleType("vllm.lora"))
        monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
        return module

    return install


def test_vllm_gets_the_adapter_and_one_seed_a_completion(fake_vllm, problems, tmp_path, tiny_model_dir):
    module = fake_vllm()
    (tmp_path / "adapter_config.json").write_text('{"r": 12}')
    protocol = dataclasses.replace(PROTOCOLS["gsm8k"], chat_template_kwargs={"enable_thinking": False})
    generate = vllm_engine(str(tiny_model_dir("qwen2")), protocol, str(tmp_path), seed=5, chat_template="the run's")
    assert generate(problems) == ["#### 1"] * 4
    assert module.calls[0][1]["enable_lora"] is True
    assert module.calls[0][1]["max_lora_rank"] == 16
    template = {"chat_template": "the run's", "chat_template_kwargs": {"enable_thinking": False}}
    assert module.calls[2] == ("chat", [5, 6, 7, 8], ("adapter", 1, str(tmp_path)), template)
    assert not {"chat_template", "language_model_only"} & module.calls[0][1].keys()


@pytest.mark.parametrize("of_the_run", [True, False])
def test_vllm_ends_completions_where_the_run_did(
    fake_vllm, problems, tmp_path, tiny_model_dir, tiny_tokenizer, of_the_run
):
    """The base's own files name 1 alone."""
    module, base = fake_vllm(), tmp_path / "base"
    shutil.copytree(tiny_model_dir("qwen2"), base)
    tiny_tokenizer.save_pretrained(base)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    if of_the_run:
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    vllm_engine(str(base), PROTOCOLS["gsm8k"], str(tmp_path))(problems)
    assert module.calls[1] == ("ends", *[[1, 7] if of_the_run else [1]] * 4)


@pytest.mark.parametrize("asked", [{}, {"language_model_only": False}], ids=["by default", "asked otherwise"])
def test_vllm_builds_no_tower_for_problems_in_text(fake_vllm, tmp_path, asked):
    """It built Qwen3.5's and Gemma 3's, and computed the largest pictures at its start."""
    module = fake_vllm()
    dense_model("gemma3").save_pretrained(tmp_path)
    vllm_engine(str(tmp_path), PROTOCOLS["gsm8k"], **asked)
    assert module.calls[0][1]["language_model_only"] is asked.get("language_model_only", True)


def test_vllm_that_ignores_the_adapter_is_refused(fake_vllm, tmp_path, tiny_model_dir):
    fake_vllm(dead=True)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(RuntimeError, match="not applied"):
        vllm_engine(str(tiny_model_dir("qwen2")), PROTOCOLS["gsm8k"], str(tmp_path))


def test_without_vllm_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="vllm"):
        vllm_engine("base", PROTOCOLS["gsm8k"])


def test_module_has_no_noise():
    assert "noise" not in vars(evaluation)


def test_a_difference_of_few_problems_is_not_certain():
    value, low, high = paired_difference([False] * 20, [False] * 20)
    assert value == 0 and low == pytest.approx(-high) and 0.05 < high < 0.12
    value, low, high = paired_difference([False] * 20, [True] * 20)
    assert value == 1 and 0.7 < low < high <= 1
