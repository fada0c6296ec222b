"""A folder belongs to one run: another one, a finished one, a second process, other data are told so and change nothing in it. And what a
run has measured and saved is not lost to what fails afterwards."""

import importlib.util
import json
import multiprocessing
import shutil
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from qerl_trl.checkpoint import seal
from qerl_trl.cli import main as cli
from qerl_trl.cli import train
from qerl_trl.publish import hub
from qerl_trl.rollout.engine import RolloutError
from qerl_trl.rollout.generation import QeRLVLLMGeneration
from tests.hub_server import TOKEN
from tests.publish.test_hub import REPO, server  # noqa: F401

from .catalog import fault, told
from .tiny_runs import PROMPTS, WEIGHTS, contents, interrupting, spread_reward, tiny_runs  # noqa: F401


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


@fault("R8.two_runs_one_folder", recovered=True)
def test_a_second_process_is_refused_the_folder(tiny_runs, finished, tmp_path):  # noqa: F811
    """The first is another process in its second step, and is killed: then the folder is free, and the second goes on from the first step."""
    parallel = multiprocessing.get_context("fork")
    training = parallel.Event()

    def wait():
        training.set()
        time.sleep(600)

    run = tmp_path / "run"
    first = parallel.Process(target=lambda: tiny_runs.trainer(run, reward=interrupting(2, by=wait)).train())
    first.start()
    try:
        assert training.wait(60)
        before = contents(run)
        with told(RuntimeError, str(run), f"process {first.pid}", "Another run", "choose another output_dir"):
            tiny_runs.command(run)
        assert contents(run) == before and seal.last_checkpoint(run) == str(run / "checkpoint-1")
    finally:
        first.kill()
        first.join()
    saved = contents(run / "checkpoint-1")
    tiny_runs.command(run)
    assert contents(run / "checkpoint-1") == saved  # it went on from there
    assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


@fault("S.prompt_longer_than_model")
def test_prompts_beyond_the_model_are_refused_at_start(tiny_runs, tmp_path):  # noqa: F811
    data = Dataset.from_dict({"prompt": ["say one ", "say " * 150]})  # the model takes 512 tokens, of one byte each
    with told(ValueError, "1 of 2 prompts", "the longest has 600 tokens", "the model takes 512", "Filter them out"):
        tiny_runs.trainer(tmp_path, dataset=data)
    data = Dataset.from_dict({"prompt": ["say one ", "say " * 127]})
    with told(ValueError, "1 of 2 prompts", "508 tokens", "takes 512", "lower max_completion_length"):
        tiny_runs.trainer(tmp_path, dataset=data, max_completion_length=5)


@fault("S.prompt_longer_than_model")
def test_prompts_that_nobody_can_count_are_not_trained_on(tiny_runs, tmp_path):  # noqa: F811
    def wandering(prompts, trainer):
        count = len(prompts)
        return {
            "prompt_ids": [[5] * 600] * count,
            "completion_ids": [[7] * 3] * count,
            "logprobs": [[-1.0] * 3] * count,
        }

    trainer = tiny_runs.trainer(tmp_path, rollout_func=wandering, aqn=False)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items() if "lora" in name}
    with told(ValueError, "600 tokens", "completion of 3", "takes, 512 tokens", "Leave such prompts out"):
        trainer.train()
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in before.items())


# --- the example: what it has measured -----------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_gsm8k.py"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """`example(output_dir, **options)`: the example's embedded run, of one step, in this process."""
    spec = importlib.util.spec_from_file_location("grpo_gsm8k", EXAMPLE)
    module = sys.modules["grpo_gsm8k"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {
        "max_steps": 1,
        "per_device_train_batch_size": 16,
        "max_completion_length": 8,
        "eval_problems": 6,
        "lora_r": 4,
    }

    def options(given):
        return [str(part) for name, value in given.items() for part in (f"--{name}", value)]

    def words(given):
        module.main(list(given))

    def run(output_dir, **given):
        words(
            options(
                {"config": EXAMPLE.parent / "configs" / "embedded.yaml", **small, "output_dir": output_dir, **given}
            )
        )
        return json.loads((Path(output_dir) / "results.json").read_text())

    run.words, run.small = words, options(small)
    yield run
    del sys.modules["grpo_gsm8k"]


@pytest.fixture(scope="module")
def measured(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "run"
    example(folder)
    return folder


@fault("S.arms_share_folder", recovered=True)
def test_arms_one_after_the_other_share_nothing(example, tmp_path, monkeypatch):
    """The command runs the example itself, here in this process."""
    monkeypatch.setattr(train, "launch", lambda command, log: example.words(command[2:]) or 0)
    words = ["arms", "embedded", "--arms", "nvfp4", "bf16-no-noise", "--seeds", "1", "--output_dir", str(tmp_path)]
    outcome = CliRunner().invoke(cli.app, [*words, *example.small])
    assert outcome.exit_code == 0, outcome.exception
    for folder, base, noise in (("nvfp4-1", "nvfp4", True), ("bf16-no-noise-1", "bf16", False)):
        results = json.loads((tmp_path / folder / "results.json").read_text())
        assert (results["steps"], results["arm"]["base_format"], results["arm"]["aqn"]) == (1, base, noise)
        assert seal.recorded_run(tmp_path / folder)["base_format"] == base
    assert "| seed | nvfp4 | bf16-no-noise | bf16-no-noise - nvfp4 |" in outcome.stdout


@fault("S.other_eval_problems")
def test_other_problems_are_refused_before_any_training(example, measured, tmp_path):
    run = shutil.copytree(measured, tmp_path / "run")
    before = contents(run)
    with told(ValueError, "before.json", "6 problems then, 4 now", "--eval_problems 6", "another output_dir"):
        example(run, eval_problems=4, max_steps=2)
    with told(ValueError, "before.json", "6 problems both times, but others", "same problems"):
        example(run, system_prompt="Be brief.", max_steps=2, allow_other_settings="true")
    assert contents(run) == before


@fault("S.other_eval_problems")
@pytest.mark.parametrize(
    ("way", "other", "named"),
    [
        ({"grader": "own.py:check"}, {}, "grader_sha256: "),
        ({"grader": "reward", "reward_funcs": "own.py:rate"}, {}, "reward_sha256: "),
        (
            {"grader": "reward", "reward_funcs": "own.py:rate"},
            {"solved_reward": -1},
            "solved_reward: 1.0 then, -1.0 now",
        ),
        ({}, {"max_completion_length": 4, "allow_other_settings": "true"}, "max_completion_length: 8 then, 4 now"),
    ],
    ids=["own grader", "reward", "solved_reward", "length"],
)
def test_another_way_of_measuring_is_refused_after_training(way, other, named, example, tmp_path, monkeypatch):
    """The grader was mended between two starts: before by the one, after by the other was a gain of 100 points, and nothing was trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = tmp_path / "own.py"
    text = """
def check(answer, reference):
    return LOOSE

def rate(completions, **kwargs):
    return [LOOSE for _ in completions]
"""
    own.write_text(text.replace("LOOSE", "0.0"))
    way = {"output_dir": "run", **way}
    first, again = example(**way), example(**way)
    before = contents(tmp_path / "run")
    if not other:
        own.write_text(text.replace("LOOSE", "1.0"))
    with told(
        ValueError,
        "before.json",
        "measured in another way",
        named,
        "same problems, grader and limits",
        "another output_dir",
    ):
        example(**way, **other)
    assert contents(tmp_path / "run") == before
    assert first["measured_by"] == again["measured_by"] and named.split(":")[0] in first["measured_by"]


@fault("S.finished_run_again", recovered=True)
def test_a_finished_run_is_measured_again_and_the_arm_is_the_one_that_was_trained(example, measured, tmp_path):
    run = shutil.copytree(measured, tmp_path / "run")
    first = json.loads((run / "results.json").read_text())
    again = example(run)
    assert {**again, "command": 0} == {**first, "command": 0}
    assert (run / WEIGHTS).read_bytes() == (measured / WEIGHTS).read_bytes()
    # another arm's arguments, let through: nothing is trained with them, so nothing is reported as theirs
    other = example(run, aqn="false", allow_other_settings="true")
    assert other["arm"]["aqn"] is True and other["steps"] == 1


@fault("S.results_lost_to_hub", recovered=True)
def test_results_are_written_before_the_network_is_touched(example, server, tmp_path):  # noqa: F811
    run, push = (
        tmp_path / "run",
        {"push_to_hub": "true", "hub_strategy": "end", "hub_model_id": REPO, "hub_token": TOKEN},
    )
    with pytest.raises(ValueError, match="hub_base_model"):  # before anything is trained
        example(run, **push)
    assert server.requests == [] and not list(run.glob("*.json"))
    push["hub_base_model"] = "someone/base"
    server.fail["POST .*/commit/.*"] = 403
    with pytest.raises(hub.HubError, match=f"qerl-trl push adapter {run} {REPO}"):
        example(run, **push)
    results = json.loads((run / "results.json").read_text())
    assert results["after"]["total"] == 6 and results["steps"] == 1
    assert seal.problems(run) == []
    server.fail.clear()
    again = example(run, **push)
    assert again["after"] == results["after"]
    assert WEIGHTS in server.repos[REPO]["files"]


# --- the rescue after a dead engine --------------------------------------------------------------------------------------------------


def dying_in(trainer, rollout, dying):
    """Wrap the trainer's rollouts as vLLM's are; in the given one `dying` is called and the engine dies."""

    class Generation(QeRLVLLMGeneration):
        def __init__(self):
            self.trainer, self.accelerator, self.mode = trainer, trainer.accelerator, "colocate"
            self.engine = types.SimpleNamespace(sleep=lambda: None)
            self._draw, self._inside, self.waits, self.rollouts = None, False, False, 0

        def _prepare(self, draw):
            self.rollouts += 1
            if self.rollouts == rollout:
                dying()
                raise RuntimeError("EngineCore died")

        def _check(self):
            pass  # there is no engine to ask

    generation, inner = Generation(), trainer._generate

    def generate(self, prompts):
        with generation._up_to_date():
            return inner(prompts)

    trainer._generate = types.MethodType(generate, trainer)


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def full_disk_of_torch(*args, **kwargs):
    raise RuntimeError("PytorchStreamWriter failed writing file")


@fault("S.rescue_loses_checkpoint", recovered=True)
@pytest.mark.parametrize(
    ("rollout", "write", "said", "left"),
    [
        (3, full_disk, "Step 2 is saved", 2),  # the checkpoint of this very step, which is not written again
        (4, full_disk, "Saving step 3 failed too (OSError: [Errno 28] There was no room", 2),
        (4, full_disk_of_torch, "Saving step 3 failed too (OSError: [Errno 28] There was no room", 2),
        (4, torch.save, "Step 3 is saved", 3),
    ],
    ids="this-step disk-full disk-full-in-torch older".split(),
)
def test_a_whole_checkpoint_outlives_the_rescue(rollout, write, said, left, tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    run, options = tmp_path / "run", {"max_steps": 4, "save_steps": 2, "save_total_limit": 1}
    trainer = tiny_runs.trainer(run, **options)
    dying_in(trainer, rollout, lambda: monkeypatch.setattr(torch, "save", write))
    with told(RolloutError, "EngineCore died", said, "resume_from_checkpoint=True"):
        trainer.train()
    monkeypatch.undo()
    assert seal.last_checkpoint(run) == str(run / f"checkpoint-{left}")
    assert len(list(run.glob(f"checkpoint-*/{seal.MANIFEST_NAME}"))) == 1
    assert tiny_runs.command(run, **options).state.global_step == 4
    assert seal.problems(run / "checkpoint-4") == []


@pytest.mark.parametrize("moment", ["before", "before, resumed", "after"])
def test_ctrl_c_in_a_measurement_says_what_was_done(moment, example, measured, tmp_path, monkeypatch):
    """It said that no step was done, of a run that goes on, and after the training nothing."""
    from qerl_trl.tasks import run as of_a_task

    run = tmp_path / "run" if moment == "before" else shutil.copytree(measured, tmp_path / "run")
    if moment == "before, resumed":
        (run / "before.json").unlink()

    def interrupted(measurement):
        raise KeyboardInterrupt

    monkeypatch.setattr(of_a_task.Measurement, "verdicts", interrupted)
    with pytest.raises(KeyboardInterrupt) as ended:
        example(run)
    said = " ".join(ended.value.__notes__)
    before, saved = "accuracy before training was being measured. ", f"{run / 'checkpoint-1'}"
    wanted = {
        "before": f"{before}No checkpoint was written yet, so the same command starts over.",
        "before, resumed": f"{before}The last whole checkpoint is {saved}: the same command goes on from it",
        "after": f"training is over, and saved in {run}.",
    }
    assert wanted[moment] in said and sum(text in said for text in wanted.values()) == 1
    if moment == "after":
        assert "the same command measures it" in said
        with pytest.raises(KeyboardInterrupt) as ended:
            example(run, resume_from_checkpoint=run / "checkpoint-1")
        assert "the same command without --resume_from_checkpoint measures it" in " ".join(ended.value.__notes__)
