"""Kills one process of a real run in one phase of a transfer, as a plan says; the run itself is the real one.

`python -m tests.job.killing drive CONFIG [steps]` is `gyre run` whose ranks are this module's; a rank is the real one with one hook around
`Transfers.carry_out`. The plan is a file beside the run directory: a list of {phase, who, when}, taken one after the other. When: at the
`begin` (nothing of the phase has been asked for), in the `middle` (after half the time that it took before), or at the `end` (it is done,
and nobody has heard of it). SIGTERM in place of the kill comes to EVERYBODY, with or without the driver, as a scheduler sends it, once
`steps` are done; there `update to` is a phase as well, that of a publication.
`python -m tests.job.killing all FOLDER [WHO ...]` goes through all phases, processes and moments and prints what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cells.transfer import Do, Phase
from gyre_hpc.configfile import load
from gyre_hpc.controller import main as ranks
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Message, Update
from gyre_hpc.controller.transfers import Order, Steps, Transfers
from gyre_hpc.driver import driver, rundir
from gyre_hpc.driver.programs import Programs
from gyre_hpc.errors import GyreError
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import Runtime
from tests.job.jobs import Job, gyre, make, until

WHO = {
    "controller": "rank 0",
    "leader": "the first rank of the cell that moves",
    "follower": "its second rank",
    "core": "the core's leader, while another cell moves",
    "engine": "that of the cell that moves",
    "peer": "that of another cell",
    "gateway": "",
    "supervisor": "",
    "harness": "",
    "driver": "",
}
WHEN = ("begin", "middle", "end")
EVERYBODY = {"everybody": True, "all but the driver": False}
"""Who gets SIGTERM together; whether the driver is among them."""
PUBLICATION = "update to"
TWO_RANKS = ("follower",)
"""Who is only there where a cell has two ranks."""
MODULES = {
    "controller": "gyre_hpc.controller.main",
    "gateway": "gyre_hpc.gateway.main",
    "supervisor": "gyre_hpc.executions.supervisor",
    "engine": "gyre_hpc.engines.torch_main",
}
Kill = dict[str, str]


def plan_of(run: Path) -> Path:
    return run.parent / "kills.json"


def kills_left(run: Path) -> list[Kill]:
    found: list[Kill] = json.loads(plan_of(run).read_text())
    return found


def write(run: Path, kills: list[Kill]) -> None:
    """Whole or not at all: others read it at any time."""
    partial = plan_of(run).with_suffix(".partial")
    partial.write_text(json.dumps(kills))
    partial.replace(plan_of(run))


# -- inside the run -------------------------------------------------------------------------------------------------------------
def _processes(run: Path) -> Iterator[psutil.Process]:
    mark = f"GYRE_ATTEMPT={run}/"
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace"):
                yield process


@dataclass(frozen=True)
class Place:
    """Where a victim is looked for: `cell` moves, of cells with `width` ranks each."""

    run: Path
    cell: int
    width: int

    def rank(self, who: str) -> int | None:
        """The MPI rank meant by `who`; None for one that does not live by a rank, or that is not there now."""
        if who == "core":
            return 1 if self.cell else None
        if who in ("leader", "engine"):
            return 1 + self.cell * self.width
        return 2 + self.cell * self.width if who == "follower" and self.width > 1 else None

    def victim(self, who: str) -> psutil.Process | None:
        """None where there is none now: a harness between two executions, the core of a cell that is the core."""
        if who == "driver":
            return next((p for p in psutil.process_iter(["cmdline"]) if self._drives(p.info["cmdline"] or [])), None)
        for process in _processes(self.run):
            with contextlib.suppress(psutil.Error):
                if self._is(process, who):
                    return process
                if who == "harness" and process.name() == "bwrap":
                    boxed = process.children(recursive=True)
                    inside = [p for p in boxed if "harness/main.py" in " ".join(p.cmdline()) and p.name() != "bwrap"]
                    if inside:
                        return inside[0]
        return None

    def _drives(self, line: list[str]) -> bool:
        return "tests.job.killing" in line and "drive" in line and str(self.run.parent / "job.yaml") in line

    def _is(self, process: psutil.Process, who: str) -> bool:
        line = " ".join(process.cmdline())
        if who in ("controller", "leader", "follower", "core"):
            number = self._number(who)
            return number is not None and "tests.job.killing rank" in line and process.environ().get("PMI_RANK") == number
        if who in ("engine", "peer"):
            parent = process.parent() if MODULES["engine"] in line else None
            owner = parent.environ().get("PMI_RANK") if parent is not None else None
            return owner is not None and (owner == self._number("engine")) is (who == "engine")
        return who in MODULES and MODULES[who] in line

    def _number(self, who: str) -> str | None:
        found = 0 if who == "controller" else self.rank(who)
        return None if found is None else str(found)


def _strike(kill: Kill, plan: list[Kill], place: Place) -> bool:
    """Kill it and wait until it is dead; False where there is nobody to kill, which leaves the plan as it is."""
    who, run = kill["who"], place.run
    if who in EVERYBODY:
        write(run, plan[1:])
        _terminate(place, EVERYBODY[who])
        return True
    victim = psutil.Process() if who == "controller" else place.victim(who)
    if victim is None:
        return False
    write(run, plan[1:])
    with (run.parent / "killed.jsonl").open("a") as log:
        log.write(json.dumps({**kill, "cell": place.cell, "pid": victim.pid, "t": time.time()}) + "\n")
    victim.send_signal(signal.SIGKILL)
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.002)
    return True


def _terminate(place: Place, driver: bool) -> None:
    """SIGTERM to all processes of the run on this machine but mpiexec's own, which would end the ranks: srun's node daemon gets none."""
    drives = place.victim("driver") if driver else None
    everybody = [process for process in _processes(place.run) if process.pid != os.getpid() and not _launches(process)]
    for process in [*([drives] if drives else []), *everybody, psutil.Process()]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)


def _launches(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith(("mpiexec", "hydra"))
    return False


def _done(run: Path) -> int:
    return sum(event["kind"] == "step.end" for event in read_events(run / "events.jsonl"))


def hook(run: Path, width: int) -> None:
    """From now on `carry_out` looks into the plan first. `width`: ranks of a cell."""
    real = Transfers.carry_out
    usual: dict[str, float] = {}
    """Seconds that each phase took last."""

    def carry_out(self: Transfers, action: Any, order: Order) -> Steps:
        plan, place = kills_left(run), Place(run, order.cell, width)
        due = (
            bool(plan) and isinstance(action, Do) and action.phase.value == plan[0]["phase"] and _done(run) >= int(plan[0].get("steps", 0))
        )
        when = plan[0].get("when", "begin") if due else ""
        if when == "begin":
            _strike(plan[0], plan, place)
        thread = threading.Timer(usual.get(action.phase.value, 0.01) / 2, _strike, (plan[0], plan, place)) if when == "middle" else None
        if thread is not None:
            thread.start()
        began = time.monotonic()
        try:
            answer = yield from real(self, action, order)
        finally:
            if thread is not None:
                thread.join()
        if isinstance(action, Do):
            usual[action.phase.value] = time.monotonic() - began
        if when == "end":
            _strike(plan[0], plan, place)
        return answer

    Transfers.carry_out = carry_out  # type: ignore[method-assign]
    agree = Asking.agree

    def announce(self: Asking, message: Message, name: str, deadline: Any) -> Any:
        plan = kills_left(run) if isinstance(message, Update) else []
        if plan and name.startswith(plan[0]["phase"]) and _done(run) >= int(plan[0].get("steps", 0)):
            _strike(plan[0], plan, Place(run, 0, width))
        return (yield from agree(self, message, name, deadline))

    Asking.agree = announce  # type: ignore[method-assign]


# -- the driver -----------------------------------------------------------------------------------------------------------------
def drive(config: str, steps: str = "") -> int:
    try:
        paths = rundir.prepare(load(Path(config), [f"run.steps={steps}"] if steps else []))
        return int(driver.drive(paths.root, programs=Programs(mpi=lambda: [sys.executable, "-m", "tests.job.killing", "rank"])))
    except GyreError as error:
        print(error.line, flush=True)
        return int(error.exit_code)


def start(job: Job, log: Path, steps: int) -> subprocess.Popen[bytes]:
    """The run in a process of its own."""
    argv = [sys.executable, "-m", "tests.job.killing", "drive", str(job.config), str(steps)]
    with open(log, "ab") as out:
        return subprocess.Popen(argv, stdout=out, stderr=out, cwd=Path(__file__).parents[2], start_new_session=True)


# -- the tests' side ------------------------------------------------------------------------------------------------------------
def go_through(folder: Path, kills: list[Kill], patience: float = 300.0) -> list[str]:
    """A run in which all of them happen, resumed as often as it takes, to its end. One line an attempt; asserts all that must hold."""
    deadlines = {"start": 240, "transfer": 20, "step": 60, "idle": 60, "stop": 5}
    cells = {"count": 2, "ranks_per_node": 2 if any(kill["who"] in TWO_RANKS for kill in kills) else 1}
    satellites = {"phi": 0.0} if any(kill["who"] == "core" for kill in kills) else {}  # nothing is carried over: they always join
    run = {"steps": 500, "min_free_mb": 1}
    job = make(folder, run=run, cells=cells, harness={"tool_delay": 0.4}, schedule=satellites, deadlines=deadlines)
    write(job.paths.root, kills)
    lines, log = [], folder / "out.log"
    while True:
        before = len(kills_left(job.paths.root))
        code = _attempt(job, log, patience)
        done = kills[len(kills) - before : len(kills) - len(kills_left(job.paths.root))]
        last = log.read_text().strip().splitlines()[-1]
        named = ", ".join(name_of(kill) for kill in done) or "nothing"
        lines.append(f"exit {code} after {named}: {last[-160:]}")
        print(lines[-1], flush=True)
        if code == -signal.SIGKILL and done and done[-1]["who"] == "driver":
            until("end of all that the driver had started", lambda: not job.processes(), 60)
        else:
            assert code == 75, log.read_text()[-3000:]
        assert not job.processes(), [p.cmdline() for p in job.processes()]
        if not kills_left(job.paths.root):
            break
        assert done, f"nothing was killed: {log.read_text()[-3000:]}"
    steps = len(job.steps()) + 1
    assert start(job, log, steps).wait(patience) == 0, log.read_text()[-3000:]
    check(job.paths, steps)
    return lines


def _attempt(job: Job, log: Path, patience: float) -> int:
    """One, to its end: by a kill, or stopped by us a step after the last one. Its exit code."""
    process = start(job, log, 500)
    while process.poll() is None and (left := kills_left(job.paths.root)):
        until(name_of(left[0]), lambda at=left: process.poll() is not None or kills_left(job.paths.root) != at, patience)  # type: ignore[misc]
    if process.poll() is None:  # all are done and it lives: let it go on for a step
        seen = len(job.steps())
        until("step after the last kill", lambda: process.poll() is not None or len(job.steps()) > seen, patience)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    return process.wait(60)


def name_of(kill: Kill) -> str:
    """A kill in a word."""
    return ":".join(kill[name] for name in ("phase", "who", "when") if name in kill)


def check(paths: RunPaths, steps: int) -> None:
    """Every step once, no group twice, every execution ended once, and what was told of it is what its tree holds; the trees whole."""
    events = list(read_events(paths.events))
    assert [event["step"] for event in events if event["kind"] == "step.end"] == list(range(1, steps + 1))
    trained = [group for event in events if event["kind"] == "step.end" for group in event["groups"]]
    assert len(trained) == len(set(trained)), "no group trained twice"
    ends = [event for event in events if event["kind"] == "execution.end"]
    ended = [(event["group"], event["index"]) for event in ends]
    assert len(ended) == len(set(ended)), "what is over is over once"
    kept = {entry["execution"]: entry for entry in json.loads(gyre("trees", "ls", str(paths.root), "--json").stdout)}
    for event in ends:
        tree = kept[event["execution"]]
        assert all(tree[name] == event[name] for name in ("group", "index", "attempt", "reason", "valid", "calls")), (event, tree)
        assert tree["score"] == pytest.approx(event["score"], abs=1e-5)
    found = json.loads(gyre("trees", "verify", str(paths.root), "--json").stdout)
    assert found["problems"] == [], found


def all_of(folder: Path, who: list[str]) -> None:
    """Every phase with each of these processes, at every moment."""
    phases = [phase.value for phase in Phase]
    for name in who or WHO:
        for when in WHEN:
            place = folder / f"{name}-{when}"
            place.mkdir(parents=True)
            began = time.monotonic()
            go_through(place, [{"phase": phase, "who": name, "when": when} for phase in phases], 400.0)
            print(f"{name}, {when}: all {len(phases)} phases in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        if os.environ.get("PMI_RANK") == "0":
            found = Runtime.from_environment().run_dir
            hook(found, load(found.parent / "job.yaml").cells.ranks_per_node)
        sys.exit(ranks.main())
    if sys.argv[1] == "drive":
        sys.exit(drive(*sys.argv[2:4]))
    all_of(Path(sys.argv[2]), sys.argv[3:])
