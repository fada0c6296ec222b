"""The distance of sampling and trained policy: its estimate, truncation, limits and logs."""

import math
import types
from collections import defaultdict

import pytest
import torch

from qerl_trl.rollout import mismatch
from qerl_trl.rollout.mismatch import Mismatch, MismatchWatch
from tests.faults.tiny_runs import logged

ALONE = types.SimpleNamespace(gather=lambda value: value)
TRAINER = types.SimpleNamespace(accelerator=ALONE, args=types.SimpleNamespace(use_vllm=False))


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Half of the tokens may lack a log-probability here, not one of a hundred."""
    monkeypatch.setattr(mismatch, "_MISSING", 0.5)


def found(trained, sampled, mask=None):
    trained, sampled = torch.as_tensor(trained), torch.as_tensor(sampled)
    return mismatch.of_logps(TRAINER, trained, sampled, torch.ones_like(sampled).bool() if mask is None else mask)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("gap", [0.0, -10.0, -40.0])
def test_estimates_are_means_over_the_importance_ratios(gap):
    """Also where a ratio less 1 is -1 to the last digit."""
    generator = torch.Generator().manual_seed(0)
    sampled = -torch.rand(4, 50, generator=generator)
    trained = sampled + gap + 3 * torch.randn(4, 50, generator=generator)
    mask = torch.rand(4, 50, generator=generator) < 0.7
    trained[~mask] = math.nan
    sampled[tuple(mask.nonzero()[0])] = math.nan
    known_mask = mask & sampled.isfinite()
    d = (trained[known_mask].double() - sampled[known_mask].double()).tolist()
    ratios = [math.exp(one) for one in d]
    mean = sum(ratios) / len(d)
    variance = sum((ratio - mean) ** 2 for ratio in ratios) / len(d)
    known = found(trained, sampled, mask)
    assert known.mismatch_kl == pytest.approx(sum(math.expm1(one) - one for one in d) / len(d))
    assert known.logp_gap == pytest.approx(math.log(mean))
    assert known.logp_gap_error == pytest.approx(math.sqrt(variance / len(d)) / mean)
    assert known.entropy == pytest.approx(-sampled[known_mask].double().mean().item()) and known.nan_logps == 1


def test_rollouts_without_finite_values_end_the_run():
    with pytest.raises(RuntimeError, match=r"3 of the 3 tokens .* resume from the last checkpoint"):
        found([[0.0] * 3], [[math.nan, -math.inf, math.nan]])
    nothing = found([[0.0]], [[math.nan]], torch.zeros(1, 1).bool())  # every token was a tool's
    assert nothing.mismatch_kl is None and nothing.nan_logps == 0
    for trained in (-800.0, -math.inf):  # no ratio is above 0
        watch, apart = MismatchWatch(0.1), found([[trained] * 3], [[-1.0] * 3])
        assert apart.logp_gap == -math.inf and apart.mismatch_kl > 100
        with pytest.raises(RuntimeError):
            for step in range(watch.PERSISTENT + 1):
                watch.judge(apart, step, False)


SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
SAMPLING |= {"generation_kwargs": None, "vllm_structured_outputs_regex": None, "use_vllm": True}


def args_with(**options):
    return types.SimpleNamespace(**SAMPLING | options)


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("processed", [True, False], ids=["vllm", "transformers"])
@pytest.mark.parametrize("kept", [{"top_p": 0.6}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}], ids=str)
def test_the_gap_of_truncated_sampling_is_within_its_bounds(spread, processed, kept):
    """Exactly, for two random policies over 50 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = normal(generator, 200, 50)
    q = (2 * logits).softmax(-1)
    p = (2 * logits + spread * normal(generator, 200, 50)).softmax(-1)
    likely, order = q.sort(-1, descending=True)
    inside = (likely.cumsum(-1) - likely < kept.get("top_p", 1)) & (torch.arange(50) < kept.get("top_k", 50))
    mass_of_q, mass_of_p = (torch.where(inside, each.gather(-1, order), 0).sum(-1) for each in (q, p))
    gap = (mass_of_p / (1 if processed else mass_of_q)).mean().log().item()
    low, high = mismatch.gap_bounds(args_with(use_vllm=processed, **kept), same=spread == 0)
    assert low <= gap + 1e-9 and gap - 1e-9 <= high
    neutral = args_with(generation_kwargs={"stop": ["."], "ignore_eos": True, "top_k": None})
    assert mismatch.sampler(neutral) == "all" and mismatch.gap_bounds(neutral, same=True) == (0.0, 0.0)


def only(logps, kept):
    return logps.where(kept, -math.inf).log_softmax(-1)


TOKEN = torch.arange(50)
#: setting -> its value, and vLLM's log-probabilities (T, 50) under it
SAMPLERS = {
    "vllm_structured_outputs_regex": ("[0-9]{4}", lambda q: only(q, TOKEN < 3)),
    "top_k": (20, lambda q: only(q, q >= q.topk(20).values[:, -1:])),
    "top_p": (0.9, lambda q: only(q, q >= q.quantile(0.5, dim=-1, keepdim=True))),
    "bad_words": (["x"], lambda q: only(q, TOKEN != 7)),
    "logit_bias": ({3: 5.0}, lambda q: (q + 5.0 * (TOKEN == 3)).log_softmax(-1)),
    "repetition_penalty": (1.3, lambda q: q.where(TOKEN < 25, 1.3 * q).log_softmax(-1)),
}


def rollouts_of(setting, spread):
    """KL of three rollouts, as with vLLM, whose engine has an adapter `spread` away from the trainer's."""
    value, change = SAMPLERS[setting]
    own = setting in SAMPLING
    trainer = types.SimpleNamespace(
        args=args_with(**{setting: value} if own else {"generation_kwargs": {setting: value, "stop": ["."]}}),
        accelerator=ALONE,
        model=types.SimpleNamespace(training=True),
        state=types.SimpleNamespace(global_step=1),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    watch, generator = MismatchWatch(0.1), torch.Generator().manual_seed(0)
    for _ in range(3):
        p = (2 * torch.randn(4000, 50, generator=generator)).log_softmax(-1)
        q = change((p + spread * torch.randn(4000, 50, generator=generator)).log_softmax(-1))
        drawn = torch.multinomial(q.exp(), 1, generator=generator)
        rollout = {"sampling_per_token_logps": q.gather(-1, drawn), "old_per_token_logps": p.gather(-1, drawn)}
        watch.rollout(trainer, None, rollout | {"completion_mask": torch.ones(4000, 1)})
    return trainer._metrics["train"]["rollout/mismatch_kl"]


@pytest.mark.parametrize("setting", SAMPLERS)
def test_a_sampler_that_leaves_out_or_reweighs_tokens_is_no_fault(setting, caplog):
    """trl#3924: the KL to the trainer's whole softmax includes the tokens left out."""
    kl = rollouts_of(setting, spread=0.02)
    assert not caplog.records and min(kl) >= 0
    if setting in ("vllm_structured_outputs_regex", "logit_bias"):
        assert min(kl) > 0.1, "enough to end a run"


@pytest.mark.parametrize("setting", ["top_k", "bad_words"])
def test_a_stale_adapter_is_found_although_tokens_are_left_out(setting):
    with pytest.raises(RuntimeError, match=r"KL of at least .* stale adapter"):
        rollouts_of(setting, spread=1.0)


def test_a_large_kl_warns_and_ends_the_run_if_it_persists(caplog):
    def kl(value):
        return Mismatch(value, 0.0, 0.01, 1.0, 0)

    watch = MismatchWatch(0.1)
    watch.judge(kl(0.09), 1, noisy=True)
    watch.judge(kl(0.009), 1, noisy=False)
    watch.judge(kl(0.29), 1, noisy=True, expected=0.2)
    MismatchWatch(0.1, coarse=True).judge(kl(0.09), 1, noisy=False)
    assert not caplog.records
    watch.judge(kl(0.2), 2, noisy=True)
    watch.judge(kl(0.02), 3, noisy=False)
    assert "0.2 nats" in caplog.text and "0.02 nats" in caplog.text
    for noisy, value in ((True, 1.1), (False, 0.11)):
        watch = MismatchWatch(0.1)
        for step in range(6):  # a good rollout starts the count again
            watch.judge(kl(value if step % 3 else 0.0), step, noisy)
        with pytest.raises(RuntimeError, match=r"in 3 rollouts in a row.*rollout_mismatch_threshold"):
            watch.judge(kl(value), 6, noisy)
        MismatchWatch(None).judge(kl(value), 1, noisy)


def test_the_mismatch_is_measured_in_batches_of_a_step(tiny_runs, tmp_path, monkeypatch):
    assert mismatch.measure(TRAINER, None, {"completion_mask": torch.ones(1, 4)}) is None, "equal policies"
    small = {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 4}
    trainer = tiny_runs.trainer(tmp_path, **small, max_steps=2, save_strategy="no")
    sizes, logps = [], trainer._get_per_token_logps_and_entropies

    def watched(model, input_ids, *args, batch_size=None, **kwargs):
        sizes.append(batch_size or len(input_ids))
        return logps(model, input_ids, *args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", watched)
    trainer.train()
    assert logged(trainer, "rollout/mismatch_kl") and set(sizes) == {2}
