"""Faults of what is read and written: model folders, manifests, run folders. They passed without a word at 843f908."""

import copy
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qerl_trl
from qerl_trl.checkpoint import seal
from qerl_trl.cli import evaluate, make
from qerl_trl.model import loading
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.headers import INDEX_NAME
from qerl_trl.publish import export, hub
from qerl_trl.publish.load import ADAPTER_FILE, load_any
from qerl_trl.publish.quantize import quantize_folder
from qerl_trl.run import folder as run_folder
from tests.faults.catalog import fault, told
from tests.faults.tiny_runs import tiny_runs  # noqa: F401  (a fixture)
from tests.publish.test_export import make_policy
from tests.publish.test_hub import REPO, server  # noqa: F401  (a fixture)


@pytest.fixture
def dense(tiny_model_dir, tmp_path) -> Path:
    """A dense model, to be damaged."""
    return shutil.copytree(tiny_model_dir("llama"), tmp_path / "dense")


def edit_header(file: Path, change) -> None:
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header = change(header) or header
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def shift(header: dict) -> None:
    """The second tensor's bytes become the last of the first one's and some of its own."""
    first, second = sorted(
        (name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )[:2]
    end = header[second]["data_offsets"][1] - 32
    header[second]["data_offsets"] = [header[first]["data_offsets"][1] - 32, end]


def negative(header: dict) -> None:
    header["lm_head.weight"]["data_offsets"] = [-64, header["lm_head.weight"]["data_offsets"][1] - 64]


@fault("S.negative_offsets")
@pytest.mark.parametrize("change", [shift, negative], ids=["overlapping", "negative"])
def test_offsets_that_safetensors_refuses_are_not_quantized(change, dense, tmp_path):
    edit_header(dense / "model.safetensors", change)
    with told(ValueError, "dense/model.safetensors", "offset" if change is shift else "-64", "download it again"):
        quantize_folder(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@fault("S.odd_header")
@pytest.mark.parametrize(
    "change",
    [lambda h: [1], lambda h: {"x": 1}, lambda h: h["model.norm.weight"].pop("data_offsets") and None],
    ids=["list", "no entry", "no offsets"],
)
def test_an_odd_header_is_named(change, dense, tmp_path):
    edit_header(dense / "model.safetensors", change)
    with told(ValueError, "dense/model.safetensors", "not a whole safetensors file", "download it again"):
        quantize_folder(dense, tmp_path / "out")


@fault("S.odd_header", recovered=True)
def test_a_legal_integer_buffer_is_copied(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    buffers = {"model.positions": torch.arange(7), "model.flags": torch.tensor([True, False])}
    save_file({**tensors, **buffers}, dense / "model.safetensors", metadata={"format": "pt"})
    quantize_folder(dense, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in buffers.items())


def by_index(folder: Path, other: Path) -> None:
    weights = dict.fromkeys(load_file(other / "model.safetensors"), f"../{other.name}/model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def by_link(folder: Path, other: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")


@fault("S.path_leads_out")
@pytest.mark.parametrize("lead", [by_index, by_link])
def test_files_outside_of_the_folder_are_loaded_and_not_quantized(lead, dense, tiny_model_dir, tmp_path):
    other = shutil.copytree(tiny_model_dir("llama"), tmp_path / "other")
    lead(dense, other)
    from_pretrained(dense)
    with told(ValueError, "dense", str(other / "model.safetensors"), "leads out", "name the folder"):
        quantize_folder(dense, dense.parent / "out")


@fault("S.path_leads_out")
def test_a_linked_text_is_not_copied_into_what_will_be_published(dense, tmp_path):
    (tmp_path / "private.json").write_text('"a secret"')
    (dense / "tokenizer.json").symlink_to(tmp_path / "private.json")
    with told(ValueError, "dense/tokenizer.json", "leads out", "copy them here"):
        quantize_folder(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_links_of_the_hubs_cache_are_followed(tiny_model_dir, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in tiny_model_dir("llama").iterdir():
        shutil.copyfile(file, blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"hash-of-{file.name}", snapshot))
    quantize_folder(snapshot, tmp_path / "out")
    from_pretrained(snapshot)


# --- manifests


def write_manifest(folder: Path, content) -> None:
    (folder / seal.MANIFEST_NAME).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


DAMAGED = {
    "list": [],
    "not UTF-8": b"\xff\xfe{}",
    "no bytes": seal.manifest({"trainer_state.json": {"sha256": ""}}, {}),
    "names another": seal.manifest({"../x": {"bytes": 1, "sha256": ""}}, {}),
    "no run": {"files": {}},
}


@fault("S.damaged_manifest", recovered=True)
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_manifest_is_a_damaged_checkpoint(content, tmp_path, caplog):
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text("{}")
        seal.seal(tmp_path / f"checkpoint-{step}")
    write_manifest(tmp_path / "checkpoint-2", content)
    assert seal.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert "checkpoint-2" in caplog.text and "unreadable" in caplog.text and "older checkpoint" in caplog.text


@fault("S.damaged_manifest")
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_an_export_with_a_damaged_manifest_is_named_and_made_again(content, dense, tmp_path):
    out = tmp_path / "out"
    quantize_folder(dense, out)
    write_manifest(out, content)
    with told(ValueError, str(out), "unreadable", "export it"):
        hub.push_folder(out, REPO)
    with told(ValueError, str(out), "already exists", "overwrite"):
        quantize_folder(dense, out)
    quantize_folder(dense, out, overwrite=True)
    assert not seal.problems(out)


@fault("S.manifest_names_outside")
@pytest.mark.parametrize("by", ["name", "link"])
def test_a_file_outside_of_the_folder_is_not_uploaded(by, server, dense, tmp_path):  # noqa: F811
    quantize_folder(dense, tmp_path / "out")
    (tmp_path / "LICENSE").write_text("private")
    manifest = seal.read_manifest(tmp_path / "out")
    name = "../LICENSE" if by == "name" else "LICENSE"
    if by == "link":
        (tmp_path / "out/LICENSE").symlink_to(tmp_path / "LICENSE")
    entry = {"bytes": 7, "sha256": seal.sha256(tmp_path / "LICENSE")}
    write_manifest(tmp_path / "out", seal.manifest({**manifest["files"], name: entry}, manifest["run"]))
    words = ("leads out", "copy them here") if by == "link" else ("outside", "Export")
    with told(ValueError, str(tmp_path / "out"), "LICENSE", *words):
        hub.push_folder(tmp_path / "out", REPO)
    assert server.requests == []


def test_what_was_published_is_published_again(server, dense, tmp_path):  # noqa: F811
    """The manifest on the Hub is of other files than the folder's: its card is written anew."""
    quantize_folder(dense, tmp_path / "out")
    hub.push_folder(tmp_path / "out", REPO)
    there = tmp_path / "there"
    there.mkdir()
    (there / seal.MANIFEST_NAME).write_text(server.text(REPO)[seal.MANIFEST_NAME])
    assert "model.safetensors" in seal.read_manifest(there)["files"]
    hub.push_folder(tmp_path / "out", REPO)


# --- run folders


@pytest.fixture(scope="module")
def whole_run(tiny_model_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    """What a run leaves behind."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"base_format": "nvfp4", "dtype": "float32", "model": str(tiny_model_dir("llama"))}
    with run_folder.sealing(folder, settings):
        make_policy(tiny_model_dir("llama")).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
    return folder


def edit_adapter(change):
    def edit(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_FILE)
        change(tensors)
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})

    return edit


def times_1000(tensors: dict) -> None:
    for tensor in tensors.values():
        tensor.mul_(1000)


def half_of_it(tensors: dict) -> None:
    for name in sorted(tensors)[::2]:
        del tensors[name]


def put_nan(tensors: dict) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def double_alpha(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))


EDITS = {
    "nan": edit_adapter(put_nan),
    "half": edit_adapter(half_of_it),
    "times 1000": edit_adapter(times_1000),
    "alpha": double_alpha,
}
READERS = {
    "merge": lambda folder, out: make.merge(folder, out),
    "push": lambda folder, out: make.push("adapter", folder, REPO, base_model="someone/base"),
    "eval": lambda folder, out: evaluate.evaluate(str(folder), data="none.jsonl", output=out),
    "eval with vLLM": lambda folder, out: evaluate.evaluate(str(folder), data="none.jsonl", engine="vllm", output=out),
}


@fault("S.run_folder_edited")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_run_folder_is_not_read(edit, read, whole_run, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    edit(folder)
    with told(ValueError, str(folder), "adapter_", "not as the run wrote it", "checkpoint-<step>"):
        read(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


#: files that a run did not write -> what they would have made of it
ADDED = {
    "special_tokens_map.json": '{"eos_token": "7", "pad_token": "8"}',  # where its answers end
    "added_tokens.json": '{"EVIL": 3}',  # other tokens of the same text
    "additional_chat_templates/tool_use.jinja": "EVIL{{ messages }}",
    "generation_config.json": '{"eos_token_id": 3}',
    "config.json": '{"model_type": "gpt2"}',  # another class of tokenizer
    "merges.txt": "a b",
    "adapter_model.bin": "a pickle",
}


def put(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(ADDED[name])


@fault("S.run_folder_edited")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", ADDED)
def test_what_was_added_to_a_run_folder_is_not_read(name, read, whole_run, tmp_path):
    """It was merged, sealed and published as if the run had written it."""
    folder = shutil.copytree(whole_run, tmp_path / "run")
    put(folder, name)
    with told(
        ValueError, str(folder), f"{name} was added after it was sealed", "checkpoint-<step>", "remove qerl_manifest"
    ):
        read(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@fault("S.run_folder_edited")
def test_what_was_added_to_a_run_folder_is_found_by_hand(whole_run, tiny_model_dir, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    put(folder, "special_tokens_map.json")
    with told(ValueError, str(folder), "special_tokens_map.json was added", "Copy or download it again"):
        qerl_trl.load_adapter(qerl_trl.from_pretrained(tiny_model_dir("llama"), dtype=torch.float32), folder)


def test_what_may_lie_beside_a_run(whole_run, tmp_path):
    """Figures, logs, checkpoints, exports; and a tokenizer, where the run saved none."""
    folder = shutil.copytree(whole_run, tmp_path / "run")
    for name in (
        "results.json",
        "eval-gsm8k.json",
        "before.json",
        "notes.txt",
        "checkpoint-2/tokenizer.json",
        "e/config.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert seal.added(folder) == []
    files = set(seal.read_manifest(folder)["files"]) & {ADAPTER_FILE, "adapter_config.json"}
    seal.seal(folder, seal.recorded_run(folder), names=files)
    assert seal.added(folder) == []


def test_templates_in_a_folder_of_their_own_are_sealed_and_exported(tiny_model_dir, tiny_tokenizer, tmp_path):
    """Of a tokenizer with several: they are the run's."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "TOOLS{{ messages }}"}
    with run_folder.sealing(tmp_path / "run", {"base_format": "nvfp4", "model": "someone/base"}):
        make_policy(tiny_model_dir("llama")).save_pretrained(tmp_path / "run")
        tokenizer.save_pretrained(tmp_path / "run")
    name = "additional_chat_templates/tool_use.jinja"
    assert name in seal.read_manifest(tmp_path / "run")["files"]
    export.copy_adapter(tmp_path / "run", tmp_path / "adapter")
    assert (tmp_path / "adapter" / name).read_text() == "TOOLS{{ messages }}"
    assert name in seal.read_manifest(tmp_path / "adapter")["files"]
    (tmp_path / "run" / name).write_text(ADDED["additional_chat_templates/tool_use.jinja"])
    with told(ValueError, name, "not as the run wrote it", "checkpoint-<step>"):
        export.copy_adapter(tmp_path / "run", tmp_path / "again")


@fault("S.run_folder_edited")
@pytest.mark.parametrize(("edit", "message"), [("nan", "NaN or infinite"), ("half", "lacks 14 of 28 tensors")])
def test_a_bad_adapter_is_refused_without_a_seal_or_with_a_new_one(edit, message, whole_run, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    EDITS[edit](folder)
    seal.seal(folder, seal.recorded_run(folder))
    with told(ValueError, str(folder / ADAPTER_FILE), message, "again"):
        make.merge(folder, tmp_path / "out")


def test_a_whole_run_folder_is_merged(whole_run, tmp_path):
    make.merge(whole_run, tmp_path / "out")
    export.copy_adapter(whole_run, tmp_path / "adapter")


# --- model folders


@pytest.fixture(scope="module")
def sealed(tiny_model_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    """An NVFP4 model with its manifest."""
    source = shutil.copytree(tiny_model_dir("llama"), tmp_path_factory.mktemp("models") / "dense")
    tiny_tokenizer.save_pretrained(source)
    quantize_folder(source, source.with_name("sealed"))
    return source.with_name("sealed")


def edit_json(name: str, **values):
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        assert content.keys() >= values.keys()
        (folder / name).write_text(json.dumps({**content, **values}))

    return edit


def flip_a_bit(folder: Path, name: str = "model.safetensors") -> None:
    with open(folder / name, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 4]))


def nan_in_a_norm(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_weights(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    index = dict.fromkeys(load_file(folder / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    seal.seal(folder, seal.recorded_run(folder))
    shutil.copyfile(folder / "model-00001-of-00001.safetensors", folder / "model.safetensors")  # read in its place


FOLDER_EDITS = {
    "config": (edit_json("config.json", rms_norm_eps=1e-3), "config.json"),
    "tokenizer": (edit_json("tokenizer_config.json", eos_token="a"), "tokenizer_config.json"),
    "bit": (flip_a_bit, "model.safetensors"),
    "norm": (nan_in_a_norm, "model.safetensors"),
    "added": (add_weights, "model.safetensors was added"),
}
LOADERS = {
    "from_pretrained": qerl_trl.from_pretrained,
    "pretrained_kwargs": lambda folder: (qerl_trl.pretrained_kwargs(folder), loading.finish()),
    "eval": lambda folder: load_any(str(folder)),
}


@fault("S.model_folder_edited")
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize(("edit", "named"), FOLDER_EDITS.values(), ids=FOLDER_EDITS)
def test_an_edited_model_folder_is_not_loaded(edit, named, load, sealed, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_AT_ONCE_BYTES", 100_000)  # less than the weights, more than everything else
    folder = shutil.copytree(sealed, tmp_path / "model")
    edit(folder)
    with told(ValueError, str(folder), named, "Export or download it again", "remove qerl_manifest.json"):
        load(folder)


@fault("S.model_folder_edited")
def test_a_flipped_bit_is_found_before_the_first_step(sealed, tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(loading, "_AT_ONCE_BYTES", 100_000)
    folder = shutil.copytree(sealed, tmp_path / "model")
    flip_a_bit(folder)
    monkeypatch.setattr(tiny_runs, "model", str(folder))
    trainer = tiny_runs.trainer(tmp_path / "run")
    with told(ValueError, str(folder), "model.safetensors", "download it again"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_whole_model_folder_is_read_once(sealed, tmp_path, monkeypatch):
    folder = shutil.copytree(sealed, tmp_path / "model")
    read = []
    monkeypatch.setattr(seal, "sha256", lambda path, of=seal.sha256: (read.append(path.name), of(path))[1])
    monkeypatch.setattr(loading, "_AT_ONCE_BYTES", 100_000)
    for _ in range(2):
        qerl_trl.from_pretrained(folder)
    assert read.count("model.safetensors") == 1
    (folder / seal.MANIFEST_NAME).unlink()
    edit_json("config.json", rms_norm_eps=1e-3)(folder)
    qerl_trl.from_pretrained(folder)


@fault("S.dense_tensor_nan")
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_with_nan_is_not_quantized(value, dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors["model.embed_tokens.weight"][5, 7] = value
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    words = ("dense/model.safetensors", "model.embed_tokens.weight", "1 of", "NaN or infinite", "Download")
    with told(ValueError, *words):
        quantize_folder(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@fault("S.dense_tensor_nan")
def test_a_model_with_nan_is_not_loaded(sealed, tmp_path):
    folder = shutil.copytree(sealed, tmp_path / "model")
    nan_in_a_norm(folder)
    (folder / seal.MANIFEST_NAME).unlink()
    with told(ValueError, str(folder / "model.safetensors"), "model.norm.weight", "NaN or infinite", "Download"):
        from_pretrained(folder)


@fault("S.dense_tensor_nan")
@pytest.mark.parametrize("save", [export.save_merged, export.save_base, export.save_merged_nvfp4, export.save_adapter])
def test_a_policy_with_nan_is_not_exported(save, tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("llama"), size=0.2)
    name = "lora_A" if save is export.save_adapter else "model.norm.weight"
    with torch.no_grad():
        next(p for n, p in policy.named_parameters() if name in n).view(-1)[0] = float("nan")
    with told(ValueError, str(tmp_path), name, "NaN or infinite", "again"):
        save(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@fault("S.dense_tensor_nan")
def test_a_dense_base_with_nan_is_not_trained(dense, tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    nan_in_a_norm(dense)
    monkeypatch.setattr(tiny_runs, "model", str(dense))
    trainer = tiny_runs.trainer(tmp_path / "run", base_format="bf16", aqn=False)
    with told(ValueError, str(dense), "model.norm.weight", "NaN or infinite", "Download"):
        trainer.train()


@fault("S.dense_tensor_nan", recovered=True)
def test_weights_that_the_last_step_made_infinite_are_not_saved(tiny_runs, tmp_path):  # noqa: F811
    """The gradient was finite, and no loss comes after it."""
    trainer = tiny_runs.trainer(tmp_path / "run", max_steps=1, learning_rate=1e39)
    with told(
        RuntimeError,
        "8 of 8 trained parameters are not finite after step 1",
        "Nothing was written",
        "lower learning_rate",
    ):
        trainer.train()
    with told(RuntimeError, "not finite", "lower learning_rate"):
        trainer.save_model()
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert tiny_runs.command(tmp_path / "run", max_steps=1).state.global_step == 1
