"""Architectures in the real engine, compared with the table in the documentation."""

import pytest

from tests import architectures as table
from tests.e2e.engine.architectures import CELLS, REPRESENTATIVES, cells, to_try
from tests.e2e.engine.environment import EXHAUSTIVE

RECORDED = table.recorded()["architectures"]


@pytest.mark.parametrize("name", to_try(table.ALL) if EXHAUSTIVE else REPRESENTATIVES)
def test_the_table_is_true(name, tmp_path):
    assert cells(name, tmp_path / "log") == {cell: RECORDED[name][cell] for cell in CELLS if cell in RECORDED[name]}


def test_at_least_24_roll_out_and_refusals_have_a_reason():
    cells = {name: [found.get(cell, "") for cell in CELLS] for name, found in RECORDED.items()}
    assert sum(found == ["works", "works"] for found in cells.values()) >= 24
    for name, found in cells.items():
        if RECORDED[name]["load"] == "works":
            assert all(len(value) > 40 for value in found if value.startswith("refused")), name
            assert found[0] and (found[1] or found[0].startswith("refused")), name
