"""Publishing: no surprise about who can see it, whole or not at all, no secret in it. Judged at the stand-in Hub."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Trainer, TrainerCallback

from qerl_trl.checkpoint import seal
from qerl_trl.publish import hub
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import FILE, WEIGHTS, call, contents, edit, fails, poison, works
from tests.hub_server import REPO, TOKEN

COMMIT = r"POST /api/models/.*/commit/.*"
SECRET = "kx93-vv02-a-token-of-no-known-form"


class AfterStep(TrainerCallback):
    """Calls `action` once the step is saved and pushed."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


@pytest.fixture
def pushing(tiny_runs, tmp_path):
    """`pushing(**options)`: a trainer of two steps that pushes each of them."""

    def build(**options):
        fields = {
            "hub_model_id": REPO, "hub_token": TOKEN, "push_to_hub": True, "hub_base_model": "someone/base",
            "model_init_kwargs": {"dtype": "float32", "token": SECRET}, "hub_always_push": True,
            "hub_strategy": "every_save", "aqn": False,
        }  # fmt: skip
        return tiny_runs.trainer(tmp_path / "run", **{**fields, **options})

    return build


def published(server) -> dict[str, bytes]:
    files = server.repos[REPO]["files"]
    assert not [name for name, data in files.items() if TOKEN.encode() in data or SECRET.encode() in data]
    return files


def check_published_whole(server, folder: Path) -> None:
    files = published(server)
    for path in folder.glob("*.safetensors"):
        assert files[path.name] == path.read_bytes()


# --- who can see it ---


@fault("R7.public_without_consent", recovered=True)
def test_a_public_repository_gets_nothing_private(server, merged):
    server.put(REPO, private=False)
    before = contents(merged)
    fails((REPO, "PUBLIC", "nothing was uploaded", "--public"), "push", "merged", merged, REPO, code=1)
    assert contents(merged) == before
    assert set(server.repos[REPO]["files"]) == {".gitattributes"} and not server.objects
    server.repos[REPO].update(private=True)
    works("push", "merged", merged, REPO)
    check_published_whole(server, merged)
    server.put("tester/public", private=False)
    works("push", "merged", merged, "tester/public", "--public")


# --- whole or not at all ---


@fault("R7.upload_interrupted", recovered=True)
def test_an_upload_that_is_killed_leaves_nothing_and_is_continued(server, merged):
    """SIGKILL while large files are uploaded; the same command then sends the missing ones."""
    process = multiprocessing.get_context("fork").Process(target=call, args=("push", "merged", merged, REPO))

    def kill(request):
        if request.startswith("PUT /lfs/") and server.uploads:
            process.kill()

    server.at_request = kill
    process.start()
    process.join(60)
    server.at_request = None
    assert process.exitcode == -signal.SIGKILL
    arrived = dict(server.uploads)
    assert arrived and set(server.repos[REPO]["files"]) == {".gitattributes"}
    works("push", "merged", merged, REPO)
    check_published_whole(server, merged)
    assert len(server.repos[REPO]["commits"]) == 1
    assert all(server.uploads[oid] == times for oid, times in arrived.items())


@fault("R7.upload_interrupted", recovered=True)
def test_a_failed_push_warns_at_once_and_raises_at_the_end(server, pushing, tmp_path, caplog, monkeypatch):
    no_wait = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", no_wait)  # it and we try again, ever later
    monkeypatch.setattr(hub, "time", no_wait)
    trainer, run, at_once, cause = pushing(), tmp_path / "run", [], "answered 429"
    trainer.add_callback(AfterStep(1, lambda: server.fail.update({".*": 429})))
    trainer.add_callback(AfterStep(2, lambda: at_once.extend(caplog.messages)))
    command = f"qerl-trl push adapter {run} {REPO} --base-model someone/base"
    with raises(RuntimeError, REPO, "checkpoint-2", cause, command):
        trainer.train()
    assert [text for text in at_once if text.startswith("checkpoint-2 was not pushed") and cause in text]
    assert seal.problems(run) == seal.problems(run / "checkpoint-2") == []
    assert published(server)[WEIGHTS] == (run / "checkpoint-1" / WEIGHTS).read_bytes()
    server.fail = {}
    works(*command.split()[1:])
    assert published(server)[WEIGHTS] == (run / WEIGHTS).read_bytes()


@fault("R7.local_base_pushed")
def test_a_run_that_cannot_be_published_does_not_begin(server, pushing):
    with raises(ValueError, "only this machine has", "hub_base_model"):
        pushing(hub_base_model=None)
    server.fail = {r".*": 401}
    with raises(RuntimeError, "refused the token", "hf auth login"):
        pushing()


# --- nothing that was not to be published ---


@fault("R7.token", recovered=True)
def test_a_fully_trained_model_is_published_without_its_arguments(server, pushing, tmp_path, monkeypatch):
    """transformers would upload the whole output folder, with arguments and logs."""
    monkeypatch.setattr(Trainer, "push_to_hub", None)
    trainer = pushing(base_format="full", push_to_hub=False, max_steps=1)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "notes.txt").write_text(TOKEN)
    server.fail = {COMMIT: 500}
    command = f"qerl-trl push model {tmp_path / 'run'} {REPO}"
    with raises(RuntimeError, "answered 500", command):
        trainer.push_to_hub()
    server.fail = {}
    works(*command.split()[1:], "--dataset", "someone/data")
    by_command = published(server).keys()
    trainer.push_to_hub(dataset_name="someone/data")
    files = published(server)
    assert files.keys() == by_command >= {FILE, "config.json", "tokenizer.json", "README.md", seal.MANIFEST_NAME}
    assert not {"training_args.bin", "trainer_state.json", "notes.txt", ".qerl_lock"} & set(files)
    assert server.repos[REPO]["private"] is True
    card = server.text(REPO)["README.md"]
    assert "someone/data" in card and "LoRA" not in card


@fault("R7.token", recovered=True)
def test_a_secret_in_a_file_that_would_be_published(server, merged, tmp_path):
    folder, name = shutil.copytree(merged, tmp_path / "leaky"), "tokenizer_config.json"
    text = (folder / name).read_text()
    (folder / name).write_text(json.dumps({**json.loads(text), "headers": {"X-API-Key": "zz86-of-a-proxy"}}))
    seal.seal(folder, seal.recorded_run(folder))
    with raises(hub.HubError, name, "secret, by the name of 'X-API-Key'", "Remove it"):
        hub.push_folder(folder, REPO)
    assert server.requests == []
    (folder / name).write_text(text)
    seal.seal(folder, seal.recorded_run(folder))
    hub.push_folder(folder, REPO)
    check_published_whole(server, folder)


@fault("R7.token")
@pytest.mark.parametrize(
    ("where", "repo", "options"),
    [
        ("The commit message", REPO, {"message": f"with {TOKEN}"}),
        ("Its revision", REPO, {"revision": TOKEN}),
        ("The name of the repository", f"someone/{TOKEN}", {}),
    ],
)
def test_a_token_in_the_words_of_a_push(where, repo, options, server, merged):
    with raises(hub.HubError, f"{where} contains", "nothing was uploaded", "Leave the secret out"):
        hub.push_folder(merged, repo, **options)
    assert not server.repos


#: where a token is placed -> its value there
PLACES = {
    "hub_token": TOKEN,
    "model_init_kwargs": SECRET,
    "WANDB_API_KEY": "zz82-of-a-tracker-in-the-environment",
    "OTHER_SERVICE_TOKEN": "zz83-of-something-else-entirely",
    "HF_TOKEN": "hf_AnotherTokenOfThisMachineOnly1",
    "SOME_PROXY": "http://someone:zz85-a-password-in-a-url@proxy:3128",
}


class Tracker(TrainerCallback):
    """Writes what transformers' integrations read: arguments in each form, configurations, logs."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _write(self, *said: object) -> None:
        with open(self.file, "a") as file:
            file.writelines(f"{each!r}\n" for each in said)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._write(args.to_dict(), args.to_sanitized_dict(), args.to_json_string(), args, str(args))
        self._write(model.config.to_dict(), {name: config.to_dict() for name, config in model.peft_config.items()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._write(logs, state.log_history)


@fault("R7.token")
def test_a_token_is_found_nowhere(server, pushing, tmp_path, monkeypatch, caplog, capsys):
    """In a run that saves, logs, tracks, pushes and fails at the end."""
    caplog.set_level(logging.DEBUG)
    for name, value in PLACES.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    trainer = pushing(hub_strategy="checkpoint", log_completions=True)
    print(trainer.args, trainer.args.to_json_string())
    seal.write_json_atomically(tmp_path / "environment.json", dict(os.environ))  # what a reporting callback may keep
    logging.getLogger("run").warning("%s %r", trainer.args, trainer.args)
    trainer.add_callback(Tracker(tmp_path / "tracked.txt"))
    # the Hub quotes the token in what it answers
    trainer.add_callback(AfterStep(1, lambda: setattr(server, "fail", {r"POST /api/.*": 418})))
    with raises(RuntimeError, "answered 418", "qerl-trl push") as failed:
        trainer.train()
    server.fail = {}
    trainer.push_to_hub(dataset_name="someone/data")
    trainer.save_merged(tmp_path / "merged")
    found = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found |= server.repos[REPO]["files"]
    said = [*capsys.readouterr(), caplog.text, *traceback.format_exception(failed.value), *server.requests]
    found["said"] = "\n".join(said).encode() + b"".join(server.repos[REPO]["commits"])
    files = {"README.md", "last-checkpoint/optimizer.pt", str(tmp_path / "run/checkpoint-2/training_args.bin")}
    assert files <= set(found)
    assert b"learning_rate" in found[str(tmp_path / "tracked.txt")]
    for place, value in PLACES.items():
        secret = "zz85-a-password-in-a-url" if place == "SOME_PROXY" else value
        assert not [name for name, data in found.items() if secret.encode() in data], place


# --- a run's folder that was edited ---


def double_alpha(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))


#: an edit of a run's folder, and the message
EDITS = {
    "nan": (lambda folder: edit(folder / WEIGHTS, poison), "not as the run wrote it"),
    "alpha": (double_alpha, "not as the run wrote it"),
    "tokens": (lambda folder: (folder / "added_tokens.json").write_text('{"EVIL": 3}'), "added_tokens.json was added"),
}
READERS = {
    "merge": lambda folder, out: ("merge", folder, out),
    "push": lambda folder, out: ("push", "adapter", folder, REPO, "--base-model", "someone/base"),
    "eval": lambda folder, out: ("eval", folder, "--data", "none.jsonl", "--output", out),
}


@fault("R7.folder_edited")
@pytest.mark.parametrize(("edited", "read"), [*((name, "merge") for name in EDITS), ("alpha", "push"), ("nan", "eval")])
def test_an_edited_run_folder_is_not_read(edited, read, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    change, said = EDITS[edited]
    change(folder)
    fails((folder, said, "checkpoint-<step>"), *READERS[read](folder, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@fault("R7.folder_edited", recovered=True)
def test_an_export_with_a_damaged_manifest_is_named_and_made_again(tiny_model_dir, tmp_path):
    dense, out = tiny_model_dir("llama"), tmp_path / "out"
    quantize_folder(dense, out)
    (out / seal.MANIFEST_NAME).write_text("[]")
    with raises(ValueError, str(out), "unreadable", "export it"):
        hub.push_folder(out, REPO)
    with raises(ValueError, str(out), "already exists", "overwrite"):
        quantize_folder(dense, out)
    quantize_folder(dense, out, overwrite=True)
    assert not seal.problems(out)


@fault("R7.folder_edited")
@pytest.mark.parametrize("command", ["merge", "quantize"])
def test_an_export_does_not_replace_its_own_source(command, finished, tiny_model_dir, tmp_path):
    """--overwrite would remove the run with its checkpoints, or the only unquantized weights."""
    original = finished if command == "merge" else tiny_model_dir("qwen2")
    source = shutil.copytree(original, tmp_path / "folder/source")
    (tmp_path / "link").symlink_to(source)
    before = contents(tmp_path / "folder")
    for destination in (source, tmp_path / "link", tmp_path / "folder"):
        fails((source, "would be removed", "Name another folder"), command, source, destination, "--overwrite")
    assert contents(tmp_path / "folder") == before
