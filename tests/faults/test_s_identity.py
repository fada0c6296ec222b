"""Another base of the same shapes, wherever an adapter meets one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from qerl_trl import QeRLGRPOTrainer, from_pretrained
from qerl_trl.checkpoint.seal import MANIFEST_NAME, recorded_run, seal
from qerl_trl.tasks import evaluation
from tests.cli.test_main import call
from tests.faults.catalog import fault, told
from tests.test_trainer import LORA, PROMPTS, settings, spread_reward


@pytest.fixture(scope="module")
def trained(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """`trained(base, output_dir, **args)`: a trainer on the base; and the folder of a run of one step, with a checkpoint."""

    def make(base, output_dir, **arguments):
        args = settings(output_dir, output_dir=str(output_dir), save_strategy="steps", save_steps=1, **arguments)
        return QeRLGRPOTrainer(
            str(base), spread_reward, args, PROMPTS, processing_class=tiny_tokenizer, peft_config=LORA
        )

    run = tmp_path_factory.mktemp("runs") / "run"
    trainer = make(tiny_model_dir("qwen2"), run, max_steps=1)
    trainer.train()
    trainer.save_model()
    return make, run


@pytest.fixture(scope="module")
def other_base(tiny_model_dir, tmp_path_factory):
    """A base of the same shapes in which two rows of one matrix have changed places."""
    folder = tmp_path_factory.mktemp("bases") / "other"
    shutil.copytree(tiny_model_dir("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    weight[[0, 1]] = weight[[1, 0]].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_base(run, copy, base):
    """A copy of a run whose adapter names another base."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    named = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": str(base)}))
    seal(copy, recorded_run(run))
    return copy


@fault("S.wrong_base")
def test_resume(trained, other_base, tmp_path):
    make, run = trained
    shutil.copytree(run, tmp_path / "run")
    trainer = make(other_base, tmp_path / "run", max_steps=2)
    with told(ValueError, "base_sha256: the base model has other weights", "output_dir", "allow_other_settings"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0


@fault("S.wrong_base", recovered=True)
def test_resume_on_the_same_base_in_another_folder(trained, tiny_model_dir, tmp_path):
    """A base that was moved, or that was quantized on disk meanwhile, is the same one."""
    make, run = trained
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "moved")
    trainer = make(tmp_path / "moved", tmp_path / "run", max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


@fault("S.wrong_base")
@pytest.mark.parametrize("form", ["bf16", "nvfp4", "base"])
def test_merge(trained, other_base, tiny_model_dir, tmp_path, form):
    _, run = trained
    code, _, err = call("merge", run, tmp_path / "out", "--as", form, "--base-model", other_base)
    assert code == 2 and not (tmp_path / "out").exists()
    for word in (str(other_base), str(tiny_model_dir("qwen2")), "other weights", "--base-model", "--allow-other-base"):
        assert word in err, word


def test_merge_where_it_is_allowed_says_so(trained, other_base, tmp_path):
    _, run = trained
    code, _, err = call("merge", run, tmp_path / "out", "--base-model", other_base, "--allow-other-base")
    assert code == 0, err
    record = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["run"]["settings"]
    then = recorded_run(run)["base_sha256"]
    assert record["base_sha256"] != then
    assert record["changed"] == [f"base_sha256: trained on {then[:12]}, built on {record['base_sha256'][:12]}"]
    merged = load_file(tmp_path / "out/model.safetensors")["model.norm.weight"]
    assert torch.equal(merged, load_file(Path(other_base, "model.safetensors"))["model.norm.weight"])


def test_merge_of_the_right_base_records_it(trained, tmp_path):
    _, run = trained
    code, _, err = call("merge", run, tmp_path / "out")
    assert code == 0, err
    record = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["run"]["settings"]
    assert record["base_sha256"] == recorded_run(run)["base_sha256"] and "changed" not in record


@fault("S.wrong_base")
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_eval(trained, other_base, tmp_path, monkeypatch, engine):
    _, run = trained
    monkeypatch.setattr(evaluation, "vllm_engine", None)  # refused before one starts
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    options = ("--data", tmp_path / "problems.jsonl", "--output", tmp_path / "eval.json", "--engine", engine)
    code, _, err = call("eval", with_base(run, tmp_path / "run", other_base), *options)
    assert code == 2 and "other weights" in err
    assert not (tmp_path / "eval.json").exists()


# --- an adapter that comes ready on a base, by PEFT's own function -----------------------------------------------------------------


def ready(run, base, tiny_tokenizer, folder, named=None, **loading):
    """A trainer on what PEFT loaded, which took any base without a word. `named`: another name for it in the adapter's configuration."""
    model = from_pretrained(base, dtype=torch.float32, **loading)
    adapted = PeftModel.from_pretrained(model, str(run), is_trainable=True)
    if named is not None:
        adapted.peft_config["default"].base_model_name_or_path = str(named)
    args = settings(folder, output_dir=str(folder), max_steps=1, save_strategy="no")
    return QeRLGRPOTrainer(adapted, spread_reward, args, PROMPTS, processing_class=tiny_tokenizer)


def named_base(folder):
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_an_adapter_that_comes_ready_on_another_base(
    trained, other_base, tiny_model_dir, tiny_tokenizer, tmp_path, caplog
):
    """adapter_config.json named the one, the card the other."""
    trainer = ready(trained[1], other_base, tiny_tokenizer, tmp_path / "run")
    assert f"made for {tiny_model_dir('qwen2')}, and it lies on {other_base}" in caplog.text
    trainer.train()
    trainer.save_model()
    trainer.save_adapter(tmp_path / "export")
    assert [named_base(tmp_path / name) for name in ("run", "export")] == [str(other_base)] * 2
    assert recorded_run(tmp_path / "run")["model"] == str(other_base)
