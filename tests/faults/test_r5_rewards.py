"""Rewards and numbers that cannot be learned from: refused before the optimizer, by function, value and remedy."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pandas
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerState

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.checks import rewards as guards
from qerl_trl.checks.learning import SignalMonitor
from tests.faults.catalog import fault, told
from tests.faults.tiny_runs import spread_reward as sound_reward
from tests.faults.tiny_runs import tiny_runs  # noqa: F401  (a fixture)

PROMPTS = Dataset.from_dict({"prompt": ["say one ", "say two "] * 4})
TIMEOUT = 0.3
ROOT = Path(__file__).resolve().parents[2]


def spread(completions, **kwargs):
    return [float(index % 4) for index, _ in enumerate(completions)]


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """One for all: a fault replaces its reward function, or spoils one number of a step that is then not taken."""
    args = QeRLConfig(
        str(tmp_path_factory.mktemp("run")), use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=4, max_steps=1, save_strategy="no", report_to="none", gradient_checkpointing=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"}, reward_timeout=TIMEOUT, zero_advantage_patience=3, max_grad_norm=0.0,
        scale_rewards="none",
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    made = QeRLGRPOTrainer(
        str(tiny_model_dir("qwen2")), [spread, spread], args, PROMPTS, processing_class=tiny_tokenizer, peft_config=lora
    )
    if not hasattr(made, "async_loop"):  # TRL starts it for async functions that it is given at the start
        from trl.trainer.grpo_trainer import start_event_loop_in_daemon

        _, made.async_loop, ready = start_event_loop_in_daemon(name="loop")
        ready.wait()
    return made


@pytest.fixture
def graded_by(trainer, caplog):
    """`graded_by(function)`: the trainer, with that function and one that is at peace with everything."""
    caplog.set_level(logging.WARNING)
    trainer._monitor = SignalMonitor(trainer.args.zero_advantage_patience)
    trainer.model.train()

    def give(function):
        trainer.reward_funcs, trainer.reward_func_names = [spread, function], ["spread", "graded"]
        trainer.reward_funcs = guards.checked_rewards(
            trainer.reward_funcs, trainer.reward_func_names, trainer.args.reward_timeout
        )
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


# --- what a function returns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [pytest.param(math.inf, marks=fault("R5.plus_inf")), pytest.param(-math.inf, marks=fault("R5.minus_inf"))]
)
def test_infinite(graded_by, value):
    trainer = graded_by(lambda completions, **_: [0.0] * 7 + [value])
    with told(ValueError, "graded", str(value), "completion 7", "clip the reward"):
        rewards(trainer)


@fault("R5.nan", recovered=True)
def test_nan_is_left_out_and_said_once(graded_by, caplog):
    trainer = graded_by(lambda completions, **_: [math.nan] * len(completions))
    for _ in range(2):
        assert torch.isfinite(rollout(trainer)["advantages"]).all()
    (said,) = (message for message in caplog.messages if "'graded' returned NaN for completion 0" in message)
    assert "Return None where the function does not apply" in said


@fault("R5.huge")
@fault("S.reward_1e20")
@pytest.mark.parametrize("value", [1e38, 1e39, 1e30, 1e20, -1e20])
def test_too_large_for_float32_statistics(graded_by, value):
    trainer = graded_by(lambda completions, **_: [0.0] * 7 + [value])
    with told(ValueError, "graded", f"{value}", "completion 7", "float32", "scale the reward"):
        rewards(trainer)


@fault("R5.huge")
def test_too_large_by_its_weight(graded_by):
    trainer = graded_by(lambda completions, **_: [0.0] * 7 + [1e10])
    trainer.reward_weights = torch.tensor([1.0, 1e10])
    with told(ValueError, "graded", "1e+20", "weight of 1e+10", "scale the reward"):
        rewards(trainer)


def test_large_rewards_that_float32_can_hold_are_learned_from(graded_by):
    advantages = rollout(graded_by(lambda completions, **_: [1e15 * (i % 3) for i in range(len(completions))]))[
        "advantages"
    ]
    assert torch.isfinite(advantages).all() and advantages.abs().amax() > 1e14


@fault("R5.wrong_length")
def test_wrong_length(graded_by):
    with told(ValueError, "graded", "7 rewards for 8 completions", "exactly one per completion"):
        rewards(graded_by(lambda completions, **_: [0.0] * 7))


@fault("R5.not_a_number")
@pytest.mark.parametrize("value", ["good", [1.0], 1 + 0j])
def test_not_a_number(graded_by, value):
    with told(TypeError, "graded", repr(value), "completion 7", "or None where"):
        rewards(graded_by(lambda completions, **_: [0.0] * 7 + [value]))


@fault("R5.huge")
@pytest.mark.parametrize("value", [10**400, -(10**5000), Fraction(10**400)], ids=["int", "unprintable", "fraction"])
def test_beyond_what_a_float_holds(graded_by, value):
    """Python says of it that it is too large to convert, and not whose it is."""
    with told(ValueError, "graded", "inf", "completion 7", "clip the reward"):
        rewards(graded_by(lambda completions, **_: [0.0] * 7 + [value]))


@fault("R5.not_a_number")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (bytes(range(8)), "(bytes)"),
        ("12345678", "(str)"),
        (pandas.DataFrame([[5.0] * 8]), "(DataFrame)"),
        (pandas.DataFrame({"reward": [5.0] * 8}), "(DataFrame)"),
    ],
    ids=["bytes", "text", "one row", "one column"],
)
def test_what_gives_numbers_that_are_no_rewards(graded_by, value, said):
    with told(TypeError, "graded", said, "return a list"):
        rewards(graded_by(lambda completions, **_: value))


def test_a_column_of_a_frame_is_a_list(graded_by):
    frame = pandas.DataFrame({"reward": [float(index) for index in range(8)]}, index=range(8, 0, -1))
    assert rewards(graded_by(lambda completions, **_: frame["reward"]))[:, 1].tolist() == list(range(8))


@fault("R5.all_none")
def test_a_run_in_which_nothing_is_graded_ends(graded_by, caplog):
    trainer = graded_by(lambda completions, **_: [None] * len(completions))
    trainer.reward_funcs[0] = trainer.reward_funcs[1]
    for _ in range(2):
        assert not rollout(trainer)["advantages"].any()
    assert sum("no function of 'spread', 'graded' applied" in message for message in caplog.messages) == 1
    with told(RuntimeError, "graded", "8 completions", "3 rollouts in a row", "return a number"):
        rollout(trainer)


@fault("R5.equal_rewards", recovered=True)
def test_a_streak_of_equal_rewards(graded_by, caplog):
    trainer = graded_by(lambda completions, **_: [1.0] * len(completions))
    trainer.reward_funcs[0] = trainer.reward_funcs[1]
    for _ in range(3):
        rollout(trainer)
    assert "last 3 rollouts (mean reward 2" in caplog.text and "log_completions=True" in caplog.text


# --- what a function does --------------------------------------------------------------------------------------------


def broken(completions, **_):
    raise KeyError("answer")


async def broken_later(completions, **_):
    await asyncio.sleep(0)
    raise KeyError("answer")


def broken_in_a_pool(completions, **_):
    return in_thread(lambda: broken(completions))


def broken_lazily(completions, **_):
    return map(broken, completions)


def broken_in_a_generator(completions, **_):
    for text in completions:
        yield len(text) + None  # a TypeError of its own


async def broken_later_and_lazily(completions, **_):
    return map(broken, completions)


async def slow(completions, **_):
    await asyncio.sleep(60)


def hanging(completions, **_):
    for _ in range(6000):
        time.sleep(0.01)


def hanging_lazily(completions, **_):
    return map(hanging, completions)


def hanging_in_a_generator(completions, **_):
    for text in completions:
        hanging([text])
        yield 0.0


def without_an_end(completions, **_):
    return itertools.repeat(0.0)


def hanging_and_catching(completions, **_):
    with contextlib.suppress(Exception):
        time.sleep(60)
    return [0.0] * len(completions)


@fault("R5.raises")
@pytest.mark.parametrize("function", [broken, broken_later, broken_lazily, broken_later_and_lazily])
def test_raises(graded_by, function):
    with told(RuntimeError, "'graded' raised KeyError", "answer", "return None", "resume"):
        rewards(graded_by(function))


def exits(completions, **_):
    exec("import sys; sys.exit()")  # what a grader of code was given by the model


async def exits_later(completions, **_):
    exits(completions)


@fault("R5.raises")
@pytest.mark.parametrize("function", [exits, exits_later])
def test_an_exit_in_a_reward_is_no_end_of_the_run(graded_by, function):
    with told(RuntimeError, "'graded' raised SystemExit", "called exit()", "a process of its own", "resume"):
        rewards(graded_by(function))


@fault("R5.raises")
def test_an_error_of_a_generator_is_not_taken_for_one_of_its_kind(graded_by):
    with told(RuntimeError, "'graded' raised TypeError", "unsupported operand", "return None", "resume"):
        rewards(graded_by(broken_in_a_generator))


@fault("R5.raised_outside_main_thread")
@pytest.mark.parametrize("function", [broken, broken_later, broken_in_a_pool, broken_lazily])
def test_raises_outside_the_main_thread(graded_by, function):
    with told(RuntimeError, "'graded' raised KeyError", "answer", "return None", "resume"):
        in_thread(lambda: rewards(graded_by(function)))


@fault("R5.raised_outside_main_thread")
def test_an_alarm_outside_the_main_thread(graded_by):
    import signal

    def alarming(completions, **_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    with told(RuntimeError, "'graded' raised ValueError", "main thread only", "turn their time limits off"):
        in_thread(lambda: rewards(graded_by(alarming)))


@fault("R5.hangs")
@fault("S.reward_hangs")
@pytest.mark.parametrize("function", [hanging, slow, hanging_lazily, hanging_in_a_generator, without_an_end])
def test_hangs(graded_by, function):
    trainer, begun = graded_by(function), time.monotonic()
    with told(RuntimeError, "'graded' did not return", f"reward_timeout={TIMEOUT} s", "raise reward_timeout", "resume"):
        rewards(trainer)
    assert time.monotonic() - begun < 10 * TIMEOUT


@fault("R5.hangs")
def test_hangs_and_catches_what_ends_it(graded_by):
    with told(RuntimeError, "'graded' did not return", "raise reward_timeout"):
        rewards(graded_by(hanging_and_catching))


@fault("R5.hangs")
def test_an_async_function_that_never_gives_control_back(graded_by, monkeypatch):
    monkeypatch.setattr(guards, "_GRACE", 0.1)

    async def blocking(completions, **_):
        time.sleep(1.5)

    begun = time.monotonic()
    with told(RuntimeError, "'graded' did not return", "raise reward_timeout"):
        rewards(graded_by(blocking))
    assert time.monotonic() - begun < 1.2
    time.sleep(1)  # it gives the loop back


def test_a_function_gets_what_trl_passes_and_nothing_else(graded_by):
    """An environment's own reward takes `environments`; whoever calls it without completions gets its rewards."""
    seen = {}

    def of_environment(environments, **kwargs):
        seen.update(kwargs)
        return [1.0 for _ in environments]

    trainer = graded_by(of_environment)
    trainer.environments = ["a"] * 8
    try:
        assert rewards(trainer)[:, 1].tolist() == [1.0] * 8
    finally:
        trainer.environments = None
    assert set(seen) >= {"prompts", "completions", "completion_ids", "trainer_state", "log_metric"}
    assert trainer.reward_funcs[1](environments=["a", "b"]) == [1.0, 1.0]


# --- what a step computes --------------------------------------------------------------------------------------------


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
    with told(RuntimeError, said, "at step 0", "lora_B", "lower learning rate"):
        spoiled_step(trainer, lambda grad: torch.full_like(grad, value))


@fault("R5.nan_loss")
def test_nan_loss(graded_by, monkeypatch):
    trainer = graded_by(spread)
    compute = trainer.compute_loss
    monkeypatch.setattr(trainer, "compute_loss", lambda *args, **kwargs: compute(*args, **kwargs) * math.nan)
    with told(RuntimeError, "the loss is nan at step 0", "no weight was changed", "learning rate"):
        spoiled_step(trainer, lambda grad: grad)


@fault("R5.entropy_collapse", recovered=True)
def test_entropy_collapse(graded_by, caplog, monkeypatch):
    """Of the model itself: its head is turned up until the policy is certain."""
    trainer = graded_by(spread)
    monkeypatch.setattr(trainer, "state", TrainerState())
    trainer._metrics["train"].clear()
    for trainer.state.global_step, scale in ((1, 1.0), (6, 1e4)):
        handle = trainer.model.get_output_embeddings().register_forward_hook(lambda m, i, out, s=scale: out * s)
        trainer._metrics["train"]["entropy"].append(entropy_of(trainer))
        trainer.log({})
        trainer._metrics["train"].clear()
        handle.remove()
    assert "for 5 steps below 0.25 of its start" in caplog.text and "lower learning_rate" in caplog.text


def entropy_of(trainer):
    with torch.no_grad():
        logits = trainer.model(torch.arange(8)[None]).logits
    return torch.distributions.Categorical(logits=logits.float()).entropy().mean().item()


# --- and then ------------------------------------------------------------------------------------------------------------


def _raises():
    raise KeyError("solution")


FAILURES = {
    "plus_inf": lambda: [math.inf] * 4,
    "minus_inf": lambda: [-math.inf] * 4,
    "huge": lambda: [1e38] * 4,
    "wrong_length": lambda: [1.0],
    "not_a_number": lambda: ["one"] * 4,
    "raises": _raises,
    "raised_outside_main_thread": lambda: in_thread(_raises),
    "hangs": lambda: time.sleep(20),
    "all_none": lambda: [None] * 4,
}


@pytest.fixture(scope="module")
def uninterrupted(tiny_runs, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("uninterrupted")
    tiny_runs.command(folder, **_options("wrong_length"))
    return adapter(folder)


def adapter(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def _options(kind):
    return {
        "save_steps": 100,
        "max_steps": 3,
        "reward_timeout": 1.0 if kind == "hangs" else 60.0,
        "zero_advantage_patience": 1,
    }


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("plus_inf", marks=fault("R5.plus_inf", recovered=True)),
        pytest.param("minus_inf", marks=fault("R5.minus_inf", recovered=True)),
        pytest.param("huge", marks=fault("R5.huge", recovered=True)),
        pytest.param("wrong_length", marks=fault("R5.wrong_length", recovered=True)),
        pytest.param("not_a_number", marks=fault("R5.not_a_number", recovered=True)),
        pytest.param("raises", marks=fault("R5.raises", recovered=True)),
        pytest.param("raised_outside_main_thread", marks=fault("R5.raised_outside_main_thread", recovered=True)),
        pytest.param("hangs", marks=fault("R5.hangs", recovered=True)),
        pytest.param("all_none", marks=fault("R5.all_none", recovered=True)),
    ],
)
def test_a_reward_that_fails_after_two_steps_costs_nothing(kind, uninterrupted, tiny_runs, tmp_path):  # noqa: F811
    """The step before is saved with its random state; once the function is mended, the same command ends as if nothing had been."""
    calls = []

    def spread_reward(completions, **kwargs):
        calls.append(kind)
        return FAILURES[kind]() if len(calls) == 3 else sound_reward(completions, **kwargs)

    broken = tiny_runs.trainer(tmp_path, reward=spread_reward, **_options(kind))
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        broken.train()
    saved = "Step 2 is saved; resume from the last checkpoint (resume_from_checkpoint=True) once the cause is gone."
    assert caught.value.__notes__[-1] == saved
    assert tiny_runs.command(tmp_path, **_options(kind))._resumed.global_step == 2
    assert adapter(tmp_path) == uninterrupted


#: options, the rollout that fails, whether the step that had ended can be saved
IN_THE_MIDDLE = {
    "second rollout of a step": ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 4, True),
    "first rollout of a step": ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 3, True),
    "a step that begins with an older rollout": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        2,
        False,
    ),
    "the one after it": ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, 3, True),
}


@fault("R5.raises", recovered=True)
@pytest.mark.parametrize("case", IN_THE_MIDDLE)
def test_a_reward_that_fails_in_the_middle_of_a_step_costs_nothing_either(case, tiny_runs, tmp_path):  # noqa: F811
    """At f05be0c the step before was saved with the random state of the middle, and what went on from there was another run."""
    rhythm, number, saved = IN_THE_MIDDLE[case]
    options, calls = _options("raises") | rhythm | {"max_steps": 4, "zero_advantage_patience": 10}, []

    def spread_reward(completions, **kwargs):
        calls.append(case)
        return FAILURES["raises"]() if len(calls) == number else sound_reward(completions, **kwargs)

    tiny_runs.command(tmp_path / "whole", **options)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        tiny_runs.trainer(tmp_path / "broken", reward=spread_reward, **options).train()
    notes = " ".join(caught.value.__notes__)
    assert ("is saved; resume" in notes) == saved and ("own state is intact; resume" in notes) != saved
    again = tiny_runs.command(tmp_path / "broken", **options)
    assert (again._resumed is not None) == saved
    assert adapter(tmp_path / "broken") == adapter(tmp_path / "whole")
