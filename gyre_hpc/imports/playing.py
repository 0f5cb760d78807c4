"""A text-only session on its way into a store, answer by answer in the order of its file.

An answer becomes a call with its prompt, and a *context* node behind it: no log-probs were recorded, so nothing of it can be trained on as
sampled. Turns that nothing answered are context, too. `difference` of a call: `sub-agent`: a sub-agent's first; `compaction`: the chain
begins anew; `clean`: goes on from a turn that nothing went on from; `edit`: the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from gyre_hpc.gateway.dialects.canonical import Message
from gyre_hpc.imports.claude import Session
from gyre_hpc.imports.texts import Texts
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Role
from trees.store import StoreWriter

_EARLIER = Message("user", ({"type": "text", "text": "[what was asked is not in this recording]"},))


class Playing:
    """Appends one session."""

    def __init__(self, writer: StoreWriter, session: Session, texts: Texts) -> None:
        self._writer = writer
        self._session = session
        self._texts = texts
        self._execution = -1
        self._nodes: dict[int, int] = {}
        """Answer -> the node at its end."""
        self._continued: set[int] = set()
        self._agents: set[str] = set()
        self._seen: set[int] = set()
        self.calls = self.tokens = 0

    def play(self) -> None:
        """Append everything and commit. ValueError: the template refuses a turn."""
        writer, turns = self._writer, self._session.turns
        execution = self._execution = writer.allocate_execution()
        writer.append(Group(execution, self._session.name, 1, 0, 0))
        writer.append(Execution(execution, execution, 0, 0))
        parents = {turn.parent for turn in turns}
        for place, turn in enumerate(turns):
            if turn.message.role == "assistant":
                self._answer(place)
            elif place not in parents:
                start, asked = self._asked(place)
                self._append(start, asked, -1, self._role(place))
        writer.append(ExecutionEnd(execution, "imported", 0.0, False, self.calls, 0, 0.0))
        writer.commit()

    def _answer(self, place: int) -> None:
        writer, turn = self._writer, self._session.turns[place]
        start, asked = self._asked(turn.parent)
        role = self._role(place)
        call = writer.allocate_call()
        node = self._append(start, asked, call, role)
        writer.append(Intent(call, self._execution, node, role, self._digest(start, asked)))
        end = self._context(node, self._texts.answer(turn.message, self._before(turn.parent)), call, role)
        writer.append(CallEnd(call, self._execution, -1, Fate.DELIVERED, turn.finish, self._difference(place, start, asked)))
        self._nodes[place] = end
        self._continued.add(start)
        self._agents.add(turn.agent)
        self.calls += 1

    def _before(self, place: int) -> list[Message]:
        """The conversation up to and with that turn, for a template that looks back at it."""
        turns, before = self._session.turns, []
        while self._texts.looks_back and place >= 0:
            before.append(turns[place].message)
            place = turns[place].parent
        return before[::-1]

    def _asked(self, place: int) -> tuple[int, list[int]]:
        """(the answer before `place`, -1: none; the turns behind it up to `place`, in order)."""
        turns, asked = self._session.turns, []
        while place >= 0 and turns[place].message.role != "assistant":
            asked.append(place)
            place = turns[place].parent
        return place, asked[::-1]

    def _append(self, start: int, asked: list[int], call: int, role: Role) -> int:
        """The node at the end of these turns."""
        messages = _joined(self._session.turns[place].message for place in asked)
        node = self._nodes[start] if start >= 0 else -1
        if not messages and node >= 0:
            return node
        messages = messages or [_EARLIER]
        for tokens in self._texts.root(messages) if start < 0 else [self._texts.delta(messages, self._before(start))]:
            node = self._context(node, tokens, call, role)
        return node

    def _context(self, parent: int, tokens: list[int], call: int, role: Role) -> int:
        if not tokens:
            return parent
        node = self._writer.context_node(parent, np.array(tokens, np.int32), self._execution, call, role)
        if node not in self._seen:
            self._seen.add(node)
            self.tokens += len(tokens)
        return node

    def _role(self, place: int) -> Role:
        return Role.SUB_AGENT if self._session.turns[place].agent else Role.MAIN

    def _difference(self, place: int, start: int, asked: list[int]) -> str:
        turns = self._session.turns
        if turns[place].agent not in self._agents:
            return "sub-agent" if turns[place].agent else "clean"
        if start < 0:
            return "compaction" if any(turns[i].anew for i in asked) else "edit"
        return "edit" if start in self._continued else "clean"

    def _digest(self, start: int, asked: list[int]) -> bytes:
        keys = [self._session.turns[place].message.key for place in asked]
        return blake2b(start.to_bytes(8, "little", signed=True) + b"".join(keys), digest_size=16).digest()


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Turns of one role that follow each other as one, as the harness sends them."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == message.role:
            found[-1] = Message(message.role, (*found[-1].blocks, *message.blocks))
        else:
            found.append(message)
    return found
