"""The table of endings, and which ending an exit is."""

from __future__ import annotations

import pytest

from gyre_hpc.executions.endings import TABLE, Budget, Ending, of_exit
from gyre_hpc.executions.sandbox import Exit


def test_the_table_is_complete_and_consistent() -> None:
    assert set(TABLE) == set(Ending)
    for ending, rule in TABLE.items():
        assert rule.grade == rule.valid, ending
        assert not (rule.retry and rule.grade), f"{ending}: a failure of ours is never scored, one of the agent's never retried"


def test_what_the_agent_did_is_graded_and_what_we_did_is_not() -> None:
    graded = {ending for ending, rule in TABLE.items() if rule.grade}
    assert graded == {Ending.FINISHED, Ending.TIMEOUT, Ending.NONZERO, Ending.LIMIT}
    assert TABLE[Ending.OVERALL].retry is None
    assert TABLE[Ending.FAULT].retry is Budget.AGENT
    assert TABLE[Ending.VERIFIER].retry is Budget.VERIFIER
    assert TABLE[Ending.NO_CALLS].retry is Budget.SETUP


@pytest.mark.parametrize(
    ("exit", "bundled", "ending"),
    [
        (Exit(0, 1.0), True, Ending.FINISHED),
        (Exit(3, 1.0), True, Ending.LIMIT),
        (Exit(4, 1.0), True, Ending.LIMIT),
        (Exit(5, 1.0), True, Ending.FAULT),
        (Exit(5, 1.0), False, Ending.NONZERO),
        (Exit(1, 1.0), True, Ending.NONZERO),
        (Exit(137, 1.0), True, Ending.NONZERO),
        (Exit(None, 1.0, timed_out=True), True, Ending.TIMEOUT),
        (Exit(None, 1.0, started=False), True, Ending.SANDBOX),
    ],
)
def test_endings_of_exits(exit: Exit, bundled: bool, ending: Ending) -> None:
    assert of_exit(exit, bundled) is ending


def test_a_workspace_that_outgrew_its_limits_is_a_limit_however_it_died() -> None:
    assert of_exit(Exit(None, 1.0), bundled=True, over_disk=True) is Ending.LIMIT
