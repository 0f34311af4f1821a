"""Run tests and count them: `python -m tests.gpu.bundle.tested PATH [pytest's arguments] RESULT`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.bundle.summary import write_outcome


class Counting:
    """A plugin of pytest's that remembers how tests ended, and why some were skipped."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count(report, report.when == "call" or not report.passed)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._count(report, not report.passed)

    def _count(self, report: pytest.TestReport | pytest.CollectReport, counts: bool) -> None:
        if not counts:
            return
        self.counts[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def main() -> None:
    """Ends with pytest's own status, unless nothing ran: then it is skipped with the commonest reason."""
    counting = Counting()
    status = pytest.main(["-ra", "--durations=5", *sys.argv[1:-1]], plugins=[counting])
    counts = counting.counts
    figures = {name: (counts[name], "tests") for name in ("passed", "failed", "skipped")}
    nothing_ran = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not counts["passed"]
    reason = counting.reasons.most_common(1)[0][0] if counting.reasons else "no such test in this tree"
    write_outcome(Path(sys.argv[-1]), figures, reason if nothing_ran else "")
    sys.exit(0 if nothing_ran else int(status))


if __name__ == "__main__":
    main()
