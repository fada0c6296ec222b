"""Rewards and numbers that cannot be learned from: refused before the optimizer, by function, value and remedy."""

import asyncio
import contextlib
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from datasets import Dataset

from qerl_trl.checks import rewards as guards
from qerl_trl.checks.learning import SignalMonitor
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import WEIGHTS
from tests.faults.tiny_runs import spread_reward as sound_reward

PROMPTS = Dataset.from_dict({"prompt": ["say one ", "say two "] * 4})
TIMEOUT = 0.3


def spread(completions, **kwargs):
    return [float(index % 4) for index, _ in enumerate(completions)]


@pytest.fixture(scope="module")
def trainer(tiny_runs, tmp_path_factory):
    """Shared: a fault replaces its reward function, or spoils one number of a step that is then not taken."""
    options = {"reward_timeout": TIMEOUT, "zero_advantage_patience": 3, "max_grad_norm": 0.0, "scale_rewards": "none"}
    options |= {"per_device_train_batch_size": 8, "max_steps": 1, "save_strategy": "no"}
    made = tiny_runs.trainer(tmp_path_factory.mktemp("run"), [spread, spread], PROMPTS, **options)
    if not hasattr(made, "async_loop"):  # TRL starts it for async functions that it is given at the start
        from trl.trainer.grpo_trainer import start_event_loop_in_daemon

        _, made.async_loop, ready = start_event_loop_in_daemon(name="loop")
        ready.wait()
    return made


@pytest.fixture
def graded_by(trainer, caplog):
    """`graded_by(function)`: the trainer, with `spread` and that function."""
    caplog.set_level(logging.WARNING)
    trainer._monitor = SignalMonitor(trainer.args.zero_advantage_patience)
    trainer.model.train()

    def give(function):
        trainer.reward_func_names = ["spread", "graded"]
        trainer.reward_funcs = guards.checked_rewards([spread, function], trainer.reward_func_names, TIMEOUT)
        return trainer

    yield give
    trainer.reward_weights = torch.ones(2)
    trainer.model.zero_grad()


def rewards(trainer):
    texts = [f"text {index}" for index in range(8)]
    return trainer._calculate_rewards([{"prompt": text} for text in texts], texts, texts, [[5]] * 8)


def rollout(trainer):
    return trainer._generate_and_score_completions([{"prompt": row["prompt"]} for row in PROMPTS])


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# --- what a function returns ---

RETURNED = [
    pytest.param(
        7 * [0.0] + [math.inf], ValueError, ("completion 7", "inf", "clip the reward"), marks=fault("R5.infinite")
    ),
    pytest.param(7 * [0.0] + [-1e20], ValueError, ("completion 7", "-1e+20", "float32", "scale the reward")),
    pytest.param(7 * [0.0] + ["good"], TypeError, ("completion 7", "'good'", "or None where")),
    pytest.param(
        7 * [0.0], ValueError, ("7 rewards for 8", "exactly one per completion"), marks=fault("R5.wrong_length")
    ),
    pytest.param("12345678", TypeError, ("(str)", "return a list"), marks=fault("R5.not_a_number")),
    pytest.param(torch.ones(8, 2), TypeError, ("Tensor", "completion 0")),
    pytest.param(0.5, TypeError, ("0.5", "list")),
]


@pytest.mark.parametrize(("value", "kind", "words"), RETURNED)
def test_values_that_cannot_be_learned_from(graded_by, value, kind, words):
    with raises(kind, "graded", *words):
        rewards(graded_by(lambda completions, **_: value))


@fault("R5.nan", recovered=True)
def test_nan_is_left_out_and_warned_of_once(graded_by, caplog):
    trainer = graded_by(lambda completions, **_: [math.nan] * len(completions))
    for _ in range(2):
        assert torch.isfinite(rollout(trainer)["advantages"]).all()
    (said,) = (message for message in caplog.messages if "'graded' returned NaN for completion 0" in message)
    assert "Return None where the function does not apply" in said


@fault("R5.all_none")
def test_a_run_without_any_grade_ends(graded_by, caplog):
    trainer = graded_by(lambda completions, **_: [None] * len(completions))
    trainer.reward_funcs[0] = trainer.reward_funcs[1]
    for _ in range(2):
        assert not rollout(trainer)["advantages"].any()
    assert sum("no function of 'spread', 'graded' applied" in message for message in caplog.messages) == 1
    with raises(RuntimeError, "graded", "8 completions", "3 rollouts in a row", "return a number"):
        rollout(trainer)


# --- what a function does ---


def broken(completions, **_):
    raise KeyError("answer")


async def broken_later(completions, **_):
    await asyncio.sleep(0)
    raise KeyError("answer")


def broken_in_a_pool(completions, **_):
    return in_thread(lambda: broken(completions))


def exits(completions, **_):
    exec("import sys; sys.exit()")  # what a grader of code was given by the model


KEY = ("raised KeyError", "answer", "return None")
RAISE = [
    (broken, KEY, False),
    (broken_later, KEY, False),
    (exits, ("raised SystemExit", "called exit()", "a process of its own"), False),
    (broken, KEY, True),
    (broken_later, KEY, True),
    (broken_in_a_pool, KEY, True),
]


@fault("R5.raises")
@pytest.mark.parametrize(("function", "words", "in_a_thread"), RAISE)
def test_raises_in_the_main_thread_or_outside(graded_by, function, words, in_a_thread):
    with raises(RuntimeError, "'graded'", *words, "resume"):
        (in_thread if in_a_thread else lambda work: work())(lambda: rewards(graded_by(function)))


async def slow(completions, **_):
    await asyncio.sleep(60)


def hanging_and_catching(completions, **_):
    with contextlib.suppress(Exception):
        time.sleep(60)
    return [0.0] * len(completions)


@fault("R5.hangs")
@pytest.mark.parametrize("function", [slow, hanging_and_catching])
def test_hangs(graded_by, function):
    trainer, begun = graded_by(function), time.monotonic()
    with raises(
        RuntimeError, "'graded' did not return", f"reward_timeout={TIMEOUT} s", "raise reward_timeout", "resume"
    ):
        rewards(trainer)
    assert time.monotonic() - begun < 10 * TIMEOUT


# --- what a step computes ---


def spoiled_step(trainer, hook):
    """One step of a run in which `hook` changes the gradient of one adapter matrix; the adapter is as it was before."""
    parameter = next(p for n, p in trainer.model.named_parameters() if "lora_B" in n)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    handle = parameter.register_hook(hook)
    try:
        trainer.train()
    finally:
        handle.remove()
        after = dict(trainer.model.named_parameters())
        assert all(torch.equal(after[n], value) for n, value in before.items())


@fault("R5.inf_gradient")
@pytest.mark.parametrize(
    ("value", "said"), [(math.inf, "gradient is not finite in 1 of"), (1e30, "norm that overflows (1e+30)")]
)
def test_gradient(graded_by, value, said):
    trainer = graded_by(spread)
    with raises(RuntimeError, said, "at step 0", "lora_B", "lower learning rate"):
        spoiled_step(trainer, lambda grad: torch.full_like(grad, value))


@fault("R5.nan_loss")
def test_nan_loss(graded_by, monkeypatch):
    trainer = graded_by(spread)
    compute = trainer.compute_loss
    monkeypatch.setattr(trainer, "compute_loss", lambda *args, **kwargs: compute(*args, **kwargs) * math.nan)
    with raises(RuntimeError, "the loss is nan at step 0", "no weight was changed", "learning rate"):
        spoiled_step(trainer, lambda grad: grad)


# --- and then ---


def _raises():
    raise KeyError("solution")


FAILURES = [
    pytest.param(lambda: [math.inf] * 4, marks=fault("R5.infinite", recovered=True), id="infinite"),
    pytest.param(lambda: [1.0], marks=fault("R5.wrong_length", recovered=True), id="wrong_length"),
    pytest.param(lambda: ["one"] * 4, marks=fault("R5.not_a_number", recovered=True), id="not_a_number"),
    pytest.param(_raises, marks=fault("R5.raises", recovered=True), id="raises"),
    pytest.param(lambda: time.sleep(20), marks=fault("R5.hangs", recovered=True), id="hangs"),
    pytest.param(lambda: [None] * 4, marks=fault("R5.all_none", recovered=True), id="all_none"),
]
STEPS = {"save_steps": 100, "max_steps": 3, "zero_advantage_patience": 1}


@pytest.fixture(scope="module")
def uninterrupted(tiny_runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    tiny_runs.command(folder, **STEPS)
    return (folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize("fails", FAILURES)
def test_a_reward_that_fails_after_two_steps_costs_nothing(fails, uninterrupted, tiny_runs, tmp_path):
    """The step before is saved with its RNG state; with a repaired function, the same command resumes from it."""
    calls, options = [], STEPS | {"reward_timeout": 1.0}

    def spread_reward(completions, **kwargs):
        calls.append(fails)
        return fails() if len(calls) == 3 else sound_reward(completions, **kwargs)

    broken = tiny_runs.trainer(tmp_path, reward=spread_reward, **options)
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        broken.train()
    assert "Step 2 is saved; resume from the last checkpoint" in caught.value.__notes__[-1]
    assert tiny_runs.command(tmp_path, **options)._resumed.global_step == 2
    assert (tmp_path / WEIGHTS).read_bytes() == uninterrupted
