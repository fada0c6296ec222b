"""The list is complete, every mark is of a fault on it, and what the marks show meets the goals."""

from tests.faults.catalog import FAULTS, ITEMS, LISTED, NOT_HERE, at_843f908, shown, tests_of


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


def test_every_point_of_what_was_found_has_its_tests():
    """And what was run at 843f908 was wrong there."""
    named = [name for faults in ITEMS.values() for name in faults.split()]
    assert len(named) == len(set(named)) and not set(named) - set(FAULTS)
    assert not {name for name in FAULTS if name.startswith("S.")} - set(named)
    assert not [name for name in named if not tests_of().get(name)]
    assert not set(shown()) - set(tests_of()), "a mark that no test carries"
    assert all(set(verdicts.split(", ")) <= {"silent", "crashed"} for verdicts in at_843f908().values())
