"""An adapter with another base of the same shapes, a base that has the adapter already, or a local one."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import qerl_trl
from qerl_trl import NVFP4Config
from qerl_trl.checkpoint.fingerprint import base_sha256
from qerl_trl.checkpoint.seal import MANIFEST_NAME, manifest, recorded_run, seal
from qerl_trl.publish import export, hub
from qerl_trl.publish.load import TrainedPolicy
from qerl_trl.publish.quantize import quantize_folder
from qerl_trl.tasks import evaluation
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import (
    FILE,
    WEIGHTS,
    AfterStep,
    contents,
    fails,
    flip_a_bit,
    in_hub_cache,
    make_policy,
    works,
)
from tests.hub_server import REPO
from tests.tiny_models import make_tiny_model

IDS = torch.randint(5, 300, (3, 16), generator=torch.Generator().manual_seed(0))


def settings_of(folder) -> dict:
    return recorded_run(folder)["settings"]


# --- another base ---


@fault("R7.wrong_base", recovered=True)
def test_resume(finished, other_base, tiny_runs, tmp_path):
    """On another base it is refused; on the same one in another folder it goes on."""
    run, moved = shutil.copytree(finished, tmp_path / "run"), shutil.copytree(tiny_runs.model, tmp_path / "moved")
    trainer = tiny_runs.trainer(run, model=str(other_base), max_steps=3)
    with raises(ValueError, "base_sha256: the base model has other weights", "output_dir", "allow_other_settings"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0
    assert tiny_runs.command(run, model=str(moved), max_steps=3).state.global_step == 3


@fault("R7.wrong_base")
def test_merge(finished, other_base, tiny_runs, tmp_path):
    words = (other_base, tiny_runs.model, "other weights", "--base-model", "--allow-other-base")
    for form in ("bf16", "nvfp4", "base"):
        fails(words, "merge", finished, tmp_path / "out", "--as", form, "--base-model", other_base)
    assert not (tmp_path / "out").exists()
    works("merge", finished, tmp_path / "out")
    then = recorded_run(finished)["base_sha256"]
    assert settings_of(tmp_path / "out")["base_sha256"] == then and "changed" not in settings_of(tmp_path / "out")
    works("merge", finished, tmp_path / "other", "--base-model", other_base, "--allow-other-base")
    now = settings_of(tmp_path / "other")["base_sha256"]
    assert now != then
    assert settings_of(tmp_path / "other")["changed"] == [f"base_sha256: trained on {then[:12]}, built on {now[:12]}"]


@fault("R7.wrong_base")
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_eval(finished, other_base, tmp_path, monkeypatch, engine):
    monkeypatch.setattr(evaluation, "vllm_engine", None)  # refused before one starts
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    named = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": str(other_base)}))
    seal(run, recorded_run(finished))
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    where = ("--data", tmp_path / "problems.jsonl", "--output", tmp_path / "eval.json")
    fails(("other weights",), "eval", run, *where, "--engine", engine)
    assert not (tmp_path / "eval.json").exists()


@fault("R7.wrong_base", recovered=True)
def test_an_adapter_that_is_loaded_by_hand(finished, other_base, tiny_runs, tmp_path, monkeypatch):
    """From the Hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    name, folder = "someone/adapter", in_hub_cache(tmp_path / "hub", "someone/adapter", "a" * 40, finished)

    def load(base, **options):
        qerl_trl.load_adapter(qerl_trl.from_pretrained(base, dtype=torch.float32), name, **options)

    with raises(ValueError, name, "a base with other weights", "allow_other_base=True"):
        load(other_base)
    load(other_base, allow_other_base=True)
    load(tiny_runs.model)
    flip_a_bit(folder / WEIGHTS)
    with raises(ValueError, f"{name} differs from its manifest", WEIGHTS, "download it again"):
        load(tiny_runs.model)


# --- a base of another revision ---


@fault("R7.wrong_base", recovered=True)
def test_the_revision_that_was_trained_on_is_merged_and_named(server, tiny_runs, tmp_path, monkeypatch):
    """The base got another commit of the same shapes since."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    run, commit = tmp_path / "run", "a" * 40
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        in_hub_cache(tmp_path / "hub", "someone/base", commit, tiny_runs.model)
        tiny_runs.command(run, model="someone/base", max_steps=1)
        make_tiny_model("qwen2", seed=1).save_pretrained(tmp_path / "newer")
        in_hub_cache(tmp_path / "hub", "someone/base", "b" * 40, tmp_path / "newer")
        works("merge", run, tmp_path / "merged")
    words = (f"someone/base at revision {commit[:12]}", "--allow-other-base")
    fails(words, "merge", run, tmp_path / "other", "--base-model", tmp_path / "newer")
    assert not (tmp_path / "other").exists() and recorded_run(run)["base_revision"] == commit
    name = "model.embed_tokens.weight"
    assert torch.equal(load_file(tmp_path / "merged" / FILE)[name], load_file(f"{tiny_runs.model}/{FILE}")[name])
    then, merged = recorded_run(run)["base_sha256"], settings_of(tmp_path / "merged")
    assert (merged["base_revision"], merged["base_sha256"]) == (commit, then)
    works("push", "adapter", run, REPO)
    config = json.loads(server.repos[REPO]["files"]["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/base", commit)
    assert f"| revision `{commit}`, fingerprint `{then[:16]}` |" in server.text(REPO)["README.md"]


# --- a base that was quantized on disk ---


@fault("R7.wrong_base")
@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # with tied embeddings and without
def test_a_base_quantized_on_disk_records_its_fingerprint(kind, tiny_model_dir, tmp_path):
    """The fingerprint of the loaded base, from the pieces as they are written."""
    for _ in range(2):  # finished, it is recognized
        quantize_folder(tiny_model_dir(kind), tmp_path / "base", max_shard_bytes=60_000)
    loaded = qerl_trl.from_pretrained(tiny_model_dir(kind), NVFP4Config())
    assert settings_of(tmp_path / "base")["base_sha256"] == base_sha256(loaded)


@fault("R7.wrong_base")
def test_an_adapter_is_not_published_for_another_base(finished, other_base, tiny_runs, server, tmp_path):
    """Named by the push or by the export."""
    quantize_folder(other_base, tmp_path / "base")
    hub.push_folder(tmp_path / "base", "someone/quantized")
    words = ("someone/quantized holds a base with other weights", "--allow-other-base")
    fails(words, "push", "adapter", finished, REPO, "--base-model", "someone/quantized")
    trainer = tiny_runs.trainer(tmp_path / "run")
    trainer.save_adapter(tmp_path / "adapter", base_model="someone/quantized")
    fails(words, "push", "adapter", tmp_path / "adapter", REPO)
    assert REPO not in server.repos
    err = works("push", "adapter", tmp_path / "adapter", REPO, "--allow-other-base")
    assert "It is used anyway, as allowed" in err and WEIGHTS in server.repos[REPO]["files"]


# --- a merge without effect, and one that is done twice ---


@fault("R7.merge_without_effect")
def test_a_change_that_four_bits_lose_is_not_published_as_a_model(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=0.0005)
    recorded = {"base_format": "nvfp4", "model": str(tiny_model_dir("qwen2"))}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, recorded), tmp_path / "run")
    words = ("of the adapter's change survives", "--force", "Publish the adapter")
    fails(words, "merge", tmp_path / "run", tmp_path / "out", "--as", "nvfp4")
    assert not (tmp_path / "out").exists()


@fault("R7.merged_twice")
def test_an_adapter_on_a_model_that_has_it(finished, tmp_path):
    works("merge", finished, tmp_path / "merged")
    fails(("other weights", "--base-model"), "merge", finished, tmp_path / "twice", "--base-model", tmp_path / "merged")
    assert not (tmp_path / "twice").exists()


@fault("R7.merged_twice", recovered=True)
def test_a_live_model_that_is_merged(tiny_runs, tmp_path):
    trainer = tiny_runs.command(tmp_path / "run", max_steps=1)
    trainer.save_merged(tmp_path / "before")
    run = contents(tmp_path / "run")
    trainer.model.merge_adapter()
    with raises(RuntimeError, "adapter is merged into the model already", "unmerge_adapter()"):
        trainer.save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged").exists() and contents(tmp_path / "run") == run
    trainer.model.unmerge_adapter()
    trainer.save_merged(tmp_path / "merged")  # the packed base is back, bit for bit
    assert (tmp_path / "before" / FILE).read_bytes() == (tmp_path / "merged" / FILE).read_bytes()


BF16 = {"base_format": "bf16", "model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 0.05}


@fault("R7.merged_twice", recovered=True)
def test_a_base_that_changes_during_training_is_not_saved(tiny_runs, tmp_path):
    """In 16 bits a merge and unmerge does not restore the weights."""
    trainer = tiny_runs.trainer(tmp_path / "run", max_steps=3, **BF16)
    trainer.add_callback(AfterStep(2, lambda model: (model.merge_adapter(), model.unmerge_adapter())))
    with raises(RuntimeError, "frozen base has other weights", "save_adapter", "resume from the last checkpoint"):
        trainer.train()
    with raises(RuntimeError, "frozen base has other weights", "save_adapter"):
        trainer.save_model()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    assert tiny_runs.command(tmp_path / "run", max_steps=3, **BF16)._resumed.global_step == 1


# --- tied weights ---


@fault("R7.tied_weights", recovered=True)
def test_a_tied_embedding_is_one_matrix_in_the_product(tiny_runs, tmp_path):
    trainer = tiny_runs.command(tmp_path / "run", max_steps=1)
    for form in ("bf16", "nvfp4", "base"):
        works("merge", tmp_path / "run", tmp_path / form, "--as", form, *(["--force"] if form == "nvfp4" else []))
        assert "lm_head.weight" not in load_file(tmp_path / form / FILE)
        assert json.loads((tmp_path / form / "config.json").read_text())["tie_word_embeddings"] is True
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        expected = trainer.model.eval()(IDS).logits
        assert (merged.eval()(IDS).logits - expected).abs().max() < 0.02 * expected.std()  # bf16 rounding


# --- a base that only this machine has ---


@fault("R7.local_base_pushed")
def test_an_adapter_of_a_local_base(finished, tiny_runs, server, tmp_path):
    words = (tiny_runs.model, "only this machine has", "--base-model")
    fails(words, "push", "adapter", finished, REPO)
    with raises(ValueError, "only this machine has", "hub_base_model"):
        tiny_runs.trainer(tmp_path / "run").push_to_hub()
    assert server.requests == [] and server.repos == {}


@fault("R7.local_base_pushed", recovered=True)
@fault("R7.merged_twice")
def test_the_base_that_is_named_instead_is_compared(finished, server, tmp_path):
    for name, form in (("tester/own", "base"), ("tester/merge", "merged")):
        works("merge", finished, tmp_path / form, "--as", "base" if form == "base" else "bf16")
        works("push", form, tmp_path / form, name)
    push = ("push", "adapter", finished)
    works(*push, REPO, "--base-model", "tester/own")
    assert json.loads(server.repos[REPO]["files"]["adapter_config.json"])["base_model_name_or_path"] == "tester/own"
    other = json.loads(server.repos["tester/own"]["files"][MANIFEST_NAME])
    other["run"]["settings"]["base_sha256"] = "0" * 64
    server.put("tester/other", **{MANIFEST_NAME: json.dumps(manifest(other["files"], other["run"])).encode()})
    words = ("tester/other holds a base with other weights", "--allow-other-base")
    fails(words, *push, "tester/adapter", "--base-model", "tester/other")
    fails(("tester/merge holds a merged model", "--as base"), *push, "tester/adapter", "--base-model", "tester/merge")
    assert "tester/adapter" not in server.repos
    works(*push, "tester/adapter", "--base-model", "tester/merge", "--allow-other-base")
