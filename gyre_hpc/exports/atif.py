"""ATIF, Harbor's Agent Trajectory Interchange Format (ATIF-v1.7: its RFC 0001): one JSON document an execution.

The document's own steps are the main conversation as it ended: the path to the newest leaf of the role `main`. Every other leaf (what was
before a compaction, a sub-agent, an edit) is a trajectory of its own below `subagent_trajectories`; steps that a document has already are
`is_copied_context` and have no token ids, so that every sampled token stands there once. A sampled node is an agent's step, read by the
run's own parsers; context behind a step that called tools is its observation, other context a step of the user, the first of several at
the root one of the system. Invariants: `completion_token_ids` and `logprobs` are the recorded ones; `prompt_token_ids` are left out (they
would grow with the square of a conversation; the steps before have them). Text is what the tokenizer makes of the tokens, without the
template's own marks around a turn where those can be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gyre_hpc import __version__
from gyre_hpc.exports.lineage import Lineages
from gyre_hpc.gateway.dialects.canonical import Message
from gyre_hpc.gateway.text.parsers import Parsers
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.toolcalls import blocks_of
from trees.export import as_dict
from trees.records import Group, NodeKind, Role
from trees.tree import Tree

SCHEMA = "ATIF-v1.7"
Document = dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """Who acted: the program's name and the model's."""

    name: str
    model: str


class Trajectories:
    """Makes the documents. `renderer`: of the model that the trees were recorded with; `parsers`: what read its answers;
    `lineages`: of the run."""

    def __init__(self, renderer: TurnRenderer, parsers: Parsers, agent: Agent, lineages: Lineages) -> None:
        self._renderer = renderer
        self._parsers = parsers
        self._lineages = lineages
        self._agent = {"name": agent.name, "version": __version__, "model_name": agent.model}
        self._wraps = _wraps(renderer)

    def document(self, tree: Tree, groups: Mapping[int, Group]) -> Document | None:
        """One execution; None: nothing was recorded of it."""
        if not tree.nodes:
            return None
        main, *others = sorted(tree.leaves, key=lambda leaf: (tree.role_of(leaf) is not Role.MAIN, -leaf))
        seen: dict[int, Any] = {}
        name = f"execution-{tree.execution.execution}"
        facts = {key: value for key, value in self._lineages.told(as_dict(tree, groups)).items() if key not in ("nodes", "calls")}
        found = self._trajectory(tree, main, name, name, seen)
        found["extra"] = {**facts, "role": tree.role_of(main).name.lower()}
        below = [self._trajectory(tree, leaf, name, f"{name}-leaf-{leaf}", seen) for leaf in sorted(others)]
        sampled = [row for row in tree.nodes.values() if row.kind is NodeKind.SAMPLED]
        found["final_metrics"] = {
            "total_prompt_tokens": sum(tree.path_length(call.prompt) for call in tree.calls.values() if call.prompt >= 0),
            "total_completion_tokens": sum(row.length for row in sampled),
            "total_steps": len(found["steps"]),
        }
        if below:
            found["subagent_trajectories"] = below
            found["notes"] = "subagent_trajectories: every other leaf of the execution's tree; extra.role tells what it was"
        return found

    def _trajectory(self, tree: Tree, leaf: int, session: str, name: str, seen: dict[int, Any]) -> Document:
        """`seen`: nodes that the document has already: the step of what was sampled, the text of context."""
        steps: list[Document] = []
        path = tree.path(leaf)
        before = 0
        for node in path:
            row, copied = tree.nodes[node], {"is_copied_context": True} if node in seen else {}
            if row.kind is NodeKind.SAMPLED:
                step: Document | None = seen[node] if copied else self._sampled(tree, node, before)
                seen.setdefault(node, _without_tokens(step) if step else step)
            else:
                seen[node] = seen[node] if copied else self._unwrapped(self._renderer.shown(tree.tokens_of([node]).tolist()))
                step = self._context(tree, path, seen[node], steps)
            before += row.length
            if step is not None:
                steps.append({"step_id": len(steps) + 1, **step, **copied})
        document = {"schema_version": SCHEMA, "session_id": session, "trajectory_id": name, "agent": self._agent, "steps": steps}
        return {**document, "extra": {"role": tree.role_of(leaf).name.lower()}}

    def _context(self, tree: Tree, path: Sequence[int], shown: tuple[str, str], steps: list[Document]) -> Document | None:
        """A step of its own, or None: the observation of the step before. `shown`: see `_unwrapped`."""
        kind, text = shown
        behind = steps[-1] if steps and steps[-1]["source"] == "agent" else None
        if behind is not None and (kind == "tool" or behind.get("tool_calls")):
            calls = behind.get("tool_calls") or []
            source = {"source_call_id": calls[0]["tool_call_id"]} if len(calls) == 1 and kind == "tool" else {}
            behind.setdefault("observation", {"results": []})["results"].append({**source, "content": text})
            return None
        first = not steps and len(path) > 1 and tree.nodes[path[1]].kind is NodeKind.CONTEXT
        return {"source": "system" if first else "user", "message": text}

    def _sampled(self, tree: Tree, node: int, before: int) -> Document:
        row, columns = tree.nodes[node], tree.columns
        if columns is None:
            raise ValueError(f"tree of execution {tree.execution.execution} was read without tokens")
        span = slice(row.offset, row.offset + row.length)
        tokens = columns.tokens[span].tolist()
        call = tree.calls.get(row.call)
        parser = self._parsers.start(f"toolu_{row.call:08x}", [], self._renderer.opens_thought)
        pieces = parser.feed(self._renderer.text(tokens))
        blocks = blocks_of([*pieces, *parser.finish(call is not None and call.finish == "length")])
        message = Message("assistant", blocks)
        step: Document = {"source": "agent", "message": message.text, "llm_call_count": 1}
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        if thought:
            step["reasoning_content"] = thought
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if calls:
            step["tool_calls"] = [{"tool_call_id": c["id"], "function_name": c["name"], "arguments": c["input"]} for c in calls]
        versions = columns.versions[span]
        step["metrics"] = {
            "prompt_tokens": before,
            "completion_tokens": row.length,
            "completion_token_ids": tokens,
            "logprobs": columns.logprobs[span].tolist(),
            "extra": {"versions": versions.tolist(), "target": tree.is_target(node), "node": node, "call": row.call},
        }
        if call is not None:
            fate = call.fate.name.lower() if call.fate is not None else "open"
            step["extra"] = {"fate": fate, "finish": call.finish, "difference": call.difference, "role": call.role.name.lower()}
        return step

    def _unwrapped(self, text: str) -> tuple[str, str]:
        """("user" or "tool" if it is known to be one, the text without the template's marks around it)."""
        for kind, head, tail in self._wraps:
            if text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail) and head not in text[len(head) :]:
                return kind, text[len(head) : len(text) - len(tail)]
        return "", text


def _without_tokens(step: Document) -> Document:
    """A sampled step as others repeat it: a history that many leaves share would be written out for each."""
    metrics = {key: value for key, value in step["metrics"].items() if key not in ("completion_token_ids", "logprobs")}
    return {**step, "metrics": {**metrics, "extra": {key: value for key, value in metrics["extra"].items() if key != "versions"}}}


def _wraps(renderer: TurnRenderer) -> list[tuple[str, str, str]]:
    """(kind, what the template writes before a message that follows an answer, and behind it), with and without the end of the answer."""
    mark = "gyre7c1e42"
    user = Message("user", ({"type": "text", "text": mark},))
    tool = Message("user", ({"type": "tool_result", "tool_use_id": "i", "content": [mark], "is_error": False},))
    found = []
    for kind, message in (("user", user), ("tool", tool)):
        for closed in (True, False):
            head, marked, tail = renderer.shown(renderer.delta([message], closed)).partition(mark)
            if marked:
                found.append((kind, head, tail))
    return sorted(found, key=lambda wrap: len(wrap[1]), reverse=True)  # a result's marks begin with those of a user's turn


def write(folder: Path, documents: Iterable[tuple[int, Document | None]]) -> int:
    """Write each (execution, document) as `execution-NNNNNN.json`; returns how many."""
    count = 0
    for execution, document in documents:
        if document is not None:
            (folder / f"execution-{execution:06d}.json").write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
            count += 1
    return count
