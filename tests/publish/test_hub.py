"""Publishing against a stand-in Hub on 127.0.0.1: create, LFS preupload, commit, refusals, dropped connections. Never the network."""

import json
import logging
import shutil
import types

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from qerl_trl.checkpoint import seal
from qerl_trl.publish import card, export, hub
from qerl_trl.publish.load import TrainedPolicy
from tests.hub_server import TOKEN
from tests.publish.test_export import make_policy

REPO = "tester/model"


@pytest.fixture(autouse=True)
def no_token_anywhere(capsys, caplog):
    """Whatever a test makes the code say, the token is not in it."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    assert TOKEN not in caplog.text


@pytest.fixture(scope="module")
def exported(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """Folders with the three kinds of export, made once."""
    root = tmp_path_factory.mktemp("exports")
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16")
    trained = TrainedPolicy(
        policy, tiny_tokenizer, {"base_format": "nvfp4", "model": "someone/base", "scale_rule": "rtn"}
    )
    facts = {"kind": "adapter", "settings": trained.settings, "dataset": None}
    export.save_adapter(trained, root / "adapter", card=lambda folder, record: card.write(folder, facts, record))
    export.save_merged(
        trained,
        root / "merged",
        max_shard_bytes=200_000,
        card=lambda folder, record: card.write(folder, facts, record),
    )
    export.save_base(trained, root / "base", card=lambda folder, record: card.write(folder, facts, record))
    return root


@pytest.mark.parametrize("kind", ["adapter", "merged", "base"])
def test_what_is_published_is_the_folder_privately_and_announced(server, exported, tmp_path, kind):
    told = []
    base = "someone/base" if kind == "adapter" else None
    url = hub.push_folder(exported / kind, REPO, base_model=base, notify=told.append)
    assert told[0] == f"Publishing to {server.endpoint}/{REPO} (private: only you and your organization)"
    assert url.startswith(f"{server.endpoint}/{REPO}/commit/")
    repo = server.repos[REPO]
    assert repo["private"] is True
    assert len(repo["commits"]) == 1
    for path in (exported / kind).iterdir():
        if path.name not in ("README.md", "adapter_config.json", seal.MANIFEST_NAME):
            assert repo["files"][path.name] == path.read_bytes(), path.name
    assert f"# {REPO.split('/')[1]}" in server.text(REPO)["README.md"]
    assert REPO in server.text(REPO)["README.md"]
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name, data in repo["files"].items():
        (downloaded / name).write_bytes(data)
    assert seal.problems(downloaded) == []  # of the card and the configuration that were sent, not of those here
    if kind == "merged":
        model = AutoModelForCausalLM.from_pretrained(downloaded, dtype=torch.bfloat16)
        assert model.config.num_hidden_layers == 2


def test_the_announcement_comes_before_any_request(server, exported):
    def notify(text):
        if text.startswith("Publishing"):
            assert server.requests == []

    hub.push_folder(exported / "base", REPO, notify=notify)
    assert server.requests[0] == "POST /api/repos/create"


def test_uploading_again_changes_nothing(server, exported):
    hub.push_folder(exported / "merged", REPO)
    uploads = sum(server.uploads.values())
    url = hub.push_folder(exported / "merged", REPO)
    assert sum(server.uploads.values()) == uploads
    assert len(server.repos[REPO]["commits"]) == 1
    assert url.endswith(f"{1:040x}")


def test_an_update_removes_stale_shards(server, exported, tiny_model_dir, tiny_tokenizer, tmp_path):
    hub.push_folder(exported / "merged", REPO)
    old = {name for name in server.repos[REPO]["files"] if name.endswith(".safetensors")}
    assert len(old) > 3
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16", size=0.02)
    trained = TrainedPolicy(policy, tiny_tokenizer, {"base_format": "nvfp4", "model": "someone/base"})
    export.save_merged(trained, tmp_path / "merged")
    hub.push_folder(tmp_path / "merged", REPO)
    assert {name for name in server.repos[REPO]["files"] if "safetensors" in name} == {"model.safetensors"}
    assert len(server.repos[REPO]["commits"]) == 2


def test_a_branch_that_is_not_there_is_made(server, exported):
    """At ab98d3d the Hub's 404 was shown, and an empty repository was left."""
    for _ in range(2):
        url = hub.push_folder(exported / "base", REPO, revision="v1")
    assert server.repos[REPO]["branches"] == ["v1"] and "model.safetensors" in server.repos[REPO]["files"]
    assert url.startswith(server.endpoint)
    assert any(request.startswith("POST") and request.endswith("/commit/v1") for request in server.requests)


def test_dropped_connections_are_retried(server, exported):
    server.drop_uploads, server.drop_commits = 2, 1
    hub.push_folder(exported / "base", REPO)
    assert len(server.repos[REPO]["commits"]) == 1
    assert server.repos[REPO]["files"]["model.safetensors"] == (exported / "base/model.safetensors").read_bytes()


def test_an_interrupted_upload_leaves_nothing_and_goes_on_where_it_was(server, exported):
    server.fail = {r"POST /api/models/.*/commit/.*": 503}
    with pytest.raises(hub.HubError, match="answered 503"):
        hub.push_folder(exported / "merged", REPO)
    assert set(server.repos[REPO]["files"]) == {".gitattributes"}
    sent = dict(server.uploads)
    assert sent
    server.fail = {}
    hub.push_folder(exported / "merged", REPO)
    assert dict(server.uploads) == sent  # not one large file was sent twice
    assert len(server.repos[REPO]["commits"]) == 1


def test_no_network(server, exported):
    server.close()
    with pytest.raises(hub.HubError, match="connection to the Hub failed") as error:
        hub.push_folder(exported / "base", REPO)
    assert "Run the same command again" in str(error.value)
    assert error.value.__cause__ is None


def test_offline_mode(server, exported, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub.HubError, match="offline mode"):
        hub.push_folder(exported / "base", REPO)
    assert server.requests == []


def test_missing_token(server, exported, monkeypatch, capsys):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(hub.HubError, match="no Hub token"):
        hub.push_folder(exported / "base", REPO)
    assert server.requests == []
    assert capsys.readouterr().out.startswith("Publishing to")


def test_refused_token(server, exported):
    with pytest.raises(hub.HubError, match="refused the token"):
        hub.push_folder(exported / "base", REPO, token="hf_wrong")
    assert server.repos == {}


def test_a_foreign_namespace(server, exported):
    with pytest.raises(hub.HubError, match="may not write to stranger/model"):
        hub.push_folder(exported / "base", "stranger/model")
    assert server.repos == {}


def test_the_token_is_removed_from_the_servers_own_words(server, exported):
    server.fail = {r"POST /api/repos/create": 418}  # its answer quotes the Authorization header
    with pytest.raises(hub.HubError) as error:
        hub.push_folder(exported / "base", REPO)
    assert "418" in str(error.value)
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("exists_private", "asked_private", "message"), [(False, True, "is PUBLIC"), (True, False, "is private")]
)
def test_visibility_of_an_existing_repository_is_never_a_surprise(
    server, exported, exists_private, asked_private, message
):
    server.put(REPO, private=exists_private)
    with pytest.raises(hub.HubError, match=message):
        hub.push_folder(exported / "base", REPO, private=asked_private)
    assert set(server.repos[REPO]["files"]) == {".gitattributes"}


def test_public_on_purpose(server, exported):
    told = []
    hub.push_folder(exported / "base", REPO, private=False, notify=told.append)
    assert "PUBLIC" in told[0]
    assert server.repos[REPO]["private"] is False


def test_other_content_is_refused_unless_forced(server, exported):
    server.put(REPO, **{"config.json": b"{}", "notes.txt": b"mine"})
    with pytest.raises(hub.HubError, match="already contains other files"):
        hub.push_folder(exported / "base", REPO)
    assert server.repos[REPO]["files"]["config.json"] == b"{}"
    assert not server.uploads
    hub.push_folder(exported / "base", REPO, force=True)
    assert server.repos[REPO]["files"]["notes.txt"] == b"mine"


def test_another_kind_of_export_is_refused(server, exported):
    hub.push_folder(exported / "base", REPO)
    with pytest.raises(hub.HubError, match="already contains a nvfp4 base"):
        hub.push_folder(exported / "merged", REPO)


def test_adapter_of_a_local_base_is_refused_before_anything_happens(server, exported):
    with pytest.raises(ValueError, match="nobody could load"):
        hub.push_folder(exported / "adapter", REPO)
    assert server.requests == []
    hub.push_folder(exported / "adapter", REPO, base_model="someone/base")
    config = json.loads(server.repos[REPO]["files"]["adapter_config.json"])
    assert config["base_model_name_or_path"] == "someone/base"
    assert "base_model: someone/base" in server.text(REPO)["README.md"]
    local = json.loads((exported / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert local not in "".join(server.text(REPO).values())


def test_without_a_token_nobody_is_asked_for_the_base(server, exported, monkeypatch):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    told = []
    with pytest.raises(hub.HubError, match="There is no Hub token"):
        hub.push_folder(exported / "adapter", REPO, base_model="someone/base", notify=told.append)
    assert server.requests == []
    assert told[0].startswith("Publishing to")


@pytest.mark.parametrize("stored", ["packed", "dense"])
def test_the_card_loads_a_packed_base_so_that_peft_can_adapt_it(server, exported, stored):
    config = {"quantization_config": {"quant_method": "compressed-tensors"}} if stored == "packed" else {}
    server.put("someone/base", **{"config.json": json.dumps({"model_type": "llama", **config}).encode()})
    hub.push_folder(exported / "adapter", REPO, base_model="someone/base")
    assert ("CompressedTensorsConfig(dequantize=True)" in server.text(REPO)["README.md"]) == (stored == "packed")


def test_a_damaged_folder_and_a_folder_of_something_else(server, exported, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be published: qerl_manifest\.json is missing"):
        hub.push_folder(tmp_path, REPO)
    damaged = tmp_path / "damaged"
    shutil.copytree(exported / "base", damaged)
    with open(damaged / "model.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    with pytest.raises(ValueError, match=r"cannot be published: model\.safetensors has other content"):
        hub.push_folder(damaged, REPO)
    assert server.requests == []


def resealed(folder, destination, **texts):
    """A copy of an export with further files, sealed."""
    shutil.copytree(folder, destination)
    for name, text in texts.items():
        (destination / name).write_text(text)
    seal.seal(destination, seal.recorded_run(destination))
    return destination


def test_a_file_with_the_token_is_not_uploaded(server, exported, tmp_path):
    config = json.loads((exported / "base/config.json").read_text())
    leaky = resealed(exported / "base", tmp_path / "leaky", **{"config.json": json.dumps({**config, "note": TOKEN})})
    with pytest.raises(hub.HubError, match=r"config\.json contains the value of token"):
        hub.push_folder(leaky, REPO, token=TOKEN)
    assert server.requests == []


def test_files_that_are_not_published_stay_here(server, exported, tmp_path):
    folder = resealed(
        exported / "base", tmp_path / "more", **{"notes.json": TOKEN, "training_args.bin": "x", "optimizer.pt": "x"}
    )
    told = []
    hub.push_folder(folder, REPO, notify=told.append)
    assert "notes.json, optimizer.pt, training_args.bin" in told[0]
    assert not {"notes.json", "training_args.bin", "optimizer.pt"} & set(server.repos[REPO]["files"])
    assert "notes" not in server.text(REPO)[seal.MANIFEST_NAME]


def test_other_ranks_upload_nothing(server, exported, monkeypatch):
    trainer = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(is_main_process=False), args=types.SimpleNamespace(output_dir="run")
    )
    monkeypatch.setattr(export, "save_adapter", lambda *a, **k: {"kind": "adapter"})
    assert hub.push_adapter(trainer, REPO, facts={"kind": "adapter", "settings": {}}) is None
    assert server.requests == []


def test_an_adapter_that_was_not_sent_is_not_sent_for_the_next_one(server, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policies = [make_policy(tiny_model_dir("qwen2"), size=size) for size in (0.1, 0.3)]
    server.fail = {r"POST /api/models/.*/commit/.*": 401}
    with pytest.raises(hub.HubError):
        hub.push_adapter(policies[0], REPO, "someone/base")
    server.fail = {}
    hub.push_adapter(policies[1], REPO, "someone/base")
    sent = load(server.repos[REPO]["files"]["adapter_model.safetensors"])
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B"
    assert torch.equal(sent[f"{name}.weight"], policies[1].state_dict()[f"{name}.default.weight"])
