"""PEFT's tuners, unmodified, on packed layers: the bits of the dequantized model, against the table that the documentation shows."""

import importlib.util
import json

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from tests import peft_tuners

TABLE = json.loads(peft_tuners.RESULT.read_text())["tuners"]


def test_the_table_is_of_this_list():
    assert list(TABLE) == list(peft_tuners.TUNERS)
    for row in TABLE.values():
        for cell in row.values():
            assert cell == "equal" or cell.startswith(
                ("PEFT cannot: ", "refused: ValueError: ", "refused: RuntimeError: ")
            )


def test_all_of_pefts_tuners_are_in_it():
    """Whatever PEFT of this version has a configuration for."""
    here = {make().peft_type.value for name, make in peft_tuners.TUNERS.items() if name not in peft_tuners.NEEDS}
    assert here | {name.upper() for name in peft_tuners.NEEDS} == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


@pytest.mark.parametrize("name", peft_tuners.TUNERS)
def test_the_table_is_true(name):
    needed = peft_tuners.NEEDS.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"PEFT needs {needed} for it")
    assert peft_tuners.cells(name) == TABLE[name]
