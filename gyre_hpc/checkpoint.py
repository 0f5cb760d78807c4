"""Checkpoints: one HDF5 file per core rank and `state.h5`, in RUN/checkpoints/step-NNNNNN/ (contract: readable with plain h5py or h5dump).

What one is, and how it is found and read; checkpoint_writer.py writes them. A complete one has the marker COMPLETE with size and blake3 of
each file.

Invariants: a step-NNNNNN directory is never changed after its rename; a reader takes the newest whose every byte matches its marker and
says in one line which it skipped (in a run each rank of the core reads its own shard, see controller/restoring.py). What a resume has
passed by gets another name, `set_aside`: were it found right later (a copy that came), the next resume would go on with weights that were
given up. What can't be read now (a file system that is away, a right that is gone) may be whole: it is not passed by, the resume ends.
No torch here: the controller reads and writes without a model.
Ordering key: the step.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
from blake3 import blake3
from numpy.typing import NDArray

from gyre_hpc.durable import beside
from gyre_hpc.errors import ConfigError, Resumable
from gyre_hpc.paths import RunPaths

log = logging.getLogger(__name__)

SCHEMA = 1
MARKER = "COMPLETE"
STATE = "state.h5"
ASIDE = ".damaged"
"""Behind the name of one that a resume passed by."""
_READ = 4 << 20
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""What a file system says of a file that is not there; all else says nothing of it."""
_STEP = re.compile(r"step-(\d{6,})")
Tell = Callable[[int], None]


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

    @property
    def bytes(self) -> int:
        return sum(values.nbytes for values in self.arrays.values())


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

    def require(self, model: str, core_ranks: int, name: str = STATE) -> None:
        """Refuse early, before any model is loaded (`model`: a fingerprint). Raises ConfigError with both values.

        `name`: of the part that tells them: `state.h5` is the small one, but those of older checkpoints don't; nothing is refused then.
        """
        had = self.identity(name)
        if had is not None:
            had.require(Identity(model, had.parameters, core_ranks))

    def identity(self, name: str = STATE) -> Identity | None:
        """As the part `name` tells it; None where it does not."""
        with h5py.File(self.directory / name, "r") as f:
            if "model" not in f.attrs:
                return None
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


# -- reading --------------------------------------------------------------------------------------------------------------------
def skip(directory: Path, why: str) -> None:
    """The one line that says that a checkpoint is not used."""
    log.warning("checkpoint %s skipped: %s", directory, why)


def candidates(paths: RunPaths, skip: Callable[[Path, str], None] = skip) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first, as far as a look tells: marker, sizes, and the bytes of `state.h5`; `skip` hears of each that
    is not. The shards of the core's ranks are not read: they may be terabytes, and `damage` is for as many readers as there are.

    Raises Resumable for one that can't be read now.
    """
    for directory in directories(paths.checkpoints):
        try:
            found = _read_marker(directory)
            for part in found.parts:
                check_size(directory, part)
        except DamagedCheckpoint as error:
            skip(directory, str(error))
            continue
        except OSError as error:
            if error.errno not in _MISSING:
                raise _unread(directory, error) from error
            skip(directory, str(error))
            continue
        why = next(filter(None, (damage(found, part) for part in found.parts if part.name == STATE)), None)
        if why is None:
            yield found
        else:
            skip(directory, why)


def set_aside(directory: Path) -> Path:
    """Nobody finds it any more under the name that this returns; nothing of it is lost. Raises OSError."""
    number = 0
    while (aside := beside(directory, ASIDE + (f"-{number}" if number else ""))).exists():
        number += 1
    directory.rename(aside)
    return aside


def aside(paths: RunPaths) -> list[Path]:
    """Those that were set aside, by name."""
    return sorted(paths.checkpoints.glob(f"step-*{ASIDE}*")) if paths.checkpoints.is_dir() else []


def damage(checkpoint: Checkpoint, part: Part, tell: Tell = lambda done: None) -> str | None:
    """Why a file is not what the marker says, None if every byte is. Read once, in order; `tell` hears of the bytes.

    Raises Resumable where it can't be read: whoever proposed it has seen it.
    """
    try:
        digest = digest_of(checkpoint.directory / part.name, tell)
    except OSError as error:
        raise _unread(checkpoint.directory, error) from error
    return None if digest == part.blake3 else f"{part.name} does not match its digest"


def _unread(directory: Path, error: OSError) -> Resumable:
    return Resumable(
        f"checkpoint {directory} can't be read on this node: {error}",
        "see its file system and rights: the same command resumes; to go on from an older one, move it out of checkpoints/",
    )


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


# -- what both readers and the writer look at -----------------------------------------------------------------------------------
class DamagedCheckpoint(Exception):
    """A checkpoint that is not what its marker says."""


def digest_of(path: Path, tell: Tell = lambda done: None) -> str:
    """Of a file, read in order: a parallel file system is slow at the page faults of a map."""
    digest, buffer, done = blake3(), memoryview(bytearray(_READ)), 0
    with open(path, "rb", buffering=0) as raw:
        while count := raw.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            tell(done)
    return str(digest.hexdigest())


def check_size(directory: Path, part: Part) -> None:
    """The file is as long as the marker says. Raises DamagedCheckpoint, OSError."""
    size = (directory / part.name).stat().st_size
    if size != part.bytes:
        raise DamagedCheckpoint(f"{part.name} has {size} bytes instead of {part.bytes}")


def step_of(directory: Path) -> int:
    """Of a checkpoint's directory. Raises DamagedCheckpoint."""
    match = _STEP.fullmatch(directory.name)
    if match is None:
        raise DamagedCheckpoint(f"{directory.name} is not a step")
    return int(match[1])


def directories(parent: Path) -> list[Path]:
    """Checkpoint directories under their final names, newest first."""
    found = [child for child in (parent.iterdir() if parent.is_dir() else ()) if _STEP.fullmatch(child.name) and child.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def _read_marker(directory: Path) -> Checkpoint:
    try:
        marker = json.loads((directory / MARKER).read_text())
        if marker["schema"] != SCHEMA:
            raise DamagedCheckpoint(f"schema {marker['schema']}, this program reads {SCHEMA}")
        found = Checkpoint(directory, int(marker["step"]), tuple(Part(**part) for part in marker["parts"]))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MARKER}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{MARKER} can't be read ({error})") from None
    if found.step != step_of(directory):
        raise DamagedCheckpoint(f"{MARKER} is of step {found.step}")
    if [part.name for part in found.parts] != found.expected:
        raise DamagedCheckpoint(f"{MARKER} names {[part.name for part in found.parts]} in place of {found.expected}")
    return found
