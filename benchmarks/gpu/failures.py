"""A plugin of pytest that prints a failure when it happens: a run that is ended has no summary."""

from __future__ import annotations

import pytest


class _Printer:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reporter.write_line(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prints by pytest's own terminal, which workers of pytest-xdist have not."""
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(_Printer(reporter))
