"""Architectures in the real engine, compared with the table in the documentation."""

import pytest
import torch

from tests import architectures as table
from tests.e2e.engine.architectures import CELLS, REPRESENTATIVES, TOLERANCE, cells, dtype_of, to_try
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


def test_the_page_has_dtypes_and_tolerances():
    rollouts = table.recorded()["rollouts"]
    assert rollouts.keys() == {name for name, found in RECORDED.items() if "rollout" in found}
    for name, row in rollouts.items():
        if row["device"] == "CPU" and not torch.cuda.is_available():
            assert row["dtype"] == str(dtype_of(table.DENSE_EXPERTS.get(name, name))).removeprefix("torch.")
    page = (table.RESULT.parent / "source" / "models.md").read_text()
    for dtype, (most, _) in TOLERANCE.items():
        assert f"to {most:g} nats" in page and str(dtype).removeprefix("torch.") in page
