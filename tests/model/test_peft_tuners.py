"""PEFT's tuners, unmodified, on packed layers: the bits of the dequantized model, against the table that the documentation shows."""

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


def test_a_row_is_not_written_anew_without_what_peft_imports_for_it(monkeypatch, tmp_path):
    """It would say that PEFT cannot."""
    monkeypatch.setattr(peft_tuners, "NEEDS", {"AdaMSS": "package_that_is_not_there"})
    monkeypatch.setattr(peft_tuners, "TUNERS", {name: peft_tuners.TUNERS[name] for name in ("AdaMSS", "Prompt tuning")})
    monkeypatch.setattr(peft_tuners, "RESULT", tmp_path / "peft.json")
    peft_tuners.RESULT.write_text(json.dumps({"commits": ["of AdaMSS"], "tuners": TABLE}))
    monkeypatch.setattr("sys.argv", ["peft_tuners"])
    peft_tuners.main()
    written = json.loads(peft_tuners.RESULT.read_text())
    assert written["tuners"] == {name: TABLE[name] for name in ("AdaMSS", "Prompt tuning")}
    assert written["commits"][0] == "of AdaMSS" and len(written["commits"]) == 2


def test_all_of_pefts_tuners_are_in_it():
    """Whatever PEFT of this version has a configuration for."""
    here = {make().peft_type.value for name, make in peft_tuners.TUNERS.items() if name not in peft_tuners.NEEDS}
    assert here | {name.upper() for name in peft_tuners.NEEDS} == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


@pytest.mark.parametrize("name", peft_tuners.TUNERS)
def test_the_table_is_true(name):
    if not peft_tuners.to_try([name]):
        pytest.skip(f"PEFT needs {peft_tuners.NEEDS[name]} for it")
    assert peft_tuners.cells(name) == TABLE[name]
