"""What a user is told when something can't go on, and the exit code that goes with it.

Invariant: every error that reaches a user is one line that says what is wrong and what to do about it.
Library code raises these; only the command line prints them and turns them into an exit code.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of every `gyre` command (contract, docs/architecture.md section 8)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    RESUMABLE = 75


class GyreError(Exception):
    """Something the user must hear about: what happened, and the remedy, each without a line break."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = " ".join(what.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(self.line)

    @property
    def line(self) -> str:
        """The one line for the terminal: `what; remedy`."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class ConfigError(GyreError):
    """A configuration or command line that can't be used. Exit 2."""

    exit_code = ExitCode.USAGE


class Resumable(GyreError):
    """The run stopped in a state from which the same command continues. Exit 75."""

    exit_code = ExitCode.RESUMABLE


class PeerLost(Resumable):
    """What a process hears of another one that is gone: never the first cause, only the word of who waited for it."""
