"""The MPI step: `python -m gyre_hpc.controller.main`, one process a rank, started by mpiexec or srun with GYRE_RUNTIME set.

Rank 0 becomes the controller, the others ranks of cells. Invariants: a leader's engine is started before MPI_Init (its environment is
scrubbed, but a fork after MPI_Init is what some fabrics forbid); one thread at a time calls MPI; a rank that fails records why and aborts
the whole world, because the others would wait for it until their deadlines; the end of MPI has a deadline as well; exit 0 done, 75 stopped
and resumable.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from gyre_hpc.config import Config
from gyre_hpc.configfile import load
from gyre_hpc.driver.preflight import LOCAL
from gyre_hpc.driver.world import mark_busy, mark_ready, mark_through
from gyre_hpc.errors import ExitCode, GyreError, Resumable
from gyre_hpc.failure import as_failure, record_failure
from gyre_hpc.importing import uncollected
from gyre_hpc.layout import cell_seats
from gyre_hpc.model import model_directory
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import Runtime
from gyre_hpc.stopfile import Stubborn
from gyre_hpc.tasks.source import TaskSource, task_source

if TYPE_CHECKING:
    from cells.claims import Claims
    from cells.communicators import Communicators, Layout
    from cells.watchdog import Watch
    from gyre_hpc.checkpoint import Checkpoint
    from gyre_hpc.engines.bank import EngineBank

logger = logging.getLogger(__name__)


def main() -> int:
    """One rank from its environment to its exit code."""
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("SLURM_PROCID") or 0)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    runtime = Runtime.from_environment()
    paths = RunPaths(Path(runtime.run_dir))
    who = _who(rank)
    Stubborn(paths.runtime(runtime.attempt), who).install()
    try:
        code = _rank(runtime, paths, rank)
    except BaseException as error:
        logger.exception("%s stops", who)
        failure = as_failure(who, error)
        record_failure(paths.runtime(runtime.attempt), failure)
        _abort(failure.exit_code)
        return failure.exit_code
    return int(code)


def _who(rank: int) -> str:
    return "controller" if rank == 0 else f"rank-{rank:05d}"


def _rank(runtime: Runtime, paths: RunPaths, rank: int) -> ExitCode:
    from cells.claims import Claims
    from cells.communicators import Layout, build
    from cells.watchdog import Watchdog
    from gyre_hpc.controller.restoring import agree, meet

    config = load(paths.config)
    layout = Layout(config.cells.count, config.cells.nodes_per_cell * config.cells.ranks_per_node, runtime.standalone)
    base = model_directory(config)
    engines = _start_engines(config, paths, runtime, layout, rank, base)
    # tasks of a folder are gated here, in boxes: before MPI_Init as well
    folder, limit = paths.runtime(runtime.attempt), config.deadlines.start
    tasks = task_source(config, paths, lambda task, seconds: mark_busy(folder, rank, f"task {task.name}", seconds)) if rank == 0 else None
    world = _init_mpi(folder, rank)
    meet(world, "all ranks to come through MPI_Init", limit)
    watch = Watchdog(partial(_give_up, folder, rank), logger.warning).watch
    with watch("MPI to make its communicators", limit):
        ranks = build(layout, world)
    claims = Claims(ranks.world, watch, deadline=limit, patience=config.deadlines.step)
    checkpoint = agree(ranks, config, paths, base)
    if tasks is not None:
        code = _controller(config, paths, runtime, base, ranks, tasks, checkpoint, claims, watch)
    else:
        code = _cell(config, paths, base, ranks, claims, engines, checkpoint, runtime.attempt, watch)

    claims.free()
    with watch("MPI to end", config.deadlines.step):
        _finalize_mpi()
    return code


def _give_up(folder: Path, rank: int, name: str, seconds: float) -> None:
    """The end of a rank that waits inside MPI: nothing else gets it out of there."""
    error = Resumable(f"{name}: not there after {seconds:g} s", "see mpi.log; nothing is lost: the same command resumes")
    logger.error("%s", error.line)
    record_failure(folder, as_failure(_who(rank), error))
    os._exit(int(error.exit_code))


def _controller(
    config: Config,
    paths: RunPaths,
    runtime: Runtime,
    base: Path,
    ranks: Communicators,
    tasks: TaskSource,
    checkpoint: Checkpoint | None,
    claims: Claims,
    watch: Watch,
) -> ExitCode:
    from cells.epochs import Channel
    from cells.lines import Lines
    from gyre_hpc.controller.controller import Controller
    from gyre_hpc.gateway.client import ControlClient

    assert ranks.control is not None
    with watch("MPI to make the controller's channels", config.deadlines.start):
        channel, lines = Channel(ranks.control), Lines(ranks.control)
    client = ControlClient(runtime.gateway_url, runtime.secret, config.deadlines.gateway)
    controller = Controller(config, paths, runtime.attempt, base, channel, lines, client, tasks, checkpoint, claims)
    if tasks.left_out:  # a person who looks at the terminal only must hear that a part of the data is not used
        controller.events.emit("tasks.refused", tasks=len(tasks.left_out), first=tasks.left_out[0], attempt=runtime.attempt)
    return controller.run()


def _cell(
    config: Config,
    paths: RunPaths,
    base: Path,
    ranks: Communicators,
    claims: Claims,
    engines: Future[EngineBank] | None,
    checkpoint: Checkpoint | None,
    attempt: int,
    watch: Watch,
) -> ExitCode:
    with uncollected():
        from gyre_hpc.controller.cell import CellRank

    reason = CellRank(config, paths, base, ranks, claims, engines, checkpoint, paths.runtime(attempt), watch).run()
    return ExitCode.DONE if reason == "done" else ExitCode.RESUMABLE


def _start_engines(config: Config, paths: RunPaths, runtime: Runtime, layout: Layout, rank: int, base: Path) -> Future[EngineBank] | None:
    """Those that this rank owns (gyre_hpc/layout.py); None without."""
    cell, slot = layout.cell_of(rank), layout.slot_of(rank)
    if cell is None:
        return None
    seats = [seat for seat in cell_seats(config, layout.is_standalone(cell)) if seat.slot == slot]
    if not seats:
        return None
    from gyre_hpc.engines.bank import EngineBank
    from gyre_hpc.engines.protocol import EngineSpec

    logs, several = paths.attempt_logs(runtime.attempt), config.rollout.engines_per_cell > 1
    specs = {
        seat.engine: EngineSpec(
            kind=config.rollout.engine,
            model=base,
            version=0,
            capacity=config.rollout.capacity,
            window=config.model.window,
            host=_host(runtime),
            log=logs / (f"engine-{cell}.{seat.engine}.log" if several else f"engine-{cell}.log"),
            dtype=config.model.dtype,
            threads=config.rollout.threads,
            options=config.rollout.options,
            handover=config.rollout.handover,
            devices=seat.devices,
        )
        for seat in seats
    }
    return ThreadPoolExecutor(1, thread_name_prefix="engines").submit(EngineBank.start, specs, config.deadlines.start)


def _host(runtime: Runtime) -> str:
    """Where this node's engine listens: on loopback if the gateway does, else under the node's name, for the gateway on the first node."""
    return "127.0.0.1" if urlsplit(runtime.gateway_url).hostname in LOCAL else socket.gethostname()


def _init_mpi(folder: Path, rank: int) -> Any:
    """MPI_COMM_WORLD. The driver watches: with every rank here, MPI_Init has `deadlines.start` seconds (driver/world.py)."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    mark_ready(folder, rank)
    if MPI.Init_thread(MPI.THREAD_SERIALIZED) < MPI.THREAD_SERIALIZED:  # a rank that computes hears by another thread (cells/pump.py)
        raise GyreError(
            "this MPI library may be called by one thread only (it does not provide MPI_THREAD_SERIALIZED)",
            "use one that was built with threads, as the mpich wheel is; `gyre doctor` names it",
        )
    mark_through(folder, rank)
    return MPI.COMM_WORLD


def _finalize_mpi() -> None:
    from mpi4py import MPI

    MPI.Finalize()


def _leave(status: int) -> NoReturn:
    """The end of the process. Never by os._exit: MPICH takes its leave of the process manager in a handler of C's exit, after MPI_Finalize,
    and mpiexec kills all other ranks for one that goes without. `freeze` lets the interpreter pass over what torch's modules left behind,
    which saves a third of the seconds of CPU that its end costs."""
    gc.freeze()
    sys.exit(status)


def _abort(code: int) -> None:
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)


if __name__ == "__main__":
    _leave(main())
