"""`gyre trees export`: which format, where to, and that what is written is whole or not there at all.

Invariants: one execution is held at a time, whatever the format; a mistake is one ConfigError before anything is written; an older file or
folder of that name is replaced only by a complete one. ATIF needs the model for its text: that of the run, or the one that is named.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from gyre_hpc.durable import beside, replace_directory, sync
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.exports.lineage import Lineages
from gyre_hpc.exports.rows import Table, rows_of
from gyre_hpc.report.trees import user_errors
from gyre_hpc.viewing import see
from trees.export import exported
from trees.reader import locate
from trees.store import StoreReader

if TYPE_CHECKING:
    from gyre_hpc.exports.atif import Trajectories


class Format(StrEnum):
    """What can be written."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    ATIF = "atif"


@dataclass(frozen=True)
class Options:
    """`table` and `jmax` are Parquet's (rows.py), `model` is ATIF's: a directory, None for the run's own."""

    form: Format = Format.JSONL
    table: Table | None = None
    jmax: int | None = None
    model: Path | None = None


def export(folder: Path, out: Path, options: Options) -> dict[str, Any]:
    """Write the trees of a run or a store to `out`. Returns what was done, for --json. ConfigError: can't be done."""
    _check(options)
    with user_errors(), StoreReader(locate(folder)) as reader:
        reader.check()
        lineages = Lineages.of(folder)
        if options.form is Format.ATIF:
            found = _atif(reader, folder, out, options, lineages)
        elif options.form is Format.PARQUET:
            found = _parquet(reader, out, options, lineages)
        else:
            found = _file(out, lambda partial: {"executions": _jsonl(reader, partial, lineages)})
    return {"format": options.form.value, **found}


def _check(options: Options) -> None:
    for name, form in (("table", Format.PARQUET), ("jmax", Format.PARQUET), ("model", Format.ATIF)):
        if getattr(options, name) is not None and options.form is not form:
            raise ConfigError(f"--{name} with --format {options.form.value}", f"it belongs to --format {form.value}")
    if options.jmax is not None and options.table not in (None, Table.PATHS):
        raise ConfigError(f"--jmax with --table {options.table}", "it chooses paths: take it out, or --table paths")


def _file(out: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Let `write` fill a file beside `out`, which then becomes `out`; a link stays one. A device or a pipe would be replaced by a file."""
    place = out.resolve()
    if not place.parent.is_dir() or (place.exists() and not place.is_file()):
        raise ConfigError(f"{out} can't be written", "give a file in a folder that exists")
    partial = beside(place, ".partial")
    try:
        with _room(out):
            counts = write(partial)
            sync(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(place)
    sync(place.parent)
    return {"file": str(out), **counts, "bytes": out.stat().st_size}


@contextmanager
def _room(out: Path) -> Iterator[None]:
    """A disk that is full is told with the file that found no room on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        reason = os.strerror(error.errno).lower()
        raise GyreError(f"{out}: {reason}", "free space there, or give --out another place; what stood there is as it was") from error


def _jsonl(reader: StoreReader, file: Path, lineages: Lineages) -> int:
    count = 0
    with file.open("wb") as lines:
        for execution in exported(reader):
            lines.write(orjson.dumps(lineages.told(execution), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def _parquet(reader: StoreReader, out: Path, options: Options, lineages: Lineages) -> dict[str, Any]:
    try:
        from gyre_hpc.exports import parquet
    except ImportError:
        raise ConfigError("Parquet needs pyarrow, which is not installed", "install pyarrow, or use --format jsonl") from None
    table = options.table or Table.PATHS
    provenance = dict(reader.header.provenance) if reader.header else {}
    about = {"table": table.value, "jmax": options.jmax, "provenance": provenance}
    rows = rows_of(reader, table, options.jmax, int(provenance.get("seed", 0)), lineages)
    return {"table": table.value, **_file(out, lambda partial: {"rows": parquet.write(partial, table, rows, about)})}


def _atif(reader: StoreReader, folder: Path, out: Path, options: Options, lineages: Lineages) -> dict[str, Any]:
    place = out.resolve()
    taken = any(child.suffix != ".json" for child in place.iterdir()) if place.is_dir() else place.exists()
    if taken or not place.parent.is_dir():
        raise ConfigError(f"{out} can't be written", "ATIF is a file an execution: give a new folder, in one that exists")
    provenance = dict(reader.header.provenance) if reader.header else {}
    if provenance.get("block_size"):
        raise ConfigError(f"{folder} holds imported traces, whose tokens are synthetic", "there is no text to export: use --format parquet")
    made = _trajectories(folder, options.model, lineages)
    counts = {"executions": 0}

    def write(partial: Path) -> None:
        from gyre_hpc.exports import atif

        counts["executions"] = atif.write(partial, documents())

    def documents() -> Iterator[tuple[int, dict[str, Any] | None]]:
        groups = reader.groups()
        for execution in sorted(reader.executions()):
            yield execution, made.document(reader.tree(execution), groups)

    with _room(out):
        replace_directory(place, write)
    return {"file": str(out), **counts, "bytes": sum(file.stat().st_size for file in out.iterdir())}


def _trajectories(folder: Path, model: Path | None, lineages: Lineages) -> Trajectories:
    from gyre_hpc.config import Config
    from gyre_hpc.exports.atif import Agent, Trajectories
    from gyre_hpc.gateway.text.parsers import make_parsers
    from gyre_hpc.gateway.text.template import TurnRenderer
    from gyre_hpc.model import model_directory

    frozen = next((file for file in (folder / "config.yaml", folder.parent / "config.yaml") if file.is_file()), None)
    if frozen is None and model is None:
        raise ConfigError(f"{folder} does not say which model's tokens it holds", "give --model, the Hugging Face directory of the model")
    config = see(frozen).config if frozen is not None else Config()
    directory = model or model_directory(config)
    parsers = make_parsers(config.model.tool_parser, config.model.reasoning_parser, directory)
    return Trajectories(TurnRenderer(directory), parsers, Agent(config.harness.kind, str(model or config.model.path)), lineages)
