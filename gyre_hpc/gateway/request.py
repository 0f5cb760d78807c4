"""One call as a dialect hands it on: what is asked, free of any protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gyre_hpc.gateway.dialects.canonical import Conversation, Message


@dataclass(frozen=True)
class CallRequest:
    """One call, free of dialect. `agent`: the harness's id of a sub-agent, or ""; `digest`: 16 bytes over body and agent.

    `delivered`: the answer -> the answer as it can come back in this dialect, where that tells less apart.
    """

    conversation: Conversation
    max_tokens: int
    agent: str
    digest: bytes
    delivered: Callable[[Message], Message] = lambda reply: reply
