"""What a seal takes out of a forest and what it leaves behind. Pure: store.py does the files and the locks.

Invariants: a `Content` is a forest of its own that later appends don't touch. A `Successor` holds exactly what its journal
holds: whatever is appended while that journal is written is followed by `take`, together with the sealed nodes and groups that it
leans on, so that the journal never refers to what only a segment has.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from trees.forest import Contents, Forest
from trees.records import Execution, Group, Intent, Node, Record
from trees.segment import Content


def ready(forest: Forest, abandoned: Container[int]) -> list[int]:
    """Executions that are over and have no call in flight; calls `abandoned` by a crash will never end."""
    return [e for e in forest.ends if all(call in abandoned for call in forest.open_calls.get(e, ()))]


def contents(forest: Forest, hashes: Mapping[int, bytes], executions: Iterable[int], limit: int) -> list[Content]:
    """These executions, in batches of about `limit` tokens (one execution is never cut)."""
    found = []
    batch: list[int] = []
    size = 0
    for execution in executions:
        batch.append(execution)
        size += sum(len(forest.nodes[node].tokens) for node in forest.closure(execution))
        if size >= limit:
            found.append(_content(forest, hashes, batch))
            batch, size = [], 0
    return [*found, _content(forest, hashes, batch)] if batch else found


def _content(forest: Forest, hashes: Mapping[int, bytes], executions: list[int]) -> Content:
    part = Forest()
    for record in forest.of_executions(executions):
        part.apply(record)
    part.groups = {e.group: forest.groups[e.group] for e in part.executions.values()}
    return Content(executions, part, {node: hashes[node] for node in part.nodes})


def living(forest: Forest, sealing: Container[int], sealed_groups: Container[int]) -> list[Record]:
    """What the next journal must repeat: executions that are not in a segment then, and groups that are in none."""
    live = [e for e in forest.executions if e not in sealing]
    needed = {forest.executions[e].group for e in live}
    leaving = {execution.group for e, execution in forest.executions.items() if e in sealing}
    groups = [group for g, group in forest.groups.items() if g in needed or not (g in leaving or g in sealed_groups)]
    return [*groups, *forest.of_executions(live, boundaries=True)]


class Successor:
    """What a writer has in memory once the next journal counts."""

    def __init__(self, records: Iterable[Record], hashes: Mapping[int, bytes]) -> None:
        """`hashes`: of nodes that are known; they are not computed again."""
        self.forest = Forest()
        self.contents = Contents()
        self._hashes = hashes
        for record in records:
            self._apply(record)

    def take(self, late: Iterable[Record], old: Forest) -> list[Record]:
        """Follow records that were appended to `old` meanwhile. Returns what must stand before them in the journal."""
        records = list(late)
        repeated = self._leaned_on(records, old)
        for record in [*repeated, *records]:
            self._apply(record)
        return repeated

    def _apply(self, record: Record) -> None:
        if isinstance(record, Node) and record.node not in self.forest.nodes:
            self.contents.add(record, self._hashes.get(record.node))
        self.forest.apply(record)

    def _leaned_on(self, late: list[Record], old: Forest) -> list[Record]:
        new = {record.node for record in late if isinstance(record, Node)}
        starts = [r.parent if isinstance(r, Node) else r.prompt for r in late if isinstance(r, Node | Intent)]
        nodes = {node for start in starts for node in _missing(start, old, self.forest)} - new
        known = {record.group for record in late if isinstance(record, Group)} | set(self.forest.groups)
        groups = {record.group for record in late if isinstance(record, Execution)} - known
        return [*(old.groups[group] for group in sorted(groups)), *(old.nodes[node] for node in sorted(nodes))]


def _missing(node: int, old: Forest, forest: Forest) -> Iterator[int]:
    """`node` and its ancestors up to the first that `forest` has."""
    while node >= 0 and node not in forest.nodes:
        yield node
        node = old.nodes[node].parent
