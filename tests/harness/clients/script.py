"""The scripted engine, the only fake of this tier: it replies with prepared tokens to what a prompt asks, and fails as it is told.

A script is a list of conversations, each with a test of the prompt and its ordered replies; the first one that accepts a prompt gives its
next reply. What is asked beyond the script, or what nothing accepts, is answered with "Done." and kept in `unexpected`.
A reply is told apart from its continuation on another engine, or after a fault, by the request's id, as in a real engine by its prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from gyre_hpc.engines.protocol import EngineFault, GenerateRequest, TokenChunk
from gyre_hpc.gateway.text.template import TurnRenderer

TURN = "<|im_start|>"
OTHERS = "others-"
"""How ids begin of calls that only fill an engine: it says nothing to them until they are cancelled."""


def call(name: str, /, **arguments: object) -> str:
    """What a policy writes to call a tool."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass(frozen=True)
class Asked:
    """A prompt as text, and its turns: (role, text) in order."""

    request: GenerateRequest
    text: str

    @property
    def turns(self) -> list[tuple[str, str]]:
        parts = [part.partition("\n") for part in self.text.split(TURN)[1:-1]]
        return [(role, text.removesuffix("\n").removesuffix("<|im_end|>")) for role, _, text in parts]

    @property
    def system(self) -> str:
        """The text of the first turn, tools included, if it is the system's."""
        return next((text for role, text in self.turns[:1] if role == "system"), "")

    @property
    def first(self) -> str:
        """The text of the first user turn."""
        return next((text for role, text in self.turns if role == "user"), "")

    @property
    def last(self) -> str:
        """The text of the last turn."""
        return self.turns[-1][1] if self.turns else ""


@dataclass(frozen=True)
class Reply:
    """`text`, then the end of the turn (not with `cut`: then it looks like max_tokens, which the engine must be asked to be).

    `faults`: engine faults on this call, each after `at` more tokens (a call with more than the router bears fails).
    `act`: started once, as a task, when `at` tokens were said (a route that closes, say). `pause`: seconds between chunks.
    """

    text: str
    cut: bool = False
    faults: int = 0
    at: int = 0
    act: Callable[[], Awaitable[object]] | None = None
    pause: float = 0.0


@dataclass
class Conversation:
    """`accepts` a prompt; `replies` in order."""

    name: str
    accepts: Callable[[Asked], bool]
    replies: list[Reply]
    spare: int = 0
    """Replies at the end that need not be asked for."""
    asked: int = 0


@dataclass
class Said:
    """One call: which conversation, its first prompt, and all the tokens that were meant (`tokens`) and said (`said`)."""

    conversation: str
    asked: Asked
    reply: Reply
    tokens: list[int]
    finish: str
    said: int = 0
    faults: int = 0
    acted: bool = False


@dataclass
class Script:
    """The conversations of one test, and what was said."""

    renderer: TurnRenderer
    step: int = 16
    """Tokens of a chunk."""
    conversations: list[Conversation] = field(default_factory=list)
    said: dict[str, Said] = field(default_factory=dict)
    """By request id, in order of arrival."""
    unexpected: list[Asked] = field(default_factory=list)
    tasks: set[asyncio.Future[object]] = field(default_factory=set)

    def on(self, name: str, accepts: Callable[[Asked], bool] | str, *replies: Reply | str, spare: int = 0) -> None:
        """A conversation; a text accepts the prompts in whose first user turn it stands."""
        test = (lambda asked: accepts in asked.first) if isinstance(accepts, str) else accepts
        self.conversations.append(Conversation(name, test, [r if isinstance(r, Reply) else Reply(r) for r in replies], spare))

    def of(self, name: str) -> list[Said]:
        """The calls of one conversation."""
        return [said for said in self.said.values() if said.conversation == name]

    @property
    def left(self) -> dict[str, int]:
        """Replies that nobody asked for, by conversation."""
        return {c.name: len(c.replies) - c.asked for c in self.conversations if c.asked < len(c.replies) - c.spare}

    def begin(self, request: GenerateRequest) -> Said:
        """The call with this id; chooses its reply when it is new."""
        if request.request_id in self.said:
            return self.said[request.request_id]
        tokenizer = self.renderer.tokenizer
        asked = Asked(request, tokenizer.decode(request.prompt, skip_special_tokens=False))
        chosen = next((c for c in self.conversations if c.accepts(asked)), None)
        if chosen is None or chosen.asked >= len(chosen.replies):
            self.unexpected.append(asked)
            name, reply = "unexpected", Reply("Done.")
        else:
            name, reply = chosen.name, chosen.replies[chosen.asked]
            chosen.asked += 1
        tokens: list[int] = tokenizer.encode(reply.text, add_special_tokens=False).ids
        tokens = tokens if reply.cut else [*tokens, self.renderer.turn_end]
        limit = request.sampling.max_tokens
        finish = "length" if reply.cut or len(tokens) > limit else "stop"
        said = self.said[request.request_id] = Said(name, asked, reply, tokens[:limit], finish)
        return said

    def act(self, act: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.ensure_future(act())
        self.tasks.add(task)


class ScriptedEngine:
    """An EngineClient: one of the engines (cells) that say what the script says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.served: list[str] = []
        """Request ids, in order, with repetitions for continuations."""
        self.others = 0
        """Calls that only fill it, now."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See EngineClient."""
        if request.request_id.startswith(OTHERS):
            self.others += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.others -= 1
        said = self._script.begin(request)
        self.served.append(request.request_id)
        reply, start = said.reply, request.position
        if start and list(request.prompt[-start:]) != said.tokens[:start]:
            raise AssertionError("a call was continued with other tokens than were said")
        at = start
        while at < len(said.tokens):
            if reply.act is not None and not said.acted and at >= reply.at:
                said.acted = True
                self._script.act(reply.act)
            if said.faults < reply.faults and at - start >= reply.at:
                said.faults += 1
                raise EngineFault("scripted fault")
            await asyncio.sleep(reply.pause)
            size = self._script.step
            if said.faults < reply.faults or (reply.act is not None and not said.acted):
                size = max(1, min(size, reply.at - (at - start if said.faults < reply.faults else at)))
            piece = said.tokens[at : at + size]
            at += len(piece)
            said.said = max(said.said, at)
            yield self._chunk(piece, said.finish if at >= len(said.tokens) else None)

    async def close(self) -> None:
        """See EngineClient."""

    @staticmethod
    def _chunk(tokens: Sequence[int], finish: str | None) -> TokenChunk:
        return TokenChunk(list(tokens), [-(token % 7) / 8 for token in tokens], [3] * len(tokens), finish)
