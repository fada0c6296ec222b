"""The list is complete, and every mark is of a fault on it."""

from tests.faults.catalog import FAULTS, LISTED, NOT_HERE, shown


def test_the_list():
    assert len(LISTED) == 92 and len(set(FAULTS)) == len(FAULTS)
    assert not set(NOT_HERE) - set(FAULTS)
    assert not set(NOT_HERE) & set(shown()), "injected after all"
