"""Slurm's topology outputs, host lists, and cells cut along the network.

The trees' texts are as Slurm 22.05 printed them for a topology.conf of two levels; the blocks' have the format of Slurm 23.11 and later,
held against the plugin's source (topology_block.c) and what several sites show of theirs: no such Slurm was at hand.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.config import CellsSection
from gyre_hpc.driver.allocation import find_topology, place
from gyre_hpc.driver.topology import Topology, cut, expand, parse_partition, parse_topology
from gyre_hpc.errors import GyreError

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-3]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[4-6]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[7-8]
SwitchName=t0 Level=1 LinkSpeed=1 Nodes=n[1-6] Switches=s[0-1]
SwitchName=t1 Level=1 LinkSpeed=1 Nodes=n[7-8] Switches=s2
SwitchName=u Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=t[0-1]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=a[01-04] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=a[05-08] BlockSize=4
BlockName=b3 BlockIndex=2 Nodes=a[09-12] BlockSize=4
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=a[01-08] BlockSize=8
"""
ADDRESSES = """\
BlockName=nv_b0 BlockIndex=0 Nodes=10.1.7.103,10.1.8.115
BlockName=nv_b1 BlockIndex=1 Nodes=10.1.7.152,10.1.9.120
"""
"""Nodes that are named by their addresses, and no BlockSize, as the plugin's first versions print it."""
RINGS = "RingName=r1 Nodes=a[01-08] RingSize=8\n"
PARTITION = "PartitionName=gpu AllowGroups=ALL Nodes=a[01-12] OverTimeLimit=NONE PreemptMode=OFF{} State=UP TotalCPUs=12\n"


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in numbers)


def test_a_tree_gives_each_node_its_path() -> None:
    found = parse_topology(TREE)
    assert found.kind == "tree"
    assert (found.paths["n1"], found.paths["n5"], found.paths["n8"]) == (("u", "t0", "s0"), ("u", "t0", "s1"), ("u", "t1", "s2"))
    assert found.leaves(names(1, 4, 2)) == ("s0", "s1")


def test_blocks_and_what_they_are_aggregated_to() -> None:
    found = parse_topology(BLOCKS)
    assert found.kind == "block"
    assert (found.paths["a05"], found.paths["a12"]) == (("b[1-2]", "b2"), ("b3",))


def test_blocks_without_a_size_and_nodes_that_are_named_by_addresses() -> None:
    found = parse_topology(ADDRESSES)
    assert found.paths == dict.fromkeys(("10.1.7.103", "10.1.8.115"), ("nv_b0",)) | dict.fromkeys(("10.1.7.152", "10.1.9.120"), ("nv_b1",))


def test_cells_stay_in_a_block_then_in_what_blocks_are_aggregated_to() -> None:
    found = parse_topology(BLOCKS)
    nodes = [f"a{i:02}" for i in range(1, 13)]
    assert cut(nodes, 3, 4, found) == (tuple(nodes[:4]), tuple(nodes[4:8]), tuple(nodes[8:]))
    assert cut(nodes[2:], 1, 6, found) == (tuple(nodes[2:8]),), "two blocks of one aggregate, not the three"
    placed = place(tuple(nodes[:8]), CellsSection(count=2, nodes_per_cell=3, leftover=False), local=False, topology=found)
    assert (placed.cells, placed.straddling) == ((("a02", "a03", "a04"), ("a05", "a06", "a07")), 0)
    assert placed.facts()["switches"] == [["b1"], ["b2"]]


@pytest.mark.parametrize("text", [RINGS, "", "No topology information available\n", "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=(null)\n"])
def test_without_a_topology_there_is_none(text: str) -> None:
    assert parse_topology(text) == Topology()


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
        ("n[0001]", ["n0001"]),
        ("(null)", []),
    ],
)
def test_host_lists(hosts: str, found: list[str]) -> None:
    assert expand(hosts) == found


def test_no_cell_straddles_switches_where_that_can_be_helped() -> None:
    tree = parse_topology(TREE)
    assert cut(names(1, 2, 3, 4, 5, 6, 7, 8), 3, 2, tree) == (names(1, 2), names(4, 5), names(7, 8))
    assert cut(names(1, 2, 3, 4, 5, 6, 7, 8), 4, 2, tree) == (names(1, 2), names(3, 6), names(4, 5), names(7, 8))
    assert cut(names(1, 2, 3, 4, 5, 6, 7, 8), 1, 4, tree) == (names(1, 2, 3, 4),), "below t0, not over the top"
    assert cut(names(1, 4, 2, 5, 7, 8), 3, 2, tree) == (names(1, 2), names(4, 5), names(7, 8)), "whatever the allocation's order"
    assert cut(names(7, 1, 8, 2), 2, 2, tree, first="n1") == (names(1, 2), names(7, 8)), "the controller's node is in the core"
    assert cut(names(9, 1, 2, 10), 2, 2, tree) == (names(9, 10), names(1, 2)), "nodes that the topology does not know are no neighbours"


def test_the_allocations_order_without_a_topology() -> None:
    assert cut(names(5, 3, 1, 2), 2, 2, Topology()) == (names(5, 3), names(1, 2))


def test_a_placement_says_which_switches_its_cells_hang_on() -> None:
    placed = place(names(1, 2, 3, 4, 5, 6, 7, 8), CellsSection(count=2, nodes_per_cell=3), local=False, topology=parse_topology(TREE))
    assert placed.cells == (names(2, 3, 7), names(4, 5, 6))
    assert (placed.ranks[0], placed.standalone, placed.idle) == ("n1", ("n8",), ())
    assert placed.straddling == 1
    assert placed.facts() == {
        "cells": [["n2", "n3", "n7"], ["n4", "n5", "n6"]],
        "standalone": ["n8"],
        "idle": [],
        "topology": "tree",
        "switches": [["s0", "s2"], ["s1"]],
    }


def test_a_slurm_that_does_not_answer_leaves_the_allocations_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(command: list[str]) -> str:
        raise GyreError("`scontrol show topology` gave no answer in 30 s", "try again")

    monkeypatch.setattr("gyre_hpc.driver.allocation.ask", silent)
    assert find_topology("gpu") == Topology()


def test_the_partitions_own_topology_else_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "scontrol show topology": TREE,
        "scontrol show topology nv": BLOCKS,
        "scontrol --oneliner show partition gpu": PARTITION.format(" Topology=nv"),
        "scontrol --oneliner show partition cpu": PARTITION.format(""),
    }
    monkeypatch.setattr("gyre_hpc.driver.allocation.ask", lambda command: answers[" ".join(command)])
    assert [find_topology(partition).kind for partition in ("gpu", "cpu", None)] == ["block", "tree", "tree"]
    assert parse_partition(PARTITION.format(" Topology=")) is None


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(1, 5), st.randoms(use_true_random=False))
def test_cells_are_disjoint_whole_and_as_many_inside_one_switch_as_there_can_be(below: list[int], width: int, random: object) -> None:
    """`below`: the leaf of each node; two leaves a middle switch."""
    nodes = [f"n{i}" for i in range(len(below))]
    tree = Topology("tree", {node: ("top", f"m{leaf // 2}", f"s{leaf}") for node, leaf in zip(nodes, below, strict=True)})
    order = list(nodes)
    random.shuffle(order)  # type: ignore[attr-defined]
    most = len(nodes) // width
    for count in range(most + 1):
        cells = cut(order, count, width, tree)
        used = [node for cell in cells for node in cell]
        assert (len(cells), {len(cell) for cell in cells} - {width}) == (count, set())
        assert len(set(used)) == len(used)
        inside = sum(len(tree.leaves(cell)) == 1 for cell in cells)
        possible = sum(below.count(leaf) // width for leaf in set(below))
        assert inside == min(count, possible)
