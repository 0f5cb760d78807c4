"""From which checkpoint an attempt goes on: rank 0 proposes, the ranks of the core read and check their own shards, all agree.

A checkpoint of terabytes can't be read by one process in time. So rank 0 looks at markers, sizes and the small `state.h5` only; each rank
of the core then reads the shard that it is about to load, side by side with the others (and its node's page cache has it for the load).
Invariants: no rank loads a shard before every byte of every shard was found right, and what is then loaded is checked a second time by
HDF5's own checksums; where one shard is damaged all ranks pass on to the next older checkpoint together; those that were passed by are set
aside, so that no later attempt takes one up whose weights are given up by now; one that can't be read at the moment is not passed by: the
rank that can't ends the attempt; another model is refused before a shard is read; a run that had checkpoints never begins anew in silence.
The deadline grows with the bytes (`patience`), and who reads says every few seconds how far it is.
Ordering key: checkpoints, newest first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells.waiting import DeadlineExceeded, wait
from gyre_hpc.checkpoint import STATE, Checkpoint, candidates, core_name, damage, model_fingerprint, set_aside, skip, step_of
from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.paths import RunPaths

if TYPE_CHECKING:
    from cells.communicators import Communicators

logger = logging.getLogger(__name__)
TELL = 10.0
"""Seconds between two lines of a rank that reads."""


def patience(config: Config, checkpoint: Checkpoint | None) -> float:
    """Seconds within which the ranks of the core have read their shards: `deadlines.start`, and what the largest takes at the slowest."""
    largest = max((part.bytes for part in checkpoint.parts), default=0) if checkpoint is not None else 0
    return config.deadlines.start + largest / (config.checkpoint.slowest_read * 1e6)


def agree(ranks: Communicators, config: Config, paths: RunPaths, base: Path) -> Checkpoint | None:
    """Collective over the world: the checkpoint to go on from, None for a new run.

    Raises on rank 0 ConfigError for one of another model or core, GyreError where there were some and none can be used; on any rank
    Resumable for one that does not come in time, and for a checkpoint that can't be read now.
    """
    world, limit = ranks.world, config.deadlines.start
    leads = world.Get_rank() == 0
    passed = Passed()
    offers = _offers(config, paths, base, passed) if leads else iter(())
    while True:
        found = next(offers, None)
        meet(world, "rank 0 to find the newest checkpoint", limit)
        found = world.bcast(found, root=0)
        if found is None:
            break
        why = _check_own(ranks, found)
        meet(world, f"the core's ranks to read step {found.step} ({found.bytes / 1e9:.3f} GB)", patience(config, found), _SLOW_READ)
        reasons = world.gather(why, root=0)
        damaged = [reason for reason in reasons if reason is not None] if reasons is not None else []
        for reason in damaged:
            passed.by(found.directory, reason)
        if world.bcast(not damaged, root=0):
            break
    if leads:
        _settle(found, config, paths, base)
        if found is not None:
            passed.set_aside(EventLog(paths.events))
    return found


class Passed:
    """Checkpoints that were not used, with the reasons."""

    def __init__(self) -> None:
        self._reasons: dict[Path, list[str]] = {}

    def by(self, directory: Path, why: str) -> None:
        """This one is not, and says so."""
        skip(directory, why)
        self._reasons.setdefault(directory, []).append(why)

    def set_aside(self, events: EventLog) -> None:
        """An older one is taken: none of them may be found again."""
        for directory, reasons in self._reasons.items():
            why = "; ".join(reasons)
            try:
                kept = set_aside(directory).name
            except OSError as error:
                logger.warning("%s can't be set aside (%s): remove it before the run is resumed again", directory, error.strerror)
                continue
            logger.warning("checkpoint %s is kept as %s, for whoever wants to look at it: nothing uses it any more", directory.name, kept)
            events.emit("checkpoint.damaged", step=step_of(directory), why=why, kept=kept)


def _offers(config: Config, paths: RunPaths, base: Path, passed: Passed) -> Iterator[Checkpoint]:
    """Candidates; one of another model, or number of core ranks, is refused before any shard of it is read."""
    core_ranks = config.cells.nodes_per_cell * config.cells.ranks_per_node
    for found in candidates(paths, passed.by):
        if found.core_ranks != core_ranks:
            raise ConfigError(
                f"can't resume: the checkpoint has core ranks {found.core_ranks}, this run has {core_ranks}",
                "set cells.nodes_per_cell and cells.ranks_per_node as in the checkpoint",
            )
        found.require(model_fingerprint(base), core_ranks)
        yield found


def _check_own(ranks: Communicators, checkpoint: Checkpoint) -> str | None:
    """Why this rank's shard is damaged; None: it is not, or this rank has none."""
    if ranks.cell_index != 0 or ranks.slot is None:
        return None
    shards = [part for part in checkpoint.parts if part.name != STATE]
    part = shards[ranks.slot]
    progress = Progress(f"step {checkpoint.step}, {part.name}", part.bytes)
    why = damage(checkpoint, part, progress.tell)
    progress.end()
    return why


class Progress:
    """How far one file is, as lines in the log: one every few seconds, and one at the end where it took that long."""

    def __init__(
        self, name: str, total: int, every: float = TELL, log: Callable[[str], None] = logger.info, what: str = "read and checked so far"
    ) -> None:
        self._name, self._total, self._every, self._log, self._what = name, total, every, log, what
        self._done = 0
        self._began = self._told = time.monotonic()

    def tell(self, done: int) -> None:
        """So many bytes so far."""
        self._done = done
        now = time.monotonic()
        if now - self._told >= self._every:
            self._told = now
            self._say(self._what, now)

    def end(self) -> None:
        """No more comes."""
        if self._told > self._began or time.monotonic() - self._began >= self._every:
            self._say(self._what.removesuffix(" so far"), time.monotonic())

    def _say(self, what: str, now: float) -> None:
        seconds = now - self._began
        speed = self._done / max(seconds, 1e-9) / 1e6
        self._log(f"{self._name}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB {what} ({speed:.0f} MB/s)")


def _settle(checkpoint: Checkpoint | None, config: Config, paths: RunPaths, base: Path) -> None:
    """What was agreed on against what the run tells, and what it needs."""
    told = max((int(event["step"]) for event in read_events(paths.events) if event["kind"] == "checkpoint"), default=0)
    if checkpoint is None:
        if told:
            raise GyreError(
                f"{paths.checkpoints} has no usable checkpoint, but events.jsonl tells of step {told}",
                "restore one from a copy (mpi.log names what is damaged), or set run.dir to a new folder",
            )
        return
    if checkpoint.step < told:
        logger.warning(
            "the newest usable checkpoint is of step %d, there was one of step %d: the steps between are done again", checkpoint.step, told
        )
    checkpoint.require(model_fingerprint(base), config.cells.nodes_per_cell * config.cells.ranks_per_node, core_name(0))


_SLOW_START = "see mpi.log; raise deadlines.start if they are slow; the same command resumes"
_SLOW_READ = "see mpi.log (it tells how fast each rank reads); lower checkpoint.slowest_read; the same command resumes"


def meet(world: Any, name: str, seconds: float, remedy: str = _SLOW_START) -> None:
    """All ranks are here. Raises Resumable."""
    try:
        wait(world.Ibarrier().Test, name, seconds, logger.warning)
    except DeadlineExceeded as late:
        raise Resumable(str(late), remedy) from late
