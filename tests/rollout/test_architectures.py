"""Architectures in the real engine, against the table that the documentation shows."""

import pytest

from tests import architectures as table
from tests.rollout.conftest import EXHAUSTIVE
from tests.rollout.engine_architectures import CELLS, REPRESENTATIVES, UNTRIED, to_try

RECORDED = table.recorded()["architectures"]


@pytest.mark.parametrize("name", to_try(table.ALL) if EXHAUSTIVE else REPRESENTATIVES)
def test_the_table_is_true(name, architectures):
    assert architectures[name] == {cell: RECORDED[name][cell] for cell in CELLS if cell in RECORDED[name]}


def test_at_least_24_roll_out_or_are_refused_with_a_reason():
    cells = {name: [found.get(cell, "") for cell in CELLS] for name, found in RECORDED.items()}
    assert sum(found == ["works", "works"] for found in cells.values()) >= 24
    for name, found in cells.items():
        if RECORDED[name]["load"] == "works":
            assert all(len(value) > 40 for value in found if value.startswith("refused")), name
            assert found[0] and (found[1] or found[0].startswith("refused")), name
        untried = {value.startswith("not tried: ") for value in found}
        assert untried == {name in UNTRIED}, name
