"""Small real programs in the places of the gateway, the supervisors and the MPI step (fakes at the outer edge of the driver's tests).

`python actors.py gateway RUN ATTEMPT | supervisor NODE | mpi STEPS SECONDS`. The MPI program is a real MPI world: it takes one step every
SECONDS, agreed by all ranks, writes `step.end` and `checkpoint` events from rank 0, continues after the last checkpoint, and obeys the
stop file and `hold`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from cells.communicators import Layout, check_world
from gyre_hpc.configfile import load
from gyre_hpc.controller.live import LiveFile
from gyre_hpc.driver import attempt, children, driver, ending, rundir
from gyre_hpc.driver.allocation import node_name
from gyre_hpc.driver.children import MARK
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.world import mark_ready, mark_through
from gyre_hpc.errors import ExitCode, GyreError
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.failure import as_failure, record_failure
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import Address, Runtime, write_address
from gyre_hpc.stopfile import Stubborn


def programs(steps: int = 3, seconds: float = 0.05, **replaced: list[str]) -> Programs:
    """Builders of these programs; `replaced` gives whole command lines for some of them."""
    me = [sys.executable, __file__]
    return Programs(
        gateway=lambda run, attempt, host: replaced.get("gateway", [*me, "gateway", str(run), str(attempt)]),
        supervisor=lambda node: replaced.get("supervisor", [*me, "supervisor", node]),
        mpi=lambda: replaced.get("mpi", [*me, "mpi", str(steps), str(seconds)]),
        model=lambda: replaced.get("model", ["true"]),
    )


def hasten(set_attribute: Callable[[object, str, float], None]) -> None:
    """Shorter graces: these programs end at once."""
    set_attribute(children, "SETTLE", 0.3)
    set_attribute(attempt, "WISH", 0.1)
    set_attribute(ending, "LEAVE", 1.0)


def drive(run: str, steps: str) -> None:
    """The driver itself with these programs, as `gyre run` does it."""
    hasten(setattr)
    try:
        sys.exit(int(driver.drive(Path(run), programs=programs(int(steps), 0.1))))
    except GyreError as error:
        print(error.line)
        sys.exit(int(error.exit_code))


def drive_config(config: str, steps: str) -> None:
    """`gyre run CONFIG` with these programs."""
    try:
        paths = rundir.prepare(load(Path(config)))
    except GyreError as error:
        print(error.line)
        sys.exit(int(error.exit_code))
    drive(str(paths.root), steps)


class _Control(BaseHTTPRequestHandler):
    """The one call of the control API that the driver makes."""

    def do_POST(self) -> None:
        assert self.headers["Authorization"] == f"Bearer {os.environ['GYRE_SECRET']}"
        self.rfile.read(int(self.headers["Content-Length"]))
        print("asked:", self.path, flush=True)
        answer = b'{"lost": [3, 4]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def gateway(run: str, attempt: str) -> None:
    folder = RunPaths(Path(run)).runtime(int(attempt))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Control)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    write_address(folder, Address(f"http://127.0.0.1:{server.server_port}", str(folder / "gateway.sock"), os.getpid()))
    _sleep_until_term()


def supervisor(node: str) -> None:
    runtime = Runtime.from_environment()
    (runtime.run_dir / f"seen-{node}-{runtime.attempt}").write_text(os.environ.get("SLURMD_NODENAME", node))
    _sleep_until_term()


def mpi(steps: str, seconds: str) -> None:
    Stubborn(Path(os.environ[MARK]), f"rank-{os.environ['PMI_RANK']}").install()  # as the controller and the cells
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    folder = Path(os.environ[MARK])
    rank = int(os.environ["PMI_RANK"])
    if rank == 1 and os.environ.get("STUMBLES", "").startswith("late"):
        time.sleep(3600)
    mark_ready(folder, rank)
    _stumble(folder, rank)
    MPI.Init()
    mark_through(folder, rank)
    world = MPI.COMM_WORLD
    runtime = Runtime.from_environment()
    (runtime.run_dir / f"rank-{world.rank}-{runtime.attempt}").write_text(node_name())
    try:
        check_world(world.size, _layout(runtime))
        code = _steps(world, RunPaths(runtime.run_dir), int(steps), float(seconds), folder / "stop")
    except Exception as error:
        record_failure(folder, as_failure("controller" if world.rank == 0 else f"cell-{world.rank}", error))
        raise
    MPI.Finalize()
    sys.exit(code)


def _layout(runtime: Runtime) -> Layout:
    cells = load(RunPaths(runtime.run_dir).config).cells
    return Layout(cells.count, cells.nodes_per_cell * cells.ranks_per_node, runtime.standalone)


def _stumble(folder: Path, rank: int) -> None:
    """`STUMBLES`=abort:N or hang:N: the first N starts of the ranks fail as MPI_Init does where addresses don't get through PMI.

    abort: the launcher is gone and its ranks are left over. late: one rank never comes as far.
    """
    how, _, times = os.environ.get("STUMBLES", ":0").partition(":")
    tried = sum(event["kind"] == "mpi.again" for event in read_events(folder.parents[1] / "events.jsonl"))
    if tried < int(times):
        if rank == 1 and how == "abort":
            while len(list(folder.glob("ready-mpi.*"))) < _layout(Runtime.from_environment()).world_size:
                time.sleep(0.05)
            psutil.Process(os.getppid()).parent().kill()  # type: ignore[union-attr]
        time.sleep(3600)


def _steps(world: object, paths: RunPaths, steps: int, seconds: float, stop: Path) -> int:
    log = EventLog(paths.events)
    done = sum(event["kind"] == "step.end" for event in read_events(paths.events)) if world.rank == 0 else None  # type: ignore[attr-defined]
    done = world.bcast(done)  # type: ignore[attr-defined]
    if world.rank == 0:  # type: ignore[attr-defined]
        LiveFile(paths.live).write({"attempt": int(stop.parent.name.removeprefix("attempt-"))})  # as the controller: from now on it listens
    while done < steps:
        time.sleep(seconds)
        if world.bcast(stop.exists()):  # type: ignore[attr-defined]
            return ExitCode.RESUMABLE
        if world.bcast(_held(paths.root, done)):  # type: ignore[attr-defined]
            continue
        done += 1
        if world.rank == 0:  # type: ignore[attr-defined]
            log.emit("step.end", step=done, score_mean=0.5, loss=0.1, staleness_mean=0.0, target_tokens=10, seconds=seconds)
            log.emit("checkpoint", step=done, seconds=0.0, bytes=0)
    return ExitCode.DONE


def hold(run: Path, step: int | None) -> None:
    """No step after this one until it is called again: what a test does at a step meets that step, however slow the machine is."""
    if step is None:
        (run.parent / "hold").unlink()
    else:
        (run.parent / "hold.new").write_text(str(step))
        (run.parent / "hold.new").rename(run.parent / "hold")


def _held(run: Path, done: int) -> bool:
    try:
        return done >= int((run.parent / "hold").read_text())
    except FileNotFoundError:
        return False


def _sleep_until_term() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
