"""Faults of publishing that once passed silently; the product is the repository on the stand-in Hub."""

import ast
import copy
import inspect
import json
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, close_session
from transformers import Trainer, TrainerCallback
from typer.testing import CliRunner

import qerl_trl
from qerl_trl import QeRLGRPOTrainer, QeRLRLOOTrainer
from qerl_trl.checkpoint import seal
from qerl_trl.cli.main import app
from qerl_trl.publish import hub
from qerl_trl.run.publishing import PublishingMixin
from tests.faults.catalog import fault, told
from tests.hub_server import TOKEN
from tests.publish.test_hub import REPO, no_token_anywhere, server  # noqa: F401  (fixtures)
from tests.test_trainer import PROMPTS, settings, spread_reward

COMMIT = r"POST /api/models/.*/commit/.*"
WEIGHTS = "adapter_model.safetensors"
SECRET = "kx93-vv02-a-token-of-no-known-form"


def run(tiny_model_dir, tiny_tokenizer, tmp_path, **options):
    """A trainer, one small step from its end."""
    initial = {"dtype": "float32", "token": SECRET}
    return QeRLGRPOTrainer(
        model=str(tiny_model_dir("qwen2")),
        reward_funcs=spread_reward,
        args=settings(
            tmp_path,
            hub_model_id=REPO,
            hub_token=TOKEN,
            model_init_kwargs=initial,
            **{"max_steps": 1, "aqn": False, **options},
        ),
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer,
    )


def published(server, repo=REPO):  # noqa: F811
    files = server.repos[repo]["files"]
    for name, data in files.items():
        assert TOKEN.encode() not in data, name
        assert SECRET.encode() not in data, name
    return files


@fault("S.token_in_uploads", recovered=True)
def test_a_fully_trained_model_is_published_without_its_arguments(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
    monkeypatch,
):
    """transformers would upload the whole output folder: arguments, logs, whatever lies there."""
    monkeypatch.setattr(Trainer, "push_to_hub", None)
    trainer = run(tiny_model_dir, tiny_tokenizer, tmp_path, base_format="full")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "notes.txt").write_text(TOKEN)
    server.fail = {COMMIT: 500}
    command = f"qerl-trl push model {tmp_path / 'run'} {REPO}"
    with told(RuntimeError, "answered 500", command):
        trainer.push_to_hub()
    server.fail = {}
    result = CliRunner().invoke(app, [*command.split()[1:], "--dataset", "someone/data"])
    assert result.exit_code == 0, result.output
    by_command = published(server).keys()
    trainer.push_to_hub(dataset_name="someone/data")
    files = published(server)
    assert files.keys() == by_command
    assert (tmp_path / "run/training_args.bin").is_file()
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", seal.MANIFEST_NAME} <= set(files)
    assert not {"training_args.bin", "trainer_state.json", "notes.txt", ".qerl.lock"} & set(files)
    assert server.repos[REPO]["private"] is True
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name, data in files.items():
        (downloaded / name).write_bytes(data)
    assert seal.problems(downloaded) == []
    card = server.text(REPO)["README.md"]
    assert "someone/data" in card
    assert "LoRA" not in card


@fault("S.token_in_uploads")
def test_a_token_in_a_published_text_refuses_the_upload(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
):
    trainer = run(tiny_model_dir, tiny_tokenizer, tmp_path, base_format="full")
    trainer.save_model(push=False)
    config = tmp_path / "run/config.json"
    trainer.model.config.note = SECRET
    with pytest.raises(RuntimeError, match=r"config\.json contains the value of model_init_kwargs\.token") as error:
        trainer.push_to_hub()
    assert "Remove it" in str(error.value)
    assert json.loads(config.read_text())["note"] == SECRET
    assert server.requests == []


# --- while training ---------------------------------------------------------------------------------------------------------------


class AfterStep(TrainerCallback):
    """Calls `action` once the step is saved and pushed."""

    def __init__(self, trainer, step, action):
        self.trainer, self.step, self.action = trainer, step, action

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def pushing(tiny_model_dir, tiny_tokenizer, tmp_path, **options):
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "hub_always_push": True,
        "hub_strategy": "every_save",
        **options,
    }
    return run(
        tiny_model_dir,
        tiny_tokenizer,
        tmp_path,
        max_steps=2,
        push_to_hub=True,
        hub_base_model="someone/base",
        **options,
    )


@fault("S.push_while_training_fails")
@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (401, "refused the token (401)"),
        (429, "answered 429"),
        (500, "answered 500"),
        ("closed", "connection to the Hub failed"),
        ("silent", "connection to the Hub failed (ReadTimeout"),
    ],
)
def test_a_push_that_fails_is_told_at_once_and_raised_at_the_end(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
    caplog,
    monkeypatch,
    status,
    cause,
):
    no_wait = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", no_wait)  # it and we try again, ever later
    monkeypatch.setattr(hub, "time", no_wait)
    trainer = pushing(tiny_model_dir, tiny_tokenizer, tmp_path)
    told_at_once, speaks = [], threading.Event()

    def end_of_the_hub():
        if status == "closed":
            server.close()
            close_session()  # of connections that are still open
        elif status == "silent":
            monkeypatch.setattr(hub, "_ANSWER_SECONDS", 0.2)
            server.at_request = lambda request: speaks.wait(5)
        else:
            server.fail = {r".*": status}

    trainer.add_callback(AfterStep(trainer, 1, end_of_the_hub))
    trainer.add_callback(AfterStep(trainer, 2, lambda: told_at_once.extend(caplog.messages)))
    command = f"qerl-trl push adapter {tmp_path / 'run'} {REPO} --base-model someone/base"
    with told(RuntimeError, REPO, "checkpoint-2", cause, command):
        trainer.train()
    assert [text for text in told_at_once if text.startswith("checkpoint-2 was not pushed") and cause in text]
    # everything is here, and what is on the Hub is whole
    assert seal.problems(tmp_path / "run") == seal.problems(tmp_path / "run/checkpoint-2") == []
    here, there = ((tmp_path / "run" / name / WEIGHTS).read_bytes() for name in ("", "checkpoint-1"))
    assert published(server)[WEIGHTS] == there != here
    if status != "closed":
        server.fail, server.at_request = {}, None
        speaks.set()
        result = CliRunner().invoke(app, command.split()[1:])
        assert result.exit_code == 0, result.output
        assert published(server)[WEIGHTS] == here


@fault("S.push_while_training_fails", recovered=True)
def test_a_push_that_failed_is_made_good_by_the_next_one(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
    caplog,
):
    trainer = pushing(tiny_model_dir, tiny_tokenizer, tmp_path, save_total_limit=1)
    server.fail = {COMMIT: 500}
    trainer.add_callback(AfterStep(trainer, 1, lambda: setattr(server, "fail", {})))
    trainer.train()
    assert f"checkpoint-1 was not pushed to {REPO}" in caplog.text
    assert published(server)[WEIGHTS] == (tmp_path / "run/checkpoint-2" / WEIGHTS).read_bytes()
    assert not list((tmp_path / "run").glob(".push*"))


@fault("R7.local_base_pushed")
@fault("S.push_while_training_fails", recovered=True)
def test_a_run_that_cannot_be_published_does_not_begin(server, tiny_model_dir, tiny_tokenizer, tmp_path):  # noqa: F811
    with told(ValueError, "only this machine has", "hub_base_model"):
        run(tiny_model_dir, tiny_tokenizer, tmp_path, push_to_hub=True)
    server.fail = {r".*": 401}
    with told(RuntimeError, "refused the token", "hf auth login"):
        pushing(tiny_model_dir, tiny_tokenizer, tmp_path)


# --- other ways out ---------------------------------------------------------------------------------------------------------------

#: what of huggingface_hub and transformers uploads
UPLOADS = {
    "create_commit",
    "create_repo",
    "preupload_lfs_files",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
    "CommitScheduler",
}


def names_in(tree):
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Attribute, ast.Name))
    }


def test_one_place_uploads():
    root = Path(qerl_trl.__file__).parent
    uploading = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if names_in(ast.parse(path.read_text())) & UPLOADS
    }
    assert uploading == {"publish/hub.py"}


@pytest.mark.parametrize("trainer_class", [QeRLGRPOTrainer, QeRLRLOOTrainer])
def test_no_uploading_method_of_the_parents_is_left(trainer_class):
    """Whoever uploads in transformers' or TRL's trainer is overridden, without a call of the parent's."""
    ours = [cls for cls in trainer_class.__mro__ if cls.__module__.startswith("qerl_trl.")]
    found = set()
    for parent in trainer_class.__mro__:
        for name, method in vars(parent).items():
            if parent in ours or not inspect.isfunction(method):
                continue
            if names_in(ast.parse(textwrap.dedent(inspect.getsource(method)))) & UPLOADS:
                found.add(name)
    # of TRL, for completions: a warning
    assert found - {"__init__"} == {"init_hf_repo", "push_to_hub", "_push_from_checkpoint"}
    for name in found - {"__init__"}:
        source = inspect.getsource(vars(PublishingMixin)[name])
        assert f"super().{name}" not in source, name


class LogsTheModel(TrainerCallback):
    """As the callbacks of Weights & Biases and DVCLive do it."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        plain = Trainer(args=copy.deepcopy(args), model=model, processing_class=processing_class, eval_dataset=["fake"])
        plain.save_model(self.folder)


@fault("S.token_in_uploads", recovered=True)
def test_a_tracker_that_logs_the_model_pushes_nothing(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: HfApi(endpoint=server.endpoint, token=TOKEN))
    trainer = pushing(tiny_model_dir, tiny_tokenizer, tmp_path)
    trainer.add_callback(LogsTheModel(str(tmp_path / "logged")))
    trainer.train()
    assert (tmp_path / "logged" / WEIGHTS).is_file()
    files = published(server)
    assert "training_args.bin" not in files
    assert len(server.repos[REPO]["commits"]) == 2
