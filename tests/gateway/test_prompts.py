"""A template that looks back is shown what stands before, also where a body was read in part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Known, Message
from gyre_hpc.gateway.prompts import Prompts
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.families import COMMAND, HARMONY, LLAMA, Family, family_model
from trees.matching import Match


@pytest.mark.parametrize(("family", "read"), [(LLAMA, False), (HARMONY, True), (COMMAND, True)], ids=["nothing", "one turn", "all turns"])
async def test_the_text_of_known_turns_is_read_where_it_is_needed(tmp_path: Path, family: Family, read: bool) -> None:
    renderer = TurnRenderer(family_model(tmp_path, family))
    call = {"type": "tool_use", "id": "i", "name": "run", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "i", "content": ["out"], "is_error": False}
    whole = (Message("user", ({"type": "text", "text": "go"},)), Message("assistant", (call,)), Message("user", (result,)))
    asked: list[bool] = []

    def again() -> Conversation:
        asked.append(True)
        return Conversation(Head(), whole)

    known = tuple(Known(message.role, message.key, False) for message in whole[:2])
    index: Any = SimpleNamespace(deepest=lambda execution, history: Match(2, 0, b""))
    history = SimpleNamespace(classify=lambda conversation, match, agent: None)
    live: Any = SimpleNamespace(execution=1, nodes={0: (None, [65])}, history=history, prompt=lambda node, parts: parts)
    start = await Prompts(renderer, index).of(live, Conversation(Head(), (*known, whole[2]), known=2, whole=again), "")
    assert bool(asked) == read
    assert start.parts[0].tokens.tolist() == renderer.behind(whole[2:], 65, whole[:2])
