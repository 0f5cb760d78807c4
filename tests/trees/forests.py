"""Random stores: what harnesses may do to a tree, and a plain model of what must be read back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreWriter

GROUPS = 2
SIZE = 3


@dataclass(frozen=True)
class Turn:
    """One call: from some node known to the execution, some context, some sampled tokens (0: none), an end or none."""

    execution: int
    anchor: int
    context: int
    sampled: int
    role: Role
    fate: Fate | None
    then: str
    """"" | commit | seal | reopen | end"""


turns = st.builds(
    Turn,
    execution=st.integers(0, GROUPS * SIZE - 1),
    anchor=st.integers(0, 1 << 16),
    context=st.integers(1, 4),
    sampled=st.integers(0, 5),
    role=st.sampled_from(Role),
    fate=st.sampled_from([Fate.DELIVERED] * 6 + [Fate.SUPERSEDED, Fate.BROKEN, Fate.CANCELLED, None]),
    then=st.sampled_from(["", "", "", "commit", "commit", "end", "seal", "reopen"]),
)
forests = st.lists(turns, min_size=1, max_size=25)


@dataclass
class Model:
    """Everything that was appended, in plain dicts."""

    nodes: dict[int, Node] = field(default_factory=dict)
    calls: dict[int, tuple[Intent, CallEnd | None]] = field(default_factory=dict)
    of: dict[int, set[int]] = field(default_factory=dict)
    ends: dict[int, ExecutionEnd] = field(default_factory=dict)

    def path(self, node: int) -> list[int]:
        return [*self.path(self.nodes[node].parent), node] if node >= 0 else []


class Play:
    """Plays turns on a store and keeps the model. Executions 0..5 belong to groups 0 and 1."""

    def __init__(self, directory, seed: int = 0) -> None:
        self.directory = directory
        self.writer = StoreWriter(directory, {"test": seed})
        self.model = Model()
        self.rng = np.random.default_rng(seed)
        for group in range(GROUPS):
            self.writer.append(Group(group, f"tasks/{group}", SIZE, 0, 0))
        for execution in range(GROUPS * SIZE):
            assert self.writer.allocate_execution() == execution
            self.writer.append(Execution(execution, execution // SIZE, execution % SIZE, 0))
            self.model.of[execution] = set()

    def play(self, turns: list[Turn]) -> None:
        for turn in turns:
            if turn.execution not in self.model.ends:
                self.call(turn)
            self.after(turn)

    def call(self, turn: Turn) -> None:
        e, writer, model = turn.execution, self.writer, self.model
        anchors = [-1, *sorted(model.of[e])]
        parent = anchors[turn.anchor % len(anchors)]
        call = writer.allocate_call()
        tokens = self.rng.integers(0, 2, turn.context).astype(np.int32)
        prompt = writer.context_node(parent, tokens, e, call, turn.role)
        model.nodes.setdefault(prompt, Node(prompt, parent, e, call, NodeKind.CONTEXT, turn.role, tokens))
        model.of[e].update(model.path(prompt))
        intent = Intent(call, e, prompt, turn.role, bytes([call % 256]) * 16)
        writer.append(intent)
        writer.commit()
        sampled = -1
        if turn.sampled:
            n, sampled = turn.sampled, writer.allocate_node()
            logprobs = -self.rng.random(n).astype(np.float32)
            versions = np.arange(n, dtype=np.int32)
            tokens = self.rng.integers(0, 99, n).astype(np.int32)
            node = Node(sampled, prompt, e, call, NodeKind.SAMPLED, turn.role, tokens, logprobs, versions)
            writer.append(node)
            model.nodes[sampled] = node
            model.of[e].add(sampled)
        end = None if turn.fate is None else CallEnd(call, e, sampled, turn.fate, "stop", "clean")
        if end is not None:
            writer.append(end)
        model.calls[call] = (intent, end)

    def after(self, turn: Turn) -> None:
        match turn.then:
            case "commit":
                self.writer.commit()
            case "end" if turn.execution not in self.model.ends:
                end = ExecutionEnd(turn.execution, "done", 0.5, True, 1, 2, 3.0, "détail")
                self.writer.append(end)
                self.model.ends[turn.execution] = end
            case "seal":
                self.writer.seal()
            case "reopen":
                self.writer.close()
                self.writer = StoreWriter(self.directory)


def begin(writer, execution=0, group=0):
    writer.append(Group(group, "t", 2, 0, 0))
    writer.append(Execution(writer.allocate_execution(), group, 0, 0))


def one_call(writer, execution, prompt, tokens=(1, 2)):
    call, node, n = writer.allocate_call(), writer.allocate_node(), len(tokens)
    writer.append(Intent(call, execution, prompt, Role.MAIN, bytes(16)))
    writer.append(Node(node, prompt, execution, call, NodeKind.SAMPLED, Role.MAIN, np.array(tokens), -np.ones(n), np.zeros(n)))
    writer.append(CallEnd(call, execution, node, Fate.DELIVERED, "stop", "clean"))
    return node


def finish(writer, execution):
    writer.append(ExecutionEnd(execution, "done", 1.0, True, 1, 2, 0.5))
