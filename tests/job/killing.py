"""Kills one process of a real run at the very begin of one phase of a transfer, as a plan says; the run itself is the real one.

`python -m tests.job.killing drive CONFIG [steps]` is `gyre run` whose ranks are this module's; a rank is the real one with one hook around
`Transfers.carry_out`. The plan is a file beside the run directory: a list of {phase, who}, taken one after the other.
`python -m tests.job.killing all FOLDER [WHO ...]` goes through all phases and processes and prints what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from cells.transfer import Do, Phase
from gyre_hpc.configfile import load
from gyre_hpc.controller import main as ranks
from gyre_hpc.controller.transfers import Order, Steps, Transfers
from gyre_hpc.driver import driver, rundir
from gyre_hpc.driver.programs import Programs
from gyre_hpc.errors import GyreError
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import Runtime
from tests.job.jobs import Job, gyre, make, until

WHO = ("controller", "leader", "engine", "gateway", "supervisor", "harness")
MODULES = {
    "controller": "gyre_hpc.controller.main",
    "gateway": "gyre_hpc.gateway.main",
    "supervisor": "gyre_hpc.executions.supervisor",
    "engine": "gyre_hpc.engines.torch_server",
}
Kill = dict[str, str]


def plan_of(run: Path) -> Path:
    return run.parent / "kills.json"


def kills_left(run: Path) -> list[Kill]:
    found: list[Kill] = json.loads(plan_of(run).read_text())
    return found


def _write(run: Path, kills: list[Kill]) -> None:
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


def _victim(run: Path, who: str, cell: int) -> psutil.Process | None:
    """None where there is none now: a harness between two executions."""
    for process in _processes(run):
        with contextlib.suppress(psutil.Error):
            line, rank = " ".join(process.cmdline()), process.environ().get("PMI_RANK")
            if who == "harness" and process.name() == "bwrap":
                inside = [p for p in process.children(recursive=True) if "harness/main.py" in " ".join(p.cmdline()) and p.name() != "bwrap"]
                if inside:
                    return inside[0]
            elif who == "leader" and "tests.job.killing" in line and "-m" in line and rank == str(cell + 1):
                return process
            elif who == "engine" and MODULES["engine"] in line:
                parent = process.parent()
                if parent is not None and parent.environ().get("PMI_RANK") == str(cell + 1):
                    return process
            elif who in MODULES and MODULES[who] in line:
                return process
    return None


def hook(run: Path) -> None:
    """From now on `carry_out` looks into the plan first."""
    real = Transfers.carry_out

    def carry_out(self: Transfers, action: Any, order: Order) -> Steps:
        plan = kills_left(run)
        if plan and isinstance(action, Do) and action.phase.value == plan[0]["phase"]:
            who = plan[0]["who"]
            victim = psutil.Process() if who == "controller" else _victim(run, who, order.cell)
            if victim is not None:
                _write(run, plan[1:])
                with (run.parent / "killed.jsonl").open("a") as log:
                    log.write(json.dumps({**plan[0], "cell": order.cell, "pid": victim.pid, "t": time.time()}) + "\n")
                victim.send_signal(signal.SIGKILL)
                while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.002)
        return (yield from real(self, action, order))

    Transfers.carry_out = carry_out  # type: ignore[method-assign]


# -- the driver -----------------------------------------------------------------------------------------------------------------
def drive(config: str, steps: str = "") -> int:
    try:
        paths = rundir.prepare(load(Path(config), [f"run.steps={steps}"] if steps else []))
        return int(driver.drive(paths.root, programs=Programs(mpi=lambda: [sys.executable, "-m", "tests.job.killing", "rank"])))
    except GyreError as error:
        print(error.line, flush=True)
        return int(error.exit_code)


def start(job: Job, log: Path, steps: int) -> Any:
    """The run in a process of its own."""
    import subprocess

    argv = [sys.executable, "-m", "tests.job.killing", "drive", str(job.config), str(steps)]
    with open(log, "ab") as out:
        return subprocess.Popen(argv, stdout=out, stderr=out, cwd=Path(__file__).parents[2], start_new_session=True)


# -- the tests' side ------------------------------------------------------------------------------------------------------------
def go_through(folder: Path, kills: list[Kill], patience: float = 300.0) -> list[str]:
    """A run in which all of them happen, resumed as often as it takes, to its end. One line an attempt; asserts all that must hold."""
    deadlines = {"start": 240, "transfer": 20, "step": 60, "idle": 60, "stop": 5}
    job = make(folder, run={"steps": 500, "min_free_mb": 1}, cells={"count": 2}, harness={"tool_delay": 0.4}, deadlines=deadlines)
    _write(job.paths.root, kills)
    lines, log = [], folder / "out.log"
    while True:
        before = len(kills_left(job.paths.root))
        process = start(job, log, 500)
        until("kill", lambda p=process, b=before: p.poll() is not None or len(kills_left(job.paths.root)) == 0, patience)
        if process.poll() is None:  # all are done and it lives: let it go on for a step, and stop it
            seen = len(job.steps())
            until("step after the last kill", lambda p=process, s=seen: p.poll() is not None or len(job.steps()) > s, patience)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        done = kills[len(kills) - before : len(kills) - len(kills_left(job.paths.root))]
        last = log.read_text().strip().splitlines()[-1]
        named = ", ".join(f"{kill['phase']}:{kill['who']}" for kill in done) or "nothing"
        lines.append(f"exit {code} after {named}: {last[-160:]}")
        print(lines[-1], flush=True)
        assert code == 75, log.read_text()[-3000:]
        assert not job.processes(), [p.cmdline() for p in job.processes()]
        if not kills_left(job.paths.root):
            break
        assert done, f"nothing was killed: {log.read_text()[-3000:]}"
    steps = len(job.steps()) + 1
    assert start(job, log, steps).wait(patience) == 0, log.read_text()[-3000:]
    check(job.paths, steps)
    return lines


def check(paths: RunPaths, steps: int) -> None:
    """Every step once, no group twice, every execution ended once, the trees whole."""
    events = list(read_events(paths.events))
    assert [event["step"] for event in events if event["kind"] == "step.end"] == list(range(1, steps + 1))
    trained = [group for event in events if event["kind"] == "step.end" for group in event["groups"]]
    assert len(trained) == len(set(trained)), "no group trained twice"
    ended = [(event["group"], event["index"]) for event in events if event["kind"] == "execution.end"]
    assert len(ended) == len(set(ended)), "what is over is over once"
    found = json.loads(gyre("trees", "verify", str(paths.root), "--json").stdout)
    assert found["problems"] == [], found


def all_of(folder: Path, who: list[str]) -> None:
    """Every phase with each of these processes."""
    phases = [phase.value for phase in Phase]
    for name in who or WHO:
        place = folder / name
        place.mkdir(parents=True)
        began = time.monotonic()
        go_through(place, [{"phase": phase, "who": name} for phase in phases], 400.0)
        print(f"{name}: all {len(phases)} phases in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        if os.environ.get("PMI_RANK") == "0":
            hook(Runtime.from_environment().run_dir)
        sys.exit(ranks.main())
    if sys.argv[1] == "drive":
        sys.exit(drive(*sys.argv[2:4]))
    all_of(Path(sys.argv[2]), sys.argv[3:])
