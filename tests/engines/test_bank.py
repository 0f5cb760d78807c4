"""A rank's engines as one, on servers that do nothing (fakes at the outer edge: the processes)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gyre_hpc.engines.bank import EngineBank
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, EngineServer, EngineSpec, Holding


@dataclass
class FakeServer:
    """In place of an engine process."""

    number: int
    together: threading.Barrier | None = None
    pid: int = 1
    lives: bool = True
    broken: bool = False
    did: list[str] = field(default_factory=list)

    @property
    def address(self) -> EngineAddress:
        return EngineAddress("fake", f"u{self.number}.{self.pid}", 4, 100)

    def _do(self, what: str) -> None:
        if self.together is not None:
            self.together.wait(5.0)
        self.did.append(what)
        if self.broken:
            raise EngineFault(f"engine {self.number} is broken")

    def alive(self) -> bool:
        return self.lives

    def holding(self, deadline: float) -> Holding:
        return Holding(350, 3)

    def pause(self, deadline: float) -> None:
        self._do("pause")

    def resume(self, deadline: float) -> None:
        self._do("resume")

    def update_weights(self, model: Path, version: int, deadline: float) -> None:
        self._do(f"update {version}")

    def release(self, deadline: float) -> None:
        self._do("release")

    def restore(self, model: Path, version: int, deadline: float) -> None:
        self._do(f"restore {version}")

    def stop(self) -> None:
        self.did.append("stop")


def made(count: int, together: bool = False, failing: int | None = None) -> tuple[EngineBank, list[FakeServer]]:
    barrier = threading.Barrier(count) if together else None
    servers: list[FakeServer] = []

    def starter(spec: EngineSpec, deadline: float) -> EngineServer:
        number = spec.version  # tells the specs of this test apart
        if number == failing:
            raise EngineFault(f"engine {number} did not start")
        servers.append(FakeServer(number, barrier, pid=len(servers)))
        return servers[-1]

    specs = {number: EngineSpec("fake", Path("m"), number, 4, 100, Path("log")) for number in range(count)}
    return EngineBank.start(specs, 1.0, starter), servers


def test_what_is_asked_of_one_is_done_by_all_at_the_same_time() -> None:
    bank, servers = made(3, together=True)
    bank.pause(1.0)
    bank.update_weights(Path("w"), 7, 1.0)
    bank.release(1.0)
    bank.restore(Path("w"), 8, 1.0)
    bank.resume(1.0)
    bank.stop()
    assert {tuple(server.did) for server in servers} == {("pause", "update 7", "release", "restore 8", "resume", "stop")}


def test_a_failure_is_raised_once_all_have_answered() -> None:
    bank, servers = made(3)
    next(server for server in servers if server.number == 0).broken = True
    with pytest.raises(EngineFault, match="engine 0 is broken"):
        bank.update_weights(Path("w"), 7, 1.0)
    assert all(server.did == ["update 7"] for server in servers)
    bank.stop()


def test_a_start_that_fails_leaves_none() -> None:
    with pytest.raises(EngineFault, match="engine 1 did not start"):
        made(3, failing=1)


def test_the_report_has_addresses_and_what_was_measured() -> None:
    bank, _ = made(2)
    report = bank.report(1.0)
    assert sorted(report) == ["0", "1"]
    assert {key: report["1"][key] for key in ("kind", "capacity", "holds", "kv_tokens")} == {
        "kind": "fake",
        "capacity": 4,
        "holds": 3,
        "kv_tokens": 350,
    }
    bank.stop()


def test_a_process_that_ends_does_not_wait_for_an_engine_that_starts() -> None:
    """The stop of an attempt gives a start up (controller/keeper.py); Python joins all threads but daemons, those of pools included."""
    bank, servers = made(2)
    begun, over, waited_for = threading.Event(), threading.Event(), list[bool]()

    def starter(spec: EngineSpec, deadline: float) -> EngineServer:
        waited_for.append(not threading.current_thread().daemon)
        begun.set()
        over.wait(60.0)
        raise EngineFault("it came too late")

    bank._starter = starter
    threading.Thread(target=bank.restart, args=([1], Path("w"), 7, 60.0), daemon=True).start()
    assert begun.wait(60.0)
    bank.stop()
    over.set()
    assert waited_for == [False]
    assert [server.did[-1] for server in servers] == ["stop", "stop"]
