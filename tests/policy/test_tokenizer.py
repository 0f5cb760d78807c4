"""The tokenizer and its template: deterministic, lossless, append-only, one token per argument."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.policy.recipe import Recipe, make_tokenizer
from gyre_hpc.policy.tokenizer import END
from gyre_hpc.policy.transcripts import Habits, demonstrate, tools_for_template
from gyre_hpc.tasks.chores import NAMES, NUMBERS

TOOLS = tools_for_template()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(Recipe(), random.Random(7))


def render(tokenizer: Any, conversation: list[dict[str, Any]], ask: bool = False) -> str:
    return str(tokenizer.apply_chat_template(conversation, tools=TOOLS, tokenize=False, add_generation_prompt=ask))


def test_deterministic(tokenizer: Any) -> None:
    again = make_tokenizer(Recipe(), random.Random(7))
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_size(tokenizer: Any) -> None:
    assert len(tokenizer) == Recipe().vocabulary
    assert Recipe().vocabulary % 64 == 0


@given(st.text())
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_arguments_are_the_same_tokens_wherever_they_stand(tokenizer: Any) -> None:
    for word in (*NAMES, *NUMBERS):
        id_, *more = tokenizer(word, add_special_tokens=False).input_ids
        assert len(more) <= (word in NUMBERS)
        if more:
            continue
        for text in (
            f"1. Copy {word} to {word}",
            f'{{"name": "bash", "arguments": {{"command": "rm {word} {word}"}}}}',
            f"'{word}': {word}",
        ):
            assert tokenizer(text, add_special_tokens=False).input_ids.count(id_) == 2


def test_conversations_are_short(tokenizer: Any) -> None:
    rng = random.Random(1)
    lengths = [len(tokenizer(render(tokenizer, c)).input_ids) for _ in range(200) for c in demonstrate(rng, Habits(care=1.0), 3)]
    assert max(lengths) < 140


def test_template_is_append_only(tokenizer: Any) -> None:
    rng = random.Random(2)
    for _ in range(60):
        for conversation in demonstrate(rng, Habits(compaction=0.5, sub_agent=0.5), 3):
            whole = render(tokenizer, conversation)
            for end in range(1, len(conversation)):
                assert whole.startswith(render(tokenizer, conversation[:end]))
                if conversation[end]["role"] == "assistant":
                    assert whole.startswith(render(tokenizer, conversation[:end], ask=True))


@pytest.mark.parametrize("content", ["", "2."])
@pytest.mark.parametrize("calls", [1, 2])
def test_canonical_turn(tokenizer: Any, content: str, calls: int) -> None:
    """What the policy samples for a turn, and what the template makes of the parsed turn, are the same text."""
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": 'echo "ü" > a.txt'}}}
    said = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"ü\\" > a.txt"}}\n</tool_call>'
    turn = "\n".join(([content] if content else []) + [said] * calls)
    start = [{"role": "user", "content": "hello"}]
    parsed = {"role": "assistant", "content": content, "tool_calls": [call] * calls}
    assert render(tokenizer, [*start, parsed]) == render(tokenizer, start, ask=True) + turn + END + "\n"


def test_arguments_as_text_and_content_as_blocks(tokenizer: Any) -> None:
    call = {"function": {"name": "bash", "arguments": '{"command":"ls"}'}}
    text = render(
        tokenizer,
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": None, "tool_calls": [call]}],
    )
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n</tool_call><|im_end|>\n'
    )
