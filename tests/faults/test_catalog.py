"""The list is complete, every mark is of a fault on it, and what the marks show meets the goals."""

from tests.faults.catalog import FAULTS, LISTED, NOT_HERE, shown


def test_the_list():
    assert len(LISTED) == 92 and len(set(FAULTS)) == len(FAULTS)
    assert not set(NOT_HERE) - set(FAULTS)
    assert not set(NOT_HERE) & set(shown()), "injected after all"


def test_the_goals():
    """No listed fault passes silently; 88 messages say what to do; after 60 the same command goes on, after all of a resume."""
    found = shown()
    assert not [name for name in FAULTS if name not in found and name not in NOT_HERE]
    assert sum(found[name].remedy for name in LISTED if name in found) >= 88
    recovered = {name for name in LISTED if name in found and found[name].recovered}
    assert len(recovered) >= 60
    assert not [name for name in LISTED if name.startswith("R6.") and name not in recovered]
