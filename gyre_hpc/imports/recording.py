"""One session on its way into a store, call by call in the order of the trace, as a recorder appends: context, intent, answer, end.

`difference` of a call is what counts and hashes show: `sub-agent`: its first call; `retry`: the prompt of the call before, again;
`clean`: goes on from an answer that nothing went on from; `compaction`: forks, and less than half as long as the prompt before;
`drift`: has the whole prompt before, but not its answer as it was (harnesses drop thinking); `side-query`: shares no block;
`edit`: the rest.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from gyre_hpc.imports.layout import Layout, Piece, Place
from gyre_hpc.imports.tokens import logprobs_of, tokens_of
from gyre_hpc.imports.traces import Request, Session
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreWriter

_ROOT: Place = (0, 0)


class Recording:
    """Appends one session. `base`: runs of the sessions before it: numbers go on, so that no two sessions have a path in common."""

    def __init__(self, writer: StoreWriter, session: Session, base: int) -> None:
        self._writer = writer
        self._session = session
        self._base = base
        self._layout = Layout(session)
        self._execution = -1
        self._nodes: dict[Place, int] = {_ROOT: -1}
        """Store nodes by where they end."""
        self._open: set[Place] = set()
        """Ends of answers from which nothing went on so far."""
        self.runs = len(self._layout.before)
        self.tokens = self.sampled = 0

    def play(self) -> None:
        """Append everything and commit."""
        writer, requests = self._writer, self._session.requests
        execution = self._execution = writer.allocate_execution()
        writer.append(Group(execution, self._session.name, 1, 0, 0))
        writer.append(Execution(execution, execution, 0, 0))
        last: dict[str, int] = {}
        for number, request in enumerate(requests):
            self._call(number, request, last.get(request.agent, -1))
            last[request.agent] = number
        writer.append(ExecutionEnd(execution, "imported", 0.0, False, len(requests), self.sampled, 0.0))
        writer.commit()

    def _call(self, number: int, request: Request, last: int) -> None:
        writer, place, answer = self._writer, self._layout.places[number], self._layout.answers[number]
        role = Role.SUB_AGENT if request.agent else Role.MAIN
        call = writer.allocate_call()
        start, segments = self._missing(place)
        difference = self._difference(number, last, start)
        node = self._nodes[start]
        self._open.discard(start)
        for end, pieces in segments:
            tokens = tokens_of(pieces)
            node = self._nodes[end] = writer.context_node(node, tokens, self._execution, call, role)
            self.tokens += len(tokens)
        writer.append(Intent(call, self._execution, node, role, _digest(request)))
        sampled = self._answer(call, node, place, answer, role) if request.output else -1
        writer.append(CallEnd(call, self._execution, sampled, Fate.DELIVERED, request.finish, difference))

    def _answer(self, call: int, prompt: int, place: Place, answer: Place, role: Role) -> int:
        start, segments = self._missing(answer)
        if start != place or len(segments) != 1:
            raise RuntimeError(f"session {self._session.name}: the answer of call {call} is not one new stretch behind its prompt")
        pieces = segments[0][1]
        tokens = tokens_of(pieces)
        node = self._writer.allocate_node()
        columns = tokens, logprobs_of(pieces), np.zeros(len(tokens), np.int32)
        self._writer.append(Node(node, prompt, self._execution, call, NodeKind.SAMPLED, role, *columns))
        self._nodes[answer] = node
        self._open.add(answer)
        self.tokens += len(tokens)
        self.sampled += len(tokens)
        return node

    def _missing(self, place: Place) -> tuple[Place, list[tuple[Place, list[Piece]]]]:
        """The deepest stored place on the path to `place`, and what lies between: (end, tokens) of each node to come, root first."""
        segments: list[tuple[Place, list[Piece]]] = []
        at = place
        while at not in self._nodes:
            end = at
            pieces: list[Piece] = []
            while not pieces or (at != _ROOT and not self._layout.is_cut(at)):
                (run, first, past), at = self._layout.back(at)
                pieces.append((self._base + run, first, past))
            segments.append((end, pieces[::-1]))
        return at, segments[::-1]

    def _difference(self, number: int, last: int, start: Place) -> str:
        requests, places = self._session.requests, self._layout.places
        request = requests[number]
        if last < 0:
            return "sub-agent" if request.agent else "clean"
        if places[number] == places[last]:
            return "retry"
        if start in self._open or (start == places[last] and not requests[last].output):
            return "clean"
        if start == _ROOT:
            return "side-query"
        if 2 * request.prompt < requests[last].prompt:
            return "compaction"
        before = requests[last].blocks
        return "drift" if np.array_equal(request.blocks[: len(before)], before) else "edit"


def _digest(request: Request) -> bytes:
    """16 bytes over what is known of the prompt; retries are equal."""
    return blake2b(request.prompt.to_bytes(8, "little") + request.blocks.astype("<i8").tobytes(), digest_size=16).digest()
