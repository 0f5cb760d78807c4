"""Reads every byte of a store and checks every invariant: behind `gyre trees verify`.

A segment's bytes are compared with the digest that the journal has of it, so any changed byte is found, whatever it means. Segments
are checked on their plain columns, the journal on the same columns made from its records. Each problem is one line that names the
file and the place; an empty list means that all is well. An uncommitted tail of the journal is no problem: it is cut next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trees.catalogue import Entry
from trees.codec import Header, decode
from trees.errors import Damaged, Missing, StoreError
from trees.forest import HASH_BYTES, Contents, Forest, content_hash
from trees.journal import Scan, damage_after, journal_name, newest_journal
from trees.merging import check_digest
from trees.reader import locate
from trees.records import NodeKind, Role
from trees.sealed import Segment, catalogued
from trees.segment import DESCRIPTIONS, OPEN, call_columns, node_columns, segment_name, span
from trees.tree import Columns

LOGPROB_MOST = 1e-4
"""Rounding above 0 that a log-probability may have."""
_TRIES = 100
Table = Mapping[str, NDArray[Any]]


class Seen:
    """What the files so far hold: ids and hashes of nodes, and where each execution is. Arrays only: a store may have millions."""

    def __init__(self) -> None:
        self._nodes = np.zeros(0, np.int64)
        self._hashes = np.zeros((0, HASH_BYTES), np.uint8)
        self._executions = np.zeros(0, np.int64)
        self._homes = np.zeros(0, np.int64)
        self._files: list[str] = []
        self.groups = np.zeros(0, np.int64)

    def nodes(self, ids: NDArray[np.int64], hashes: NDArray[np.uint8]) -> Iterator[str]:
        """Take a file's nodes in (ascending); tells of those that differ from the same ones in an earlier file."""
        at = np.minimum(np.searchsorted(self._nodes, ids), max(0, len(self._nodes) - 1))
        known = self._nodes[at] == ids if len(self._nodes) else np.zeros(len(ids), bool)
        for node in ids[known][(self._hashes[at[known]] != hashes[known]).any(axis=1)]:
            yield f"node {node} differs from the same node in an earlier segment"
        joined = np.concatenate([self._nodes, ids[~known]])
        order = np.argsort(joined, kind="stable")
        self._nodes, self._hashes = joined[order], np.concatenate([self._hashes, hashes[~known]])[order]

    def executions(self, ids: NDArray[np.int64], file: str) -> Iterator[str]:
        """Take a file's executions in; tells of those that another file has as well."""
        for execution in np.intersect1d(ids, self._executions):
            home = self._files[self._homes[self._executions == execution][0]]
            yield f"execution {execution} is also in {home}"
        self._executions = np.concatenate([self._executions, ids])
        self._homes = np.concatenate([self._homes, np.full(len(ids), len(self._files))])
        self._files.append(file)

    def missing(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these executions that no file has."""
        return np.setdiff1d(ids, self._executions)


def verify(path: Path) -> list[str]:
    """All problems of the store at `path` (a store or a run directory). StoreError if there is none, or its header can't be read."""
    directory = locate(path)
    for _ in range(_TRIES):
        generation, problems, gone = _verified(directory)
        if not gone or newest_journal(directory) == generation:
            return problems
        # A writer merged segments while we read: what it made of them is in the next journal.
    raise StoreError(f"{directory}: the journal was replaced {_TRIES} times while it was read", "try again")


def _verified(directory: Path) -> tuple[int, list[str], bool]:
    """(the journal's generation, problems, whether a segment was not there)."""
    name, fd = _open_newest(directory)
    header, forest, damage = _replay(fd)
    header = catalogued(directory, header)
    problems = [f"{name}: {problem}" for problem in damage]
    seen, gone = Seen(), False
    for entry in header.segments:
        segment = Segment(directory / segment_name(entry.number))
        found: list[str] = []
        try:
            found.extend(segment_problems(segment, entry, seen))
        except (StoreError, OSError, ValueError, KeyError) as error:
            gone = gone or isinstance(error, Missing)
            found.append(f"can't be read: {' '.join(str(error).split())}")
        finally:
            segment.forget()
        problems += [f"{segment.path.name}: {problem}" for problem in found]
    problems += [f"{name}: {problem}" for problem in _catalogue(header, seen)]
    problems += [f"{name}: {problem}" for problem in _journal(name, forest, seen)]
    return header.generation, problems, gone


def _catalogue(header: Header, seen: Seen) -> Iterator[str]:
    lacking = seen.missing(np.array(list(header.executions), np.int64))
    if len(lacking):
        yield f"sealed executions that are in no segment: {_some(lacking)}"


def _open_newest(directory: Path) -> tuple[str, int]:
    """The newest journal, which a writer may replace while we look for it."""
    for _ in range(_TRIES):
        name = journal_name(newest_journal(directory) or 0)
        with contextlib.suppress(FileNotFoundError):
            return name, os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
    raise StoreError(f"{directory}: the journal was replaced {_TRIES} times while it was opened", "try again")


def _replay(fd: int) -> tuple[Header, Forest, list[str]]:
    try:
        scan, forest, damage = Scan(fd), Forest(), []
        header = Header.decode(next(scan.frames(), b"{}"))
        later: int | None = 0
        while later is not None:
            end = scan.offset
            for payload in scan.frames():
                for record in decode(payload):
                    forest.apply(record)
            # A frame behind the end that was seen may be a commit of this moment: then the end has moved, and is looked for anew.
            if later and scan.offset == end:
                damage.append(f"damaged at byte {end}: a good frame follows at byte {later}")
                break
            later = damage_after(fd, scan.offset, scan.seq)
        return header, forest, damage
    finally:
        os.close(fd)


def _journal(name: str, forest: Forest, seen: Seen) -> Iterator[str]:
    nodes = [forest.nodes[node] for node in sorted(forest.nodes)]
    missing = [node.node for node in nodes if node.parent >= 0 and node.parent not in forest.nodes]
    if missing:
        yield f"nodes without their parent: {_some(missing)}"
        return
    offsets = dict(zip((n.node for n in nodes), np.cumsum([0, *(len(n.tokens) for n in nodes)]).tolist(), strict=False))
    contents = Contents.of(forest.nodes, {})
    calls = [call for execution in sorted(forest.executions) for call in forest.calls(execution)]
    table = {**node_columns(nodes, offsets, contents.hashes), **call_columns(sorted(calls, key=lambda call: call.call))}
    columns = Columns.of(nodes)
    yield from _structure(table, set(forest.executions), len(columns.tokens))
    yield from _values(table, columns)
    yield from seen.nodes(table["nodes/id"], table["nodes/hash"])
    yield from seen.executions(np.array(sorted(forest.executions), np.int64), name)
    for e in forest.executions.values():
        if e.group not in forest.groups and e.group not in seen.groups:
            yield f"execution {e.execution} is of the unknown group {e.group}"


def segment_problems(segment: Segment, entry: Entry, seen: Seen | None = None) -> Iterator[str]:
    """What is wrong with one segment, alone and beside those `seen`. StoreError: so much that it can't be read."""
    seen = seen or Seen()
    try:
        check_digest(segment.path, entry)
    except Damaged as error:
        yield error.what
    table = {name: segment.column(name) for name in DESCRIPTIONS}
    yield from seen.executions(table["executions/id"], segment.path.name)
    bare = segment.without_checksums()
    if bare:
        yield f"{', '.join(f'/{name}' for name in bare)} without checksums"
    for kind in ("executions", "groups", "nodes"):
        if span(table[f"{kind}/id"]) != getattr(entry, kind):
            yield f"{kind} {span(table[f'{kind}/id'])} where the journal says {getattr(entry, kind)}"
    columns = Columns(table["tokens"], table["logprobs"], table["versions"])
    found = list(_structure(table, set(table["executions/id"].tolist()), len(columns.tokens)))
    yield from found
    if found:
        return
    yield from _values(table, columns)
    own = {int(node): bytes(digest) for node, digest in zip(table["nodes/id"], table["nodes/hash"], strict=True)}
    yield from _hashes(table, columns.tokens, own)
    yield from seen.nodes(table["nodes/id"], table["nodes/hash"])
    sizes = dict(zip(table["groups/id"].tolist(), table["groups/size"].tolist(), strict=True))
    for execution, group, index in zip(*(table[f"executions/{name}"].tolist() for name in ("id", "group", "index")), strict=True):
        if not 0 <= index < sizes.get(group, 0):
            yield f"execution {execution}: group {group} or index {index} is unknown"
    seen.groups = np.union1d(seen.groups, table["groups/id"])


def _structure(table: Table, executions: set[int], tokens: int) -> Iterator[str]:
    """Ids, parents, spans, codes, and that calls and nodes agree. Everything else relies on these."""
    ids, parents, kinds = table["nodes/id"], table["nodes/parent"], table["nodes/kind"]
    spans = sorted(zip(table["nodes/offset"].tolist(), table["nodes/length"].tolist(), strict=True))
    if (np.diff(ids) <= 0).any() or (np.diff(table["calls/id"]) <= 0).any():
        yield "ids do not ascend"
        return
    ends = np.cumsum([0, *(length for _, length in spans)]).tolist()
    if any(length < 1 for _, length in spans) or [offset for offset, _ in spans] != ends[:-1] or ends[-1] != tokens:
        yield f"the nodes' spans do not cover the {tokens} tokens once"
    orphans = ids[(parents >= ids) | ((parents >= 0) & ~np.isin(parents, ids)) | (parents < -1)]
    if len(orphans):
        yield f"nodes whose parent is missing or later: {_some(orphans)}"
        return
    codes = np.isin(kinds, [k.value for k in NodeKind]).all() and np.isin(table["nodes/role"], [r.value for r in Role]).all()
    if not codes or not np.isin(table["calls/fate"], [0, 1, 2, 3, OPEN]).all():
        yield "codes of kind, role or fate that mean nothing"
    yield from _agreement(table, executions)


def _agreement(table: Table, executions: set[int]) -> Iterator[str]:
    """Calls and nodes tell the same story, and no path goes through what another execution sampled."""
    calls = {c: (e, p) for c, e, p in zip(*(table[f"calls/{k}"].tolist() for k in ("id", "execution", "prompt")), strict=True)}
    by_node = {-1: (-1, -1)}
    names = ("id", "parent", "kind", "execution", "call")
    for node, parent, kind, execution, call in zip(*(table[f"nodes/{name}"].tolist() for name in names), strict=True):
        owner = by_node[parent][0]
        if kind == NodeKind.SAMPLED:
            if calls.get(call) != (execution, parent):
                yield f"sampled node {node} does not continue the prompt of a call {call} of execution {execution}"
            if owner not in (-1, execution):
                yield f"node {node} of execution {execution} goes on from tokens that execution {owner} sampled"
            owner = execution
        by_node[node] = (owner, call if kind == NodeKind.SAMPLED else -1)
    for call, sampled in zip(table["calls/id"].tolist(), table["calls/sampled"].tolist(), strict=True):
        execution, prompt = calls[call]
        if execution not in executions:
            yield f"call {call} is of the unknown execution {execution}"
        if prompt not in by_node or prompt < 0 or by_node[prompt][0] not in (-1, execution):
            yield f"call {call}: its prompt, node {prompt}, is not one of execution {execution}"
        if sampled >= 0 and by_node.get(sampled, (-1, -1))[1] != call:
            yield f"call {call}: node {sampled} is not what it sampled"


def _values(table: Table, columns: Columns) -> Iterator[str]:
    """Log-probs and versions where tokens were sampled, and only there."""
    sampled = np.zeros(len(columns.tokens), bool)
    for offset, length, kind in zip(*(table[f"nodes/{name}"].tolist() for name in ("offset", "length", "kind")), strict=True):
        sampled[offset : offset + length] = kind == NodeKind.SAMPLED
    with np.errstate(invalid="ignore"):
        good = np.isfinite(columns.logprobs) & (columns.logprobs <= LOGPROB_MOST)
    for wrong, what in (
        (columns.tokens < 0, "token ids below 0"),
        (sampled & ~good, "log-probs of sampled tokens that are not finite or above 0"),
        (sampled & (columns.versions < 0), "sampled tokens without a version"),
        (~sampled & ~np.isnan(columns.logprobs), "log-probs on context"),
        (~sampled & (columns.versions != -1), "versions on context"),
    ):
        if wrong.any():
            yield f"{int(wrong.sum())} {what}, the first at token {int(np.argmax(wrong))}"


def _hashes(table: Table, tokens: NDArray[np.int32], own: Mapping[int, bytes]) -> Iterator[str]:
    names = ("id", "parent", "offset", "length", "kind")
    for node, parent, offset, length, kind in zip(*(table[f"nodes/{name}"].tolist() for name in names), strict=True):
        if content_hash(own.get(parent, bytes(16)), NodeKind(kind), tokens[offset : offset + length]) != own[node]:
            yield f"the content of node {node} does not have its hash"


def _some(ids: Any) -> str:
    shown = ", ".join(str(int(i)) for i in list(ids)[:5])
    return shown + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
