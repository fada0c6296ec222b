"""benchmarks/checks_cost.py: what a step's checks cost, of steps with and without them; and that there are steps without them."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("checks_cost")


def test_pairs_change_their_order(costs):
    """A machine that becomes slower by 1 ms per step, and checks of 10 ms."""
    checked = [True, False, False, True] * 3
    seconds = [1 + 1e-3 * number + 1e-2 * on for number, on in enumerate(checked)]
    found = costs.paired(seconds, probe_ms=2.0)
    assert found["pairs"] == 6
    assert found["difference_ms"] == pytest.approx(10, abs=0.01)
    assert found["standard_error_ms"] == pytest.approx(1e3 * 1e-3 * (6 / 5) ** 0.5 / 6**0.5, abs=0.01)
    assert found["percent"] == pytest.approx(0.1 * 12 / found["without_s"], abs=0.002)


def test_checks_are_taken_away_and_come_back(costs):
    clock = costs.Clock.__new__(costs.Clock)
    clock.places = {}
    for label, (_, module, path) in costs.TIMED.items():
        owner = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        clock.places[label] = owner, name, getattr(owner, name)

    def changed() -> set[str]:
        return {
            label for label, (owner, name, function) in clock.places.items() if getattr(owner, name) is not function
        }

    of_a_step = {
        label
        for label, (kind, _, _) in costs.TIMED.items()
        if kind == "check" and not label.startswith(("start: ", "train(): "))
    }
    try:
        clock.check_steps(on=False)
        assert changed() == of_a_step >= set(costs.WITHOUT)
        clock.check_steps(on=True)
        assert not changed()
        clock.check_steps(on=False)
    finally:
        clock.stop()
    assert not changed()
