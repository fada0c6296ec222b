"""Candidates and their costs: what is offered can run, and the cheapest known one is chosen."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from qerl_nvfp4 import cost, select

SMS = 132


@pytest.fixture
def h200(monkeypatch):
    """A GPU without a table, and factors by which a tile of 160 tokens costs little."""
    monkeypatch.setattr(select, "device_properties", lambda index: ("a Hopper", 130, (9, 0)))  # no table
    monkeypatch.setattr(select, "shared_memory_limit", lambda index: 227 * 1024)
    found = {"dense": {"launch": 500.0}}
    for M in cost.SIZES:
        for config in cost.candidates(4608, 3584, M, SMS):
            found.setdefault(cost.variant(config), {"launch": 5.0, "units": 1.0 + config.get("BM", 0) * 0.02})
    found["wide BM=160 P=2 S=3 X=7 tasks=0"] = {"launch": 1.0}
    monkeypatch.setattr(cost, "factors", lambda: found)
    monkeypatch.setattr(cost, "WIDE_ALLOWED", True)
    select.explain.cache_clear()
    yield found
    select.explain.cache_clear()


def matrices() -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(16 * draw.randint(1, 3000), draw.choice((32, 128, 256)) * draw.randint(8, 80)) for _ in range(40)]


@pytest.mark.parametrize("BM,P", cost.WIDE)
def test_a_wide_tile_fits_shared_memory(BM, P):
    S, X = cost.wide_stages(BM, P)
    assert S >= 2 and X >= 4, "one unit is multiplied while the next one comes"
    assert cost.wide_shared_memory(BM, P, S, X) <= cost.SHARED_MEMORY < 227 * 1024


def test_every_number_of_tokens_has_candidates_and_each_gets_a_positive_share_of_work():
    for N, K in matrices():
        for M in (17, 40, 100, 130, 250, 300, 512, 1504):
            found = cost.candidates(N, K, M, SMS)
            assert found
            names = [(cost.variant(c), c.get("grid")) for c in found]
            assert len(set(names)) == len(names), "no candidate twice"
            for config in found:
                assert 0 < config.get("grid", 1) <= SMS
                assert config.get("BM", 16) % 16 == 0
                terms = cost.terms(config, N, K, M, SMS, 32)
                assert terms["launch"] == 1 and all(value >= 0 for value in terms.values())


def test_k_that_the_copy_engine_cannot_read_leaves_the_dense_path():
    """Rows of words are of 16 bytes for every multiple of 32; less than a unit is for no engine's matrix."""
    for K in (912, 224):
        assert not cost.fits(1152, K)
        assert [c["kernel"] for c in cost.candidates(1152, K, 48, SMS)] == ["dense"]


@pytest.mark.parametrize("N,K", [(1152, 896), (2304, 1152), (576, 960), (576, 288)])
def test_k_that_is_no_multiple_of_a_unit_costs_what_the_next_one_does(N, K):
    whole = 256 * cost.units_along(K)
    assert K < whole < K + 256
    for M in (24, 64, 200, 512):
        found = cost.candidates(N, K, M, SMS)
        assert found == cost.candidates(N, whole, M, SMS) and found[0]["kernel"] == "wgmma"
        for config in found:
            assert config["kernel"] == "dense" or select.can_run(config, N, K, M, SMS, 227 * 1024)
            if config["kernel"] != "dense":
                units = [cost.terms(config, N, columns, M, SMS, 32)["units"] for columns in (K, whole)]
                assert units[0] == units[1] > 0


def test_the_cheapest_is_chosen_and_what_was_never_measured_is_not(monkeypatch):
    monkeypatch.setattr(cost, "WIDE_ALLOWED", True)
    N, K, M = 4608, 3584, 160
    one = next(c for c in cost.candidates(N, K, M, SMS) if c.get("BM") == 160)
    model = {"dense": {"launch": 50.0}, cost.variant(one): {"launch": 10.0}}
    assert cost.variant(cost.cheapest(N, K, M, SMS, 96, (), model)) == cost.variant(one)
    model[cost.variant(one)] = {"launch": 10.0, "units": 100.0}
    assert cost.cheapest(N, K, M, SMS, 96, (), model)["kernel"] == "dense"
    assert cost.cheapest(N, K, M, SMS, 96, (), {}) is None
    monkeypatch.setattr(cost, "WIDE_ALLOWED", False)
    model[cost.variant(one)] = {"launch": 10.0}
    assert cost.cheapest(N, K, M, SMS, 96, (), model)["kernel"] == "dense"


def test_the_cost_model_answers_between_the_tables_sizes(h200, monkeypatch):
    config, why = select.explain(4608, 3584, 150, 0, True)
    assert (config["kernel"], config["BM"], why) == ("wide", 160, "cost model")
    assert select.explain(4608, 3584, 150, 0, True) == select.explain(4608, 3584, 160, 0, True), "a step of 16 tokens"
    assert select.explain(4608, 3584, 16, 0, True)[1] == "heuristic"
    assert select.explain(4608, 3584, cost.SIZES[-1] + 1, 0, True) == ({"kernel": "dense", "pieces": 1}, "heuristic")
    assert select.explain(4608, 3584, 150, 0, False)[1] == "heuristic", "float16"
    assert select.explain(1152, 912, 40, 0, True)[0]["kernel"] == "portable", "K that the copy engine cannot read"
    assert select.explain(1152, 896, 40, 0, True)[0]["kernel"] == "wgmma", "the last unit is a part of one"
    entry = {"kernel": "wgmma", "BM": 128, "P": 2, "S": 2, "permute": False, "grid": 132, "lora": {"tasks": True}}
    monkeypatch.setattr(select, "table_for", lambda *_: ("an H200", {(4608, 3584, 256): entry}))
    select.explain.cache_clear()
    assert select.explain(4608, 3584, 256, 0, True) == (entry, "table of an H200")
    assert select.explain(4608, 3584, 240, 0, True)[1] == "cost model"


def test_without_a_fit_the_table_and_the_heuristic_answer(h200, monkeypatch):
    monkeypatch.setattr(cost, "factors", dict)
    assert select.explain(4608, 3584, 150, 0, True)[1] == "heuristic"


def test_the_rows_of_the_adapter_are_those_of_all_shards(h200, monkeypatch):
    """q/k/v with rank 32 have 96 rows of A: where x A^T is dear, it is no longer computed beside the product."""
    from qerl_nvfp4 import ops, precompile, refine

    N, K, M, splits = 4608, 3584, 128, (3584, 512, 512)
    h200.clear()
    beside, before = (next(c for c in cost.candidates(N, K, M, SMS) if c.get("tasks") is t) for t in (True, False))
    h200[cost.variant(beside)] = {"MFLOP of x A^T": 1.0}
    h200[cost.variant(before)] = {"launch": M * K * 80e-6}
    assert select.choose(N, K, M, 0, True, 32)["tasks"] and select.choose(N, K, M, 0, True, 64)["tasks"]
    assert not select.choose(N, K, M, 0, True, 32, len(splits))["tasks"]
    assert select.choose(N, K, M, 0, True)["tasks"], "without an adapter as before"
    (row,) = refine.near(precompile.Weight(N, K, splits, 32), M, 0)[:1]
    assert not row["tasks"], "what is shipped comes first"
    monkeypatch.setattr(ops, "device_properties", select.device_properties)
    monkeypatch.setattr(ops, "is_available", lambda device: True)
    (listed,) = ops.selected(N, K, (M,), 0, rank=32, shards=3)
    assert len(ops.selected_text({"qkv": (N, K, 3)}, 0, 32)) == 1
    assert listed.config["tasks"] is False

    seen: list[dict] = []
    monkeypatch.setattr(ops, "product", lambda config, *arguments: seen.append(config))
    monkeypatch.setattr(ops, "use_gluon", lambda index: True)
    precompile._launch_all([precompile.Weight(N, K, splits, 32)], [M], [], torch.bfloat16, 0)
    assert [config["tasks"] for config in seen] == [False], "what is compiled ahead"


RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "every_size_h200.json"


@pytest.fixture
def shipped(monkeypatch):
    """shipped(N, K, M, rank, shards): what ships for an H200, and why."""
    gpu = ["NVIDIA H200", 132, (9, 0)]
    monkeypatch.setattr(select, "device_properties", lambda index: tuple(gpu))
    monkeypatch.setattr(select, "shared_memory_limit", lambda index: 227 * 1024)
    monkeypatch.setattr(cost, "WIDE_ALLOWED", True)
    select.explain.cache_clear()

    def ask(*place, sms: int = 132) -> tuple[dict, str]:
        gpu[1] = sms
        return select.shipped(*place[:3], 0, True, *place[3:])

    yield ask
    select.explain.cache_clear()


def test_what_ships_was_timed_to_be_within_two_percent_of_the_fastest(shipped, monkeypatch):
    """Of the candidates whose variants are kept, for every matrix and number of tokens, where they were timed last."""
    monkeypatch.syspath_prepend(RESULT.parents[1])
    import fit

    result, by = json.loads(RESULT.read_text()), set()
    for row in fit.latest(result["matrices"]):
        config, why = shipped(row["N"], row["K"], row["M"], 32, row["rows"] // 32)
        assert fit.slower(config, [row]) <= 1.02, (row["matrix"], row["M"], config, why)
        assert config["kernel"] == "dense" or select.can_run(config, row["N"], row["K"], row["M"], 132, 227 * 1024)
        by.add(why)
    assert by == {"timed on NVIDIA H200", "table of NVIDIA H200", "cost model"}


def test_what_was_timed_holds_for_its_gpu_rows_and_kernels_only(shipped, monkeypatch):
    entries = json.loads(cost.FACTORS.read_text())["timed"]
    for entry in (entries[0], next(e for e in entries if e["config"]["kernel"] == "wide")):
        place, shards = (entry["N"], entry["K"], entry["size"]), entry["rows"] // 32
        assert shipped(*place, 32, shards) == (entry["config"], "timed on NVIDIA H200")
        for other in (
            shipped(*place),
            shipped(*place, 16, shards),
            shipped(*place, 32, shards, sms=114),
            shipped(entry["N"] + 64, *place[1:], 32, shards),
        ):
            assert other[0] != entry["config"] or not other[1].startswith("timed")
    monkeypatch.setattr(cost, "WIDE_ALLOWED", False)
    assert shipped(*place, 32, shards)[0]["kernel"] != "wide"


def test_a_variant_has_no_price_beyond_what_it_was_measured_for():
    """x A^T beside the product is a candidate for many tokens and the widest tiles: where that was never timed, it is
    not chosen.
    """
    far = [
        (N, K, M, config)
        for N, K in ((896, 896), (3584, 3584), (37888, 3584))
        for M in (272, 400, 512, 1024)
        for config in cost.candidates(N, K, M, SMS)
        if config.get("tasks")
    ]
    assert {M for N, K, M, _ in far if N * K >= 2**25} == {272, 400, 512}
    assert {M for N, K, M, _ in far if N * K < 2**25} == {272, 400, 512, 1024}
    assert {208, 224, 256} <= {config["BM"] for *_, config in far}
    seen = set()
    for N, K, M, config in far:
        assert select.can_run(config, N, K, M, SMS, 227 * 1024)
        timed = cost.factors().get(cost.variant(config), {}).get(cost.TOKENS, 0) >= M
        assert math.isfinite(cost.predicted_us(config, N, K, M, SMS, 96)) == timed
        seen.add((timed, M))
    assert seen == {(True, 272), (False, 272), (True, 400), (False, 400), (True, 512), (False, 512), (False, 1024)}


def test_what_a_product_pays_for():
    """Tokens that a tile has and the product has not; rounds of tasks, fewer where programs do nothing else; pieces of
    tiles.
    """
    wide = {"kernel": "wide", "BM": 192, "P": 2, "S": 3, "X": 5, "tasks": True, "grid": 132}
    paid = cost.terms(wide, 7168, 5120, 352, 132, 96)
    assert paid["units of tokens that are not"] == pytest.approx(56 * 20 * (2 - 352 / 192) / 132)
    assert cost.adapter_tasks(5120, 352, 132, 96) == (132, 1) and paid["rounds of x A^T"] == 5.12
    assert cost.terms(wide, 7168, 5120, 384, 132, 96)["rounds of x A^T"] == 2 * 5.12, "144 tasks, 132 programs"
    assert cost.terms(wide | {"grid": 112}, 7168, 5120, 384, 132, 96)["rounds of x A^T"] == 2 * 5.12
    assert cost.terms(wide | {"tasks": False}, 7168, 5120, 384, 132, 96)["rounds of x A^T"] == 0
    assert cost.terms(wide | {"grid": 112}, 7168, 5120, 384, 132, 32)["pieces"] == 1, "a tile each, and all whole"
    assert cost.terms(wide, 17920, 1536, 384, 132, 64)["pieces"] == 1 + 2, (
        "280 tiles: one whole, and 6.7 units of tiles of 6"
    )
