"""The list is complete, every mark is of a fault on it, and what the marks show meets the goals."""

from tests.faults import catalog
from tests.faults.catalog import FAULTS, ITEMS, LISTED, NOT_HERE, NOT_THERE, at_843f908, shown


def test_the_list():
    assert len(LISTED) == 92 and len(set(FAULTS)) == len(FAULTS)
    assert not set(NOT_HERE) - set(FAULTS)
    assert not set(NOT_HERE) & set(shown()), "injected after all"


def test_the_goals():
    """No listed fault passes silently; of 88 a message that a test looks at says what to do; after 60 the same command goes on, after all of a
    resume."""
    found = shown()
    assert not [name for name in FAULTS if name not in found and name not in NOT_HERE]
    assert sum(found[name].remedy is True for name in LISTED if name in found) >= 88
    assert not [name for name, seen in found.items() if seen.remedy is None and not seen.recovered]
    recovered = {name for name in LISTED if name in found and found[name].recovered}
    assert len(recovered) >= 60
    assert not [name for name in LISTED if name.startswith("R6.") and name not in recovered]


def test_every_point_of_what_was_found_has_its_tests():
    named, tests = [name for faults in ITEMS.values() for name in faults.split()], catalog.tests_of()
    assert len(named) == len(set(named)) and not set(named) - set(FAULTS)
    assert not {name for name in FAULTS if name.startswith("S.")} - set(named)
    assert not [name for name in named if not tests.get(name)]
    assert not set(shown()) - set(tests), "a mark that no test carries"


def test_what_was_found_was_wrong_at_843f908():
    """Each point has a case that ran in a checkout of it, and whose product was wrong, gone, or not there without a cause; and is right since."""
    there = at_843f908()
    assert all(set(verdicts.split(", ")) <= {"silent", "lost", "crashed"} for verdicts in there.values())
    named = {name for faults in ITEMS.values() for name in faults.split()}
    assert named - set(there) == set(NOT_THERE)
    assert not [point for point, faults in ITEMS.items() if not set(faults.split()) & set(there)]
    assert all(set(said.split(", ")) <= {"told", "right", "no door"} for said in catalog.since()[1].values())
