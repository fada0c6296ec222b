"""Architectures in the real engine, compared with the table in the documentation."""

import pytest

from tests import architectures as table
from tests.e2e.engine.architectures import CELLS, REPRESENTATIVES, cells, to_try
from tests.e2e.engine.environment import EXHAUSTIVE

RECORDED = table.recorded()["architectures"]


@pytest.mark.parametrize("name", to_try(table.ALL) if EXHAUSTIVE else REPRESENTATIVES)
def test_the_table_is_true(name, tmp_path):
    assert cells(name, tmp_path / "log") == {cell: RECORDED[name][cell] for cell in CELLS if cell in RECORDED[name]}
