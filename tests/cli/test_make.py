"""`quantize`, `merge` and `push` on small models."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl.checkpoint import seal
from qerl_trl.checkpoint.fingerprint import base_sha256
from qerl_trl.cli import make
from qerl_trl.publish.distance import logits_of
from qerl_trl.publish.load import load_any, load_policy
from qerl_trl.publish.quantize import REPORT_NAME
from tests.faults.tiny_runs import call, fails, works
from tests.hub_server import REPO

IDS = torch.randint(5, 300, (3, 16), generator=torch.Generator().manual_seed(0))


def logits(model) -> torch.Tensor:
    return torch.cat(logits_of(model, [IDS]))


def test_quantize(tiny_model_dir, tmp_path):
    words = ("--json", "--scale-rule", "four_over_six", "--skip", "down_proj")
    code, out, err = call("quantize", tiny_model_dir("llama"), tmp_path / "out", *words)
    assert code == 0, err
    result = json.loads(out)
    assert result["layers"] == 12 and 0.004 < result["nmse"] < 0.012
    assert "model.layers.0.mlp.down_proj" in result["not_quantized"]
    assert f"{result['weights']:,} in 12 layers" in (tmp_path / "out/README.md").read_text()
    code, _, err = call("quantize", tiny_model_dir("qwen2"), tmp_path / "out")
    assert code == 2 and "--overwrite" in err


def test_quantize_reports_its_damage(tiny_model_dir, tiny_tokenizer, tmp_path):
    """The KL with v_proj dense is that of --skip v_proj; the folder with the report is whole."""
    model, text, found = shutil.copytree(tiny_model_dir("llama"), tmp_path / "model"), tmp_path / "text.txt", []
    tiny_tokenizer.save_pretrained(model)
    text.write_text("Tom has 12 apples and gives 7 away to Ann, who had 5 apples before.")
    for folder, words in ((tmp_path / "all", ()), (tmp_path / "less", ("--skip", "v_proj"))):
        code, out, err = call("quantize", model, folder, "--report-kl", text, "--json", *words)
        assert code == 0, err
        found.append(json.loads(out)["measured"])
        assert json.loads((folder / REPORT_NAME).read_text())["measured"] == found[-1] and not seal.problems(folder)
    kl = found[1]["quantized"]["kl_nats_per_token"]
    assert found[0]["if_dense"]["v_proj"]["kl_nats_per_token"] == pytest.approx(kl, rel=1e-4)
    assert "q_proj k_proj v_proj" in found[0]["if_dense"] and "v_proj" not in found[1]["if_dense"]
    source, quantized = (load_any(str(each), dtype="float32").model for each in (model, tmp_path / "all"))
    (ids,), inputs, name = make.prompt_batches(text, tiny_tokenizer), [], "model.layers.1.mlp.down_proj"
    source.get_submodule(name).register_forward_pre_hook(lambda layer, given: inputs.append(given[0]))
    with torch.no_grad():
        p, q = (each(ids).logits[0, :-1].log_softmax(-1) for each in (source, quantized))
        right, wrong = (F.linear(inputs[0], each.get_submodule(name).weight.clone()) for each in (source, quantized))
    assert found[0]["quantized"]["kl_nats_per_token"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), 1e-4)
    assert found[0]["source"]["perplexity"] == pytest.approx(F.nll_loss(p, ids[0, 1:]).exp().item(), 1e-4)
    error = (wrong - right).square().sum() / right.square().sum()
    assert found[0]["output_errors"][name] == pytest.approx(error.item(), rel=1e-4)


def test_four_commands_publish_a_run(finished, tiny_model_dir, tmp_path, write_rows):
    """Adapter, merged model, NVFP4 base and its other readers; each gives the policy's own greedy tokens."""
    folder, policy = finished
    expected, prompts = logits(policy).argmax(-1), write_rows(tmp_path / "held_out.jsonl")
    code, out, err = call("merge", folder, tmp_path / "merged", "--prompts", prompts, "--json")
    assert code == 0, err
    measured = json.loads(out)["measured"]
    assert 0 < measured["mean_logit_distance"] < 0.05 and measured["kl_nats_per_token"] < 1e-4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (logits(merged).argmax(-1) == expected).float().mean() > 0.98
    card = (tmp_path / "merged/README.md").read_text()
    assert "value: 50.0" in card and "someone/data" in card
    for form, kind in (("adapter", "adapter"), ("base", "nvfp4_base"), ("nvfp4", "nvfp4_merged")):
        code, out, err = call("merge", folder, tmp_path / form, "--as", form, "--json")
        assert code == 0, err
        assert json.loads(out)["kind"] == kind
        assert (tmp_path / form / "README.md").is_file() and (tmp_path / form / "tokenizer.json").is_file()
    again = load_policy(tmp_path / "adapter", base_model=str(tiny_model_dir("qwen2")))
    assert torch.equal(logits(again.model).argmax(-1), expected)
    on_published_base = load_policy(tmp_path / "adapter", base_model=str(tmp_path / "base"), dtype="float32")
    assert torch.equal(logits(on_published_base.model), logits(policy))


def test_a_merge_as_gguf_is_converted_by_llama_cpps_tool(finished, tmp_path, monkeypatch):
    words, tool = ("merge", finished[0], tmp_path / "out.gguf", "--as", "gguf"), tmp_path / "convert_hf_to_gguf.py"
    fails(("convert_hf_to_gguf.py", "LLAMA_CPP"), *words)
    tool.write_text("import os, sys; os.rename(sys.argv[1] + '/model.safetensors', sys.argv[-1]); print(sys.argv[2:4])")
    tool.chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    works(*words)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out.gguf").values()} == {torch.bfloat16}
    assert {path.name for path in tmp_path.iterdir()} == {"out.gguf", tool.name}


def test_a_merge_onto_the_original_base_is_another_model_and_measured(finished, tmp_path, write_rows):
    words = ("merge", finished[0], tmp_path / "other", "--onto-original")
    code, _, err = call(*words)
    assert code == 2 and "--prompts" in err
    code, out, err = call(*words, "--prompts", write_rows(tmp_path / "held_out.jsonl"), "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["kind"] == "merged_other_base" and result["measured"]["kl_nats_per_token"] > 1e-5
    card = (tmp_path / "other/README.md").read_text()
    assert "Not the policy that was trained" in card and "model-index" not in card
    assert f"{result['measured']['kl_nats_per_token']:.4g}" in card


def test_the_dtype_of_a_merge_is_not_that_of_the_training(save_run, finished, tmp_path):
    """The base was loaded in it, and refused as another one than the run's."""
    save_run(tmp_path / "run", base_sha256=base_sha256(finished[1]))
    for words, dtype in (((), torch.bfloat16), (("--dtype", "float16"), torch.float16)):
        code, _, err = call("merge", tmp_path / "run", tmp_path / str(dtype), *words)
        assert code == 0, err
        merged = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert {tensor.dtype for tensor in merged.values()} == {dtype}


def test_merge_and_eval_ask_as_the_run_and_the_task_do(save_run, tiny_tokenizer, tmp_path, monkeypatch, write_rows):
    """With the run's `chat_template_kwargs` and limit, and the task's template and system message."""
    save_run(tmp_path / "run", max_completion_length=3, options={"chat_template_kwargs": {"enable_thinking": False}})
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ 'aloud' if enable_thinking else 'quietly' }}"
    (tmp_path / "own.jinja").write_text(template)
    for split in ("train", "test"):
        rows = [{"prompt": f"{i}?", "question": "another", "answer": str(i)} for i in range(2)]
        write_rows(tmp_path / f"{split}.jsonl", *rows)
    lines = ["dataset_name: .", "grader: exact", "chat_template_path: own.jinja", "system_prompt: In words."]
    (tmp_path / "task.yaml").write_text("\n".join(lines))
    asked, batches_of = [], make.prompt_batches

    def prompt_batches(*arguments):
        batches = batches_of(*arguments)
        asked.append([tiny_tokenizer.decode(ids[0]) for ids in batches])
        return batches

    monkeypatch.setattr(make, "prompt_batches", prompt_batches)
    of_the_task = ["--task", tmp_path / "task.yaml"]
    for source, target, form in (("run", "again", "adapter"), ("again", "merged", "bf16")):
        code, _, err = call("merge", tmp_path / source, tmp_path / target, "--as", form, *of_the_task)
        assert code == 0, err
    assert asked == [[f"In words. {i}? quietly{i}" for i in range(2)]]  # of the merge
    kept = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert kept == tiny_tokenizer.chat_template != template
    code, _, err = call("eval", tmp_path / "merged", *of_the_task)
    assert code == 0, err
    measured = json.loads((tmp_path / "merged/eval-task.json").read_text())["protocol"]
    assert measured["chat_template_kwargs"] == {"enable_thinking": False} and measured["max_new_tokens"] == 3


def test_push(finished, server, tmp_path):
    folder, _ = finished
    code, _, err = call("push", "adapter", folder, REPO)
    assert code == 2 and "--base-model" in err and server.requests == []
    code, _, err = call("push", "adapter", tmp_path / "typo", REPO)
    assert code == 2 and "typo has neither config.json nor adapter_config.json. Name a model, a checkpoint" in err
    assert call("merge", folder, tmp_path / "merged")[0] == 0
    words = ("push", "merged", tmp_path / "merged", REPO)
    code, out, err = call(*words, "--dataset", "someone/other-data", "--json")
    assert code == 0, err
    assert json.loads(out)["private"] is True and "(private" in err
    assert "model.safetensors" in server.repos[REPO]["files"]
    assert "someone/other-data" in server.text(REPO)["README.md"]
    assert call("push", "base", tmp_path / "merged", REPO)[0] == 2
    code, out, err = call("push", "adapter", folder, "tester/adapter", "--base-model", "someone/base", "--public")
    assert code == 0, err
    assert server.repos["tester/adapter"]["private"] is False and "PUBLIC" in err
    server.fail = {".*": 403}
    code, _, err = call(*words)
    assert code == 1 and "may not write" in err
