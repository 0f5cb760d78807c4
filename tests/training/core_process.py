"""Core cells of several ranks, as a program: `python -m tests.training.core_process MODEL`, jobs as JSON on standard input.

A job is {run, world, steps, dtype, stage}: its ranks step on fixed rows until `steps`, checkpoint after each step, leave weights and norms
in `run`, and begin at the newest checkpoint there. Ranks are forked, so that the imports (seconds) are paid once for all jobs.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre_hpc.checkpoint import RunState, latest, read_core
from gyre_hpc.checkpoint_writer import begin, commit, write_core, write_state
from gyre_hpc.configfile import check
from gyre_hpc.durable import beside
from gyre_hpc.paths import RunPaths
from gyre_hpc.training.actor import Core
from gyre_hpc.training.engine import import_deepspeed
from tests.training.conftest import TRAINING, make_rows


def rank_main(model: str, job: dict[str, Any], port: int, rank: int) -> None:
    world, paths = job["world"], RunPaths(Path(job["run"]))
    training = {**TRAINING, "deepspeed": {"zero_optimization": {"stage": job["stage"]}}}
    core = Core(Path(model), check({"training": training, "model": {"dtype": job["dtype"]}}, "test"), rank, world, f"127.0.0.1:{port}")
    found = latest(paths)
    if found is not None:
        core.load_state(read_core(found, rank))
    norms: list[float] = []
    while core.version < job["steps"]:
        core.zero()
        core.accumulate(make_rows(8, seed=core.version)[rank::world])
        gradient = torch.from_numpy(core.gradient())
        if not core.sharded:
            torch.distributed.all_reduce(gradient)
        norms.append(core.step(gradient.numpy(), 8).grad_norm)
        save(paths, core)
    np.save(paths.root / f"weights-rank{rank}.npy", core.snapshot())
    np.save(paths.root / f"norms-rank{rank}.npy", norms)
    core.close()
    if "mpi4py" in sys.modules:
        raise SystemExit("MPI was imported")


def save(paths: RunPaths, core: Core) -> None:
    partial = beside(paths.checkpoint(core.version), ".partial")
    if core.rank == 0:
        begin(paths, core.version)
    torch.distributed.barrier()
    parts: list[Any] = [None] * core.world
    torch.distributed.all_gather_object(parts, write_core(partial, core.state()))
    if core.rank == 0:
        commit(partial, [*parts, write_state(partial, RunState(core.version, core.version), core.state().identity)], keep=9)
    torch.distributed.barrier()


def main(model: str, jobs: list[dict[str, Any]]) -> None:
    import_deepspeed()
    for late in ("deepspeed.runtime.zero.muon.muon_optimizer", "torch.distributed.fsdp"):  # seconds for each rank
        importlib.import_module(late)
    context = multiprocessing.get_context("fork")
    for job in jobs:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        ranks = [context.Process(target=rank_main, args=(model, job, port, rank)) for rank in range(job["world"])]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
        if any(process.exitcode != 0 for process in ranks):
            raise SystemExit(f"{job}: exit codes {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
