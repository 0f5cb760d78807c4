"""Small session traces: made by hypothesis, or written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SIZE = 4
Row = dict[str, Any]


def request(blocks: list[int], rest: int = 0, out: int = 0, **more: Any) -> Row:
    """A request whose prompt is these whole blocks and `rest` tokens."""
    return {"in": SIZE * len(blocks) + rest, "out": out, "hash_ids": blocks, "stop": "tool_use", **more}


def agent(*requests: Row, name: str = "a1") -> Row:
    return {"type": "subagent", "agent_id": name, "requests": list(requests)}


def session(*requests: Row, name: str = "s") -> Row:
    return {"id": name, "block_size": SIZE, "requests": list(requests)}


def write(path: Path, *sessions: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in sessions))
    return path


def calls(row: Row) -> list[Row]:
    """The requests of a session or sub-agent in order, those of its sub-agents where they stand."""
    return [call for r in row["requests"] for call in (calls(r) if "requests" in r else [r])]


@st.composite
def sessions(draw: st.DrawFn, name: str = "s") -> Row:
    """Prompts that go on from, fork off, or repeat earlier ones; few different ids, so that everything meets everything."""
    requests: list[Row] = []
    for _ in range(draw(st.integers(1, 9))):
        known = [call["hash_ids"] for call in calls({"requests": requests})] or [[]]
        old = draw(st.sampled_from([known[-1], draw(st.sampled_from(known))]))
        kept = draw(st.sampled_from([len(old), len(old), draw(st.integers(0, len(old)))]))
        blocks = [*old[:kept], *draw(st.lists(st.integers(1, 3), max_size=4))]
        rest = draw(st.integers(0 if blocks else 1, SIZE - 1))
        made = request(blocks, rest, draw(st.integers(0, 3 * SIZE)), stop=draw(st.sampled_from(["tool_use", "", "max_tokens"])))
        requests.append(agent(made, name=f"a{draw(st.integers(1, 2))}") if draw(st.integers(0, 4)) == 0 else made)
    return session(*requests, name=name)
