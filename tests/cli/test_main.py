"""The command line: instant help, exit codes, and messages without secrets."""

import resource
import subprocess
import sys

import pytest

from qerl_trl.checkpoint import seal
from qerl_trl.cli import main as cli
from qerl_trl.publish import hub
from tests.faults.tiny_runs import call

COMMANDS = ("quantize", "merge", "push", "train", "arms", "eval", "plan", "tune", "doctor")


def test_help_is_instant():
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "qerl_trl.cli.main", "--help"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)  # not the machine's load
    assert best < 0.5
    assert all(f"  {command} " in out for command in COMMANDS)


def test_an_error_is_one_message_without_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_Hidden123")
    monkeypatch.setattr(sys, "argv", ["qerl-trl", "quantize", str(tmp_path / "hf_Hidden123"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("qerl-trl: ") and "<secret> is neither a folder here nor a Hub id" in err
    assert "Traceback" not in err and "hf_Hidden123" not in err
    assert issubclass(hub.HubError, RuntimeError)  # exit code 1


@pytest.mark.parametrize("command", ["plan", "eval"])
def test_a_missing_model_is_named(command, monkeypatch):
    code, _, err = call(command, "./runs/typo")
    assert code == 2 and "./runs/typo is neither a folder here nor a Hub id (user/name)" in err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = call(command, "runs/typo")
    assert code == 1 and "runs/typo cannot be loaded: " in err
    assert f"Without a network, name a folder with {'config.json' if command == 'plan' else 'its files'}." in err


def test_an_unfinished_run_is_refused_with_its_newest_checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    seal.seal(folder)
    for words in (("merge", tmp_path / "run", tmp_path / "out"), ("eval", tmp_path / "run")):
        code, _, err = call(*words)
        assert code != 0 and f"name its newest checkpoint, {folder}" in err
