"""Signals are a flag while the driver lives, and change nothing once a stop is under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gyre_hpc.driver.signals import Signals

SCRIPT = """
import os, signal, sys
from gyre_hpc.driver.signals import Signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
with Signals(last=True) as caught:
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
    print(caught.stop, caught.hurry, flush=True)
os.kill(os.getpid(), signal.SIGINT)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("times", "status", "said"),
    [(0, -signal.SIGINT, "None False"), (1, 75, f"{signal.SIGINT!s} False"), (3, 75, f"{signal.SIGINT!s} True")],
)
def test_an_impatient_ctrl_c_on_the_way_out_does_not_take_the_exit_code(times: int, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(times)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (status, said)


def test_a_driver_inside_another_program_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Signals() as caught:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert caught.time_up
    assert signal.getsignal(signal.SIGUSR1) is before
