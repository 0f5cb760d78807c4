"""Where the calls of a session lie in its tree, worked out from block ids and token counts alone.

A *run* is a stretch of tokens that is known to be one piece: a block of the trie over all prompts, the *tail* of a prompt (its tokens after
the last whole block), or an answer of which nothing came back. A prompt ends in a *place*: (run, offset). A trace says which prompts share
blocks, never what an answer says, so the rest is inferred:
- an answer is taken to be part of a later prompt (it *came back*) if that prompt has all blocks of its call's prompt and room for the
  whole answer behind them, was sent after it, and nothing forks or ends within the answer. Then the answer is a stretch of that path,
  as a recorder would have found it. Else it is a leaf;
- of several calls with one prompt (retries) only the last answer before the path goes on can have come back;
- a tail is shared with the path on which an answer came back, else it is the prompt's own.

Invariants: the tree over blocks is exactly the trie over the session's block ids; every token lies in one run; every fork is at the end of
a store node (`cuts`), so nothing is stored twice; a stretch that a call samples is reached by later calls only.
Ordering key: requests in the order of the file; places are settled from the longest prompt to the shortest, since whether an answer came
back depends on what lies behind it only.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from gyre_hpc.imports.traces import Request, Session

Place = tuple[int, int]
"""(run, tokens of it): an end of a prompt or of an answer."""
Piece = tuple[int, int, int]
"""(run, from, to): some tokens of a run."""


class Layout:
    """The runs of one session. Run 0 is the root, without tokens; runs are numbered in the order in which they were found."""

    def __init__(self, session: Session) -> None:
        self.before = [0]
        self.ends = [0]
        """Tokens from the root to the end of each run."""
        self.cuts: dict[int, list[int]] = {}
        """Offsets in a run at which a store node ends, ascending."""
        self.places: list[Place] = [(0, 0)] * len(session.requests)
        """Where each prompt ends."""
        self.answers: list[Place] = [(0, 0)] * len(session.requests)
        """Where each answer ends; in a run of its own if it did not come back. An empty answer ends where its prompt does."""
        self._hangs: dict[int, Place] = {}
        """Where the runs of answers that did not come back begin."""
        self._children: list[list[int]] = [[]]
        self._first = [0]
        """The first request that passes through each run."""
        self._inside: dict[int, list[int]] = {}
        """Positions (tokens from the root) within a run, at which prompts end."""
        self._lowest: dict[int, int] = {}
        """Of the prompts settled so far whose last whole block is this run: the length of the shortest, in tokens."""
        blocks = _Blocks(self, session.block_size)
        self._settle(session.requests, [blocks.add(i, request) for i, request in enumerate(session.requests)])
        for run, children in enumerate(self._children):
            if len(children) > 1 and run:
                self._cut((run, self.length(run)))

    def length(self, run: int) -> int:
        """Tokens of a run."""
        return self.ends[run] - self.ends[self.before[run]] if run else 0

    def new_run(self, before: int, length: int, first: int) -> int:
        """Another run behind `before`, first passed by the request `first`."""
        run = len(self.before)
        self.before.append(before)
        self.ends.append(self.ends[before] + length)
        self._children.append([])
        self._first.append(first)
        self._children[before].append(run)
        return run

    def _settle(self, requests: tuple[Request, ...], after: list[int]) -> None:
        """`after`: the last block run of each prompt."""
        points: dict[tuple[int, int], list[int]] = {}
        for i, request in enumerate(requests):
            points.setdefault((request.prompt, after[i]), []).append(i)
        for (position, block), members in sorted(points.items(), reverse=True):
            heir, child = self._came_back(requests, block, position, members)
            place = self._place(block, position, members, child)
            self._lowest[block] = position
            self._cut(place)
            for i in members:
                self.places[i] = place
                self.answers[i] = self._answer(place, position, requests[i].output, child if i == heir else 0)

    def _came_back(self, requests: tuple[Request, ...], block: int, position: int, members: list[int]) -> tuple[int, int]:
        """(the request whose answer is part of a later prompt, the run behind `block` that leads to it); (-1, 0) if there is none."""
        for child in sorted(self._children[block], key=self._first.__getitem__):
            earlier = bisect_left(members, self._first[child])
            if earlier:
                heir = members[earlier - 1]
                if self._unbroken(child, position, position + requests[heir].output):
                    return heir, child
        return -1, 0

    def _unbroken(self, run: int, start: int, end: int) -> bool:
        """Whether one path and nothing else leads from `start`, in or before `run`, to `end`.

        Every prompt that ends beyond `start` is settled already, so what is seen here is final.
        """
        while not any(start < position < end for position in self._inside.get(run, ())):
            if end <= self.ends[run]:
                return True
            if len(self._children[run]) != 1 or self._lowest.get(run, end) < end:
                return False
            run = self._children[run][0]
        return False

    def _place(self, block: int, position: int, members: list[int], child: int) -> Place:
        """The end of a prompt: the block's end, or in the run on which an answer came back (`child`), or in a tail of its own."""
        rest = position - self.ends[block]
        if rest == 0:
            return block, self.length(block)
        if child:
            self._first[child] = min(self._first[child], members[0])
        run = child or self.new_run(block, rest, members[0])
        self._inside.setdefault(run, []).append(position)
        return run, rest

    def _answer(self, place: Place, position: int, length: int, child: int) -> Place:
        """The end of an answer: on the path through `child`, or in a run of its own (`child` 0)."""
        if length == 0:
            return place
        if not child:
            return self._leaf(place, length), length
        run = child
        while self.ends[run] < position + length:
            (run,) = self._children[run]
        answer = run, position + length - self.ends[self.before[run]]
        self._cut(answer)
        return answer

    def _leaf(self, place: Place, length: int) -> int:
        """A run that nothing continues; it is not among the children of the run in (not only behind) which it hangs."""
        run = len(self.before)
        self.before.append(0)
        self.ends.append(length)
        self._children.append([])
        self._first.append(-1)
        self._hangs[run] = place
        self._cut((run, length))
        return run

    def _cut(self, place: Place) -> None:
        run, offset = place
        cuts = self.cuts.setdefault(run, [])
        at = bisect_left(cuts, offset)
        if at == len(cuts) or cuts[at] != offset:
            insort(cuts, offset)

    def back(self, place: Place) -> tuple[Piece, Place]:
        """One step towards the root: the tokens between `place` and the cut or run's end before it, and that place."""
        run, offset = place
        cuts = self.cuts.get(run, ())
        at = bisect_left(cuts, offset)
        if at:
            return (run, cuts[at - 1], offset), (run, cuts[at - 1])
        before = self.before[run]
        return (run, 0, offset), self._hangs.get(run) or (before, self.length(before))

    def is_cut(self, place: Place) -> bool:
        """Whether a store node ends here."""
        return place[1] in self.cuts.get(place[0], ())


class _Blocks:
    """The trie over a session's block ids."""

    def __init__(self, layout: Layout, size: int) -> None:
        self._layout = layout
        self._size = size
        self._runs: dict[tuple[int, int], int] = {}
        self._last: tuple[NDArray[np.int64], list[int]] = (np.zeros(0, np.int64), [])
        """The prompt before, and the runs of its blocks."""

    def add(self, number: int, request: Request) -> int:
        """The run of the prompt's last block (0: it has none)."""
        before, path = self._last
        shared = min(len(before), len(request.blocks))
        differs = np.flatnonzero(before[:shared] != request.blocks[:shared])
        # What is equal to the prompt before need not be looked up again: histories are long, and what is new is short.
        path = path[: int(differs[0]) if len(differs) else shared]
        run = path[-1] if path else 0
        for block in request.blocks[len(path) :].tolist():
            key = run, block
            run = self._runs.get(key, 0)
            if not run:
                run = self._runs[key] = self._layout.new_run(key[0], self._size, number)
            path.append(run)
        self._last = request.blocks, path
        return run
