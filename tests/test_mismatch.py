"""How far apart sampling and training are: the estimate, what counts as truncated, and what a run logs."""

import math
import types
from collections import defaultdict

import pytest
import torch

from qerl_trl.rollout import mismatch
from tests.trainers import logged

TRAINER = types.SimpleNamespace(
    accelerator=types.SimpleNamespace(gather=lambda value: value), args=types.SimpleNamespace(use_vllm=False)
)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """One of three may be without a log-probability here, as one of a hundred may in a rollout."""
    monkeypatch.setattr(mismatch, "_MISSING", 0.5)


def found(trained, sampled, mask=None):
    trained, sampled = torch.as_tensor(trained), torch.as_tensor(sampled)
    return mismatch.of_logps(TRAINER, trained, sampled, torch.ones_like(sampled).bool() if mask is None else mask)


def test_kl_and_entropy_of_known_log_probabilities():
    sampled = torch.tensor([[-1.0, -2.0, math.nan, 5.0]])
    trained = torch.tensor([[-1.0 + math.log(2), -2.0, 0.0, 5.0]])
    mask = torch.tensor([[True, True, True, False]])
    known = found(trained, sampled, mask)
    assert known.mismatch_kl == pytest.approx((1 - math.log(2)) / 2)
    assert known.entropy == pytest.approx(1.5)
    assert known.logp_gap == pytest.approx(math.log(1.5))
    assert known.nan_logps == 1


@pytest.mark.parametrize("gap", [0.0, -10.0, -40.0])
def test_the_sums_are_those_of_the_ratios_themselves(gap):
    """Far apart too, where the ratio less 1 is -1 to the last digit: the run has to end there."""
    generator = torch.Generator().manual_seed(0)
    sampled = -torch.rand(4, 50, generator=generator)
    trained = sampled + gap + 3 * torch.randn(4, 50, generator=generator)
    mask = torch.rand(4, 50, generator=generator) < 0.7
    trained[~mask] = math.nan  # what nobody asks for says nothing
    d = (trained[mask].double() - sampled[mask].double()).tolist()
    ratios = [math.exp(one) for one in d]
    mean = sum(ratios) / len(d)
    variance = sum((ratio - mean) ** 2 for ratio in ratios) / len(d)
    known = found(trained, sampled, mask)
    assert known.mismatch_kl == pytest.approx(sum(math.expm1(one) - one for one in d) / len(d))
    assert known.logp_gap == pytest.approx(math.log(mean))
    assert known.logp_gap_error == pytest.approx(math.sqrt(variance / len(d)) / mean)


@pytest.mark.parametrize("trained", [-800.0, -math.inf])
def test_policies_of_which_no_ratio_is_above_zero_end_the_run(trained):
    watch = mismatch.MismatchWatch(0.1)
    apart = found([[trained] * 3], [[-1.0] * 3])
    assert apart.logp_gap == -math.inf and apart.mismatch_kl > 100
    with pytest.raises(RuntimeError):
        for step in range(watch.PERSISTENT + 1):
            watch.judge(apart, step, False)


def test_no_finite_log_probability_at_all_is_an_error():
    with pytest.raises(RuntimeError, match=r"3 of the 3 tokens .* resume from the last checkpoint"):
        found([[0.0] * 3], [[math.nan, -math.inf, math.nan]])
    nothing = found([[0.0]], [[math.nan]], torch.zeros(1, 1).bool())  # every token was a tool's
    assert nothing.mismatch_kl is None and nothing.nan_logps == 0


def of_two_policies(spread, error=0.0, tokens=2000):
    """What tokens drawn from one random policy over 50 say about another, when the first is reported `error` nats wrong."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, 50, generator=generator, dtype=torch.float64)
    p = (q + spread * torch.randn(tokens, 50, generator=generator, dtype=torch.float64)).log_softmax(-1)
    drawn = torch.multinomial(q.softmax(-1), 1, generator=generator)
    return found(p.gather(-1, drawn), q.log_softmax(-1).gather(-1, drawn) + error)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 0.5, 1.0])
def test_the_gap_is_zero_for_any_two_policies_and_the_error_otherwise(spread):
    honest = of_two_policies(spread)
    assert abs(honest.logp_gap) < mismatch.MismatchWatch.CERTAIN * honest.logp_gap_error
    wrong = of_two_policies(spread, error=0.3)
    assert wrong.logp_gap == pytest.approx(honest.logp_gap - 0.3)
    assert abs(wrong.logp_gap) > mismatch.MismatchWatch.CERTAIN * wrong.logp_gap_error


SAMPLING = {
    "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "vllm_structured_outputs_regex": None, "use_vllm": True,
}  # fmt: skip


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("processed", [True, False], ids=["vllm", "transformers"])
@pytest.mark.parametrize("kept", [{"top_p": 0.6}, {"top_p": 0.95}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}], ids=str)
def test_the_gap_of_truncated_sampling_is_within_its_bounds(spread, processed, kept):
    """Exactly, from two random policies over 50 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50, generator=generator, dtype=torch.float64)
    q = (2 * logits).softmax(-1)
    p = (2 * logits + spread * torch.randn(200, 50, generator=generator, dtype=torch.float64)).softmax(-1)
    likely, order = q.sort(-1, descending=True)
    inside = (likely.cumsum(-1) - likely < kept.get("top_p", 1)) & (torch.arange(50) < kept.get("top_k", 50))
    mass_of_q, mass_of_p = (torch.where(inside, each.gather(-1, order), 0).sum(-1) for each in (q, p))
    gap = (mass_of_p / (1 if processed else mass_of_q)).mean().log().item()
    args = types.SimpleNamespace(**SAMPLING | kept | {"use_vllm": processed})
    low, high = mismatch.gap_bounds(args, same=spread == 0)
    assert low <= gap + 1e-9 and gap - 1e-9 <= high
    assert mismatch.gap_bounds(types.SimpleNamespace(**SAMPLING | {"use_vllm": processed}), same=False) == (0.0, 0.0)


def test_what_truncation_may_explain_is_not_told(caplog):
    def gap(value):
        return mismatch.Mismatch(0.0, value, 0.001, 1.0, 0)

    bounds = mismatch.gap_bounds(types.SimpleNamespace(**SAMPLING | {"top_p": 0.5}), same=True)
    watch = mismatch.MismatchWatch(0.1)
    watch.judge(
        gap(-0.3), 1, False, bounds
    )  # as much as the mass that top_p=0.5 may leave out: log-probabilities 0.3 too high look the same
    assert not caplog.records
    watch.judge(gap(0.05), 2, False, bounds)
    assert "from exp(-0.6931) to exp(0), as tokens are left out" in caplog.text


#: setting -> log-probabilities (T, 50) that vLLM samples from, of those of the model
SAMPLERS = {
    "vllm_structured_outputs_regex": ("[0-9]{4}", lambda q: only(q, torch.arange(50) < 3)),
    "top_k": (20, lambda q: only(q, q >= q.topk(20).values[:, -1:])),
    "min_p": (0.01, lambda q: only(q, q >= q.amax(-1, keepdim=True) + math.log(0.01))),
    "top_p": (0.9, lambda q: only(q, q >= q.quantile(0.5, dim=-1, keepdim=True))),
    "structured_outputs": ({"choice": ["a", "b"]}, lambda q: only(q, torch.arange(50) < 2)),
    "allowed_token_ids": ([*range(40)], lambda q: only(q, torch.arange(50) < 40)),
    "bad_words": (["x"], lambda q: only(q, torch.arange(50) != 7)),
    "min_tokens": (4, lambda q: only(q, torch.arange(50) != 0)),
    "logit_bias": ({3: 5.0}, lambda q: (q + 5.0 * (torch.arange(50) == 3)).log_softmax(-1)),
    "presence_penalty": (1.5, lambda q: (q - 1.5 * (torch.arange(50) < 25)).log_softmax(-1)),
    "repetition_penalty": (1.3, lambda q: q.where(torch.arange(50) < 25, 1.3 * q).log_softmax(-1)),
}  # fmt: skip
ARGUMENTS = {name for name in SAMPLING if name != "generation_kwargs"}


def only(logps, kept):
    return logps.where(kept, -math.inf).log_softmax(-1)


def rollouts_of(setting, spread):
    """Three rollouts of a model whose adapter in the engine is `spread` away, measured and judged as with vLLM."""
    value, change = SAMPLERS[setting]
    given = {setting: value} if setting in ARGUMENTS else {"generation_kwargs": {setting: value, "stop": ["."]}}
    args = types.SimpleNamespace(**SAMPLING | given)
    trainer = types.SimpleNamespace(
        args=args, accelerator=TRAINER.accelerator, model=types.SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
        state=types.SimpleNamespace(global_step=1),
    )  # fmt: skip
    watch, generator = mismatch.MismatchWatch(0.1), torch.Generator().manual_seed(0)
    for _ in range(3):
        p = (2 * torch.randn(4000, 50, generator=generator)).log_softmax(-1)
        q = change((p + spread * torch.randn(4000, 50, generator=generator)).log_softmax(-1))
        drawn = torch.multinomial(q.exp(), 1, generator=generator)
        rollout = {"sampling_per_token_logps": q.gather(-1, drawn), "old_per_token_logps": p.gather(-1, drawn)}
        watch.rollout(trainer, None, rollout | {"completion_mask": torch.ones(4000, 1)})
    return trainer._metrics["train"]["rollout/mismatch_kl"]


@pytest.mark.parametrize("setting", SAMPLERS)
def test_a_sampler_that_leaves_out_or_reweighs_tokens_is_no_fault(setting, caplog):
    """After trl#3924: the KL to the trainer's whole softmax holds what was left out, and a run ended with "stale adapter"."""
    found = rollouts_of(setting, spread=0.02)
    assert not caplog.records and min(found) >= 0
    if setting in ("vllm_structured_outputs_regex", "structured_outputs", "logit_bias"):
        assert min(found) > 0.1, "what ended a run"


@pytest.mark.parametrize("setting", ["top_p", "top_k", "min_p", "bad_words", "min_tokens"])
def test_a_stale_adapter_is_found_where_few_tokens_are_left_out(setting):
    with pytest.raises(RuntimeError, match=r"KL of at least .* stale adapter"):
        rollouts_of(setting, spread=1.0)


@pytest.mark.parametrize("given", [{"stop": ["."]}, {"stop_token_ids": [7], "ignore_eos": True}, {"top_k": None}])
def test_what_changes_no_probability_leaves_the_limits_as_they_are(given):
    args = types.SimpleNamespace(**SAMPLING | {"generation_kwargs": given})
    assert mismatch.sampler(args) == "all" and mismatch.gap_bounds(args, same=True) == (0.0, 0.0)


def test_what_is_too_far_warns_and_what_stays_so_ends_the_run(caplog):
    def kl(value):
        return mismatch.Mismatch(value, 0.0, 0.01, 1.0, 0)

    watch = mismatch.MismatchWatch(0.1)
    watch.judge(kl(0.09), 1, noisy=True)
    watch.judge(kl(0.009), 1, noisy=False)
    assert not caplog.records
    watch.judge(kl(0.2), 2, noisy=True)
    watch.judge(kl(0.02), 3, noisy=False)
    assert "0.2 nats" in caplog.text and "0.02 nats" in caplog.text
    for noisy, value in ((True, 1.1), (False, 0.11)):
        watch = mismatch.MismatchWatch(0.1)
        for step in range(6):  # a good one in between starts the count again
            watch.judge(kl(value if step % 3 else 0.0), step, noisy)
        with pytest.raises(RuntimeError, match=r"in 3 rollouts in a row.*rollout_mismatch_threshold"):
            watch.judge(kl(value), 6, noisy)
        mismatch.MismatchWatch(None).judge(kl(value), 1, noisy)


@pytest.mark.parametrize(
    ("mode", "low", "high", "ratio", "fraction"),
    [
        ("token_truncate", None, 2.0, [[2.0, 1.0, 0.5, 9.0]], 1 / 3),
        ("token_truncate", 0.5, None, [[2.0, 1.0, 0.5, 9.0]], 1 / 3),
        ("token_truncate", 0.5, 2.0, [[2.0, 1.0, 0.5, 9.0]], 2 / 3),
        ("token_mask", None, 2.0, [[0.0, 1.0, 0.5, 9.0]], 1 / 3),
        ("sequence_truncate", None, 2.0, [[2.0]], 1.0),
    ],
)
def test_truncated_fraction_counts_both_ends_of_real_tokens(mode, low, high, ratio, fraction):
    trainer = types.SimpleNamespace(
        accelerator=TRAINER.accelerator,
        args=types.SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
    )
    rollout = mismatch.measure(
        trainer,
        None,
        {
            "completion_mask": torch.tensor([[1, 1, 1, 0]]),
            "sampling_per_token_logps": torch.tensor([[0.0, 0.0, math.nan, 0.0]]),
            "old_per_token_logps": torch.tensor([[math.log(2), 0.0, 0.0, 5.0]]),
            "importance_sampling_ratio": torch.tensor(ratio),
        },
    )
    assert rollout.truncated_fraction == pytest.approx(fraction)
    assert rollout.mismatch_kl == pytest.approx((1 - math.log(2)) / 2)  # the two tokens that were scored
    assert rollout.nan_logps == 1


def test_two_equal_policies_are_not_measured():
    assert mismatch.measure(TRAINER, None, {"completion_mask": torch.ones(1, 4)}) is None


def test_the_mismatch_is_measured_on_as_many_sequences_at_a_time_as_a_step(make_trainer, monkeypatch):
    trainer = make_trainer(per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=4, max_steps=3)
    sizes, logps = [], trainer._get_per_token_logps_and_entropies

    def watching(model, input_ids, *args, batch_size=None, **kwargs):
        sizes.append(batch_size or len(input_ids))
        return logps(model, input_ids, *args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", watching)
    trainer.train()
    assert logged(trainer, "rollout/mismatch_kl")
    assert set(sizes) == {2}
