"""Weights that a resume gave up, and how far what they sampled is from the weights of now.

With `checkpoint.every` above 1 a resumed run goes on from step S, while groups were dispatched, and tokens sampled, at versions after
S that no checkpoint has any more. Those weights are a branch that ends: the run counts the same numbers again, for other weights. What
they sampled is as good as any other (its log-probs are those it was sampled with) and no finished execution is thrown away; but its
distance is not the difference of two numbers. Between version v of the branch and version w of the run lie the updates back to S and
those from there: (v - S) + (w - S). So v counts as 2 S - v, which may be below 0; never is a distance negative.

Ordering key: ids of groups and executions, handed out in ascending order: what is below a branch's was made before the resume. An
execution never lives on over a resume, so all its tokens are of one attempt. Invariant: the branches that a checkpoint holds are those of
the weights it holds; a resume from it adds its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Branch:
    """A resume at `step`: groups below `groups` and executions below `executions` are older than it."""

    step: int
    groups: int
    executions: int


class Branches:
    """All resumes that may still matter, in their order; immutable."""

    def __init__(self, known: Iterable[Branch] = ()) -> None:
        self._known = tuple(known)

    @classmethod
    def of(cls, saved: Iterable[Sequence[int]]) -> Branches:
        """Undo `saved`."""
        return cls(Branch(*(int(number) for number in numbers)) for numbers in saved)

    def saved(self) -> list[list[int]]:
        """JSON, for a checkpoint."""
        return [[branch.step, branch.groups, branch.executions] for branch in self._known]

    def resumed(self, branch: Branch, consumed_below: int) -> Branches:
        """With one more; those after which all groups below `consumed_below` were made, and those that it goes behind, say nothing more."""
        old = (known for known in self._known if known.groups > consumed_below and known.step < branch.step)
        return Branches((*old, branch))

    def of_group(self, group: int, version: int, ended: Sequence[int]) -> int:
        """What the version of a group's dispatch counts as; `ended`: its executions that are over.

        The first resume after the dispatch decides (steps ascend from one to the next). If all of these were made after it, or there are
        none, nothing of the group is of weights that it gave up: the group counts as dispatched there, whatever later resumes give up.
        """
        off = [branch for branch in self._known if group < branch.groups and branch.step < version]
        if not off:
            return version
        first = min(off, key=lambda branch: branch.step)
        older = any(execution < first.executions for execution in ended)
        return counted(version, first.step) if older else first.step

    def of_execution(self, execution: int) -> int | None:
        """The step up to which the versions of an execution's tokens are the run's own; None: all of them."""
        return min((branch.step for branch in self._known if execution < branch.executions), default=None)


def counted(version: int, branch: int | None) -> int:
    """What `version` counts as, for distances from versions of the run's own."""
    return version if branch is None or version <= branch else 2 * branch - version


def counted_all(versions: NDArray[np.int32], branch: int | None) -> NDArray[np.int32]:
    """The same of int32[T]."""
    return versions if branch is None else np.where(versions > branch, 2 * branch - versions, versions).astype(np.int32)
