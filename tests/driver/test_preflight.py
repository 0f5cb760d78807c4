"""What the first node must allow before anything starts: each mistake is one line with the key, the value and what is allowed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.driver import driver, preflight
from gyre_hpc.driver.allocation import Allocation
from gyre_hpc.driver.driver import drive
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.events import read_events
from gyre_hpc.report.status import collect, render
from tests.driver.actors import programs


def hosted(host: str) -> Config:
    return check({"gateway": {"host": host}}, "test")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fake of the name service at its edge: what is in the table, nothing else."""
    known = {"here.cluster": "127.0.0.1", "elsewhere.cluster": "192.0.2.7"}

    def look_up(name: str, *_: Any, **__: Any) -> list[Any]:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_a_name_of_this_node_is_fine(resolver: dict[str, str]) -> None:
    for host in ("here.cluster", *preflight.LOCAL[:2]):
        preflight.check_address(hosted(host), ["n1"])


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("nowhere.cluster", r"gateway\.host = nowhere\.cluster does not resolve here \(Name or service not known\); a name or address of"),
        ("elsewhere.cluster", r"gateway\.host = elsewhere\.cluster is 192\.0\.2\.7, which is no address of this node; a name"),
    ],
)
def test_a_name_by_which_nobody_reaches_this_node_is_told(resolver: dict[str, str], host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        preflight.check_address(hosted(host), ["n1"])


def test_a_name_that_can_be_none_is_told_as_well() -> None:
    with pytest.raises(ConfigError, match="does not resolve here"):
        preflight.check_address(hosted("x" * 70), ["n1"])


def test_on_several_nodes_the_hosts_own_name_counts(resolver: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere.cluster")
    preflight.check_address(hosted("nowhere.cluster"), ["n1", "n2"])
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    with pytest.raises(ConfigError, match="this node's own name, n1, does not resolve, and 2 nodes are to reach the gateway by it"):
        preflight.check_address(hosted("127.0.0.1"), ["n1", "n2"])


def test_threads_are_bound_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_threads(check({"rollout": {"threads": 64}}, "test"), 2)
    with pytest.raises(ConfigError, match=r"training\.threads = 65 on a node with 2 cores; at most 64 here"):
        preflight.check_threads(check({"training": {"threads": 65}}, "test"), 2)


def test_limits_above_the_nodes_memory_are_said() -> None:
    config = check({"harness": {"memory_mb": 4096, "disk_mb": 5000}}, "test")
    assert preflight.loose(config, 8192) == []
    memory, scratch = preflight.loose(config, 2048)
    assert memory.startswith("harness.memory_mb = 4096 is more than the 2048 MiB of this node: one process")
    assert scratch.startswith("harness.disk_mb = 5000 is more than")


def test_nothing_is_started_with_a_mistake_in_it(tmp_path: Path, resolver: dict[str, str]) -> None:
    gateway = {"host": "nowhere.cluster"}
    run = prepare(check({"run": {"dir": str(tmp_path / "run"), "name": "t", "min_free_mb": 1}, "gateway": gateway}, "test"))
    with pytest.raises(ConfigError, match=r"nowhere\.cluster does not resolve"):
        drive(run.root, programs=programs())
    assert not run.logs.exists()
    assert not run.lock.exists()
    assert list(read_events(run.events)) == []


def test_why_a_job_did_not_begin_is_an_event(tmp_path: Path, resolver: dict[str, str]) -> None:
    """Nobody sits before a job: `gyre status` and the table of a sweep read the log."""
    gateway = {"host": "nowhere.cluster"}
    run = prepare(check({"run": {"dir": str(tmp_path / "run"), "name": "t", "min_free_mb": 1}, "gateway": gateway}, "test"))
    with pytest.raises(ConfigError, match=r"nowhere\.cluster does not resolve"):
        drive(run.root, programs=programs(), allocation=Allocation(("n1",), job="7"))
    (told,) = read_events(run.events)
    assert (told["kind"], told["attempt"]) == ("failure", 1)
    assert "last failure: gateway.host = nowhere.cluster does not resolve here" in render(collect(run))


def test_a_log_that_takes_no_event_hides_no_cause(tmp_path: Path, resolver: dict[str, str]) -> None:
    gateway = {"host": "nowhere.cluster"}
    run = prepare(check({"run": {"dir": str(tmp_path / "run"), "name": "t", "min_free_mb": 1}, "gateway": gateway}, "test"))
    for damage in (lambda: run.events.mkdir(), lambda: (run.events.rmdir(), run.events.write_text("no event\n"))):
        damage()
        with pytest.raises(GyreError) as caught, driver._recorded(run, Allocation(("n1",), job="7")):
            raise GyreError("the cause", "mend it")
        assert caught.value.what == "the cause"
