"""What blocks without a way back: named, told at half time, given up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from cells.watchdog import Watchdog
from tests.cells.ranks import clean_environment


class Kennel:
    """A watchdog whose words are kept, and may be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.gone: list[tuple[str, float]] = []
        self.told, self.given_up = threading.Event(), threading.Event()
        self.dog = Watchdog(self._give_up, self._log, look=0.001)

    def _give_up(self, name: str, seconds: float) -> None:
        self.gone.append((name, seconds))
        self.given_up.set()

    def _log(self, line: str) -> None:
        self.lines.append(line)
        self.told.set()

    def close(self) -> None:
        """Its thread is over: a run's goes on looking for as long as the process lives."""
        with self.dog.watch("the end", 0.0):
            assert self.dog._thread is not None
            self.dog._thread.join(60.0)


@pytest.fixture
def kennel() -> Iterator[Kennel]:
    made = Kennel()
    yield made
    made.close()


def test_what_hangs_is_given_up_by_name_and_once(kennel: Kennel) -> None:
    with kennel.dog.watch("the outer call", 1000.0), kennel.dog.watch("a flush", 0.01):
        assert kennel.given_up.wait(60.0)
    assert kennel.gone == [("a flush", 0.01)]


def test_what_takes_half_of_its_time_is_told_once_and_goes_on(kennel: Kennel) -> None:
    with kennel.dog.watch("a long call", 1e9):
        watched = kennel.dog._open[-1]
        watched.began -= 0.6e9
        assert kennel.told.wait(60.0)
        kennel.told.clear()
        with kennel.dog.watch("another", 1e9):
            kennel.dog._open[-1].began -= 0.6e9
            assert kennel.told.wait(60.0)  # by now the first was looked at again
    assert [line.split(":")[0] for line in kennel.lines] == ["waiting for a long call", "waiting for another"]
    assert not kennel.given_up.is_set()


def test_what_is_over_is_forgotten_also_when_it_raised(kennel: Kennel) -> None:
    with pytest.raises(OSError, match="failed"), kennel.dog.watch("a call that fails", 1000.0):
        raise OSError("failed")
    assert kennel.dog._open == []
    assert sum(thread is kennel.dog._thread for thread in threading.enumerate()) == 1
    for _ in range(3):
        with kennel.dog.watch("a call", 1000.0):
            pass
    assert kennel.gone == []


_HANGS = """
import os
from mpi4py import MPI
from cells.watchdog import Watchdog
def give_up(name, seconds):
    print(name, flush=True)
    os._exit(75)
with Watchdog(give_up, print, look=0.01).watch("a message that nobody sends", 0.05):
    MPI.COMM_SELF.Recv(bytearray(1), source=0, tag=1)
"""


def test_a_process_that_is_stuck_inside_mpi_gets_out() -> None:
    """mpi4py lets other threads run while a call blocks."""
    done = subprocess.run([sys.executable, "-c", _HANGS], env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (75, "a message that nobody sends"), done.stderr
