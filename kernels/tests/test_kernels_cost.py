"""Candidates and their costs: each can run, and the cheapest known one is chosen."""

import json
import random
from pathlib import Path

import pytest
from nvfp4_cases import launchable

pytest.importorskip("triton")
from qerl_nvfp4 import cost, select

SMS, SHARED_MEMORY = 132, 227 * 1024


@pytest.fixture
def h200(monkeypatch, pretend):
    """A GPU without a table, and factors by which a tile of 160 tokens costs little."""
    pretend("a Hopper", 130, (9, 0))
    found = {"dense": {"launch": 500.0}}
    for M in cost.SIZES:
        for config in cost.candidates(4608, 3584, M, SMS):
            found.setdefault(cost.variant(config), {"launch": 5.0, "units": 1.0 + config.get("BM", 0) * 0.02})
    found["wide BM=160 P=2 S=3 X=7 tasks=0"] = {"launch": 1.0}
    monkeypatch.setattr(cost, "factors", lambda: found)


def test_every_number_of_tokens_has_candidates_and_each_gets_a_positive_share_of_work():
    draw = random.Random(0)
    for _ in range(40):
        N, K = 16 * draw.randint(1, 3000), draw.choice((32, 128, 256)) * draw.randint(8, 80)
        for M in (17, 40, 100, 130, 250, 300, 512, 1504):
            found = cost.candidates(N, K, M, SMS), cost.candidates(N, K, M, SMS, fp8=True)
            names = [(cost.variant(c), c.get("grid")) for c in found[0] + found[1]]
            assert all(found) and len(set(names)) == len(names), "no candidate twice"
            for config in found[0] + found[1]:
                assert 0 < config.get("grid", 1) <= SMS
                assert config.get("BM", 16) % 16 == 0
                terms = cost.terms(config, N, K, M, SMS, 32)
                assert terms["launch"] == 1 and all(value >= 0 for value in terms.values())
    for BM, P, S, X in (*cost.WIDE, *cost.FP8):
        words, of_x, adapter = S * P * 9216, (X or 2 * S) * BM * 128, P * 4096 + BM * 64
        assert words + of_x + adapter + P * 4096 + 2048 <= SHARED_MEMORY


def test_the_cheapest_measured_candidate_is_chosen():
    place = 4608, 3584, 160, SMS
    one = next(c for c in cost.candidates(*place) if c.get("BM") == 160)
    cheap, dear = {"launch": 10.0}, {"launch": 10.0, "units": 100.0}
    for factors, kernel in ((cheap, "wide"), (dear, "dense")):
        model = {"dense": {"launch": 50.0}, cost.variant(one): factors}
        assert cost.cheapest(*place, 96, model)["kernel"] == kernel
    assert cost.cheapest(*place, 96, {}) is None


def test_the_cost_model_answers_where_nothing_was_measured(h200, monkeypatch):
    def explain(M, N=4608, K=3584, bf16=True):
        return select.explain(N, K, M, 0, bf16)

    config, why = explain(150)
    assert (config["kernel"], config["BM"], why) == ("wide", 160, "cost model")
    assert explain(150) == explain(160), "a step of 16 tokens"
    assert explain(16)[1] == "heuristic"
    assert explain(cost.SIZES[-1] + 1) == ({"kernel": "dense"}, "heuristic")
    assert explain(150, bf16=False)[1] == "heuristic"
    assert explain(40, 1152, 912)[0]["kernel"] == "portable", "K that the copy engine cannot read"
    assert explain(40, 1152, 896)[0]["kernel"] == "wgmma", "the last unit is a part of one"
    monkeypatch.setattr(cost, "factors", dict)
    select.explain.cache_clear()
    assert explain(150)[1] == "heuristic", "without a fit"


def test_shipped_choices_are_within_two_percent_of_the_fastest(pretend, monkeypatch):
    """Of the known candidates, for every matrix and number of tokens, where they were timed last."""
    benchmarks, by = Path(__file__).parents[1] / "benchmarks", set()
    monkeypatch.syspath_prepend(benchmarks)
    import fit

    pretend("NVIDIA H200", SMS, (9, 0))
    result = json.loads((benchmarks / "results" / "every_size_h200.json").read_text())
    for row in fit.latest(result["matrices"]):
        config, why = select.explain(row["N"], row["K"], row["M"], 0, True, 32, row["rows"] // 32)
        assert fit.slower(config, [row]) <= 1.02, (row["matrix"], row["M"], config, why)
        assert launchable(config, row["N"], row["K"], row["M"], SMS)
        by.add(why)
    assert by == {"measured on NVIDIA H200", "cost model"}
