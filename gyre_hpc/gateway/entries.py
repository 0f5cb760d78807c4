"""What is written down of a call, record by record: context nodes, intent and boundary at its begin; what was sampled, and
the answer's boundary, at its end.

Invariants: records are appended in the order in which a reader needs them (a node before what names it), never made durable here; what is
stored is what the engine sampled; boundaries are those of the canonical form of the answer *as it was delivered*; an answer that said
nothing is superseded when it is asked for again, and no history goes on behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gyre_hpc.gateway.dialects.canonical import Message
from gyre_hpc.gateway.live import Live
from gyre_hpc.gateway.notes import NOTED_TOOLS, Answered
from gyre_hpc.gateway.prompts import Start
from gyre_hpc.gateway.request import CallRequest
from gyre_hpc.gateway.roles import UNEXPLAINED
from gyre_hpc.gateway.turn import Turn
from trees.matching import Match, MessageIndex, chain
from trees.records import Fate, Intent, Node, NodeKind, Role
from trees.store import StoreWriter

log = logging.getLogger(__name__)
WARNINGS = 10
"""Forks of one execution that a warning event tells of."""


class Entries:
    """Appends them to `store` and keeps `index` to it; `on_fork` hears of forks that nothing explains."""

    def __init__(self, store: StoreWriter, index: MessageIndex, on_fork: Callable[[dict[str, Any]], None]) -> None:
        self._store, self._index, self._on_fork = store, index, on_fork

    def begin(self, live: Live, request: CallRequest, prompt: Start) -> tuple[int, int]:
        """What is new of its prompt, the call's intent and where its history ends: (call, node), appended and not yet durable."""
        call = self._store.allocate_call()
        node, asked = prompt.match.node, prompt.asked
        for part in prompt.parts:
            parent, node = node, self._store.context_node(node, part.tokens, live.execution, call, asked.verdict.role)
            part.tokens = self._store.forest.nodes[node].tokens  # one array for both
            live.nodes[node], live.runs[node] = (parent, part.tokens), part
        live.trunk = (node, list(prompt.ids.runs), len(prompt.ids))
        silent = live.silent.pop(request.digest, None)
        if silent is not None:
            live.delivered.pop(request.digest, None)  # if the new call breaks, the next one is new again
            self._store.append(replace(silent, fate=Fate.SUPERSEDED))
            self._index.drop(live.execution, Match(0, silent.sampled, asked.prompt))  # no history goes on behind it
        self._store.append(Intent(call, live.execution, node, asked.verdict.role, request.digest))
        self._store.append(asked.boundary(live.execution, call, node, len(request.conversation.messages)))
        if asked.verdict.difference in UNEXPLAINED:
            self._warn(live, call, prompt)
        return call, node

    def sampled(self, live: Live, turn: Turn, role: Role) -> int:
        """The node of what a turn has sampled."""
        node = self._store.allocate_node()
        said = turn.sampled()
        columns = (said.tokens, said.logprobs, said.versions)
        self._store.append(Node(node, turn.node, live.execution, turn.call, NodeKind.SAMPLED, role, *columns))
        live.nodes[node] = (turn.node, self._store.forest.nodes[node].tokens)
        return node

    def answer(self, live: Live, request: CallRequest, prompt: Start, turn: Turn, sampled: int, reply: Message) -> tuple[Answered, Match]:
        """What the history takes of the answer, and where it ends there (both appended)."""
        depth, digest = len(request.conversation.messages), prompt.asked.prompt
        if not reply.blank:
            depth, digest = depth + 1, chain(digest, reply.key)
        answered = Answered(prompt.asked, reply.key, reply.tool_ids[:NOTED_TOOLS], sampled)
        self._store.append(answered.boundary(live.execution, turn.call, depth, digest))
        return answered, Match(depth, sampled, digest)

    def _warn(self, live: Live, call: int, prompt: Start) -> None:
        """Of the first forks of an execution that nothing explains; the record counts them all."""
        difference, depth = prompt.asked.verdict.difference, prompt.match.depth
        log.warning("execution %d: a turn came back in an unknown form after %d messages (%s)", live.execution, depth, difference)
        live.warnings += 1
        if live.warnings <= WARNINGS:
            self._on_fork({"execution": live.execution, "call": call, "difference": difference, "messages": depth})
