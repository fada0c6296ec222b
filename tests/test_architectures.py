"""Every architecture through every cell, against the table that the documentation shows."""

import pytest

from qerl_trl.nvfp4.architectures import ROWS
from tests import architectures


def test_the_table_is_of_this_list():
    assert list(architectures.recorded()["architectures"]) == list(architectures.ALL)
    assert len(architectures.ALL) >= 24


@pytest.mark.parametrize("name", architectures.ALL)
def test_the_table_is_true(name):
    recorded = architectures.recorded()["architectures"][name]
    assert architectures.cells(name) == {cell: recorded[cell] for cell in architectures.CELLS if cell in recorded}


def test_rows_are_of_models_that_transformers_has():
    from transformers import CONFIG_MAPPING

    assert not [name for name in ROWS if name not in CONFIG_MAPPING]
