"""Which paths of a tree are trained on, and with what weight per token (qwengyre.md 3.4 and 3.5).

Leaves are classed by role, MAIN first. Take the highest class that still has unmasked target tokens; draw one of its leaves with
probability proportional to its count of unmasked target tokens; select its root-to-leaf path; mask every token of the path;
again, until no target is left or `jmax` paths are selected.

Invariants: every selected target was sampled by the policy in a delivered call and is a target of exactly one path; the weights of
an execution's targets sum to one; the choice depends on (seed, execution) and the tree only, in every process. An incomplete
execution is not trained on: a call that was not captured would come back looking as if the environment had written it.
A path ends with its last target: context behind it can't reach the loss, so it isn't computed (our choice; the source is silent).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trees.tree import Tree


@dataclass(frozen=True, eq=False)
class Path:
    """One row for the trainer, root first.

    `tokens` int32[T]; `targets` bool[T]: trained on in this row; `logprobs` float32[T] behaviour log-probs in nats and `versions`
    int32[T], meaningful where `targets` only (0 and -1 elsewhere). `weight`: of each target, 1 / selected targets of the execution.
    """

    execution: int
    index: int
    leaf: int
    nodes: tuple[int, ...]
    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    weight: float


def select_paths(tree: Tree, jmax: int, seed: int) -> list[Path]:
    """At most `jmax` (>= 1) paths of the tree, in the order drawn. Empty if the tree is incomplete or holds no target."""
    if jmax < 1:
        raise ValueError(f"jmax = {jmax}: at least 1")
    if tree.incomplete:
        return []
    chosen = _draw_leaves(tree, jmax, seed)
    total = sum(tree.nodes[node].length for _, fresh in chosen for node in fresh)
    return [_row(tree, index, leaf, fresh, 1.0 / total) for index, (leaf, fresh) in enumerate(chosen)]


def all_paths(tree: Tree) -> Iterator[Path]:
    """Paths that have every target between them, made one by one: by class, the newest leaf first, those without a new target left out."""
    if tree.incomplete:
        return
    total = sum(row.length for row in tree.nodes.values() if tree.is_target(row.node))
    seen: set[int] = set()
    index = 0
    for leaf in sorted(tree.leaves, key=lambda leaf: (tree.role_of(leaf), -leaf)):
        fresh = {node for node in tree.path(leaf) if tree.is_target(node) and tree.nodes[node].length} - seen
        if fresh:
            yield _row(tree, index, leaf, fresh, 1.0 / total)
            seen |= fresh
            index += 1


def _draw_leaves(tree: Tree, jmax: int, seed: int) -> list[tuple[int, set[int]]]:
    """(leaf, its target nodes that no earlier path had), in the order drawn."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed & (2**64 - 1), tree.execution.execution])))
    classes: dict[int, list[int]] = {}
    for leaf in tree.leaves:
        classes.setdefault(int(tree.role_of(leaf)), []).append(leaf)
    targets = {leaf: {n for n in tree.path(leaf) if tree.is_target(n) and tree.nodes[n].length} for leaf in tree.leaves}
    chosen: list[tuple[int, set[int]]] = []
    while len(chosen) < jmax:
        for role in sorted(classes):
            leaves = classes[role]
            counts = np.array([sum(tree.nodes[n].length for n in targets[leaf]) for leaf in leaves], np.int64)
            if counts.sum() > 0:
                break
        else:
            break
        # An integer draw: exact, and the same on every platform.
        at = int(np.searchsorted(np.cumsum(counts), rng.integers(counts.sum()), side="right"))
        fresh = targets[leaves[at]]
        chosen.append((leaves[at], fresh))
        targets = {leaf: left - fresh for leaf, left in targets.items()}
    return chosen


def _row(tree: Tree, index: int, leaf: int, fresh: set[int], weight: float) -> Path:
    if tree.columns is None:
        raise ValueError(f"tree of execution {tree.execution.execution} was read without tokens")
    path = tree.path(leaf)
    path = path[: 1 + max(i for i, node in enumerate(path) if node in fresh)]
    slices = tree.column_slices(path)
    targets = np.concatenate([np.full(tree.nodes[node].length, node in fresh) for node in path])
    logprobs = np.concatenate([tree.columns.logprobs[s] for s in slices])
    versions = np.concatenate([tree.columns.versions[s] for s in slices])
    return Path(
        execution=tree.execution.execution,
        index=index,
        leaf=leaf,
        nodes=tuple(path),
        tokens=tree.tokens_of(path),
        targets=targets,
        logprobs=np.where(targets, logprobs, np.float32(0)),
        versions=np.where(targets, versions, np.int32(-1)),
        weight=weight,
    )
