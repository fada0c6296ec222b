"""Measurements on the user's own GPU: made with a fake clock, kept, read again, refused where damaged or foreign."""

import json
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from nvfp4_cases import Problem, launchable, relative_error

pytest.importorskip("triton")
from qerl_nvfp4 import cost, measured, ops, portable, precompile, refine, select, tune
from qerl_nvfp4.precompile import Weight

N, K, RANK = 128, 512, 16
CONFIG = {"kernel": "wgmma", "BM": 64, "P": 2, "S": 4, "permute": True, "grid": 2, "tasks": True}
interpreted = pytest.mark.skipif(not portable.INTERPRET, reason="the kernels run in Triton's interpreter")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_NVFP4_CACHE", str(tmp_path))
    monkeypatch.setenv("QERL_NVFP4_TUNED", "1")
    select.forget_measured()
    yield tmp_path
    select.forget_measured()


@pytest.fixture
def gpu(cache, pretend):
    return pretend


@pytest.fixture
def hopper(gpu):
    gpu("a Hopper", 132, (9, 0))


def entry(tokens=64, config=CONFIG, rank=RANK, **more) -> dict:
    return {"N": N, "K": K, "rank": rank, "tokens": tokens, "config": config, "us": 9.5, "shipped_us": 10.0} | more


def keep(*entries) -> None:
    measured.write("a Hopper", 132, list(entries))
    select.forget_measured()


def chosen(tokens=64, rank=RANK, columns=K, bf16=True) -> dict | None:
    """The configuration that was measured for this, if any."""
    config, why = select.explain(N, columns, tokens, 0, bf16, rank)
    return config if why == measured.HERE else None


# --- the file -------------------------------------------------------------------------------------


def test_each_device_package_and_triton_has_a_file_of_its_own(cache, monkeypatch):
    name = "NVIDIA H100 80GB HBM3"
    found = [measured.path_of(*key) for key in ((name, 132), (name, 114), ("NVIDIA H200", 132))]
    assert found[0].name.startswith("NVIDIA_H100_80GB_HBM3-132-")
    for changed in (("qerl_nvfp4.measured.source_digest", lambda: "0123"), ("triton.__version__", "4.0")):
        monkeypatch.setattr(*changed)
        found.append(measured.path_of(name, 132))
    assert len(set(found)) == 5


def test_entries_are_added_to_those_that_are_there(cache):
    path = measured.write("a Hopper", 132, [entry(64), entry(128)])
    assert measured.write("a Hopper", 132, [entry(64, us=1.0), entry(64, rank=0)]) == path
    found = json.loads(path.read_text())["entries"]
    assert [(e["rank"], e["tokens"], e["us"]) for e in found] == [(0, 64, 9.5), (16, 64, 1.0), (16, 128, 9.5)]
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == [path.name], "no temporary file is left"


# --- selection ------------------------------------------------------------------------------------


def test_measurements_win_for_their_tokens_and_ranks_only(hopper, monkeypatch):
    known = cost.shipped() | {"entries": [entry(config=DENSE)]}
    monkeypatch.setattr(cost, "shipped", lambda: known)
    assert select.explain(N, K, 64, 0, True, RANK) == (DENSE, "measured on NVIDIA H200")
    keep(entry())
    assert chosen(57) == chosen(64) == CONFIG
    assert select.choose(N, K, 64, 0, True, 9) == CONFIG, "an engine pads the adapter to 16"
    for other in ({"tokens": 56}, {"tokens": 65}, {"rank": 17}, {"rank": 0}, {"columns": 256}, {"bf16": False}):
        assert chosen(**other) is None, other


def test_a_switch_leaves_it_unread(hopper, monkeypatch):
    keep(entry())
    measured.path_of("a Hopper", 132).write_text("damaged")
    monkeypatch.setenv("QERL_NVFP4_TUNED", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() is None


def test_measured_configurations_are_compiled_ahead(hopper):
    keep(entry(40), entry(48, rank=0))
    found = precompile._tokens_of(Weight(N, K, (N,), RANK), 0, True)
    assert {33, 40, 41} <= set(found) and set(precompile.TOKENS) <= set(found)
    assert precompile._tokens_of(Weight(N, K, (N,), 2 * RANK), 0, True) == precompile.TOKENS
    assert precompile._tokens_of(Weight(N, K, (N,), RANK), 0, False) == precompile.TOKENS


# --- refused --------------------------------------------------------------------------------------


def refused(match: str) -> str:
    """The one warning; the shipped configuration is used."""
    select.forget_measured()
    with pytest.warns(RuntimeWarning, match=match) as said:
        assert not any(chosen(M) for M in (64, 60, 8))
    assert len(said) == 1
    return str(said[0].message)


@pytest.mark.parametrize("replaced,match", [(b"]", "cannot be read"), (b'"grid": 2', "not what was written")])
def test_a_damaged_file_is_refused_by_name_and_replaced(hopper, replaced, match):
    keep(entry())
    path = measured.path_of("a Hopper", 132)
    path.write_bytes(path.read_bytes().replace(replaced, replaced[:-1] + b"3" * (len(replaced) > 1)))
    message = refused(match)
    assert str(path) in message and "\n" not in message
    assert path.name in select.measured_for(0).problem
    keep(entry())
    assert chosen() == CONFIG


def test_measurements_of_other_kernels_are_ignored_with_a_warning(hopper, monkeypatch):
    keep(entry())
    monkeypatch.setattr(measured, "source_digest", lambda: "0123")
    assert "other kernels or another Triton" in refused("qerl-trl tune")


# --- measuring ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """clock["price"](config) -> microseconds, in the place of a GPU's; the products themselves are computed."""
    state = {"price": lambda config: 10.0}
    call = tune.Matrix.call

    def tagged(self, config, x, out, adapter):
        made = call(self, config, x, out, adapter)
        made.config = config
        return made

    monkeypatch.setattr(tune.Matrix, "call", tagged)
    monkeypatch.setattr(tune, "time_us", lambda call, *_: state["price"](call.config))
    monkeypatch.setattr(tune, "times_us", lambda calls, *_: [state["price"](call.config) for call in calls])
    return state


PORTABLE = {"kernel": "portable", "BM": 32, "BN": 64, "BK": 128, "SK": 2, "NW": 4, "NS": 2, "MMA": 2}
SHIPPED, FAST, DENSE = PORTABLE, PORTABLE | {"SK": 4}, {"kernel": "dense"}
WEIGHT = Weight(96, 512, (64, 32), RANK)
PRICES = {repr(SHIPPED): 10.0, repr(FAST): 7.0, repr(DENSE): 12.0}


def measure(candidates, seconds=60.0):
    return refine.measure(WEIGHT, {24: candidates}, 1, time.time() + seconds, "cpu")


@pytest.fixture
def ada(gpu, clock):
    gpu("an Ada", 128, (8, 9), 99)
    clock["price"] = lambda config: PRICES[repr(config)]
    return clock


@interpreted
def test_the_fastest_is_chosen(ada):
    found = measure([SHIPPED, FAST, DENSE])
    (kept,) = found.entries
    assert (kept["config"], kept["us"], kept["shipped_us"], kept["tokens"], kept["rank"]) == (FAST, 7.0, 10.0, 24, 16)
    assert not found.unmeasured and "up to 43% faster (at 24)" in found.text()


@interpreted
def test_the_shipped_choice_stays_if_nothing_is_clearly_faster(ada):
    ada["price"] = lambda config: 9.95 if config == FAST else 10.0
    found = measure([SHIPPED, FAST, DENSE])
    assert found.entries[0]["config"] == SHIPPED and not found.faster()


@interpreted
@pytest.mark.parametrize(
    "raises,after,said",
    [(False, 0, "WRONG"), (False, 1, "WRONG"), (True, 0, "out of resources")],
    ids=["wrong", "wrong after it was timed", "fails"],
)
def test_a_wrong_or_failing_candidate_is_never_chosen(ada, monkeypatch, capsys, raises, after, said):
    product, calls = ops.product, []

    def faulty(config, x, *rest):
        product(config, x, *rest)
        calls.append(config)
        if config == FAST and calls.count(FAST) > after:
            if raises:
                raise RuntimeError("out of resources")
            rest[-1][0, 0] += 1000.0

    monkeypatch.setattr(ops, "product", faulty)
    assert measure([SHIPPED, FAST, DENSE]).entries[0]["config"] == SHIPPED
    assert said in capsys.readouterr().out


@interpreted
def test_unmeasured_tokens_are_listed(ada):
    found = measure([SHIPPED], seconds=-1.0)
    assert (found.entries, found.unmeasured) == ([], [24]) and "1 not measured, what is shipped stays" in found.text()


# --- candidates -----------------------------------------------------------------------------------

H200 = ("NVIDIA H200", 132, (9, 0), 227)


@pytest.mark.parametrize("card,rank", [(H200, 0), (H200, 32), (("an Ada", 128, (8, 9), 99), 32)])
def test_candidates_can_run_and_begin_with_the_shipped_one(gpu, card, rank):
    gpu(*card)
    kernels = set()
    for n, k in [*tune.layer_shapes("7B").values(), *tune.layer_shapes("0.5B").values(), (1000, 1040)]:
        for M in (8, 16, 24, 64, 120, 200, 512):
            found = refine.near(Weight(n, k, (n,), rank), M, 0)
            assert found[0] == select.choose(n, k, M, 0, True, rank)
            assert len({repr(sorted(c.items())) for c in found}) == len(found) <= max(refine.MOST, 9)
            assert all(launchable(c, n, k, M, card[1], card[3] * 1024) for c in found)
            kernels |= {c["kernel"] for c in found}
            assert M > 16 or not any(c["kernel"] == "wgmma" for c in found[1:])
    assert ("wide" in kernels) == (card == H200)
    assert len(refine.near(Weight(4608, 3584, (4608,), 32), 64, 0)) > 1


# --- all of it ------------------------------------------------------------------------------------


@interpreted
def test_a_model_is_measured_kept_and_used(gpu, clock, monkeypatch):
    gpu("a B200", 148, (10, 0))  # the interpreter runs its candidates
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
    compiled = []
    monkeypatch.setattr(refine, "compile_launches", lambda launch_all, tell: compiled.append(launch_all))
    clock["price"] = lambda config: 5.0 if config["kernel"] == "dense" else 10.0
    said = []
    alike = Weight(96, 512, (96,), RANK)
    found = refine.refine([alike, WEIGHT, Weight(64, 256, (64,), 9)], (32, 40), 120.0, said.append)
    assert [(r.N, r.K, len(r.entries)) for r in found] == [(96, 512, 2), (64, 256, 2)], "one of two alike"
    assert said == [f"Measuring {r.N} x {r.K}, 2 numbers of tokens ..." for r in found] and len(compiled) == 1
    for M, expected in ((32, True), (33, True), (41, False)):
        config, why = select.explain(96, 512, M, 0, True, RANK)
        assert (config == DENSE, why == measured.HERE) == (expected, expected)
    assert select.explain(64, 256, 40, 0, True, 9)[1] == measured.HERE


@pytest.mark.gpu
def test_a_gpu_is_measured(cache):
    """The real clock, and the chosen kernel computes the right product."""
    import qerl_nvfp4

    n, k, splits = 1024, 2048, (512, 512)
    (found,) = refine.refine([Weight(n, k, splits, 32)], (8, 16, 64, 136), 100.0)
    assert [e["tokens"] for e in found.entries] == [8, 16, 64, 136], found.text()
    for M in (1, 8, 13, 61, 130):
        (row,) = qerl_nvfp4.selected(n, k, (M,), rank=32)
        assert row.why == measured.HERE
        problem = Problem(M, n, k, 32, splits, device="cuda", bias=False)
        assert relative_error(problem.linear(), problem.exact()) < tune.TOLERANCE


def test_impossible_requests_are_refused(monkeypatch, hopper):
    with pytest.raises(ValueError, match=r"tokens \[12\].*multiples of 8"):
        refine.refine([WEIGHT], (8, 12))
    monkeypatch.setattr(ops, "is_available", lambda device=None: False)
    with pytest.raises(RuntimeError, match="nothing to tune"):
        refine.refine([WEIGHT])
