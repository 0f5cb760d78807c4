"""Which ending of an execution is tried again, graded, rewarded: one pure table (the rules of every task suite).

Invariant: a failure of ours never becomes a score, and a failure of the agent never becomes a retry. Budgets are separate: set-up,
agent, verifier; grading never shares the agent's exhausted deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyre_hpc.executions.sandbox import Exit


class Ending(StrEnum):
    """Why an execution is over. The value is the `reason` in the ledger, the events and the report."""

    FINISHED = "finished"
    TIMEOUT = "timeout"
    """The harness's own budget; what it left is graded."""
    NONZERO = "exit"
    LIMIT = "limit"
    """Turns, context, output or disk."""
    OVERALL = "overall-timeout"
    SANDBOX = "sandbox"
    """A box or workspace could not be set up."""
    NODE = "node"
    FAULT = "fault"
    """An engine or gateway fault that the harness saw."""
    VERIFIER = "verifier"
    NO_CALLS = "no-calls"


class Budget(StrEnum):
    """Whose retries pay for another try."""

    SETUP = "setup"
    AGENT = "agent"
    VERIFIER = "verifier"


@dataclass(frozen=True)
class Rule:
    """`retry`: the budget that another try is taken from (None: final). `grade`: run the verifier. `valid`: the reward counts."""

    retry: Budget | None
    grade: bool
    valid: bool


TABLE: dict[Ending, Rule] = {
    Ending.FINISHED: Rule(None, grade=True, valid=True),
    Ending.TIMEOUT: Rule(None, grade=True, valid=True),
    Ending.NONZERO: Rule(None, grade=True, valid=True),
    Ending.LIMIT: Rule(None, grade=True, valid=True),
    Ending.OVERALL: Rule(None, grade=False, valid=False),
    Ending.SANDBOX: Rule(Budget.SETUP, grade=False, valid=False),
    Ending.NODE: Rule(Budget.SETUP, grade=False, valid=False),
    Ending.FAULT: Rule(Budget.AGENT, grade=False, valid=False),
    Ending.VERIFIER: Rule(Budget.VERIFIER, grade=False, valid=False),
    Ending.NO_CALLS: Rule(Budget.SETUP, grade=False, valid=False),
}

_BUNDLED_CODES = {0: Ending.FINISHED, 3: Ending.LIMIT, 4: Ending.LIMIT, 5: Ending.FAULT}
"""Exit codes of gyre_hpc/harness/main.py; any other harness says only zero or not."""


def of_exit(exit: Exit, bundled: bool, over_disk: bool = False) -> Ending:
    """The ending of an agent's process. `over_disk`: we stopped it because its workspace outgrew its limits."""
    if over_disk:
        return Ending.LIMIT
    if exit.timed_out:
        return Ending.TIMEOUT
    if not exit.started or exit.code is None:
        return Ending.SANDBOX
    if bundled:
        return _BUNDLED_CODES.get(exit.code, Ending.NONZERO)
    return Ending.FINISHED if exit.code == 0 else Ending.NONZERO
