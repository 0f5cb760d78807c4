"""Who sends a request, by what real clients send."""

from __future__ import annotations

import pytest

from gyre_hpc.gateway.harnesses import BUNDLED, CLAUDE_CODE, CODEX, GENERIC, HARNESSES, OPENCODE, QWEN_CODE, Harness, harness_of


@pytest.mark.parametrize(
    ("headers", "harness"),
    [
        ({"User-Agent": "claude-cli/2.1.332 (external, sdk-cli)"}, CLAUDE_CODE),
        ({"User-Agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.171.0)"}, CODEX),
        ({"User-Agent": "QwenCode/0.24.4 (linux; x64)"}, QWEN_CODE),
        ({"User-Agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"}, OPENCODE),
        ({"User-Agent": "gyre-harness/1", "x-claude-code-agent-id": "a"}, BUNDLED),
        ({"User-Agent": "OpenAI/Python 3.57.0"}, GENERIC),
        ({"x-codex-parent-thread-id": "t"}, CODEX),
        ({}, GENERIC),
    ],
)
def test_harnesses_are_known_by_their_headers(headers: dict[str, str], harness: Harness) -> None:
    assert harness_of(headers) is harness


def test_sub_agents_are_told_by_their_headers() -> None:
    assert OPENCODE.agent({"x-session-id": "s"}) == CODEX.agent({"thread-id": "t"}) == CLAUDE_CODE.agent({}) == ""
    assert OPENCODE.agent({"x-session-id": "s", "x-parent-session-id": "m"}) == "s"
    assert CODEX.agent({"thread-id": "t", "x-codex-parent-thread-id": "m"}) == "t"
    assert CLAUDE_CODE.agent({"x-claude-code-agent-id": "a"}) == "a"
    assert GENERIC.agent({"x-session-id": "s", "x-parent-session-id": "m"}) == ""


def test_an_id_that_is_no_text_is_one_all_the_same() -> None:
    """What HTTP allows and UTF-8 does not: told apart, and sayable in JSON and in the record."""
    one, other = (CLAUDE_CODE.agent({"x-claude-code-agent-id": f"a{half}"}) for half in ("\udcff", "\udcfe"))
    assert one != other
    assert one.encode().startswith(b"a")


def test_a_harness_that_nobody_knows_may_word_things_as_any_other() -> None:
    for harness in HARNESSES:
        assert set(harness.summary_asked) <= set(GENERIC.summary_asked)
        assert set(harness.side_system) <= set(GENERIC.side_system)
