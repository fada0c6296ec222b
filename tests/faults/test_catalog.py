"""Every fault of the catalogue has a test, and every mark is of one of them."""

from tests.faults.catalog import FAULTS, GROUPS, marks


def test_every_fault_is_injected():
    assert set(marks()) == set(FAULTS)
    assert len(set(FAULTS)) == len(FAULTS) and {name.partition(".")[0] for name in FAULTS} == set(GROUPS)


def test_the_same_command_goes_on():
    """After every fault of a checkpoint or resume but a refusal of other settings, and after most others."""
    recovered = {name for name, seen in marks().items() if any(seen)}
    refused = {"R6.resume_other_data", "R6.other_eval_problems"}
    assert {name for name in FAULTS if name.startswith("R6.")} - refused <= recovered
    assert len(recovered) >= 0.5 * len(FAULTS)
