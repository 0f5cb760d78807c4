"""Steps whose client was killed are gone when `close` returns (a fake in place of Slurm's commands)."""

from __future__ import annotations

import pytest

from gyre_hpc.driver import launcher
from gyre_hpc.driver.launcher import SlurmLauncher
from gyre_hpc.errors import GyreError

STEPS = "7.2 gyre-mpi\n7.3 gyre-supervisor-n1\n7.batch batch\n"


class FakeSlurm:
    """Says that the steps live until it was asked `stays` times after their end was ordered."""

    def __init__(self, stays: int) -> None:
        self.stays = stays
        self.cancelled: list[str] = []

    def __call__(self, command: list[str]) -> str:
        if command[0] == "scancel":
            self.cancelled += command[2:]
            return ""
        if self.cancelled:
            self.stays -= 1
        return STEPS if self.stays > 0 else "7.batch batch\n"


def test_close_returns_when_the_steps_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(stays=2)
    monkeypatch.setattr(launcher, "ask", slurm)
    monkeypatch.setattr(launcher, "_LOOK", 0.001)
    SlurmLauncher("7").close("mpi")
    assert slurm.cancelled == ["7.2"]
    assert slurm.stays == 0, "asked until they were gone"


def test_steps_that_stay_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "ask", FakeSlurm(stays=10**6))
    monkeypatch.setattr(launcher, "_LOOK", 0.001)
    monkeypatch.setattr(launcher, "CANCELLED", 0.01)
    with pytest.raises(GyreError, match=r"steps 7\.2, 7\.3 are still there"):
        SlurmLauncher("7").close()
