"""Reads every byte of a store and checks every invariant: behind `gyre trees verify`.

Segments are checked on their plain columns, the journal on the same columns made from its records. Each problem is one line that
names the file and the place; an empty list means that all is well. An uncommitted tail of the journal is no problem: it is cut next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trees.codec import Header, decode
from trees.errors import StoreError
from trees.forest import Contents, Forest, content_hash
from trees.journal import Scan, damage_after, journal_name, newest_journal
from trees.reader import locate
from trees.records import NodeKind, Role
from trees.sealed import Segment
from trees.segment import DESCRIPTIONS, OPEN, call_columns, node_columns, segment_name
from trees.tree import Columns

LOGPROB_MOST = 1e-4
"""Rounding above 0 that a log-probability may have."""
_TRIES = 100
Table = Mapping[str, NDArray[Any]]


def verify(path: Path) -> list[str]:
    """All problems of the store at `path` (a store or a run directory). StoreError if there is none, or its header can't be read."""
    directory = locate(path)
    name, fd = _open_newest(directory)
    problems: list[str] = []
    hashes: dict[int, bytes] = {}
    homes: dict[int, str] = {}
    groups: set[int] = set()
    header, forest, damage = _replay(fd)
    problems += [f"{name}: {problem}" for problem in damage]
    for number in range(1, header.segments + 1):
        file = segment_name(number)
        try:
            found = list(_segment(Segment(directory / file), hashes, homes, groups))
        except (StoreError, OSError, ValueError, KeyError) as error:
            found = [f"can't be read: {' '.join(str(error).split())}"]
        problems += [f"{file}: {problem}" for problem in found]
    problems += [f"{name}: {problem}" for problem in _journal(forest, hashes, homes, groups)]
    return problems


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
        frames = scan.frames()
        header = Header.decode(next(frames, b"{}"))
        for payload in frames:
            for record in decode(payload):
                forest.apply(record)
        later = damage_after(fd, scan.offset, scan.seq)
        if later is not None:
            damage.append(f"damaged at byte {scan.offset}: a good frame follows at byte {later}")
        return header, forest, damage
    finally:
        os.close(fd)


def _journal(forest: Forest, hashes: dict[int, bytes], homes: dict[int, str], groups: set[int]) -> Iterator[str]:
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
    yield from _same(contents.hashes, hashes)
    for execution in sorted(set(forest.executions) & set(homes)):
        yield f"execution {execution} is also in {homes[execution]}"
    for e in forest.executions.values():
        if e.group not in forest.groups and e.group not in groups:
            yield f"execution {e.execution} is of the unknown group {e.group}"


def _segment(segment: Segment, hashes: dict[int, bytes], homes: dict[int, str], groups: set[int]) -> Iterator[str]:
    with segment.open() as file:
        table: dict[str, NDArray[Any]] = {}
        for name in DESCRIPTIONS:
            table[name] = file[name][:]
            rows = segment.rows[name.split("/")[0] if "/" in name else "tokens"]
            if len(table[name]) != rows:
                raise StoreError(f"/{name} has {len(table[name])} rows, {rows} were committed", "restore this file from a copy")
            if not file[name].fletcher32:
                yield f"/{name} has no checksums"
    columns = Columns(table["tokens"], table["logprobs"], table["versions"])
    found = list(_structure(table, set(segment.executions), len(columns.tokens)))
    yield from found
    if found:
        return
    yield from _values(table, columns)
    own = {int(node): bytes(digest) for node, digest in zip(table["nodes/id"], table["nodes/hash"], strict=True)}
    yield from _hashes(table, columns.tokens, own)
    yield from _same(own, hashes)
    for e in segment.executions.values():
        if e.group not in segment.groups or not 0 <= e.index < segment.groups[e.group].size:
            yield f"execution {e.execution}: group {e.group} or index {e.index} is unknown"
        if e.execution in homes:
            yield f"execution {e.execution} is also in {homes[e.execution]}"
        homes[e.execution] = segment.path.name
    groups.update(segment.groups)


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


def _same(own: Mapping[int, bytes], hashes: dict[int, bytes]) -> Iterator[str]:
    """A node that several files hold is the same in all of them."""
    for node, digest in own.items():
        if hashes.setdefault(node, digest) != digest:
            yield f"node {node} differs from the same node in an earlier segment"


def _some(ids: Any) -> str:
    shown = ", ".join(str(int(i)) for i in list(ids)[:5])
    return shown + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
