"""Publishing to a stand-in Hub on 127.0.0.1: create, LFS preupload, commit, refusals. Never the network."""

import json
import logging
import shutil

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from qerl_trl.checkpoint import seal
from qerl_trl.publish import card, export, hub
from qerl_trl.publish.load import TrainedPolicy
from tests.faults.tiny_runs import flip_a_bit, make_policy
from tests.hub_server import REPO, TOKEN


@pytest.fixture(autouse=True)
def no_token_anywhere(capsys, caplog):
    """The token is in no output of a test."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err + caplog.text


@pytest.fixture(scope="module")
def exported(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """Folders with the three kinds of export, made once."""
    root = tmp_path_factory.mktemp("exports")
    settings = {"base_format": "nvfp4", "model": "someone/base", "scale_rule": "rtn"}
    trained = TrainedPolicy(make_policy(tiny_model_dir("llama"), dtype="bfloat16"), tiny_tokenizer, settings)
    facts = {"kind": "adapter", "settings": settings, "dataset": None}

    def write(folder, record):
        card.write(folder, facts, record)

    export.save_adapter(trained, root / "adapter", card=write)
    export.save_merged(trained, root / "merged", max_shard_bytes=200_000, card=write)
    export.save_base(trained, root / "base", card=write)
    return root


@pytest.mark.parametrize("kind", ["adapter", "merged", "base"])
def test_what_is_published_is_the_folder_privately_and_announced(server, exported, tmp_path, kind):
    printed_lines = []
    base = "someone/base" if kind == "adapter" else None
    url = hub.push_folder(exported / kind, REPO, base_model=base, notify=printed_lines.append)
    assert printed_lines[0] == f"Publishing to {server.endpoint}/{REPO} (private: only you and your organization)"
    assert url.startswith(f"{server.endpoint}/{REPO}/commit/")
    repo = server.repos[REPO]
    assert repo["private"] is True and len(repo["commits"]) == 1
    for path in (exported / kind).iterdir():
        if path.name not in ("README.md", "adapter_config.json", seal.MANIFEST_NAME):
            assert repo["files"][path.name] == path.read_bytes(), path.name
    readme = server.text(REPO)["README.md"]
    assert f"# {REPO.split('/')[1]}" in readme and REPO in readme
    for name, data in repo["files"].items():
        (tmp_path / name).write_bytes(data)
    assert seal.problems(tmp_path) == []  # of the card and the configuration that were sent, not of those here
    if kind == "merged":
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert model.config.num_hidden_layers == 2


def test_the_announcement_comes_before_any_request(server, exported):
    def notify(text):
        assert not text.startswith("Publishing") or server.requests == []

    hub.push_folder(exported / "base", REPO, notify=notify)
    assert server.requests[0] == "POST /api/repos/create"


def test_the_same_again_changes_nothing_and_an_update_removes_stale_shards(server, exported, tiny_model_dir, tmp_path):
    hub.push_folder(exported / "merged", REPO)
    uploads = sum(server.uploads.values())
    assert sum("safetensors" in name for name in server.repos[REPO]["files"]) > 4
    assert hub.push_folder(exported / "merged", REPO).endswith(f"{1:040x}")
    assert sum(server.uploads.values()) == uploads and len(server.repos[REPO]["commits"]) == 1
    other = make_policy(tiny_model_dir("llama"), dtype="bfloat16", size=0.02)
    export.save_merged(TrainedPolicy(other, None, {"base_format": "nvfp4", "model": "someone/base"}), tmp_path / "m")
    hub.push_folder(tmp_path / "m", REPO)
    assert {name for name in server.repos[REPO]["files"] if "safetensors" in name} == {"model.safetensors"}
    assert len(server.repos[REPO]["commits"]) == 2


def test_a_missing_branch_is_created(server, exported):
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


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("offline", "offline mode"),
        ("no token", "There is no Hub token"),
        ("wrong token", "refused the token"),
        ("foreign", "may not write to stranger/model"),
        ("exists and is private", f"{REPO} exists and is private"),
    ],
)
def test_nothing_is_published_and_the_reason_is_named(case, message, server, exported, monkeypatch):
    printed_lines, options, repo = [], {}, "stranger/model" if case == "foreign" else REPO
    if case == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if case == "no token":
        monkeypatch.setattr(hub, "get_token", lambda: None)
    if case == "wrong token":
        options = {"token": "hf_wrong"}
    if case == "exists and is private":
        server.put(REPO)
        options = {"private": False}
    with pytest.raises(hub.HubError, match=message):
        hub.push_folder(exported / "adapter", repo, "someone/base", notify=printed_lines.append, **options)
    assert printed_lines[0].startswith("Publishing to") and not server.uploads
    assert not [name for found in server.repos.values() for name in found["files"] if name != ".gitattributes"]
    assert server.requests == [] or case not in ("offline", "no token")  # not even for the base


def test_other_content_is_refused_unless_forced(server, exported):
    server.put(REPO, **{"config.json": b"{}", "notes.txt": b"mine"})
    with pytest.raises(hub.HubError, match="already contains other files"):
        hub.push_folder(exported / "base", REPO)
    assert server.repos[REPO]["files"]["config.json"] == b"{}" and not server.uploads
    hub.push_folder(exported / "base", REPO, force=True)
    assert server.repos[REPO]["files"]["notes.txt"] == b"mine"
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


@pytest.mark.parametrize("stored", ["packed", "dense"])
def test_the_card_loads_a_packed_base_so_that_peft_can_adapt_it(server, exported, stored):
    config = {"quantization_config": {"quant_method": "compressed-tensors"}} if stored == "packed" else {}
    server.put("someone/base", **{"config.json": json.dumps({"model_type": "llama", **config}).encode()})
    hub.push_folder(exported / "adapter", REPO, base_model="someone/base")
    assert ("CompressedTensorsConfig(dequantize=True)" in server.text(REPO)["README.md"]) == (stored == "packed")


def test_a_folder_of_something_else_and_a_damaged_one(server, exported, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be published: qerl_manifest\.json is missing"):
        hub.push_folder(tmp_path, REPO)
    damaged = shutil.copytree(exported / "base", tmp_path / "damaged")
    flip_a_bit(damaged / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be published: model\.safetensors has other content"):
        hub.push_folder(damaged, REPO)
    assert server.requests == []


def test_files_that_are_not_published_stay_here(server, exported, tmp_path):
    folder = shutil.copytree(exported / "base", tmp_path / "more")
    others = ("notes.json", "optimizer.pt", "training_args.bin")
    for name in others:
        (folder / name).write_text(TOKEN)
    seal.seal(folder, seal.recorded_run(folder))
    printed_lines = []
    hub.push_folder(folder, REPO, notify=printed_lines.append)
    assert ", ".join(others) in printed_lines[0] and not set(others) & set(server.repos[REPO]["files"])
    assert "notes" not in server.text(REPO)[seal.MANIFEST_NAME]
