"""kill -9 of each process of a run, one after another: it goes on, or stops in 30 s with 75 and one line, leaves nothing, and resumes.

The same at each phase of a transfer: test_transfer_kills.py.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.job.jobs import Job, make, until

pytestmark = [pytest.mark.job, pytest.mark.timeout(900)]

VICTIMS = {
    "controller": lambda p: _module(p, "gyre_hpc.controller.main") and p.environ().get("PMI_RANK") == "0",
    "core": lambda p: _module(p, "gyre_hpc.controller.main") and p.environ().get("PMI_RANK") == "1",
    "satellite": lambda p: _module(p, "gyre_hpc.controller.main") and p.environ().get("PMI_RANK") == "2",
    "gateway": lambda p: _module(p, "gyre_hpc.gateway.main"),
}
REPLACED = {
    "engine": lambda p: _module(p, "gyre_hpc.engines.torch_main"),
    "supervisor": lambda p: _module(p, "gyre_hpc.executions.supervisor"),
}
STEPS = 16


def _module(process: psutil.Process, name: str) -> bool:
    return name in " ".join(process.cmdline())


def _harnesses(job: Job) -> Iterator[psutil.Process]:
    """Harnesses in the middle of their work. A box's environment is its own: they are found below the boxes, which carry the run's mark."""
    for box in job.processes():
        try:
            for inside in box.children(recursive=True) if box.name() == "bwrap" else []:
                working = time.time() - inside.create_time() > 1.0
                if working and "bwrap" not in inside.name() and "harness/main.py" in " ".join(inside.cmdline()):
                    yield inside
        except psutil.Error:
            continue


def victim(job: Job, name: str) -> psutil.Process:
    for process in job.processes():
        try:
            if {**VICTIMS, **REPLACED}[name](process):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no {name} among {[p.cmdline()[:4] for p in job.processes()]}")


def test_every_process_may_be_killed(tmp_path: Path) -> None:
    job = make(tmp_path, run={"steps": STEPS}, cells={"count": 2}, harness={"tool_delay": 0.3})
    for number, name in enumerate(VICTIMS, 1):
        log = tmp_path / f"{name}.log"
        process = job.start(log)
        job.wait_for_steps(process, number, log)
        victim(job, name).send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert process.wait(60) == 75, f"{name}: {log.read_text()}"
        assert time.monotonic() - killed < 30, name
        last = log.read_text().strip().splitlines()[-1]
        assert "the same command resumes" in last, f"{name}: {last}"
        assert not job.processes(), f"{name}: {[p.cmdline() for p in job.processes()]}"
    driver = job.start(tmp_path / "driver.log")
    job.wait_for_steps(driver, len(VICTIMS) + 1, tmp_path / "driver.log")
    driver.kill()
    driver.wait()
    until("end of all that the driver had started", lambda: not job.processes(), 30)
    last = job.start(tmp_path / "last.log")
    job.wait_for_steps(last, len(job.steps()) + 1, tmp_path / "last.log")
    for name, told in (("engine", "engine.died"), ("supervisor", "supervisor.again")):
        victim(job, name).send_signal(signal.SIGKILL)
        until(told, lambda kind=told: job.events(kind), 60)
        assert last.poll() is None, "it is replaced, and the run goes on"
    assert last.wait(400) == 0, (tmp_path / "last.log").read_text()
    assert job.steps() == list(range(1, STEPS + 1)), "no step skipped, none repeated"
    trained = [group for event in job.events("step.end") for group in event["groups"]]
    assert len(trained) == len(set(trained)), "no group trained twice"
    ended = [(event["group"], event["index"]) for event in job.events("execution.end")]
    assert len(ended) == len(set(ended)), "a finished execution is finished once"


def test_a_killed_harness_does_not_stop_the_run(tmp_path: Path) -> None:
    job = make(tmp_path, run={"steps": 2}, cells={"count": 2}, harness={"tool_delay": 2.0, "retry": 0.0})
    process = job.start(tmp_path / "out.log")

    def kill_one() -> bool:
        for found in _harnesses(job):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself: take another
                found.kill()
                return True
        assert process.poll() is None, "the run ended before a harness was met"
        return False

    until("harness", kill_one, 300)
    assert process.wait(300) == 0, (tmp_path / "out.log").read_text()
    assert job.steps() == [1, 2]
    marks = [event["reason"] for kind in ("execution.lost", "execution.end") for event in job.events(kind)]
    assert set(marks) - {"finished"}, "the killed one is told apart"
    assert not job.processes()
