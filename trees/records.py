"""What can be appended to a trajectory store: frozen records, one noun each.

Ordering key: the record's place in the journal. Identity: `execution`, `node` and `call` are int64 handed out by the writer's
owner, dense and never used twice inside one store. One *attempt* of a task is one execution: an execution that was lost and is
tried again gets a new id, the same (group, index) and a higher attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class NodeKind(IntEnum):
    """CONTEXT: system, user, tool or harness tokens, never a target. SAMPLED: tokens that the policy drew (targets)."""

    CONTEXT = 0
    SAMPLED = 1


class Role(IntEnum):
    """The conversation that a node's call belongs to; lower trains first (qwengyre.md 3.4)."""

    MAIN = 0
    MAIN_SUMMARY = 1
    SUB_AGENT = 2
    SUB_AGENT_SUMMARY = 3


class Fate(IntEnum):
    """What became of a call. Only DELIVERED calls are trained on."""

    DELIVERED = 0
    SUPERSEDED = 1
    BROKEN = 2
    CANCELLED = 3


@dataclass(frozen=True)
class Group:
    """`size` executions of one task. `task` is a path or name, `version` the weights at dispatch, `burst` the burst's index."""

    group: int
    task: str
    size: int
    version: int
    burst: int


@dataclass(frozen=True)
class Execution:
    """One attempt at one task; written when it is handed to a supervisor."""

    execution: int
    group: int
    index: int
    attempt: int


@dataclass(frozen=True, eq=False)
class Node:
    """A run of tokens under `parent` (-1: a root). `execution` is who appended it first; context nodes are shared.

    `tokens` int32[n]; `logprobs` float32[n] and `versions` int32[n] for SAMPLED nodes, None for CONTEXT. `call` is the call that
    brought it (-1 none).
    """

    node: int
    parent: int
    execution: int
    call: int
    kind: NodeKind
    role: Role
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Intent:
    """Written, and durable, before a call is dispatched to an engine. `prompt` is the node at which the prompt ends."""

    call: int
    execution: int
    prompt: int
    role: Role
    digest: bytes
    """16 bytes of the request body's hash (retries are byte-identical)."""


@dataclass(frozen=True)
class CallEnd:
    """A call that is over. `sampled`: its SAMPLED node or -1; `finish`: stop | length | fault | cancelled; why the call forked.

    A second one may follow, that says SUPERSEDED instead of DELIVERED and the same otherwise: the answer was asked for anew.
    """

    call: int
    execution: int
    sampled: int
    fate: Fate
    finish: str
    difference: str
    """clean | retry | edit | compaction | sub-agent | side-query | drift | lost-call: how the request related to what was recorded."""


@dataclass(frozen=True)
class ExecutionEnd:
    """The end of an execution. `score` in [0, 1]; `valid` False: leaves training and the group's baseline (tasks.md)."""

    execution: int
    reason: str
    score: float
    valid: bool
    calls: int
    tokens: int
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Boundary:
    """A place in a live execution's histories, for whoever goes on recording after a restart; in the journal only, never in a segment.

    `node` ends where a history whose digest is `digest` (16 bytes) ends, after `depth` messages. A call has at most two: of its prompt
    (`node` is the intent's prompt) and of its answer (`node` is the sampled one). `note` is the recorder's own, at most 64 KiB.
    """

    execution: int
    call: int
    node: int
    depth: int
    digest: bytes
    note: bytes = b""


Record = Group | Execution | Node | Intent | CallEnd | ExecutionEnd | Boundary
