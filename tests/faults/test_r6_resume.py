"""A damaged checkpoint costs the steps since the one before it, and an interrupted run ends as it would have without: byte for byte."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_trl.checkpoint import seal as checkpoint
from qerl_trl.checkpoint.seal import MANIFEST_NAME

from .catalog import fault
from .tiny_runs import WEIGHTS, Interrupted, interrupting, tiny_runs  # noqa: F401

STATE = "trainer_state.json"


@pytest.fixture(scope="module")
def ended(tiny_runs, tmp_path_factory):  # noqa: F811
    """A run of two steps with a checkpoint of each, killed before its final adapter was written."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    tiny_runs.trainer(folder).train()
    return folder


def case(*values):
    """Parameters of one case, the last being its fault."""
    *values, mark = values
    return pytest.param(*values, marks=mark, id=mark.args[0])


# --- the newest checkpoint is damaged ------------------------------------------------------------------------------------------------


def changed_weights(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS)


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-5] ^= 4
    (folder / WEIGHTS).write_bytes(content)


def cut(file: Path, kept: float) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])


def half_rank(folder: Path) -> None:
    changed_weights(
        folder, lambda tensors: {n: (t[:2] if "lora_A" in n else t[:, :2]).contiguous() for n, t in tensors.items()}
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 2}))


def half_written(folder: Path) -> None:
    """Killed while it was written: weights are there, nothing after them."""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", STATE, MANIFEST_NAME):
        (folder / name).unlink()


def without_entry(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    del manifest["files"][WEIGHTS]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    changed_weights(folder, lambda tensors: {n: t * 1000 for n, t in tensors.items()})


DAMAGE = [
    case(lambda f: cut(f / WEIGHTS, 0.5), WEIGHTS, fault("R6.truncated_weights", recovered=True)),
    case(flip_a_bit, WEIGHTS, fault("R6.bit_flip", recovered=True)),
    case(lambda f: cut(f / WEIGHTS, 0), WEIGHTS, fault("R6.empty_file", recovered=True)),
    case(lambda f: (f / WEIGHTS).unlink(), WEIGHTS, fault("R6.missing_adapter", recovered=True)),
    case(
        lambda f: changed_weights(f, lambda t: dict(sorted(t.items())[::2])),
        WEIGHTS,
        fault("R6.missing_tensors", recovered=True),
    ),
    case(
        lambda f: changed_weights(f, lambda t: {n: v * torch.nan for n, v in t.items()}),
        WEIGHTS,
        fault("R6.nan_tensor", recovered=True),
    ),
    case(half_rank, WEIGHTS, fault("R6.other_rank", recovered=True)),
    case(
        lambda f: (f / "optimizer.pt").unlink(),
        "optimizer.pt is missing",
        fault("R6.missing_optimizer", recovered=True),
    ),
    case(lambda f: cut(f / "optimizer.pt", 0.9), "optimizer.pt has", fault("R6.truncated_optimizer", recovered=True)),
    case(
        lambda f: (f / "scheduler.pt").unlink(),
        "scheduler.pt is missing",
        fault("R6.missing_scheduler", recovered=True),
    ),
    case(
        lambda f: (f / "rng_state.pth").unlink(),
        "rng_state.pth is missing",
        fault("R6.missing_rng_state", recovered=True),
    ),
    case(lambda f: cut(f / STATE, 0.5), STATE, fault("R6.damaged_trainer_state", recovered=True)),
    case(half_written, f"{MANIFEST_NAME} is missing", fault("R6.half_written_folder", recovered=True)),
    case(without_entry, MANIFEST_NAME, fault("R6.missing_entry", recovered=True)),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE)
def test_the_same_command_goes_on_from_the_one_before(damage, named, tiny_runs, ended, tmp_path, caplog):  # noqa: F811
    run = shutil.copytree(ended, tmp_path / "run")
    damage(run / "checkpoint-2")
    tiny_runs.command(run)
    assert "Skipping" in caplog.text and "checkpoint-2" in caplog.text and named in caplog.text
    assert "Looking for an older checkpoint" in caplog.text
    for written in (run, run / "checkpoint-2"):
        assert checkpoint.problems(written) == []
        assert (written / WEIGHTS).read_bytes() == (ended / "checkpoint-2" / WEIGHTS).read_bytes()


# --- interrupted and started again ---------------------------------------------------------------------------------------------------


def told_to_go_on(text: str, run: Path, newest: str, wanted: int) -> bool:
    """Whether a run has said, once: from which checkpoint and step it goes on, what of it is lost, and what else could be done."""
    step = newest.removeprefix("checkpoint-")
    words = (
        f"{run} goes on at step {step} of {wanted} (epoch ",
        f"from {newest}",
        "choose another output_dir",
    )
    return text.count("goes on at step") == 1 and all(word in text for word in words)


QUIET = {"aqn": False, "max_steps": 4}
LATER = {**QUIET, "gradient_accumulation_steps": 8, "save_steps": 3}  # two updates an epoch
# two updates share a rollout: a save that falls between them waits for the second
INSIDE = {**QUIET, "steps_per_generation": 2, "max_steps": 6, "save_steps": 3}
INTERRUPTED = [
    case(QUIET, 3, "checkpoint-2", fault("R6.resume_on_boundary", recovered=True)),
    case(INSIDE, 3, "checkpoint-4", fault("R6.resume_inside_buffer", recovered=True)),
    case(
        {**QUIET, "num_iterations": 2},
        2,
        "checkpoint-2",
        fault("R6.resume_num_iterations", recovered=True),
    ),
    case(LATER, 4, "checkpoint-3", fault("R6.resume_later_epoch", recovered=True)),
    case(
        {"aqn_sigma_start": 0.5, "max_steps": 4},
        4,
        "checkpoint-3",
        fault("R6.resume_with_noise", recovered=True),
    ),
]


@pytest.mark.parametrize(("options", "rollout", "newest"), INTERRUPTED)
def test_an_interrupted_run_ends_as_if_it_had_not_been(options, rollout, newest, tiny_runs, tmp_path, capsys, caplog):  # noqa: F811
    whole = tiny_runs.command(tmp_path / "whole", **options)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        tiny_runs.command(run, reward=interrupting(rollout), **options)
    assert checkpoint.last_checkpoint(run) == str(run / newest)
    assert "goes on" not in capsys.readouterr().out  # of first starts
    resumed = tiny_runs.command(run, **options)
    assert told_to_go_on(capsys.readouterr().out, run, newest, options["max_steps"])
    moved = "one rollout is used for 2 steps here"
    assert (moved in caplog.text) is (options is INSIDE or "num_iterations" in options)
    assert (run / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    assert options is not LATER or resumed._resumed.epoch > 1
    assert "aqn" in options or any(entry.get("aqn/sigma") for entry in whole.state.log_history)


@fault("R6.resume_after_sigkill", recovered=True)
@pytest.mark.parametrize("moment", ["in a rollout", "in a save"])
def test_a_killed_run_ends_as_if_it_had_not_been(moment, tiny_runs, ended, tmp_path, capsys, caplog):  # noqa: F811
    run = tmp_path / "run"

    def killed():
        def kill(*args):
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "in a save":  # of the second checkpoint, before its seal
            seals, seal = [], checkpoint.seal
            checkpoint.seal = lambda *args, **named: kill() if seals else seals.append(seal(*args, **named))
        tiny_runs.trainer(run, reward=interrupting(2, by=kill) if moment == "in a rollout" else interrupting(0)).train()

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint.last_checkpoint(run) == str(run / "checkpoint-1")
    tiny_runs.command(run)
    assert told_to_go_on(capsys.readouterr().out, run, "checkpoint-1", 2)
    half = "checkpoint-2: qerl_manifest.json is missing: the run that wrote it was stopped before it was complete"
    assert (half in caplog.text) is (moment == "in a save")
    assert (run / WEIGHTS).read_bytes() == (ended / "checkpoint-2" / WEIGHTS).read_bytes()
