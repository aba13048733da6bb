"""Says at the end which faults were tried, and how each ended."""

from __future__ import annotations

from typing import Any

import faults


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if lines := faults.summary():
        terminalreporter.section("fault matrix")
        for line in lines:
            terminalreporter.write_line(line)
