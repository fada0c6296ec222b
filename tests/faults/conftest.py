"""A test of a fault that is skipped has injected nothing, and the table counts its mark all the same: it fails."""

import pytest

from tests.faults.catalog import MAY_BE_SKIPPED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    names = [mark.args[0] for mark in item.iter_markers("fault")]
    if names and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not MAY_BE_SKIPPED.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{', '.join(names)}: counted as detected, and not injected here ({reason}). Install what is missing: `make faults` does."
    return report
