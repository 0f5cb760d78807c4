"""Checkpoints: one HDF5 file per core rank and `state.h5`, in RUN/checkpoints/step-NNNNNN/ (contract: readable with plain h5py or h5dump).

Life of one: `begin` (the controller) makes step-NNNNNN.partial; every core rank writes its file, the controller `state.h5`; when all
`Part`s are in hand `commit` writes the marker COMPLETE (size and blake3 of each file), syncs, renames, and only then removes the oldest.

Invariants: a step-NNNNNN directory is never changed after its rename; deletion never comes before a newer complete one; a reader takes the
newest whose every byte matches its marker and says in one line which it skipped (in a run each rank of the core reads its own shard, see
controller/restoring.py). A full disk costs the new checkpoint, never an old one: what can't be written is thrown away (sink.py). No torch
here: the controller reads and writes without a model.
Ordering key: the step.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

import gyre_hpc
from gyre_hpc.durable import beside, clear_leftovers, publish_directory
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.paths import RunPaths
from gyre_hpc.sink import Sink

log = logging.getLogger(__name__)

SCHEMA = 1
MARKER = "COMPLETE"
STATE = "state.h5"
_CHUNK = 1 << 18
_READ = 4 << 20
_STEP = re.compile(r"step-(\d{6,})")
Tell = Callable[[int], None]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DESCRIPTIONS = {
    "master": "float32 master weights of this rank, padded; the ranks' shards joined in rank order are indexed by /parameters",
    "optimizer": "optimizer state of this rank, in the order of /master",
    "rng": "state of the random generator of that name",
}


@dataclass(frozen=True)
class Identity:
    """What a checkpoint fits. `model`: see `model_fingerprint`; `parameters` of the whole model; `core_ranks` that hold the optimizer."""

    model: str
    parameters: int
    core_ranks: int

    def require(self, now: Identity) -> None:
        """Raises ConfigError, with what the checkpoint has and what the run has, at the first difference."""
        for name, remedy in (
            ("model", "set model.path to the checkpoint's model, or start a new run.dir"),
            ("core_ranks", "set cells.nodes_per_cell and cells.ranks_per_node as in the checkpoint"),
            ("parameters", "set model.path to the checkpoint's model, or start a new run.dir"),
        ):
            had, has = getattr(self, name), getattr(now, name)
            if had != has:
                raise ConfigError(f"can't resume: the checkpoint has {name.replace('_', ' ')} {had}, this run has {has}", remedy)


@dataclass(frozen=True, eq=False)
class CoreState:
    """One core rank's part. `arrays`: HDF5 path -> values; `table`: (name, group, offset, length) of each parameter."""

    rank: int
    ranks: int
    parameters: int
    model: str
    version: int
    arrays: Mapping[str, NDArray[Any]]
    table: Sequence[tuple[str, int, int, int]]

    @property
    def identity(self) -> Identity:
        return Identity(self.model, self.parameters, self.ranks)


@dataclass(frozen=True)
class RunState:
    """The controller's part; `policy` is a JSON value."""

    step: int
    version: int
    policy: Any = None


@dataclass(frozen=True)
class Part:
    """One finished file of a checkpoint; small, to be sent to whoever commits."""

    name: str
    bytes: int
    blake3: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    directory: Path
    step: int
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def expected(self) -> list[str]:
        """Names of its parts, in order."""
        return [*(core_name(rank) for rank in range(max(1, self.core_ranks))), STATE]

    @property
    def core_ranks(self) -> int:
        return sum(part.name.startswith("core-rank") for part in self.parts)

    def require(self, model: str, core_ranks: int) -> None:
        """Refuse early, before any model is loaded (`model`: a fingerprint). Raises ConfigError with both values."""
        had = self.identity()
        had.require(Identity(model, had.parameters, core_ranks))

    def identity(self) -> Identity:
        with h5py.File(self.directory / core_name(0), "r") as f:
            return Identity(str(f.attrs["model"]), int(f.attrs["parameters"]), int(f.attrs["core_ranks"]))


def core_name(rank: int) -> str:
    """File name of a core rank's part."""
    return f"core-rank{rank:05d}.h5"


def model_fingerprint(model_dir: Path) -> str:
    """One readable line that tells models apart by what must not change under a run: architecture, sizes, configuration, tokenizer."""
    raw = (model_dir / "config.json").read_bytes()
    tokenizer = model_dir / "tokenizer.json"
    config = json.loads(raw)
    config = {**config, **config.get("text_config", {})}
    sizes = " ".join(f"{key}={config[key]}" for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in config)
    digest = blake3(json.dumps(config, sort_keys=True).encode())
    digest.update(tokenizer.read_bytes() if tokenizer.is_file() else b"")
    return f"{(config.get('architectures') or ['?'])[0]} {sizes} #{digest.hexdigest()[:12]}"


# -- writing --------------------------------------------------------------------------------------------------------------------
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


def write_core(partial: Path, state: CoreState) -> Part:
    """Write one core rank's file durably. Raises GyreError and leaves no half file."""

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

    return _write(partial / core_name(state.rank), fill)


def write_state(partial: Path, state: RunState) -> Part:
    """Write `state.h5` durably. Raises GyreError and leaves no half file."""

    def fill(f: h5py.File) -> None:
        f.attrs["description"] = "Step, weight version, and the scheduling policy's snapshot"
        f.attrs["step"] = state.step
        f.attrs["version"] = state.version
        _dataset(f, "policy", np.array([json.dumps(state.policy).encode()]), "Snapshot of the scheduling policy, JSON")

    return _write(partial / STATE, fill)


def commit(partial: Path, parts: Iterable[Part], keep: int) -> Checkpoint:
    """Make the checkpoint complete under its final name, then remove all but the newest `keep` (at least 1).

    One process, when every part is on disk. Raises GyreError; the older checkpoints stay as they are then.
    """
    final = partial.with_name(partial.name.removesuffix(".partial"))
    made = Checkpoint(final, _step_of(final), tuple(sorted(parts, key=lambda part: part.name)))
    if [part.name for part in made.parts] != made.expected:
        what = f"{partial}: parts {[part.name for part in made.parts]}, expected {made.expected}"
        raise GyreError(what, "this is a mistake in the program")
    try:
        for part in made.parts:
            _check_size(partial, part)
        marker = {"schema": SCHEMA, "step": made.step, "parts": [asdict(part) for part in made.parts]}
        (partial / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        publish_directory(partial, final)
    except (OSError, _Damaged) as error:
        raise _write_error(partial, error) from error
    _prune(final.parent, max(1, keep))
    return made


def save(paths: RunPaths, cores: Iterable[CoreState], state: RunState, keep: int) -> Checkpoint:
    """The whole life of a checkpoint in one process. Raises GyreError, leaving nothing of it behind."""
    partial = begin(paths, state.step)
    try:
        return commit(partial, [*(write_core(partial, core) for core in cores), write_state(partial, state)], keep)
    except GyreError:
        abandon(partial)
        raise


def abandon(partial: Path) -> None:
    """Remove an unfinished checkpoint (a full disk gets its space back)."""
    shutil.rmtree(partial, ignore_errors=True)


# -- reading --------------------------------------------------------------------------------------------------------------------
def candidates(paths: RunPaths) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first, as far as a look tells: marker, sizes, and the bytes of `state.h5`; a warning line for each that
    is skipped. The shards of the core's ranks are not read: they may be terabytes, and `damage` is for as many readers as there are."""
    for directory in _directories(paths.checkpoints):
        try:
            found = _read_marker(directory)
            for part in found.parts:
                _check_size(directory, part)
        except (OSError, _Damaged) as error:
            skip(directory, str(error))
            continue
        why = next(filter(None, (damage(found, part) for part in found.parts if part.name == STATE)), None)
        if why is None:
            yield found
        else:
            skip(directory, why)


def skip(directory: Path, why: str) -> None:
    """The one line that says that a checkpoint is not used."""
    log.warning("checkpoint %s skipped: %s", directory, why)


def damage(checkpoint: Checkpoint, part: Part, tell: Tell = lambda done: None) -> str | None:
    """Why a file is not what the marker says, None if every byte is. Read once, in order; `tell` hears of the bytes."""
    try:
        digest = _digest(checkpoint.directory / part.name, tell)
    except OSError as error:
        return str(error)
    return None if digest == part.blake3 else f"{part.name} does not match its digest"


def latest(paths: RunPaths) -> Checkpoint | None:
    """The newest checkpoint whose every byte matches its marker, read by this process alone; a warning line for each that was skipped."""
    for found in candidates(paths):
        why = next(filter(None, (damage(found, part) for part in found.parts if part.name != STATE)), None)
        if why is None:
            return found
        skip(found.directory, why)
    return None


def read_state(checkpoint: Checkpoint) -> RunState:
    """The controller's part."""
    with h5py.File(checkpoint.directory / STATE, "r") as f:
        return RunState(step=int(f.attrs["step"]), version=int(f.attrs["version"]), policy=json.loads(f["policy"][0]))


def read_core(checkpoint: Checkpoint, rank: int) -> CoreState:
    """One core rank's part. Raises ConfigError when the checkpoint has no such rank."""
    if rank >= checkpoint.core_ranks:
        raise ConfigError(
            f"can't resume: the checkpoint has core ranks {checkpoint.core_ranks}, this run has at least {rank + 1}",
            "set cells.nodes_per_cell and cells.ranks_per_node as in the checkpoint",
        )
    arrays: dict[str, NDArray[Any]] = {}
    with h5py.File(checkpoint.directory / core_name(rank), "r") as f:

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and name != "parameters":
                arrays[name] = item[()]

        f.visititems(visit)
        return CoreState(
            rank=int(f.attrs["core_rank"]),
            ranks=int(f.attrs["core_ranks"]),
            parameters=int(f.attrs["parameters"]),
            model=str(f.attrs["model"]),
            version=int(f.attrs["version"]),
            arrays=arrays,
            table=[(row["name"].decode(), int(row["group"]), int(row["offset"]), int(row["length"])) for row in f["parameters"][()]],
        )


# -- inside ---------------------------------------------------------------------------------------------------------------------
class _Damaged(Exception):
    """A checkpoint that is not what its marker says."""


def _write(path: Path, fill: Callable[[h5py.File], None]) -> Part:
    try:
        with open(path, "w+b", buffering=0) as raw:
            sink = Sink(raw)
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
        return Part(path.name, path.stat().st_size, _digest(path))
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


def _digest(path: Path, tell: Tell = lambda done: None) -> str:
    """Of a file, read in order: a parallel file system is slow at the page faults of a map."""
    digest, buffer, done = blake3(), memoryview(bytearray(_READ)), 0
    with open(path, "rb", buffering=0) as raw:
        while count := raw.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            tell(done)
    return str(digest.hexdigest())


def _check_size(directory: Path, part: Part) -> None:
    size = (directory / part.name).stat().st_size
    if size != part.bytes:
        raise _Damaged(f"{part.name} has {size} bytes instead of {part.bytes}")


def _step_of(directory: Path) -> int:
    match = _STEP.fullmatch(directory.name)
    if match is None:
        raise _Damaged(f"{directory.name} is not a step")
    return int(match[1])


def _directories(parent: Path) -> list[Path]:
    """Checkpoint directories under their final names, newest first."""
    found = [child for child in (parent.iterdir() if parent.is_dir() else ()) if _STEP.fullmatch(child.name) and child.is_dir()]
    return sorted(found, key=_step_of, reverse=True)


def _read_marker(directory: Path) -> Checkpoint:
    try:
        marker = json.loads((directory / MARKER).read_text())
        if marker["schema"] != SCHEMA:
            raise _Damaged(f"schema {marker['schema']}, this program reads {SCHEMA}")
        found = Checkpoint(directory, int(marker["step"]), tuple(Part(**part) for part in marker["parts"]))
    except FileNotFoundError:
        raise _Damaged(f"it has no {MARKER}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{MARKER} can't be read ({error})") from None
    if found.step != _step_of(directory):
        raise _Damaged(f"{MARKER} is of step {found.step}")
    if [part.name for part in found.parts] != found.expected:
        raise _Damaged(f"{MARKER} names {[part.name for part in found.parts]} in place of {found.expected}")
    return found


def _prune(parent: Path, keep: int) -> None:
    complete = [directory for directory in _directories(parent) if (directory / MARKER).is_file()]
    for directory in complete[keep:]:
        old = beside(directory, ".old")
        try:
            directory.rename(old)
            shutil.rmtree(old)
        except OSError as error:  # the new checkpoint is complete; what stays costs only space, and `begin` tries again
            log.warning("old checkpoint %s not removed: %s", directory, error)
