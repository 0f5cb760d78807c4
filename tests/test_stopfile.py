"""How a stop is asked for, and what SIGTERM does to a rank before, during and after the time that the driver gives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gyre_hpc import stopfile
from gyre_hpc.stopfile import Grace, StopFile, ask, wish, wished, withdraw


def test_the_file_says_how_long_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(stopfile, "time", SimpleNamespace(time=lambda: now))
    file = StopFile(tmp_path)
    assert (file.asked(), file.left()) == (False, float("inf"))
    ask(tmp_path, 10.0)
    now += 4.0
    assert (file.asked(), file.left()) == (True, 6.0)
    ask(tmp_path, 0.0)
    assert file.left() == 0.0
    (tmp_path / "stop").unlink()
    assert not file.soon()
    wish(tmp_path, "rank-00001")
    assert (file.asked(), file.soon()) == (False, True)
    ask(tmp_path, 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stop", "wish"]
    withdraw(tmp_path)
    assert (file.asked(), file.left(), wished(tmp_path)) == (False, float("inf"), False)


def test_one_that_somebody_touched_leaves_no_time(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    assert (StopFile(tmp_path).asked(), StopFile(tmp_path).left()) == (True, 0.0)


def test_a_process_of_the_same_pid_on_another_node_may_wish_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, others = os.replace, ["rank-00002"]

    def meanwhile(partial: Path, path: Path) -> None:
        if others:
            wish(tmp_path, others.pop())
        replace(partial, path)

    monkeypatch.setattr(stopfile.os, "replace", meanwhile)
    wish(tmp_path, "rank-00001")
    assert [path.name for path in tmp_path.iterdir()] == ["wish"]
    assert (tmp_path / "wish").read_text() == "rank-00001"


_RANK = """
import signal, sys
from pathlib import Path
from gyre_hpc.stopfile import Stubborn
Stubborn(Path(sys.argv[1]), "rank-00001").install()
print("ready", flush=True)
for line in sys.stdin:
    signal.raise_signal(signal.SIGTERM)
    print("lives", flush=True)
"""


@pytest.mark.parametrize("until", ["its time is over", "the driver is gone", "the file can't be read"])
def test_a_rank_leaves_a_wish_and_goes_on(tmp_path: Path, until: str) -> None:
    command = [sys.executable, "-c", _RANK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None

        def term() -> str:
            assert rank.stdin is not None
            assert rank.stdout is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
            return rank.stdout.readline()

        assert rank.stdout.readline() == "ready\n"
        assert not wished(tmp_path)
        assert term() == "lives\n"
        assert wished(tmp_path)
        (tmp_path / "wish").unlink()
        ask(tmp_path, 1000.0)
        assert term() == "lives\n"
        assert not wished(tmp_path), "the stop is under way: there is nothing to wish for"
        if until == "its time is over":
            ask(tmp_path, 0.0)
        elif until == "the driver is gone":
            shutil.rmtree(tmp_path)
        else:
            (tmp_path / "stop").unlink()
            (tmp_path / "stop").mkdir()
        assert term() == ""
        assert rank.wait(60) == -signal.SIGTERM


def test_the_gateway_goes_on_until_its_time_is_over_or_nobody_asks(tmp_path: Path) -> None:
    now = 0.0
    grace = Grace(tmp_path, "gateway", 10.0, lambda: now)
    assert not grace.over()
    assert wished(tmp_path)
    withdraw(tmp_path)
    now = 9.0
    assert not grace.over()
    assert wished(tmp_path), "once more: the ranks were started again meanwhile"
    ask(tmp_path, 1000.0)
    now = 900.0
    assert not grace.over(), "the driver knows, and gives it time"
    ask(tmp_path, 0.0)
    assert grace.over()
    withdraw(tmp_path)
    assert grace.over(), "a driver that does not ask never will"
    assert Grace(tmp_path / "gone", "gateway").over()
    assert Grace(tmp_path / ("x" * 300), "gateway").over(), "a file system that says no ends it, and raises nothing"
