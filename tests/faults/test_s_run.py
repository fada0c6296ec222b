"""A folder belongs to one run: another one, a finished one, a second process, other data are told so and change nothing in it."""

import multiprocessing
import shutil
import time

import pytest
from datasets import Dataset

from .catalog import fault, told
from .tiny_runs import PROMPTS, WEIGHTS, spread_reward, tiny_runs  # noqa: F401


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".qerl_lock"}


@pytest.fixture(scope="module")
def finished(tiny_runs, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny_runs.command(folder)
    return folder


@fault("S.arms_share_folder")
@pytest.mark.parametrize("arm", [{"base_format": "bf16"}, {"aqn": False}], ids=["bf16", "no-noise"])
def test_another_arm_is_refused_the_folder(arm, tiny_runs, finished):  # noqa: F811
    before = contents(finished)
    trainer = tiny_runs.trainer(finished, **arm)
    option, value = next(iter(arm.items()))
    with told(
        ValueError, "belongs to a run with other settings", f"{option}: ", f"{value!r} now", "another output_dir"
    ):
        trainer.train(resume_from_checkpoint=trainer.to_resume())
    assert contents(finished) == before


@fault("S.finished_run_again", recovered=True)
def test_a_finished_run_stays_finished(tiny_runs, finished, tmp_path, caplog):  # noqa: F811
    run = shutil.copytree(finished, tmp_path / "run")
    for _ in range(2):
        trainer = tiny_runs.command(run)
        assert trainer.state.global_step == 2
        assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    assert not (run / "checkpoint-3").exists()
    assert "2 steps are done, 2 are wanted. Nothing is trained." in caplog.text


def longer_reward(completions, **kwargs):
    return spread_reward(completions)


@fault("S.resume_other_data")
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"dataset": Dataset.from_dict({"prompt": ["count to ten "] * 16})}, "dataset_sha256: the training data"),
        ({"dataset": PROMPTS.select(range(12))}, "dataset_sha256: the training data"),
        ({"reward": longer_reward}, "rewards: ['spread_reward'] then, ['longer_reward'] now"),
        ({"optim": "sgd"}, "optim: not set then, 'sgd' now"),
    ],
    ids="data fewer-rows reward optimizer".split(),
)
def test_other_data_and_rewards_are_refused(other, named, tiny_runs, finished):  # noqa: F811
    before = contents(finished)
    with told(ValueError, named, "another output_dir", "allow_other_settings"):
        tiny_runs.trainer(finished, **other, max_steps=3).to_resume()
    assert contents(finished) == before


@fault("R8.two_runs_one_folder")
def test_a_second_process_is_refused_the_folder(tiny_runs, tmp_path):  # noqa: F811
    """The first is another process in its training, and is killed: then the folder is free."""
    parallel = multiprocessing.get_context("fork")
    training = parallel.Event()

    def waiting(completions, **kwargs):
        training.set()
        time.sleep(600)

    run = tmp_path / "run"
    first = parallel.Process(target=lambda: tiny_runs.trainer(run, reward=waiting).train())
    first.start()
    try:
        assert training.wait(60)
        with told(RuntimeError, str(run), f"process {first.pid}", "Another run", "choose another output_dir"):
            tiny_runs.trainer(run)
    finally:
        first.kill()
        first.join()
    tiny_runs.command(run)
