"""Skips are declared in advance: in CI one that tests/skips.txt doesn't name, with its reason, fails the session.

`--place`: a part of the tests (tests/places.py).

No example of hypothesis has a deadline: that a machine is busy is no mistake.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.places import PLACES, GroupScheduling, longest_first, longest_groups_first, may_have, place
from tests.slurm.fixtures import inside, slurm

__all__ = ["inside", "slurm"]

settings.register_profile("gyre", deadline=None)
settings.load_profile("gyre")
_DECLARED = Path(__file__).with_name("skips.txt")
_undeclared: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--place", choices=PLACES, help="only the tests that run beside others, in pairs, or alone (tests/places.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = config.getoption("--place")
    if wanted and collection_path.name.startswith("test_") and not may_have(collection_path, wanted):
        return True
    return None  # as pytest would


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--place")
    if wanted:
        config.hook.pytest_deselected(items=[item for item in items if place(item) != wanted])
        items[:] = [item for item in items if place(item) == wanted]
    if wanted == "beside":
        items[:] = longest_first(items)
    if wanted == "paired":
        items[:] = longest_groups_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("--place") == "paired" else None


def declared(text: str) -> list[str]:
    """The patterns of a list of skips. ValueError for one without a reason."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) < 2:
            raise ValueError(f"tests/skips.txt: {line[0]} has no reason")
    return [line[0] for line in lines]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        patterns = declared(_DECLARED.read_text())
        if not any(fnmatch(report.nodeid, pattern) for pattern in patterns):
            _undeclared.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _undeclared and os.environ.get("CI") and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _undeclared:
        terminalreporter.section("skips that tests/skips.txt does not declare")
        for nodeid in _undeclared:
            terminalreporter.line(nodeid)
