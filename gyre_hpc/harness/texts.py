"""The fixed texts of the bundled harness, in one place because the small policy's warm-up speaks the same dialect.

Standard library only and no import from the rest of the package: the harness is a separate program that knows nothing but HTTP.

How the harness uses them (Anthropic Messages; `system` and `tools` as top-level fields):
- an execution starts with `SYSTEM`, `TOOLS` and one user message, the instruction: numbered lines, one step each;
- an assistant turn is an optional short text and one tool call (or several); each result goes back as `tool_result(...)`;
- an assistant turn without a tool call ends the conversation;
- sub-agent (an instruction of two lines or more): before the first call the last line is delegated to a conversation of its own with
  `SUB_AGENT_SYSTEM` and `sub_agent_prompt(line)`; the main conversation then starts with `delegated_prompt(rest, report)`;
- compaction (after a tool result): the conversation is sent once more with the user message `COMPACT` behind it, without the tools being
  used; the answer's text is the summary, and a new conversation starts with `SYSTEM` and `compacted_prompt(first_prompt, summary)`;
- a retried call is byte-identical.
"""

from __future__ import annotations

# `typing` would cost the harness 8 ms per start
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SYSTEM = "Do the steps, one call each."
SUB_AGENT_SYSTEM = "Do the step for the main agent."
COMPACT = "Which step was the last?"

TOOLS: list[dict[str, Any]] = [
    {
        "name": "bash",
        "description": "Run a command in the workspace.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
    {
        "name": "write_file",
        "description": "Create or replace a file.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
]

NO_OUTPUT = "ok"


def tool_result(output: str, code: int) -> str:
    """What a tool call answers: its output (stdout and stderr, stripped), `ok` for silent success, the exit code of a failure."""
    text = output.strip()
    if code == 0:
        return text or NO_OUTPUT
    return f"{text}\nexit {code}" if text else f"exit {code}"


def sub_agent_prompt(line: str) -> str:
    """First user message of a sub-agent: the delegated line as it stands in the instruction."""
    return line


def delegated_prompt(rest: str, report: str) -> str:
    """First user message of the main conversation when a sub-agent already did the last line."""
    return f"{rest}\nHelper: {report}"


def compacted_prompt(prompt: str, summary: str) -> str:
    """First user message of the conversation that goes on after a compaction."""
    return f"{prompt}\nSo far: {summary}"
