"""`qerl-trl eval` of runs, models and quantized folders."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from qerl_trl.checkpoint import seal
from qerl_trl.tasks import evaluation
from tests.faults.tiny_runs import call


@pytest.fixture
def problems(tmp_path, write_rows):
    """Five problems in a file."""
    return write_rows(tmp_path / "test.jsonl")


def test_eval(finished, problems, tmp_path):
    words = ["--data", problems, "--max-new-tokens", 4, "--limit", 3, "--output", tmp_path / "eval.json"]
    code, out, err = call("eval", finished[0], *words, "--json", "--compute", "w4a8")
    assert code == 0, err
    result = json.loads((tmp_path / "eval.json").read_text())
    assert result["total"] == 3 and result["adapter"] is True and len(result["verdicts"]) == 3
    assert result["compute"] == "w4a8"
    assert json.loads(out)["accuracy"] == result["accuracy"] and result["base_format"] == "nvfp4"
    assert (result["answer_format"], result["without_an_answer"]) == ("marked", 3)
    code, _, err = call("eval", finished[0], "--data", tmp_path / "typo.jsonl", "--output", tmp_path / "x.json")
    assert code == 2 and "typo.jsonl' is no file or folder in" in err and "Name a folder with <split>.jsonl" in err


def test_completions_without_an_answer_are_counted(finished, problems, tmp_path, monkeypatch):
    """0 % because of the answers' form looks as of a model that knows nothing."""
    completions = ["#### 0", "#### 1", "#### 2", "#### 3", "4"]
    monkeypatch.setattr(evaluation, "transformers_engine", lambda *arguments: lambda data: completions)
    code, out, err = call("eval", finished[0], "--data", problems, "--output", tmp_path / "eval.json")
    assert code == 0 and "1 of 5 completions state no answer after #### or in a box" in out, err
    assert "answer_format: whole" in out


def test_a_measurement_is_not_lost_and_a_partial_one_is_not_the_models(finished, problems, tmp_path):
    """Hours of measuring were lost because the folder of the result was missing, or to a quick look with --limit."""
    folder = shutil.copytree(finished[0], tmp_path / "run")
    words = ["eval", folder, "--max-new-tokens", 2, "--temperature", 0, "--data", problems]
    code, _, err = call(*words, "--output", tmp_path / "results/of/today.json")
    assert code == 2 and "today.json cannot be written" in err
    assert call(*words)[0] == 0
    before = (folder / "eval-local.json").read_bytes()
    assert call(*words, "--limit", 2)[0] == 0
    assert (folder / "eval-local.json").read_bytes() == before
    for option in ("--limit", "--batch-size"):
        assert call(*words, option, 0)[0] == 2


def test_unusable_references_are_refused_before_anything_is_generated(finished, tmp_path, monkeypatch, write_rows):
    data = write_rows(tmp_path / "a.jsonl", {"question": "2?", "answer": None})
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: pytest.fail("it was measured"))
    code, _, err = call("eval", finished[0], "--data", data)
    assert code == 2 and "Problem 0 (from 0): The reference None is no text and no number" in err


def test_eval_in_vllm_computes_in_the_models_dtype(tiny_model_dir, tiny_tokenizer, problems, tmp_path, monkeypatch):
    """vLLM's default rounds a float32 model to 16 bits."""
    served = []
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "dense")
    tiny_tokenizer.save_pretrained(tmp_path / "dense")

    def engine(*arguments, **options):
        served.append(options.get("dtype"))
        return lambda data: ["1"] * len(data)

    monkeypatch.setattr(evaluation, "vllm_engine", engine)
    code, out, err = call("eval", tmp_path / "dense", "--data", tmp_path, "--engine", "vllm")
    assert code == 0 and "local, float32 weights: " in out, err
    assert served == ["float32"]
    code, _, err = call("eval", tmp_path / "dense", "--data", tmp_path, "--compute", "w4a8")
    assert code == 2 and "--compute w4a8 needs NVFP4 weights, and these are float32" in err
    # the dense merge of a run with FP8 products
    monkeypatch.setattr(seal, "recorded_run", lambda folder: {"options": {"compute": "w4a8"}})
    code, out, err = call("eval", tmp_path / "dense", "--data", tmp_path, "--engine", "vllm")
    assert code == 0 and "FP8" not in out, err


def test_a_report_is_one_file_with_every_curve_and_completion(finished, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run")
    log = [{"step": i, "reward": 0.5, "aqn/sigma": 0.01, "rollout/mismatch_kl": 0.1 * i} for i in (1, 2)]
    seal.write_json_atomically(run / "results.json", {"log_history": log, "task": "<task>"})
    (run / "completions").mkdir()
    row = {"step": 1, "prompt": "1+1?", "completion": [{"role": "assistant", "content": "<two>"}], "advantage": 1.0}
    Dataset.from_list([row]).to_parquet(str(run / "completions/completions_1.parquet"))
    assert call("report", run)[0] == 0
    text = (run / "report.html").read_text()
    assert text.count("<svg") == 3 and "&lt;two&gt;" in text and "&lt;task&gt;" in text and "src=" not in text
