"""First prompts are made once for all who begin alike, and only for them."""

from __future__ import annotations

from typing import Any

import pytest

from gyre_hpc.gateway.dialects.canonical import Conversation, Head, normalise_messages
from gyre_hpc.gateway.roots import Roots
from gyre_hpc.gateway.text.template import TurnRenderer

HEAD = Head("Do it.", ({"name": "bash", "description": "", "input_schema": {"type": "object"}},))


def asked(*turns: Any, head: Head = HEAD) -> Conversation:
    roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
    return Conversation(head, normalise_messages({"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)))


@pytest.fixture
def rendered(renderer: TurnRenderer, monkeypatch: pytest.MonkeyPatch) -> list[Conversation]:
    """The conversations that were really rendered."""
    seen: list[Conversation] = []
    root = TurnRenderer.root

    def counted(self: TurnRenderer, conversation: Conversation) -> list[int]:
        seen.append(conversation)
        return root(self, conversation)

    monkeypatch.setattr(TurnRenderer, "root", counted)
    return seen


def test_who_begins_alike_shares_the_prompt(renderer: TurnRenderer, rendered: list[Conversation]) -> None:
    roots = Roots(renderer)
    first = roots.of(asked("task"))
    assert roots.of(asked([{"type": "text", "text": "task", "cache_control": {"type": "ephemeral"}}])) is first
    assert len(rendered) == 1
    assert [part.tolist() for part in first] == renderer.split(renderer.root(asked("task")))
    other = roots.of(asked("task", head=Head("Do it well.")))
    assert [part.tolist() for part in other] != [part.tolist() for part in first]


def test_a_history_with_answers_is_rendered_as_it_is(renderer: TurnRenderer, rendered: list[Conversation]) -> None:
    """Thoughts are not compared, but they are rendered."""
    roots = Roots(renderer)
    for _ in range(2):
        roots.of(asked("task", "answer", "more"))
    assert len(rendered) == 2


def test_what_was_used_longest_ago_goes_first(renderer: TurnRenderer, rendered: list[Conversation]) -> None:
    size = sum(map(len, Roots(renderer).of(asked("task 0"))))
    roots = Roots(renderer, limit=2 * size)
    rendered.clear()
    for n in (0, 1, 0, 2, 0, 1):
        roots.of(asked(f"task {n}"))
    assert len(rendered) == 4
    small = Roots(renderer, limit=1)
    assert small.of(asked("task")) is not small.of(asked("task"))
