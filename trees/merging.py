"""Several sealed segments into the columns of one: the same rows under the same ids, what they have in common once.

Invariants: node ids, hashes and all values stay as they are, so a tree reads the same from either file; the result is closed under parents
because each input is; a node that several inputs repeat must be the same in all of them. An input whose bytes are not those that were
written is refused (`check_digest`) before anything of it is believed. Token columns are streamed: memory holds the tables and the image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from trees.catalogue import DIGEST_BYTES, NO_DIGEST, Entry
from trees.codec import RESTORE
from trees.errors import Damaged, Missing
from trees.sealed import Segment
from trees.segment import CODES, DESCRIPTIONS, TABLES, TOKEN_CHUNK, TOKEN_DTYPES, Sheet

_READ = 1 << 20
_TABLES = [name for name in DESCRIPTIONS if "/" in name]


def digest_of_file(path: Path) -> str:
    """The digest of a file's bytes (catalogue.digest_of). Missing: there is no such file."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        with path.open("rb") as file:
            while part := file.read(_READ):
                digest.update(part)
    except FileNotFoundError as error:
        raise Missing(f"{path} is missing", RESTORE) from error
    return digest.hexdigest()


def check_digest(path: Path, entry: Entry) -> None:
    """Damaged if the file's bytes are not those that were written. (Segments of old stores have no digest: only what HDF5 checks.)"""
    if entry.digest not in (NO_DIGEST, digest_of_file(path)):
        raise Damaged(f"{path} has other bytes than were written (its digest differs)", RESTORE)


def merged(segments: Sequence[Segment]) -> Sheet:
    """The columns of one segment in place of these (at least one). Damaged: they don't fit together. Their digests are checked before;
    `parts` are read before they are forgotten."""
    columns = {name: [segment.column(name) for segment in segments] for name in _TABLES}
    kept = _kept_nodes(segments, columns)
    tables = {table: _rows(columns, table, kept[table]) for table in TABLES}
    masks, offsets, total = _layout(segments, columns, kept["nodes"])
    tables["nodes"]["nodes/offset"] = offsets
    flat = {name: values for table in tables.values() for name, values in table.items()}
    return Sheet(flat, total, {name: _tokens(segments, masks, name) for name in TOKEN_DTYPES})


def _kept_nodes(segments: Sequence[Segment], columns: dict[str, list[NDArray[Any]]]) -> dict[str, NDArray[np.int64]]:
    """Rows (of all inputs, joined) that stay, by table, ordered by id: of those with one id the first."""
    kept = {}
    for table in TABLES:
        ids = np.concatenate(columns[f"{table}/id"])
        _, kept[table] = np.unique(ids, return_index=True)
        if len(kept[table]) == len(ids):
            continue
        if table in ("calls", "executions"):
            raise Damaged(f"{segments[0].path} and others that are merged with it share {table}", RESTORE)
        if table == "nodes":
            hashes = np.concatenate(columns["nodes/hash"])
            first = kept[table][np.searchsorted(ids[kept[table]], ids)]
            if (hashes != hashes[first]).any():
                raise Damaged(f"{segments[0].path} and others that are merged with it differ in a node", RESTORE)
    return kept


def _rows(columns: dict[str, list[NDArray[Any]]], table: str, kept: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    found = {}
    for name in (name for name in _TABLES if name.startswith(f"{table}/")):
        values = np.concatenate(columns[name])[kept]
        if values.dtype.kind == "S":
            values = values.astype(h5py.string_dtype("utf-8", max(1, values.dtype.itemsize)))
        found[name] = values.astype(CODES[name]) if name in CODES else values
    return found


def _layout(
    segments: Sequence[Segment], columns: dict[str, list[NDArray[Any]]], kept: NDArray[np.int64]
) -> tuple[list[NDArray[np.bool_]], NDArray[np.int64], int]:
    """Which tokens of each input stay; where each kept node's then begin; how many there are."""
    firsts = np.cumsum([0, *(len(ids) for ids in columns["nodes/id"])])
    stays = np.zeros(firsts[-1], bool)
    stays[kept] = True
    offsets = np.zeros(firsts[-1], np.int64)
    masks, end = [], 0
    for i, segment in enumerate(segments):
        rows = slice(firsts[i], firsts[i + 1])
        order = np.argsort(columns["nodes/offset"][i], kind="stable")
        lengths = columns["nodes/length"][i][order]
        if (np.cumsum(lengths) - lengths != columns["nodes/offset"][i][order]).any() or lengths.sum() != segment.rows("tokens"):
            raise Damaged(f"{segment.path}: the nodes do not cover the tokens once", RESTORE)
        here = stays[rows][order]
        begins = end + np.cumsum(lengths * here) - lengths * here
        offsets[rows][order] = begins
        masks.append(np.repeat(here, lengths))
        end += int((lengths * here).sum())
    return masks, offsets[kept].astype("<i8"), end


def _tokens(segments: Sequence[Segment], masks: Sequence[NDArray[np.bool_]], name: str) -> Iterator[NDArray[Any]]:
    for segment, mask in zip(segments, masks, strict=True):
        for at in range(0, len(mask), TOKEN_CHUNK):
            part = slice(at, at + TOKEN_CHUNK)
            if mask[part].any():
                yield segment.column(name, part)[mask[part]]
