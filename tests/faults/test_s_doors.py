"""The same object by another door: what one check guards must not come in beside it. Each case passed silently when it was written."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import qerl_trl
from qerl_trl import NVFP4Config, QeRLGRPOTrainer
from qerl_trl.checkpoint import seal
from qerl_trl.checkpoint.fingerprint import Pieces, base_sha256, row_of
from qerl_trl.publish import card, export, hub
from qerl_trl.publish.load import load_any, load_policy
from qerl_trl.publish.quantize import quantize_folder
from qerl_trl.run import folder as run_folder
from qerl_trl.tasks import evaluation
from tests.cli.test_main import call
from tests.faults.catalog import fault, told
from tests.faults.test_r7_publish import _commit
from tests.faults.test_s_identity import other_base, trained, with_base  # noqa: F401  (fixtures)
from tests.faults.test_s_products import dense, flip_a_bit  # noqa: F401  (fixtures)
from tests.faults.tiny_runs import PROMPTS, WEIGHTS, contents, spread_reward, tiny_runs  # noqa: F401  (a fixture)
from tests.publish.test_export import make_policy
from tests.publish.test_hub import REPO, server  # noqa: F401  (a fixture)
from tests.test_trainer import settings

# --- a base that was quantized on disk --------------------------------------------------------------------------------------------


@fault("S.wrong_base")
@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # with tied embeddings and without
def test_a_base_quantized_on_disk_says_which_it_is(kind, tiny_model_dir, tmp_path):
    """The fingerprint of what will be loaded, from the pieces that are written."""
    for _ in range(2):  # finished, it is recognized
        quantize_folder(tiny_model_dir(kind), tmp_path / "base", max_shard_bytes=60_000)
    loaded = qerl_trl.from_pretrained(tiny_model_dir(kind), NVFP4Config())
    assert seal.recorded_run(tmp_path / "base")["settings"]["base_sha256"] == base_sha256(loaded)


def test_the_row_of_a_tensor_in_pieces():
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int64):
        tensor = (50 * torch.randn(37, 5)).to(dtype)
        pieces = Pieces("x", tensor.shape)
        for part in tensor.split(3):  # of an odd number of elements
            pieces.add(part)
        assert pieces.row() == row_of("x", tensor)


@fault("S.wrong_base")
def test_an_adapter_is_not_published_for_another_base_quantized_on_disk(trained, other_base, server, tmp_path):  # noqa: F811
    quantize_folder(other_base, tmp_path / "base")
    hub.push_folder(tmp_path / "base", "someone/quantized")
    code, _, err = call("push", "adapter", trained[1], REPO, "--base-model", "someone/quantized")
    assert code == 2 and "someone/quantized holds a base with other weights" in err and "--allow-other-base" in err
    assert REPO not in server.repos


@fault("S.wrong_base")
def test_an_exported_adapter_is_not_published_for_the_other_base_that_it_names(trained, other_base, server, tmp_path):  # noqa: F811
    """The name was said to `save_adapter`, and not to the push."""
    make, run = trained
    quantize_folder(other_base, tmp_path / "base")
    hub.push_folder(tmp_path / "base", "someone/quantized")
    trainer = make(load_policy(run).settings["model"], tmp_path / "run", max_steps=1)
    trainer.save_adapter(tmp_path / "adapter", base_model="someone/quantized")
    push = ("push", "adapter", tmp_path / "adapter", REPO)
    code, _, err = call(*push)
    assert code == 2 and "someone/quantized holds a base with other weights" in err and "--allow-other-base" in err
    assert REPO not in server.repos
    code, _, err = call(*push, "--allow-other-base")
    assert code == 0 and "It is named all the same, as allowed" in err and WEIGHTS in server.repos[REPO]["files"]


@pytest.mark.parametrize("base", ["not there", "refused", "without a manifest", "at a recorded commit"])
def test_an_exported_adapter_whose_base_says_nothing_is_published(base, trained, server, tmp_path):  # noqa: F811
    make, run = trained
    trainer = make(load_policy(run).settings["model"], tmp_path / "run", max_steps=1)
    trainer.save_adapter(tmp_path / "adapter", base_model="someone/base")
    if base != "not there":
        server.put("someone/base")
    if base == "refused":
        server.fail["(GET|HEAD) /someone/base/.*"] = 403
    if base == "at a recorded commit":
        record = seal.recorded_run(tmp_path / "adapter")
        record["settings"] |= {"model": "someone/base", "base_revision": "c" * 40}
        seal.seal(tmp_path / "adapter", record)
    code, _, err = call("push", "adapter", tmp_path / "adapter", REPO)
    assert code == 0 and WEIGHTS in server.repos[REPO]["files"]
    said = {"not there": "someone/base was not found on the Hub", "at a recorded commit": ""}.get(
        base, "taken on trust"
    )
    assert said in err and ("taken on trust" in err) == (said == "taken on trust")


@fault("S.wrong_base")
def test_a_base_on_the_hub_that_does_not_say_what_it_holds(trained, server):  # noqa: F811
    """Nothing there can be compared: that is said."""
    server.put("someone/dense", private=True)
    push = ("push", "adapter", trained[1], REPO, "--base-model", "someone/dense")
    code, _, err = call(*push)
    fingerprint = seal.recorded_run(trained[1])["base_sha256"][:12]
    assert code == 0 and f"fingerprint {fingerprint}) is taken on trust" in err


# --- another format than the run's ------------------------------------------------------------------------------------------------


@fault("S.wrong_base")
def test_another_base_in_another_format(trained, other_base):  # noqa: F811
    """The original of an NVFP4 base has no fingerprint of its own in the record: it is compared as the run would have quantized it."""
    with told(ValueError, str(other_base), "other weights", "--base-model", "--allow-other-base"):
        load_policy(trained[1], str(other_base), "bf16")


def test_a_base_whose_weights_are_not_in_the_folder(trained, tiny_model_dir, tmp_path):  # noqa: F811
    """An AttributeError in transformers, minutes later."""
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "base")
    with told(ValueError, str(tmp_path / "base"), "stored as nvfp4", "name the unquantized model"):
        load_policy(trained[1], str(tmp_path / "base"), "bf16")


@fault("S.wrong_base", recovered=True)
def test_vllm_does_not_measure_an_adapter_on_a_base_of_another_format(trained, tiny_model_dir, tmp_path, monkeypatch):  # noqa: F811
    """It serves a folder as it is stored."""
    served = []
    monkeypatch.setattr(
        evaluation, "vllm_engine", lambda base, *a, **o: served.append(base) or (lambda d: ["2"] * len(d))
    )
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    words = ("--data", tmp_path / "problems.jsonl", "--output", tmp_path / "eval.json", "--engine", "vllm")
    code, _, err = call("eval", trained[1], *words)
    assert code == 2 and served == [] and not (tmp_path / "eval.json").exists()
    for word in ("base_format='nvfp4'", "stored as bf16", "qerl-trl quantize", "qerl-trl merge"):
        assert word in err, word
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "base")
    code, _, err = call("eval", with_base(trained[1], tmp_path / "run", tmp_path / "base"), *words)
    assert code == 0 and served == [str(tmp_path / "base")], err
    assert json.loads((tmp_path / "eval.json").read_text())["base_format"] == "nvfp4"


@fault("S.wrong_base", recovered=True)
def test_a_base_that_is_computed_with_in_another_way(tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    """The same weights, and no seal beside them that would tell."""
    base = Path(shutil.copytree(tiny_runs.model, tmp_path / "base"))
    monkeypatch.setattr(tiny_runs, "model", str(base))
    tiny_runs.command(tmp_path / "run", max_steps=1)
    before = (base / "config.json").read_text()
    (base / "config.json").write_text(json.dumps({**json.loads(before), "rms_norm_eps": 1e-3}))
    line = "base_config.rms_norm_eps: not set then, 0.001 now"
    with told(ValueError, str(tmp_path / "run"), line, "allow_other_settings=True"):
        tiny_runs.command(tmp_path / "run", max_steps=2)
    with told(ValueError, str(base), line, "--base-model", "--allow-other-base"):
        load_policy(tmp_path / "run")
    assert load_policy(tmp_path / "run", allow_other_base=True).settings["changed"] == [line]
    (base / "config.json").write_text(before)
    assert "changed" not in load_policy(tmp_path / "run").settings
    assert tiny_runs.command(tmp_path / "run", max_steps=2).state.global_step == 2


@fault("S.wrong_base", recovered=True)
def test_an_adapter_is_not_put_on_another_base_by_hand(trained, other_base, tiny_model_dir):  # noqa: F811
    """`qerl_trl.load_adapter`, which is all that somebody with a model of their own needs."""
    run = str(trained[1])
    model = qerl_trl.from_pretrained(other_base, dtype=torch.float32)
    with told(ValueError, run, "a base with other weights", "Load the run's own base", "allow_other_base=True"):
        qerl_trl.load_adapter(model, run)
    qerl_trl.load_adapter(model, run, allow_other_base=True)
    qerl_trl.load_adapter(qerl_trl.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32), run)


# --- a sealed folder, read by quantize, or from the Hub's cache -------------------------------------------------------------------


@fault("S.model_folder_edited")
def test_an_edited_export_is_not_quantized(tiny_model_dir, tmp_path):
    export.save_merged(make_policy(tiny_model_dir("llama"), dtype="bfloat16"), tmp_path / "merged")
    flip_a_bit(tmp_path / "merged")
    with told(
        ValueError, str(tmp_path / "merged"), "model.safetensors has other content", "Export or download it again"
    ):
        quantize_folder(tmp_path / "merged", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_said_of_the_source_is_not_said_of_the_product(tiny_model_dir, tmp_path):
    """A merged model's card and its computed log-probabilities, copied, would be published as the quantized one's."""
    facts = {"kind": "merged", "settings": {"seed": 77}}
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16")
    export.save_merged(policy, tmp_path / "merged", card=lambda folder, record: card.write(folder, facts, record))
    quantize_folder(tmp_path / "merged", tmp_path / "out")
    assert not (tmp_path / "out/qerl_card.json").exists()


@fault("S.model_folder_edited")
@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_what_changes_the_answers_is_not_added_to_a_sealed_folder(name, tiny_model_dir, tiny_tokenizer, tmp_path):
    source = shutil.copytree(tiny_model_dir("llama"), tmp_path / "source")
    tiny_tokenizer.save_pretrained(source)
    (source / name).unlink()
    quantize_folder(source, tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "before")
    (tmp_path / "model" / name).write_text("{}")
    with told(ValueError, str(tmp_path / "model"), f"{name} was added", "remove qerl_manifest.json"):
        load_any(str(tmp_path / "model"))


@fault("S.model_folder_edited")
def test_a_number_left_in_the_environment_switches_nothing_off(tiny_model_dir, tmp_path, monkeypatch):
    """LOCAL_RANK of a launcher, in a shell or a container: this process reads for no other one."""
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "base")
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-5}))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with told(ValueError, str(tmp_path / "base"), "config.json", "not as it was sealed", "download it again"):
        qerl_trl.from_pretrained(tmp_path / "base")


@fault("S.model_folder_edited")
def test_a_model_that_comes_ready_from_an_edited_folder_is_not_trained(trained, tiny_tokenizer, tmp_path):  # noqa: F811
    """transformers loaded it, which knows of no seal."""
    export.save_merged(load_policy(trained[1]), tmp_path / "merged")
    flip_a_bit(tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    args = settings(tmp_path, base_format="bf16", aqn=False, max_steps=1)
    with told(ValueError, str(tmp_path / "merged"), "model.safetensors", "not as it was sealed", "download it again"):
        QeRLGRPOTrainer(model, spread_reward, args, PROMPTS, processing_class=tiny_tokenizer).train()


@fault("S.model_folder_edited")
@pytest.mark.parametrize("use", ["from_pretrained", "train", "quantize"])
def test_a_published_model_in_the_hubs_cache_is_what_was_published(
    use,
    tiny_model_dir,
    tiny_runs,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """By its Hub id, of which only the files that were asked for are here, and whose card may be edited there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    make = quantize_folder if use != "quantize" else shutil.copytree
    make(tiny_model_dir("qwen2"), tmp_path / "base")
    for unread in ("vocab.txt", "README.md"):
        (tmp_path / "base" / unread).write_text("as it was")
    seal.seal(tmp_path / "base", seal.recorded_run(tmp_path / "base"))
    (tmp_path / "base/vocab.txt").unlink()
    (tmp_path / "base/README.md").write_text("as it is now")
    _commit(tmp_path / "hub", "someone/base", "a" * 40, tmp_path / "base")

    def action(out: str):
        if use == "from_pretrained":
            qerl_trl.from_pretrained("someone/base")
        elif use == "quantize":
            quantize_folder(tmp_path / "hub/models--someone--base/snapshots" / ("a" * 40), tmp_path / out)
            assert seal.recorded_run(tmp_path / out)["settings"]["base_revision"] == "a" * 40
        else:
            monkeypatch.setattr(tiny_runs, "model", "someone/base")
            tiny_runs.trainer(tmp_path / out, max_steps=1, save_strategy="no").train()

    action("good")
    flip_a_bit(tmp_path / "hub/models--someone--base/snapshots" / ("a" * 40))
    with told(ValueError, "model.safetensors has other content", "download it again"):
        action("bad")


@fault("S.run_folder_edited")
@pytest.mark.parametrize("command", ["merge", "quantize"])
def test_what_is_read_is_not_replaced_by_what_is_made_of_it(command, trained, tiny_model_dir, tmp_path):  # noqa: F811
    """--overwrite would remove the run with its checkpoints, or the only unquantized weights."""
    source = Path(
        shutil.copytree(trained[1] if command == "merge" else tiny_model_dir("qwen2"), tmp_path / "folder/source")
    )
    (tmp_path / "link").symlink_to(source)
    before = contents(tmp_path / "folder")
    for destination in (source, tmp_path / "link", tmp_path / "folder"):
        code, _, err = call(command, source, destination, "--overwrite")
        assert code == 2 and str(source) in err and "would be removed" in err and "Name another folder" in err
    assert contents(tmp_path / "folder") == before


def test_vllm_measures_an_adapter_of_which_nothing_is_known_with_a_word(trained, tmp_path, monkeypatch, caplog):  # noqa: F811
    """Copied without its manifest."""
    run = shutil.copytree(
        trained[1], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*", seal.MANIFEST_NAME)
    )
    monkeypatch.setattr(evaluation, "vllm_engine", lambda *a, **o: lambda d: ["2"] * len(d))
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    code, _, err = call("eval", run, "--data", tmp_path / "problems.jsonl", "--engine", "vllm")
    assert code == 0, err
    assert f"{run} has no {seal.MANIFEST_NAME}" in caplog.text


# --- a run that is resumed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny_runs, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny_runs.command(folder)
    return folder


@fault("R6.missing_optimizer", recovered=True)
def test_a_checkpoint_that_never_had_an_optimizer_is_not_gone_on_from(finished, tiny_runs, tmp_path):  # noqa: F811
    """As save_only_model leaves it: the parent begins with an empty optimizer, and the schedule of the learning rate at its start."""
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("optimizer.pt", "scheduler.pt"):
        (run / "checkpoint-2" / name).unlink()
    sealed = seal.read_manifest(run / "checkpoint-2")
    seal.seal(run / "checkpoint-2", sealed["run"], order=sealed["order"])
    trainer = tiny_runs.trainer(run, max_steps=3)
    with told(ValueError, "checkpoint-2 keeps no optimizer state", "another checkpoint", "allow_other_settings=True"):
        trainer.train(resume_from_checkpoint=trainer.to_resume())
    trainer.args.allow_other_settings = True
    trainer.train(resume_from_checkpoint=trainer.to_resume())
    assert trainer.state.global_step == 3
    assert seal.recorded_run(run / "checkpoint-3")["changed"] == ["optimizer: a new one from step 2 on"]


@fault("R6.missing_optimizer")
@pytest.mark.parametrize("by", ["link", "another output_dir"])
def test_what_a_run_has_ended_with_is_no_checkpoint_by_any_name(by, finished, tiny_runs, tmp_path):  # noqa: F811
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    (tmp_path / "link").symlink_to(run)
    named, output_dir = (tmp_path / "link", run) if by == "link" else (run, tmp_path / "new")
    trainer = tiny_runs.trainer(output_dir, max_steps=4)
    with told(ValueError, f"{named} keeps no optimizer state", "Name another checkpoint"):
        trainer.train(resume_from_checkpoint=str(named))
    assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


@fault("S.arms_share_folder")
def test_a_folder_whose_manifest_was_edited_belongs_to_a_run_all_the_same(finished, tiny_runs, tmp_path):  # noqa: F811
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    manifest = json.loads((run / seal.MANIFEST_NAME).read_text())
    del manifest["run"]["base_sha256"]
    (run / seal.MANIFEST_NAME).write_text(json.dumps(manifest))
    before = contents(run)
    trainer = tiny_runs.trainer(run, base_format="bf16")
    with told(ValueError, str(run), "changed after it was written", "another output_dir"):
        trainer.train(resume_from_checkpoint=trainer.to_resume())
    assert contents(run) == before


@fault("S.arms_share_folder", recovered=True)
@pytest.mark.parametrize("steps", [1, None], ids=["trained", "never trained"])
def test_two_trainers_of_one_process_do_not_replace_each_other(steps, tiny_runs, tmp_path):  # noqa: F811
    """Nothing lay in the folder when the second one began, and one process has one lock."""
    first, second = (
        tiny_runs.trainer(tmp_path / "run", max_steps=1, save_strategy="no", learning_rate=rate)
        for rate in (1e-3, 1e-4)
    )
    for trainer in (first, second)[: None if steps else 1]:
        trainer.train()
    first.save_model()
    before = contents(tmp_path / "run")
    with told(ValueError, str(tmp_path / "run"), "learning_rate: 0.001 then, 0.0001 now", "save_model('<folder>')"):
        second.save_model()
    assert contents(tmp_path / "run") == before
    second.save_model(tmp_path / "other")
    first.save_model()


@fault("S.arms_share_folder", recovered=True)
def test_a_run_is_not_saved_over_another_ones(finished, tiny_runs, tmp_path):  # noqa: F811
    """Not in its own folder, but by name: the other one was replaced and sealed again. So was an export."""
    other = shutil.copytree(finished, tmp_path / "other")
    trainer = tiny_runs.trainer(tmp_path / "run", learning_rate=5e-2)
    export.save_adapter(trainer, tmp_path / "export")
    before = contents(tmp_path)
    with told(ValueError, str(other), "learning_rate: 0.001 then, 0.05 now", "save_model('<folder>')"):
        trainer.save_model(str(other))
    with told(ValueError, str(tmp_path / "export"), "holds an export (adapter)", "save_model('<folder>')"):
        trainer.save_model(tmp_path / "export")
    assert contents(tmp_path) == before
    for _ in range(2):  # what it has saved itself may be newer each time
        trainer.save_model(tmp_path / "mine")


@fault("S.arms_share_folder")
@pytest.mark.parametrize("allowed", [False, True], ids=["", "other settings allowed"])
def test_a_run_does_not_go_on_from_elsewhere_in_another_ones_folder(allowed, finished, tiny_runs, tmp_path):  # noqa: F811
    """By the name of its own checkpoint: the other run's adapter, manifest and checkpoints were replaced."""
    other = shutil.copytree(finished, tmp_path / "other")
    tiny_runs.command(tmp_path / "mine", learning_rate=5e-2)
    before = contents(tmp_path)
    trainer = tiny_runs.trainer(other, learning_rate=5e-2, allow_other_settings=allowed)
    with told(ValueError, str(other), "learning_rate: 0.001 then, 0.05 now", "another output_dir"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "mine/checkpoint-1"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("where", ["an empty folder", "a folder of the same run", "its own by a link", "allowed again"])
def test_a_run_goes_on_from_elsewhere(where, finished, tiny_runs, tmp_path):  # noqa: F811
    run, into, more = shutil.copytree(finished, tmp_path / "run"), tmp_path / "into", {}
    if where == "a folder of the same run":
        shutil.copytree(finished, into)
    if where == "its own by a link":
        into.symlink_to(run)
    if where == "allowed again":
        more = {"learning_rate": 5e-2, "allow_other_settings": True}
    for _ in range(2):
        trainer = tiny_runs.trainer(into, **more)
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
        trainer.save_model()
    assert trainer.state.global_step == 2 and seal.problems(into) == []
    assert (into / WEIGHTS).read_bytes() == (
        finished / WEIGHTS
    ).read_bytes()  # a schedule goes on as it was, whatever is allowed
    assert seal.recorded_run(into)["learning_rate"] == more.get("learning_rate", 1e-3)


@fault("S.arms_share_folder")
@pytest.mark.parametrize("start", ["fresh", "from elsewhere"])
def test_a_run_does_not_begin_in_the_folder_of_an_export(start, finished, tiny_runs, tmp_path):  # noqa: F811
    """Its settings stand one level lower there than in a run's manifest, so nothing was compared, and the adapter was replaced."""
    export.save_adapter(tiny_runs.trainer(tmp_path / "run", seed=11), tmp_path / "export")
    before = contents(tmp_path)
    trainer = tiny_runs.trainer(tmp_path / "export")
    resume = None if start == "fresh" else str(finished / "checkpoint-1")
    with told(ValueError, str(tmp_path / "export"), "holds an export (adapter)", "another output_dir"):
        trainer.train(resume_from_checkpoint=resume)
    assert contents(tmp_path) == before


def test_a_run_goes_on_in_a_copy_of_the_repository_that_it_was_pushed_to(finished, tiny_runs, tmp_path):  # noqa: F811
    """With hub_strategy="checkpoint" the adapter is an export there, and the checkpoint a folder in it."""
    copy_of_it = tmp_path / "repository"
    export.save_adapter(tiny_runs.trainer(tmp_path / "run"), copy_of_it)
    shutil.copytree(finished / "checkpoint-1", copy_of_it / "last-checkpoint")
    trainer = tiny_runs.trainer(copy_of_it)
    trainer.train(resume_from_checkpoint=str(copy_of_it / "last-checkpoint"))
    trainer.save_model()
    assert (copy_of_it / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


def test_what_may_be_another_setting_may_be_one_in_such_a_copy(finished, tiny_runs, tmp_path):  # noqa: F811
    """It was refused as an export that has to be moved, whatever was allowed, and the setting was not named."""
    copy_of_it = tmp_path / "repository"
    export.save_adapter(tiny_runs.trainer(tmp_path / "run"), copy_of_it)
    shutil.copytree(finished / "checkpoint-1", copy_of_it / "last-checkpoint")
    resume = str(copy_of_it / "last-checkpoint")
    with told(ValueError, "learning_rate", "allow_other_settings"):
        tiny_runs.trainer(copy_of_it, learning_rate=2e-3).train(resume_from_checkpoint=resume)
    trainer = tiny_runs.trainer(copy_of_it, learning_rate=2e-3, allow_other_settings=True)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    assert "learning_rate" in str(seal.recorded_run(copy_of_it)["changed"])


@fault("S.arms_share_folder")
def test_an_export_that_came_meanwhile_is_not_saved_over(finished, tiny_runs, tmp_path):  # noqa: F811
    """Moved into the folder while a run that went on was training there."""
    run = tmp_path / "run"
    shutil.copytree(finished / "checkpoint-1", run / "checkpoint-1")
    trainer = tiny_runs.trainer(run)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    export.save_adapter(tiny_runs.trainer(tmp_path / "other", seed=11), tmp_path / "export")
    shutil.copytree(tmp_path / "export", run, dirs_exist_ok=True)
    before = contents(run)
    with told(ValueError, str(run), "holds an export (adapter)", "save_model('<folder>')"):
        trainer.save_model()
    assert contents(run) == before


@fault("S.run_folder_edited")
@pytest.mark.parametrize("what", ["a run", "a run that has not saved", "a folder of models"])
def test_an_export_does_not_take_the_place_of_more_than_an_export(what, finished, tiny_runs, tiny_model_dir, tmp_path):  # noqa: F811
    """`overwrite` removes what was there: a run by its output_dir, with all its checkpoints, or a folder that holds others."""
    folder, found = tmp_path / "folder", "checkpoint-1, checkpoint-2, trainer_state.json"
    if what == "a run":
        shutil.copytree(finished, folder)
    if what == "a folder of models":
        folder, found = tmp_path / "models", "mine"
        shutil.copytree(tiny_model_dir("qwen2"), folder / "mine")
    trainer = tiny_runs.trainer(tmp_path / ("folder" if what.startswith("a run") else "run"))
    if what == "a run that has not saved":
        found = ".qerl_lock"
    before = contents(tmp_path)
    with told(ValueError, str(folder), f"holds more than an export ({found}", "Name another folder"):
        export.save_adapter(trainer, folder, overwrite=True)
    with told(ValueError, str(folder), f"holds more than an export ({found}"):
        quantize_folder(tiny_model_dir("qwen2"), folder, overwrite=True)
    assert contents(tmp_path) == before


@fault("S.arms_share_folder", recovered=True)
def test_checkpoints_of_another_trainer_are_not_replaced_without_a_word(finished, tiny_runs, tmp_path, caplog):  # noqa: F811
    """TRL's own write no manifest: the same script with three lines changed writes into the same folder."""
    for step in (1, 900):
        shutil.copytree(finished / "checkpoint-1", tmp_path / f"run/checkpoint-{step}")
        (tmp_path / f"run/checkpoint-{step}" / seal.MANIFEST_NAME).unlink()
    tiny_runs.trainer(tmp_path / "run", max_steps=1).train()
    for word in (str(tmp_path / "run"), "checkpoint-1, checkpoint-900", "save_total_limit", "another output_dir"):
        assert word in caplog.text


@fault("S.resume_other_data")
@pytest.mark.parametrize("sealed", [True, False], ids=["export", "without a seal"])
def test_an_adapter_is_no_checkpoint(sealed, tiny_runs, tmp_path):  # noqa: F811
    """It ended with trainer_state.json, which was not found."""
    trainer = tiny_runs.trainer(tmp_path / "run")
    folder = str(tmp_path / "adapter")
    export.save_adapter(trainer, folder) if sealed else trainer.model.save_pretrained(folder)
    words = (
        "is an export (adapter)" if sealed else "has no trainer_state.json",
        "name a checkpoint-<step>",
        "load_adapter",
    )
    with told(ValueError, folder, *words):
        trainer.train(resume_from_checkpoint=folder)


@fault("S.resume_other_data")
def test_one_row_of_many_was_edited(tiny_runs, tmp_path):  # noqa: F811
    """Of 256 rows out of 1000 it was none."""
    rows = [f"say {number} " for number in range(1000)]
    tiny_runs.trainer(tmp_path / "run", dataset=Dataset.from_dict({"prompt": rows})).save_model()
    rows[5] = "say something else "
    trainer = tiny_runs.trainer(tmp_path / "run", dataset=Dataset.from_dict({"prompt": rows}))
    with told(ValueError, "dataset_sha256: the training data", "another output_dir", "allow_other_settings"):
        trainer.to_resume()


@fault("S.resume_other_data")
def test_another_token_ends_a_completion(tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    """No text becomes other tokens."""
    tiny_runs.command(tmp_path / "run", max_steps=1)
    tokenizer = copy.deepcopy(tiny_runs.tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(40)
    monkeypatch.setattr(tiny_runs, "tokenizer", tokenizer)
    with told(
        ValueError,
        str(tmp_path / "run"),
        "tokenizer_content_sha256: the tokenizer changed",
        "allow_other_settings=True",
    ):
        tiny_runs.command(tmp_path / "run", max_steps=2)


@fault("S.resume_other_data")
def test_a_threshold_of_trls_is_a_setting(tiny_runs, tmp_path):  # noqa: F811
    """`off_policy_mask_threshold` drops sequences; ours of warnings may be others."""
    tiny_runs.trainer(tmp_path / "run", off_policy_mask_threshold=0.5).save_model()
    tiny_runs.trainer(tmp_path / "run", off_policy_mask_threshold=0.5, rollout_mismatch_threshold=9.0).to_resume()
    trainer = tiny_runs.trainer(tmp_path / "run", off_policy_mask_threshold=1e-6)
    with told(ValueError, "off_policy_mask_threshold: 0.5 then, 1e-06 now", "allow_other_settings=True"):
        trainer.to_resume()


@fault("S.resume_other_data")
def test_a_conversation_in_other_tokens(tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    """The data are the same, and what the model reads is not."""
    tiny_runs.command(tmp_path / "run", max_steps=1)
    tokenizer = copy.deepcopy(tiny_runs.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %} please:"
    monkeypatch.setattr(tiny_runs, "tokenizer", tokenizer)
    words = (
        "tokenizer_content_sha256: the tokenizer changed",
        "template",
        "allow_other_settings=True",
    )
    with told(ValueError, str(tmp_path / "run"), *words):
        tiny_runs.command(tmp_path / "run", max_steps=2)


@fault("S.resume_other_data")
def test_an_optimizer_that_was_given_ready(tiny_runs, tmp_path):  # noqa: F811
    """No argument names it."""

    def command(steps: int, **options):
        trainer = tiny_runs.trainer(tmp_path / "run", max_steps=steps)
        trainer.optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], **options)
        trainer.train(resume_from_checkpoint=trainer.to_resume())

    command(1, lr=1e-3)
    command(2, lr=1e-3)
    with told(ValueError, "optimizer: 'AdamW' then, not set now", "choose another output_dir"):
        tiny_runs.command(tmp_path / "run", max_steps=3)


@fault("S.resume_other_data", recovered=True)
def test_a_reward_function_that_was_rewritten_under_its_name_is_told_and_recorded(
    finished,
    tiny_runs,  # noqa: F811
    tmp_path,
    caplog,
):
    """A mended one goes on, but not without a word."""
    run = shutil.copytree(finished, tmp_path / "run")

    def spread_reward(completions, **kwargs):
        return [float(len(text)) for text in completions]

    line = "rewards_sha256.spread_reward: its source changed"
    tiny_runs.command(run, reward=spread_reward, max_steps=3)
    assert f"with other settings: {line}" in caplog.text
    assert seal.recorded_run(run)["changed"] == [line]


@fault("R8.two_runs_one_folder")
def test_a_folder_is_locked_by_whatever_path(finished, tmp_path, monkeypatch):
    """Another process holds it under its own name; here it is named by a link, and from another working directory."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    code = f"import fcntl, sys; f = open({str(tmp_path / 'run/.qerl_lock')!r}, 'w'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline()
        monkeypatch.chdir(tmp_path)
        for path in ("link", "../" + tmp_path.name + "/run", Path("run/.")):
            with told(RuntimeError, str(tmp_path / "run"), "Another run", "choose another output_dir"):
                run_folder.lock(path)
    finally:
        holder.communicate()
