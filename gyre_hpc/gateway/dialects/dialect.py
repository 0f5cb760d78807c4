"""What the HTTP side needs of a dialect, and what all dialects share. A dialect is pure: bytes in, bytes out; no sockets, no clock.

Invariant: whatever the dialect, a call is one `CallRequest` and an answer is one list of events (Started, pieces, Ended), so that
recording, retries and durability know nothing of it. An answer's bytes depend on its events alone: a replay is byte-identical.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from blake3 import blake3

from gyre_hpc.gateway.calls import BadRequest, Ended, Event, Started
from gyre_hpc.gateway.dialects.bodies import Memory, Shape, read_body
from gyre_hpc.gateway.dialects.canonical import Conversation
from gyre_hpc.gateway.harnesses import Harness
from gyre_hpc.gateway.request import CallRequest
from gyre_hpc.gateway.text.toolcalls import Piece

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""What JSON escapes: a character of two halves, half of one alone, or anything else."""


class Answer(Protocol):
    """How one call is told to one client; holds the state of its stream."""

    def encode(self, events: Iterable[Event]) -> bytes:
        """These events, which follow those encoded before, as server-sent events."""
        ...

    def ping(self) -> bytes:
        """What keeps a stream alive and says nothing."""
        ...

    def broken(self, message: str, final: bool = False) -> bytes:
        """What tells that the stream broke after its headers were sent; the connection is reset behind it.

        `final`: the request was refused, the same one would be again. Else clients should ask again: empty where a reset says that best.
        """
        ...

    def whole(self, events: Iterable[Event]) -> bytes:
        """All events of a finished call as one JSON body."""
        ...


@dataclass(frozen=True)
class Asked:
    """A request that was understood. `stream`: the client wants server-sent events."""

    call: CallRequest
    stream: bool
    answer: Answer


class Dialect(Protocol):
    """One endpoint. `path`: behind the secret, beginning with a slash; `spent`: the status at which its clients stop, for a cap."""

    @property
    def path(self) -> str: ...

    @property
    def spent(self) -> int: ...

    def ask(self, raw: bytes, headers: Mapping[str, str], model: str, memory: Memory | None = None) -> Asked:
        """Read a request; `model`: the name to answer with when it names none; `memory`: of its execution. Raises BadRequest."""
        ...

    def error_body(self, status: int, message: str, error: Exception | None = None) -> bytes:
        """The body of a refused or failed request."""
        ...


@dataclass(frozen=True)
class Read:
    """A body, and what makes a conversation of it. `digest`: over its bytes."""

    fields: Mapping[str, Any]
    digest: bytes
    conversation: Callable[[], Conversation]


def read_request(
    raw: bytes, shape: Shape, harness: Harness, memory: Memory | None, conversation_of: Callable[[Mapping[str, Any], Harness], Conversation]
) -> Read:
    """Read a body, quickly where it is known. Raises BadRequest, also when its conversation is asked for."""

    def whole() -> Conversation:
        return conversation_of(parse_body(raw), harness)

    body = read_body(raw, shape, harness.name, memory) if memory is not None else None
    if body is None:
        fields = parse_body(raw)
        return Read(fields, blake3(raw).digest(), lambda: sayable(lambda: conversation_of(fields, harness)))
    known = body

    def conversation() -> Conversation:
        try:
            found = sayable(lambda: conversation_of(known.fields, harness))
        except BadRequest:
            return sayable(whole)  # in its words
        return sayable(lambda: known.conversation(found, whole))

    return Read(body.fields, body.digest, conversation)


def sayable(make: Callable[[], Conversation]) -> Conversation:
    """What `make` makes; BadRequest where it has no canonical form: that is found here, not where it would be an error of ours."""
    try:
        made = make()
        _ = made.head.key, [message.key for message in made.messages]  # not `digests`: their beginning may be known in a moment
    except (RecursionError, orjson.JSONEncodeError):
        raise BadRequest("the body is nested too deeply") from None
    return made


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request; half a character in it becomes U+FFFD. Raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = _mended(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _mended(raw: bytes) -> Any:
    """The body of a client that cut a text between the two halves of a character, as JavaScript does: refused, it would end its task."""
    try:
        return orjson.loads(_ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] else found[0], raw))
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def sort_events(events: Iterable[Event]) -> tuple[Started, list[Piece], Ended]:
    """The events of a finished call by kind. Raises ValueError when it is not over."""
    started, ended = None, None
    pieces: list[Piece] = []
    for event in events:
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Ended):
            ended = event
        else:
            pieces.append(event)
    if started is None or ended is None:
        raise ValueError("a call that is not over has no plain answer")
    return started, pieces, ended
