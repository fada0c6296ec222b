"""R7, the Hub: no surprise about who can see it, no half of it, no secret in it. Judged at the repository on the stand-in Hub."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from qerl_trl.checkpoint import seal
from qerl_trl.publish import card, export, hub
from qerl_trl.publish.load import TrainedPolicy
from tests.cli.test_main import call
from tests.faults.catalog import fault, told
from tests.faults.test_s_publish import SECRET, WEIGHTS, AfterStep, pushing
from tests.faults.tiny_runs import contents
from tests.hub_server import TOKEN
from tests.publish.test_export import make_policy
from tests.publish.test_hub import REPO, no_token_anywhere, server  # noqa: F401  (fixtures)
from tests.test_trainer import settings


@pytest.fixture(scope="module")
def merged(tiny_model_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    """A merged model in several shards."""
    policy = TrainedPolicy(
        make_policy(tiny_model_dir("llama"), dtype="bfloat16"),
        tiny_tokenizer,
        {"base_format": "nvfp4", "model": "some/base"},
    )
    facts = {"kind": "merged", "settings": policy.settings, "dataset": None}
    folder = tmp_path_factory.mktemp("exports") / "merged"
    export.save_merged(
        policy, folder, max_shard_bytes=200_000, card=lambda partial, record: card.write(partial, facts, record)
    )
    return folder


def published_whole(server, folder: Path) -> bool:  # noqa: F811
    files = server.repos[REPO]["files"]
    return all(
        files[str(name)] == content for name, content in contents(folder).items() if name.suffix == ".safetensors"
    )


# --- who can see it ---------------------------------------------------------------------------------------------------------------


@fault("R7.public_without_consent", recovered=True)
def test_a_public_repository_gets_nothing_that_was_to_be_private(server, merged):  # noqa: F811
    """With the repository private, the same command publishes what it was to publish; with consent, it may be public."""
    server.put(REPO, private=False)
    before = contents(merged)
    code, _, said = call("push", "merged", merged, REPO)
    assert code == 1
    for word in (REPO, "PUBLIC", "nothing was uploaded", "--public"):
        assert word in said
    assert set(server.repos[REPO]["files"]) == {".gitattributes"}
    assert not server.objects and contents(merged) == before
    server.repos[REPO].update(private=True)
    assert call("push", "merged", merged, REPO)[0] == 0
    assert published_whole(server, merged)
    server.put("tester/public", private=False)
    assert call("push", "merged", merged, "tester/public", "--public")[0] == 0


@fault("R7.public_without_consent", recovered=True)
def test_a_repository_that_becomes_public_while_training(server, tiny_model_dir, tiny_tokenizer, tmp_path):  # noqa: F811
    trainer = pushing(tiny_model_dir, tiny_tokenizer, tmp_path)
    trainer.add_callback(AfterStep(trainer, 1, lambda: server.repos[REPO].update(private=False)))
    with told(RuntimeError, REPO, "checkpoint-2", "PUBLIC", "hub_private_repo=False"):
        trainer.train()
    assert len(server.repos[REPO]["commits"]) == 1
    server.repos[REPO].update(private=True)
    trainer = pushing(tiny_model_dir, tiny_tokenizer, tmp_path)
    trainer.train(resume_from_checkpoint=trainer.to_resume())
    assert trainer.state.global_step == 2
    trainer.push_to_hub()
    run = tmp_path / "run"
    assert server.repos[REPO]["files"][WEIGHTS] == (run / "checkpoint-2" / WEIGHTS).read_bytes()


# --- whole or not at all ----------------------------------------------------------------------------------------------------------


@fault("R7.upload_interrupted", recovered=True)
def test_an_upload_that_is_killed_leaves_nothing_and_is_continued(server, merged):  # noqa: F811
    """SIGKILL while large files go up; the same command then sends only what has not arrived."""
    command = [sys.executable, "-m", "qerl_trl.cli.main", "push", "merged", str(merged), REPO]
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def kill(request):
        if request.startswith("PUT /lfs/") and server.uploads:
            process.send_signal(signal.SIGKILL)

    server.at_request = kill
    said = process.communicate(timeout=120)[0]
    server.at_request = None
    assert process.returncode == -signal.SIGKILL, said
    assert set(server.repos[REPO]["files"]) == {".gitattributes"}
    arrived = dict(server.uploads)
    assert arrived
    assert call("push", "merged", merged, REPO)[0] == 0
    files = server.repos[REPO]["files"]
    assert len(server.repos[REPO]["commits"]) == 1
    assert {name: files[name] for name in files if name.endswith(".safetensors")} == {
        path.name: path.read_bytes() for path in merged.glob("*.safetensors")
    }
    assert all(server.uploads[oid] == times for oid, times in arrived.items())


# --- no secret --------------------------------------------------------------------------------------------------------------------

#: where a token is placed -> its value there; without a known form, unless the place has one
PLACES = {
    "hub_token": TOKEN,
    "model_init_kwargs": SECRET,
    "WANDB_API_KEY": "zz82-of-a-tracker-in-the-environment",
    "OTHER_SERVICE_TOKEN": "zz83-of-something-else-entirely",
    "HF_TOKEN": "hf_AnotherTokenOfThisMachineOnly1",
    "SOME_PROXY": "http://someone:zz85-a-password-in-a-url@proxy:3128",
}
#: what of a value is the secret, where it is not all of it
PARTS = {"SOME_PROXY": "zz85-a-password-in-a-url"}


def everything(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()


@fault("R7.token")
def test_a_token_is_found_nowhere(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
    monkeypatch,
    caplog,
    capsys,
):
    """In the arguments and in the environment; a run that saves, logs, pushes, and fails at the end."""
    caplog.set_level(logging.DEBUG)
    for name, value in PLACES.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    trainer = pushing(
        tiny_model_dir,
        tiny_tokenizer,
        tmp_path,
        hub_strategy="checkpoint",
        log_completions=True,
    )
    print(trainer.args, trainer.args.to_json_string())
    seal.write_json_atomically(tmp_path / "environment.json", dict(os.environ))  # what a reporting callback may keep
    logging.getLogger("run").warning("%s %r", trainer.args, trainer.args)
    # the Hub quotes the token in what it answers
    trainer.add_callback(AfterStep(trainer, 1, lambda: setattr(server, "fail", {r"POST /api/.*": 418})))
    try:
        trainer.train()
        raise AssertionError("the last push failed")
    except RuntimeError as error:
        assert "answered 418" in str(error)
        told_in_full = "".join(traceback.format_exception(error))
    server.fail = {}
    trainer.push_to_hub(dataset_name="someone/data")
    trainer.save_merged(tmp_path / "merged")
    out, err = capsys.readouterr()
    found = [
        ("stdout", out.encode()),
        ("stderr", err.encode()),
        ("log", caplog.text.encode()),
        ("traceback", told_in_full.encode()),
    ]
    found += [*everything(tmp_path), *server.repos[REPO]["files"].items()]
    found += [("a commit", body) for body in server.repos[REPO]["commits"]] + [
        ("requests", "".join(server.requests).encode())
    ]
    names = {name for name, _ in found}
    assert {"README.md", "last-checkpoint/optimizer.pt", str(tmp_path / "run/checkpoint-2/training_args.bin")} <= names
    for place, value in PLACES.items():
        assert not [name for name, data in found if PARTS.get(place, value).encode() in data], place


@fault("R7.token")
@pytest.mark.parametrize(
    "argument",
    [
        {"vllm_mode": "server", "use_vllm": True, "vllm_server_base_url": "http://someone:zz84-password@host:8000"},
        {"run_name": TOKEN},
        {"output_dir": f"runs/{TOKEN}"},
        {"hub_model_id": f"someone/{TOKEN}"},
        {"report_to": [f"https://{TOKEN}@tracker"]},
        {"vllm_engine_kwargs": {"download_dir": f"/x/{TOKEN}"}},
    ],
    ids=lambda argument: next(reversed(argument)),
)
def test_a_token_where_it_would_be_seen_is_refused_by_the_arguments_name(tmp_path, argument):
    where = next(reversed(argument))
    with pytest.raises(ValueError) as error:
        settings(tmp_path, **argument)
    for word in (where, "HF_TOKEN"):
        assert word in str(error.value)
    shown = "".join(traceback.format_exception(error.value))
    assert TOKEN not in shown.replace(__file__, "") and "zz84-password" not in shown


@fault("R7.token", recovered=True)
def test_no_token(server, merged, monkeypatch):  # noqa: F811
    before = contents(merged)
    with monkeypatch.context() as nobody:
        nobody.setattr(hub, "get_token", lambda: None)
        code, _, said = call("push", "merged", merged, REPO)
    assert code == 1 and "no Hub token" in said and "hf auth login" in said
    assert server.repos == {} and contents(merged) == before
    assert call("push", "merged", merged, REPO)[0] == 0
    assert published_whole(server, merged)


@fault("R7.token", recovered=True)
def test_a_token_in_a_file_that_would_be_published(server, merged, tmp_path):  # noqa: F811
    """Wherever it is in a long text, and whoever put it there."""
    leaky = tmp_path / "leaky"
    shutil.copytree(merged, leaky)
    text = (leaky / "tokenizer.json").read_text()
    (leaky / "tokenizer.json").write_text(text + " " * (2 << 20) + f'{{"note": "{TOKEN}"}}')
    seal.seal(leaky, seal.recorded_run(leaky))
    with told(hub.HubError, "tokenizer.json", "token", "Remove it"):
        hub.push_folder(leaky, REPO)
    assert server.requests == []
    (leaky / "tokenizer.json").write_text(text)
    seal.seal(leaky, seal.recorded_run(leaky))
    hub.push_folder(leaky, REPO)
    assert published_whole(server, leaky) and server.text(REPO)["tokenizer.json"] == text
