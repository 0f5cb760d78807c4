"""What a call changes in its execution's history, as frozen data: applied when it happens, written down, and applied again after a restart.

A call is *asked* (its intent is written) and, if all goes well, *answered* (its answer was delivered). Both are boundaries of the store
(trees.records.Boundary): where they stand in the history is the boundary's, all else its note, a small JSON list. Invariant: what `History`
holds follows from these two alone, in the order of the journal; so a gateway that is started again judges the next request as the old
one would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from trees.records import Boundary, Role

NOTED_TOOLS = 2000
"""Ids of tool calls of one answer that are noted: a note has 64 KiB, and a policy that goes in circles may make more calls than fit."""


@dataclass(frozen=True)
class Verdict:
    """`base`: MAIN or SUB_AGENT, what the conversation goes on as; `role`: of this call; `difference`: see trees.records.CallEnd."""

    base: Role
    role: Role
    difference: str


@dataclass(frozen=True)
class Asked:
    """A request that was accepted. `head`: key of its head; `prompt`: digest of its whole history; `node`: what it continues, or -1.

    `first`: key of its first turn, when it continues nothing; `tools`: it has any.
    """

    agent: str
    head: bytes
    prompt: bytes
    node: int
    verdict: Verdict
    first: bytes = b""
    tools: bool = False

    def boundary(self, execution: int, call: int, node: int, depth: int) -> Boundary:
        """To be appended behind the intent, whose prompt ends at `node` and has `depth` messages."""
        v = self.verdict
        note = orjson.dumps([self.agent, self.head.hex(), self.node, v.base, v.role, v.difference, self.first.hex(), self.tools])
        return Boundary(execution, call, node, depth, self.prompt, note)

    @staticmethod
    def of(boundary: Boundary) -> Asked:
        """Back from the journal. ValueError, TypeError: the note is not ours."""
        agent, head, node, base, role, difference, first, tools = orjson.loads(boundary.note)
        verdict = Verdict(Role(base), Role(role), difference)
        return Asked(agent, bytes.fromhex(head), boundary.digest, node, verdict, bytes.fromhex(first), bool(tools))


@dataclass(frozen=True)
class Answered:
    """The answer to `asked` was recorded as node `sampled`. `reply`: key of the turn as delivered; `tools`: ids of its first tool calls."""

    asked: Asked
    reply: bytes
    tools: tuple[str, ...]
    sampled: int

    def boundary(self, execution: int, call: int, depth: int, digest: bytes) -> Boundary:
        """To be appended behind the call's end; `digest`: of the history with the answer, `depth` messages."""
        return Boundary(execution, call, self.sampled, depth, digest, orjson.dumps([self.reply.hex(), self.tools]))

    @staticmethod
    def of(boundary: Boundary, asked: Asked) -> Answered:
        """Back from the journal. ValueError, TypeError: the note is not ours."""
        reply, tools = orjson.loads(boundary.note)
        return Answered(asked, bytes.fromhex(reply), tuple(tools), boundary.node)
