"""Where a call starts: its history matched to the deepest recorded turn, and the tokens of what is new behind that.

Invariants: the prompt of a call is the tokens on its path, never a re-tokenised echo; only what is new is rendered and tokenised, beside
the event loop where that is long; nothing is written here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from gyre_hpc.engines.prompt import Prompt, Run
from gyre_hpc.gateway.calls import BadRequest
from gyre_hpc.gateway.dialects.canonical import Conversation
from gyre_hpc.gateway.live import Live
from gyre_hpc.gateway.notes import Asked
from gyre_hpc.gateway.roots import Roots
from gyre_hpc.gateway.text.template import TurnRenderer
from trees.matching import Match, MessageIndex

LONG = 100_000
"""Bytes of new messages from which on they are rendered and tokenised beside the event loop."""

MANY = 100
"""Turns from which on a template that looks back at all of them does, too: some search them for each result."""


@dataclass(frozen=True)
class Start:
    """Where a call starts: behind the recorded turn `match` (node -1: at the root), with new `parts`; `ids` is all of it.

    `asked`: what the history takes of it.
    """

    match: Match
    parts: list[Run]
    ids: Prompt
    asked: Asked


class Prompts:
    """Makes them, with one model's template; `index` knows the recorded turns of all live executions."""

    def __init__(self, renderer: TurnRenderer, index: MessageIndex) -> None:
        self._renderer, self._index = renderer, index
        self._roots = Roots(renderer)

    async def of(self, live: Live, conversation: Conversation, agent: str) -> Start:
        """Raises BadRequest for a conversation that can't be rendered."""
        messages = conversation.messages
        if not messages:
            raise BadRequest("the conversation is empty")
        history = conversation.digests if messages[-1].role == "assistant" else conversation.digests[:-1]
        match = self._index.deepest(live.execution, history)
        first = {0: match.depth, 1: max(0, match.depth - 1), 2: 0}[self._renderer.looks_back]  # of the turns that are read
        if first < conversation.known and conversation.whole is not None:
            conversation = conversation.whole()
            messages = conversation.messages
        last = int(live.nodes[match.node][1][-1]) if match.node >= 0 else -1
        size = sum(len(message.canonical) for message in messages[match.depth :])
        try:
            if size < LONG and (self._renderer.looks_back < 2 or match.depth < MANY):
                parts = self._render(conversation, match, last)
            else:
                parts = await asyncio.to_thread(self._render, conversation, match, last)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        asked = live.history.classify(conversation, match, agent)
        return Start(match, parts, live.prompt(match.node, parts), asked)

    def _render(self, conversation: Conversation, match: Match, last: int) -> list[Run]:
        """What is new behind `match`, whose node ends with the token `last`: one run for each node to come."""
        if match.node < 0:
            return [Run(part) for part in self._roots.of(conversation)]
        before = conversation.messages[: match.depth] if self._renderer.looks_back else ()
        delta = self._renderer.behind(conversation.messages[match.depth :], last, before)
        return [Run(np.asarray(delta, np.int32))]
