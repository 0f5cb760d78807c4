"""Random conversations of agents: tools, calls at once, thoughts, system messages anywhere."""

from __future__ import annotations

from hypothesis import strategies as st

from gyre_hpc.gateway.dialects.canonical import Block, Head, Message

TOOLS = tuple({"name": name, "description": "d", "input_schema": {"type": "object", "properties": {}}} for name in ("run", "read"))
HEADS = st.sampled_from([Head(), Head("Sys."), Head("Sys.", TOOLS)])
TEXTS = st.sampled_from(["x y", "n\u00e9", "line\nline", " lead", "tail ", '{"a": 1}', "7"])


def text(said: str) -> Block:
    """A text block."""
    return {"type": "text", "text": said}


@st.composite
def histories(draw: st.DrawFn, most_calls: int = 3, thoughts: bool = True) -> list[Message]:
    """A conversation that ends where an answer is asked for. `most_calls`: in one turn."""
    messages = [Message("system", (text(draw(TEXTS)),))] if draw(st.integers(0, 7)) == 0 else []
    messages.append(Message("user", (text(draw(TEXTS)),)))
    count = 0
    for _ in range(draw(st.integers(1, 4))):
        calls = draw(st.integers(0, most_calls))
        ids = [f"toolu_{count + i:08x}_0" for i in range(calls)]
        count += calls
        blocks: list[Block] = [{"type": "thinking", "thinking": "hmm"}] if thoughts and draw(st.booleans()) else []
        blocks += [text(draw(TEXTS))] if not calls or draw(st.booleans()) else []
        inputs = st.sampled_from([{}, {"c": "ls"}, {"n": 1, "c": "\u00e9\n"}])
        blocks += [{"type": "tool_use", "id": i, "name": draw(st.sampled_from(["run", "read"])), "input": draw(inputs)} for i in ids]
        shown: list[Block] = [{"type": "tool_result", "tool_use_id": i, "content": [draw(TEXTS)], "is_error": False} for i in ids]
        shown += [text(draw(TEXTS))] if not calls or draw(st.integers(0, 3)) == 0 else []
        messages += [Message("assistant", tuple(blocks)), Message("user", tuple(shown))]
        if draw(st.integers(0, 5)) == 0:
            messages.append(Message(draw(st.sampled_from(["system", "user"])), (text(draw(TEXTS)),)))
    return messages
