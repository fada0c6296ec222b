"""Merging and publishing on the wrong base, twice, or without effect; the product is the folder, or the repository on the stand-in Hub."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.checkpoint.seal import MANIFEST_NAME, manifest, recorded_run
from qerl_trl.publish import export
from qerl_trl.publish.load import TrainedPolicy
from tests.cli.test_main import call
from tests.faults.catalog import fault, told
from tests.faults.tiny_runs import WEIGHTS, contents, tiny_runs  # noqa: F401  (a fixture)
from tests.publish.test_export import IDS, make_policy
from tests.publish.test_hub import REPO, no_token_anywhere, server  # noqa: F401  (fixtures)
from tests.test_trainer import LORA, PROMPTS, settings, spread_reward
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def make(tiny_model_dir, tiny_tokenizer):
    """`make(output_dir, base, **args)`: a trainer after one step, its run saved."""

    def make(output_dir, base=None, peft_config=LORA, **arguments):
        args = settings(output_dir, output_dir=str(output_dir), max_steps=1, **arguments)
        base = str(base or tiny_model_dir("qwen2"))
        trainer = QeRLGRPOTrainer(
            base, spread_reward, args, PROMPTS, processing_class=tiny_tokenizer, peft_config=peft_config
        )
        trainer.train()
        trainer.save_model()
        return trainer

    return make


@pytest.fixture(scope="module")
def run(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return make(folder), folder


# --- a base of another revision -----------------------------------------------------------------------------------------------------


def _commit(cache, name, commit, folder):
    """What downloading `name` leaves in the Hub's cache, with `commit` as the newest."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)


@pytest.fixture
def moved_on(make, tiny_model_dir, tmp_path, monkeypatch):
    """(run, commit): trained on someone/base at `commit`, which then got another commit of the same shapes."""
    cache, first, second = tmp_path / "hub", "a" * 40, "b" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    _commit(cache, "someone/base", first, tiny_model_dir("qwen2"))
    make(tmp_path / "run", base="someone/base")
    make_tiny_model("qwen2", seed=1).save_pretrained(tmp_path / "newer")
    _commit(cache, "someone/base", second, tmp_path / "newer")
    return tmp_path / "run", first


@fault("R7.other_revision", recovered=True)
def test_the_revision_that_was_trained_on_is_merged(moved_on, tiny_model_dir, tmp_path):
    run, commit = moved_on
    assert recorded_run(run)["base_revision"] == commit
    code, _, err = call("merge", run, tmp_path / "merged")
    assert code == 0, err
    merged, base = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tiny_model_dir("qwen2"))
    )
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    record = recorded_run(tmp_path / "merged")["settings"]
    assert record["base_revision"] == commit and record["base_sha256"] == recorded_run(run)["base_sha256"]


@fault("R7.other_revision", recovered=True)
def test_the_published_adapter_names_the_revision(moved_on, server):  # noqa: F811
    run, commit = moved_on
    code, _, err = call("push", "adapter", run, REPO)
    assert code == 0, err
    config = json.loads(server.repos[REPO]["files"]["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/base", commit)
    fingerprint = recorded_run(run)["base_sha256"][:16]
    assert f"| revision `{commit}`, fingerprint `{fingerprint}` |" in server.text(REPO)["README.md"]


@fault("R7.other_revision")
def test_another_revision_is_refused(moved_on, tmp_path):
    run, commit = moved_on
    code, _, err = call("merge", run, tmp_path / "merged", "--base-model", tmp_path / "newer")
    assert code == 2 and f"someone/base at revision {commit[:12]}" in err and "--allow-other-base" in err
    assert not (tmp_path / "merged").exists()


# --- a merge without effect, and one that is done twice -----------------------------------------------------------------------------


@fault("R7.merge_without_effect")
def test_a_change_that_four_bits_lose_is_not_published_as_a_model(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=0.0005)
    recorded = {"base_format": "nvfp4", "model": str(tiny_model_dir("qwen2"))}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, recorded), tmp_path / "run")
    code, _, err = call("merge", tmp_path / "run", tmp_path / "out", "--as", "nvfp4")
    assert code == 2 and not (tmp_path / "out").exists()
    assert "of the adapter's change survives" in err and "--force" in err and "Publish the adapter" in err


@fault("R7.merged_twice")
def test_an_adapter_on_a_model_that_has_it(run, tmp_path):
    _, folder = run
    assert call("merge", folder, tmp_path / "merged")[0] == 0
    code, _, err = call("merge", folder, tmp_path / "twice", "--base-model", tmp_path / "merged")
    assert code == 2 and "other weights" in err and "--base-model" in err and not (tmp_path / "twice").exists()


@fault("R7.merged_twice", recovered=True)
def test_a_live_model_that_is_merged(make, tmp_path):
    trainer = make(tmp_path / "run")
    trainer.save_merged(tmp_path / "before")
    run = contents(tmp_path / "run")
    trainer.model.merge_adapter()
    with told(RuntimeError, "adapter is merged into the model already", "unmerge_adapter()"):
        trainer.save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged").exists() and contents(tmp_path / "run") == run
    trainer.model.unmerge_adapter()
    trainer.save_merged(tmp_path / "merged")  # the packed base is back, bit for bit
    before, merged = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "merged"))
    assert merged == before


@fault("R7.merged_twice")
def test_a_dense_base_that_merging_has_rounded(make, tmp_path):
    trainer = make(tmp_path / "run", base_format="bf16", model_init_kwargs={"dtype": "bfloat16"}, learning_rate=0.05)
    trainer.model.merge_adapter()
    trainer.model.unmerge_adapter()
    with told(RuntimeError, "frozen base has other weights", "merge from its folder"):
        trainer.save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    trainer.save_adapter(tmp_path / "adapter")
    assert call("merge", tmp_path / "adapter", tmp_path / "merged")[0] == 0


# --- tied weights -------------------------------------------------------------------------------------------------------------------


@fault("R7.tied_weights", remedy=None, recovered=True)
def test_a_tied_embedding_is_one_matrix_in_the_product(run, tmp_path):
    trainer, folder = run
    for form in ("bf16", "nvfp4", "base"):
        code, _, err = call("merge", folder, tmp_path / form, "--as", form, *(["--force"] if form == "nvfp4" else []))
        assert code == 0, err
        assert "lm_head.weight" not in load_file(tmp_path / form / "model.safetensors")
        assert json.loads((tmp_path / form / "config.json").read_text())["tie_word_embeddings"] is True
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        expected = trainer.model.eval()(IDS).logits
        assert (merged.eval()(IDS).logits - expected).abs().max() < 0.02 * expected.std()  # bf16 rounding


@fault("R7.tied_weights")
def test_memory_that_nobody_ties_again_is_not_left_out(tiny_model_dir, tmp_path):
    """As PEFT's layer_replication leaves it: what was written had layers without weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"))
    layers = model.model.layers
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    with told(ValueError, "model.layers.1.input_layernorm.weight is in the same memory", "clone it"):
        export.save_merged(model, tmp_path / "merged")


@fault("R7.tied_weights", remedy=None, recovered=True)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_a_tied_head_that_an_adapter_changes_becomes_a_matrix_of_its_own(tiny_model_dir, tmp_path):
    """Not trained here: TRL refuses an adapter on the head. Other trainers make them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    policy = get_peft_model(model, lora).eval()
    export.save_merged(policy, tmp_path / "merged", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = load_file(tiny_model_dir("qwen2") / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(merged.model.embed_tokens.weight, base.float())
    assert not torch.equal(merged.lm_head.weight, base.float())
    with torch.no_grad():
        expected = policy(IDS).logits
        assert (merged.eval()(IDS).logits - expected).abs().max() < 1e-4 * expected.std()


# --- a base that only this machine has ----------------------------------------------------------------------------------------------


@fault("R7.local_base_pushed")
def test_an_adapter_of_a_local_base(run, server):  # noqa: F811
    trainer, folder = run
    code, _, err = call("push", "adapter", folder, REPO)
    assert code == 2 and str(trainer.model.config._name_or_path) in err
    assert "only this machine has" in err and "--base-model" in err
    with told(ValueError, "only this machine has", "hub_base_model"):
        trainer.push_to_hub()
    assert server.requests == [] and server.repos == {}


@pytest.fixture
def bases(run, server, tmp_path):  # noqa: F811
    """The run's own base and a merge of it, as repositories."""
    _, folder = run
    for name, form in (("tester/own", "base"), ("tester/merge", "merged")):
        assert call("merge", folder, tmp_path / form, "--as", "base" if form == "base" else "bf16")[0] == 0
        assert call("push", form, tmp_path / form, name)[0] == 0
    return server


@fault("R7.local_base_pushed", recovered=True)
def test_the_base_that_is_named_instead_is_compared(run, bases, tmp_path):
    _, folder = run
    code, _, err = call("push", "adapter", folder, REPO, "--base-model", "tester/own")
    assert code == 0, err
    assert json.loads(bases.repos[REPO]["files"]["adapter_config.json"])["base_model_name_or_path"] == "tester/own"
    other = json.loads(bases.repos["tester/own"]["files"][MANIFEST_NAME])
    other["run"]["settings"]["base_sha256"] = "0" * 64
    bases.put("tester/other", **{MANIFEST_NAME: json.dumps(manifest(other["files"], other["run"])).encode()})
    code, _, err = call("push", "adapter", folder, "tester/adapter", "--base-model", "tester/other")
    assert code == 2 and "tester/other holds a base with other weights" in err and "--allow-other-base" in err
    assert "tester/adapter" not in bases.repos


@fault("R7.merged_twice")
def test_a_merged_model_named_as_the_base(run, bases):
    _, folder = run
    code, _, err = call("push", "adapter", folder, REPO, "--base-model", "tester/merge")
    assert code == 2 and "tester/merge holds a merged model" in err and "--as base" in err
    assert REPO not in bases.repos
    assert call("push", "adapter", folder, REPO, "--base-model", "tester/merge", "--allow-other-base")[0] == 0


def test_a_base_that_is_nowhere_is_said(run, server):  # noqa: F811
    _, folder = run
    code, _, err = call("push", "adapter", folder, REPO, "--base-model", "tester/none")
    assert code == 0 and "tester/none was not found on the Hub" in err


# --- the base and the scales while a run lasts --------------------------------------------------------------------------------------


class MergesOnce(TrainerCallback):
    """As somebody does to look at the merged model in the middle of a run."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            model.merge_adapter()
            model.unmerge_adapter()


@fault("R7.merged_twice", recovered=True)
def test_a_base_that_drifts_while_it_is_trained_on_is_not_saved_as_the_runs(tiny_runs, tmp_path):  # noqa: F811
    """In 16 bits the weights do not come back, and the seal kept the fingerprint of before."""
    options = {"base_format": "bf16", "model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 3, "learning_rate": 0.05}
    trainer = tiny_runs.trainer(tmp_path / "run", **options)
    trainer.add_callback(MergesOnce())
    with told(
        RuntimeError,
        "The frozen base has other weights",
        "merge and unmerge",
        "save_adapter",
        "resume from the last checkpoint",
    ):
        trainer.train()
    with told(RuntimeError, "The frozen base has other weights", "save_adapter"):
        trainer.save_model()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1"]
    assert tiny_runs.command(tmp_path / "run", **options)._resumed.global_step == 1
