"""Where nodes are in the network, as Slurm knows it, and cells cut so that they straddle as few switches as can be.

Pure: `scontrol show topology` (the plugins tree and block; of anything else no record is known) is parsed into the path of switches above
each node. Where a cluster has several topologies (topology.yaml, Slurm 25.05 and later) a partition names its own; without a name Slurm
shows the default one. Invariants: without a topology the order is the allocation's; no node is in two cells; a cell straddles the children
of a switch only when none of them has enough nodes left for it; cells come in the order of the network, so that neighbours in the cell
order, which reduce with each other first, are neighbours there, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_RECORDS = {"SwitchName": "tree", "BlockName": "block", "AggregatedBlock": "block"}
MOST_NAMES = 100_000
"""Of one host list: a longer one is no list of nodes."""


@dataclass(frozen=True)
class Topology:
    """`paths`: the switches above each node, from the top down to its own. `kind`: tree, block, or none."""

    kind: str = "none"
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def leaves(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """The switches (or blocks) that these nodes hang on directly, in order, each once."""
        return tuple(dict.fromkeys(path[-1] for node in nodes if (path := self.paths.get(node))))


def topology_command(name: str | None = None) -> list[str]:
    """`name`: of a topology; without one the default is shown."""
    return ["scontrol", "show", "topology", *([name] if name else [])]


def partition_command(partition: str) -> list[str]:
    return ["scontrol", "--oneliner", "show", "partition", partition]


def parse_partition(text: str) -> str | None:
    """The topology that a partition names; None where it has none of its own."""
    return next((word.partition("=")[2] for word in text.split() if word.startswith("Topology=")), None) or None


def parse_topology(text: str) -> Topology:
    """One record a line; a switch's line lists all nodes below it, so the path of a node is the records that hold it, the largest first."""
    records: list[tuple[int, str, list[str]]] = []
    kind = "none"
    for line in text.splitlines():
        fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        name = next((key for key in _RECORDS if key in fields), None)
        if name is None or "Nodes" not in fields:
            continue
        kind = _RECORDS[name]
        records.append((int(fields.get("Level", "0")), fields[name], expand(fields["Nodes"])))
    paths: dict[str, tuple[str, ...]] = {}
    for _, switch, nodes in sorted(records, key=lambda record: (-record[0], -len(record[2]), record[1])):
        for node in nodes:
            paths[node] = (*paths.get(node, ()), switch)
    return Topology(kind if paths else "none", paths)


def expand(hosts: str) -> list[str]:
    """The names of a host list such as `a[1-3,07],b2c[0-1]`. A range keeps its width of digits. Empty for (null)."""
    if hosts in ("", "(null)"):
        return []
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts):
        parts = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in re.findall(r"\[[^\]]*\]|[^\[\]]+", word)]
        names.extend("".join(choice) for choice in itertools.islice(itertools.product(*parts), MOST_NAMES))
    return names


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        if last.isdecimal() and first.isdecimal():
            end = min(int(last), int(first) + MOST_NAMES)
            found.extend(str(number).zfill(len(first)) for number in range(int(first), end + 1))
        else:
            found.append(piece)
    return found


@dataclass(frozen=True)
class _Cut:
    """A cell, and how far down the tree all of its nodes are below one switch."""

    depth: int
    nodes: tuple[str, ...]


def cut(nodes: Sequence[str], count: int, width: int, topology: Topology, first: str | None = None) -> tuple[tuple[str, ...], ...]:
    """`count` cells of `width` nodes each out of `nodes` (at least count * width of them), those below the lowest switches first.

    `first`: a node whose cell comes first, if it is in one. What is left over is in none.
    """
    found, _ = _cells(list(nodes), width, topology, 0)
    order = {node: at for at, node in enumerate(_in_order(nodes, topology, 0))}
    best = sorted(found, key=lambda one: (-one.depth, order[one.nodes[0]]))[:count]
    best.sort(key=lambda one: (first not in one.nodes, order[one.nodes[0]]))
    return tuple(one.nodes for one in best)


def _cells(nodes: list[str], width: int, topology: Topology, depth: int) -> tuple[list[_Cut], list[str]]:
    """All whole cells of these nodes, and the nodes that are in none."""
    found: list[_Cut] = []
    rest: list[str] = []
    for switch, members in _below(nodes, topology, depth).items():
        if switch is None:
            rest += members
            continue
        cells, left = _cells(members, width, topology, depth + 1)
        found += cells
        rest += left
    whole = len(rest) // width * width
    found += [_Cut(depth, tuple(rest[at : at + width])) for at in range(0, whole, width)]
    return found, rest[whole:]


def _below(nodes: Sequence[str], topology: Topology, depth: int) -> dict[str | None, list[str]]:
    """Nodes by the switch at this depth of their path, in the order of their first node."""
    below: dict[str | None, list[str]] = {}
    for node in nodes:
        path = topology.paths.get(node, ())
        below.setdefault(path[depth] if depth < len(path) else None, []).append(node)
    return below


def _in_order(nodes: Sequence[str], topology: Topology, depth: int) -> list[str]:
    """The nodes as a walk over the tree meets them."""
    ordered: list[str] = []
    for switch, members in _below(nodes, topology, depth).items():
        ordered += members if switch is None else _in_order(members, topology, depth + 1)
    return ordered
