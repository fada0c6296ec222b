"""PEFT's tuners on packed layers, against the table of the documentation."""

import json

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from tests import peft_tuners

TABLE = json.loads(peft_tuners.RESULT.read_text())["tuners"]


def test_the_table_has_every_tuner_of_peft():
    assert list(TABLE) == list(peft_tuners.TUNERS)
    known = ("PEFT cannot: ", "refused: ValueError: ", "refused: RuntimeError: ")
    assert all(cell == "equal" or cell.startswith(known) for row in TABLE.values() for cell in row.values())
    here = {make().peft_type.value for name, make in peft_tuners.TUNERS.items() if name not in peft_tuners.NEEDS}
    assert here | {name.upper() for name in peft_tuners.NEEDS} == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


@pytest.mark.parametrize("name", peft_tuners.TUNERS)
def test_the_table_is_true(name):
    if not peft_tuners.to_try([name]):
        pytest.skip(f"PEFT needs {peft_tuners.NEEDS[name]} for it")
    assert peft_tuners.cells(name) == TABLE[name]
