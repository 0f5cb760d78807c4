"""Writes checkpoints (checkpoint.py says what one is).

Life of one: `begin` (the core's leader) makes step-NNNNNN.partial; every core rank writes its file, the leader `state.h5`; when all
`Part`s are in hand `commit` writes the marker COMPLETE (size and blake3 of each file), syncs, renames, and only then removes the oldest.

Invariants: deletion never comes before a newer complete one; a full disk costs the new checkpoint, never an old one: what can't be written
is thrown away (sink.py). Ordering key: the step.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import gyre_hpc
from gyre_hpc.checkpoint import (
    MARKER,
    SCHEMA,
    STATE,
    Checkpoint,
    CoreState,
    DamagedCheckpoint,
    Identity,
    Part,
    RunState,
    Tell,
    check_size,
    core_name,
    digest_of,
    directories,
    step_of,
)
from gyre_hpc.durable import beside, clear_leftovers, publish_directory
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.paths import RunPaths
from gyre_hpc.sink import Sink

log = logging.getLogger(__name__)
_CHUNK = 1 << 18
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DESCRIPTIONS = {
    "master": "float32 master weights of this rank, padded; the ranks' shards joined in rank order are indexed by /parameters",
    "optimizer": "optimizer state of this rank, in the order of /master",
    "rng": "state of the random generator of that name",
}


def begin(paths: RunPaths, step: int) -> Path:
    """Make the directory into which the parts of `step` are written. One process; raises GyreError."""
    partial = beside(paths.checkpoint(step), ".partial")
    try:
        paths.checkpoints.mkdir(parents=True, exist_ok=True)
        clear_leftovers(paths.checkpoints)
        partial.mkdir()
    except OSError as error:
        raise _write_error(partial, error) from error
    return partial


def write_core(partial: Path, state: CoreState, tell: Tell = lambda done: None) -> Part:
    """Write one core rank's file durably; `tell` hears of the bytes. Raises GyreError and leaves no half file."""

    def fill(f: h5py.File) -> None:
        f.attrs["description"] = "Shard of master weights and optimizer state of one core rank"
        f.attrs["core_rank"] = state.rank
        f.attrs["core_ranks"] = state.ranks
        f.attrs["parameters"] = state.parameters
        f.attrs["model"] = state.model
        f.attrs["version"] = state.version
        for name, values in state.arrays.items():
            f.require_group(name.rsplit("/", 1)[0])
            _dataset(f, name, values, _DESCRIPTIONS.get(name.split("/", 1)[0], ""))
        longest = max((len(row[0].encode()) for row in state.table), default=1)
        kind = np.dtype([("name", f"S{longest}"), ("group", "<i4"), ("offset", "<i8"), ("length", "<i8")])
        table = np.array([(name.encode(), g, offset, length) for name, g, offset, length in state.table], kind)
        _dataset(f, "parameters", table, "Where each parameter lies in the joined shards of /master/<group>")

    return _write(partial / core_name(state.rank), fill, tell)


def write_state(partial: Path, state: RunState, identity: Identity | None = None) -> Part:
    """Write `state.h5` durably; `identity`: what the shards beside it fit, told here as well so that a look is enough to refuse another.

    Raises GyreError and leaves no half file.
    """

    def fill(f: h5py.File) -> None:
        f.attrs["description"] = "Step, weight version, and the scheduling policy's snapshot"
        for name, value in (asdict(identity) if identity is not None else {}).items():
            f.attrs[name] = value
        f.attrs["step"] = state.step
        f.attrs["version"] = state.version
        _dataset(f, "policy", np.array([json.dumps(state.policy).encode()]), "Snapshot of the scheduling policy, JSON")

    return _write(partial / STATE, fill)


def commit(partial: Path, parts: Iterable[Part], keep: int) -> Checkpoint:
    """Make the checkpoint complete under its final name, then remove all but the newest `keep` (at least 1) up to its step.

    One process, when every part is on disk. Raises GyreError; the older checkpoints stay as they are then.
    """
    final = partial.with_name(partial.name.removesuffix(".partial"))
    made = Checkpoint(final, step_of(final), tuple(sorted(parts, key=lambda part: part.name)))
    if [part.name for part in made.parts] != made.expected:
        what = f"{partial}: parts {[part.name for part in made.parts]}, expected {made.expected}"
        raise GyreError(what, "this is a mistake in the program")
    try:
        for part in made.parts:
            check_size(partial, part)
        marker = {"schema": SCHEMA, "step": made.step, "parts": [asdict(part) for part in made.parts]}
        (partial / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        publish_directory(partial, final)
    except (OSError, DamagedCheckpoint) as error:
        raise _write_error(partial, error) from error
    _prune(final, max(1, keep))
    return made


def save(paths: RunPaths, cores: Iterable[CoreState], state: RunState, keep: int) -> Checkpoint:
    """The whole life of a checkpoint in one process. Raises GyreError, leaving nothing of it behind."""
    partial, cores = begin(paths, state.step), list(cores)
    try:
        return commit(partial, [*(write_core(partial, core) for core in cores), write_state(partial, state, cores[0].identity)], keep)
    except GyreError:
        abandon(partial)
        raise


def abandon(partial: Path) -> None:
    """Remove an unfinished checkpoint (a full disk gets its space back)."""
    shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, fill: Callable[[h5py.File], None], tell: Tell = lambda done: None) -> Part:
    try:
        with open(path, "w+b", buffering=0) as raw:
            sink = Sink(raw, tell)
            try:
                with h5py.File(sink, "w", libver=("earliest", "v110")) as f:
                    f.attrs["schema"] = SCHEMA
                    f.attrs["writer"] = f"gyre_hpc {gyre_hpc.__version__}"
                    fill(f)
            except (OSError, RuntimeError):
                if sink.error is None:
                    raise
            if sink.error is not None:
                raise sink.error
            os.fsync(raw.fileno())
        return Part(path.name, path.stat().st_size, digest_of(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _write_error(path, error) from error


def _write_error(path: Path, error: Exception) -> Resumable:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    full = isinstance(error, OSError) and error.errno in _FULL
    remedy = "free some space or lower checkpoint.keep" if full else "see that run.dir can be written"
    return Resumable(f"checkpoint {path}: {reason}", f"{remedy}; the same command resumes: the checkpoints before it are intact")


def _dataset(f: h5py.File, name: str, values: NDArray[Any], meaning: str) -> None:
    layout = {"chunks": (min(_CHUNK, len(values)), *values.shape[1:]), "fletcher32": True} if values.size else {}
    data = f.create_dataset(name, data=values, track_times=False, **layout)
    data.attrs["description"] = meaning


def _prune(newest: Path, keep: int) -> None:
    # those of later steps are damaged, or the run would have gone on from them: they must not push out the one that was just made
    last = step_of(newest)
    complete = [found for found in directories(newest.parent) if step_of(found) <= last and (found / MARKER).is_file()]
    for directory in complete[keep:]:
        old = beside(directory, ".old")
        try:
            directory.rename(old)
            shutil.rmtree(old)
        except OSError as error:  # the new checkpoint is complete; what stays costs only space, and `begin` tries again
            log.warning("old checkpoint %s not removed: %s", directory, error)
