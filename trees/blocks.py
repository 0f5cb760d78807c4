"""Blocks of fixed size in a store's prompts: what a cache of prefixes would hold once, and what it would be asked for.

A prompt of n tokens has n // size blocks. Two blocks are the same if the whole paths up to their ends are; so each is the place in the tree
where it ends, and to count places is to count the size of a trie over all prompts.
"""

from __future__ import annotations

from trees.store import StoreReader
from trees.tree import Tree


def count_blocks(reader: StoreReader, size: int) -> tuple[int, int]:
    """(unique blocks, blocks of all prompts written out) over all calls of the view. ValueError: size < 1."""
    if size < 1:
        raise ValueError(f"blocks of {size} tokens")
    unique = expanded = 0
    counted: set[int] = set()
    for execution in reader.executions():
        tree = reader.tree(execution, tokens=False)
        ends = path_ends(tree)
        for call in tree.calls.values():
            expanded += ends[call.prompt] // size
            node = call.prompt
            while node >= 0 and node not in counted:
                counted.add(node)
                parent = tree.nodes[node].parent
                unique += ends[node] // size - ends[parent] // size
                node = parent
    return unique, expanded


def path_ends(tree: Tree) -> dict[int, int]:
    """Tokens from the root to the end of each node, by id; of -1: 0."""
    ends = {-1: 0}
    for row in tree.nodes.values():
        ends[row.node] = ends[row.parent] + row.length
    return ends
