"""One Slurm cluster for all tests that need one, and a loud word where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """A Slurm cluster with two nodes; the tests skip without one, and fail in CI."""
    slurm.require()
    with slurm.cluster() as found:
        yield found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests no cluster could be started for."""
    reasons = [
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    ]
    absent = [reason for reason in reasons if reason.startswith(slurm.ABSENT)]
    if absent:
        terminalreporter.write_line(
            f"slurm: not installed, {len(absent)} tests not run "
            f"({absent[0].removeprefix(slurm.ABSENT)})",
            yellow=True,
        )
