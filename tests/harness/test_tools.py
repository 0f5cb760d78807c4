"""The tools of the bundled harness, run as it runs them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from gyre_hpc.harness import tools


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "s3cret")


def test_bash_gives_both_outputs_and_the_exit_code() -> None:
    assert tools.run("bash", {"command": "echo out; echo err >&2; exit 4"}, 100, 5.0) == ("out\nerr\n", 4)


def test_a_time_limit_may_be_longer_than_poll_takes() -> None:
    assert tools.run("bash", {"command": "echo out"}, 100, 1e9) == ("out\n", 0)


def test_a_pipe_that_closes_early_makes_no_noise() -> None:
    assert tools.run("bash", {"command": "yes | head -n 1"}, 1000, 5.0) == ("y\n", 0)


def test_bash_has_no_standard_input_and_no_secret() -> None:
    output, code = tools.run("bash", {"command": "cat; env"}, 10_000, 5.0)
    assert code == 0
    assert "s3cret" not in output
    assert "PATH=" in output


def test_a_command_that_takes_too_long_dies_with_all_it_started() -> None:
    begun = f"sleep 3{os.getpid()}"
    output, code = tools.run("bash", {"command": f"echo before; ({begun}; touch late) & {begun}"}, 100, 1.0)
    assert code == 124
    assert "before" in output
    assert "timed out" in output
    until = time.monotonic() + 30
    while [p for p in psutil.process_iter(["cmdline"]) if begun in " ".join(p.info["cmdline"] or [])]:
        assert time.monotonic() < until, "it lives on"


def test_a_child_in_the_background_holds_nothing_up() -> None:
    assert tools.run("bash", {"command": "sleep 60 & echo $! > pid; timeout 50 yes & echo started"}, 100, 60.0)[1] == 0
    child = psutil.Process(int(Path("pid").read_text()))
    assert child.status() != psutil.STATUS_ZOMBIE, "nobody waited for it"
    child.kill()


def test_long_output_is_cut_in_the_middle() -> None:
    output, code = tools.run("bash", {"command": "echo first; yes | head -c 3000000; echo last"}, 100, 20.0)
    assert code == 0
    assert output.startswith("first")
    assert output.endswith("last\n")
    assert "characters cut" in output
    assert len(output) < 200


def test_write_file_makes_folders_and_says_what_failed(tmp_path: Path) -> None:
    assert tools.run("write_file", {"path": "a/b/c.txt", "content": "hé\ud800"}, 100, 5.0) == ("", 0)
    assert (tmp_path / "a/b/c.txt").read_bytes() == "hé?".encode()
    output, code = tools.run("write_file", {"path": "a", "content": ""}, 100, 5.0)
    assert (output, code) == ("write_file: Is a directory", 1)
    assert tools.run("write_file", {"path": "x\0y", "content": ""}, 100, 5.0)[1] == 1


@pytest.mark.parametrize(
    ("name", "arguments"), [("bash", {}), ("bash", {"command": 3}), ("write_file", {"path": "x"}), ("fly", {"command": "x"})]
)
def test_wrong_calls_are_answered(name: str, arguments: dict[str, object]) -> None:
    output, code = tools.run(name, arguments, 100, 5.0)
    assert code == 2
    assert name in output
