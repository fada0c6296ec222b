"""PEFT's tuners, unmodified, on packed layers: the bits of the dequantized model, against the table that the documentation shows."""

import json

import pytest

from tests import peft_tuners

TABLE = json.loads(peft_tuners.RESULT.read_text())["tuners"]


def test_the_table_is_of_this_list():
    assert list(TABLE) == list(peft_tuners.TUNERS)
    assert not [
        name for name, row in TABLE.items() for cell in row.values() if not cell.startswith(("equal", "PEFT cannot: "))
    ]


@pytest.mark.parametrize("name", peft_tuners.TUNERS)
def test_the_table_is_true(name):
    assert peft_tuners.cells(name) == TABLE[name]
