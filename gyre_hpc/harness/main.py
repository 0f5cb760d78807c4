"""The bundled harness: a small coding agent, a program of its own that knows nothing of the system but HTTP.

    python -I -S main.py INSTRUCTION

It speaks Anthropic Messages with SSE to $ANTHROPIC_BASE_URL, over the unix socket $GYRE_GATEWAY_SOCKET or plain TCP, runs its tools in
the current folder, and behaves like the harnesses that it stands for (Claude Code above all): tool arguments come back re-serialised, a
call that broke or was dropped is repeated byte for byte, a compaction asks for a summary and starts over, a sub-agent holds a
conversation of its own. How often is set by $GYRE_HARNESS, a JSON object (`DEFAULTS` below; everything random hangs on `seed`).

Invariants: a stream counts only with its `message_stop`; an end before it is a broken call, never a short answer. Exit codes: 0 the model
stopped calling tools, 2 usage, 3 turn limit, 4 context or output limit, 5 the gateway could not be used.

Why it looks bare: thousands are started per run and start-up is nearly all of its cost. Hence `_socket` and `_random` instead of `socket`
and `random`, posix_spawn instead of subprocess, no argparse, dataclasses or typing (each costs as much as the interpreter itself).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from _random import Random

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # isolated mode leaves the program's own folder out

import texts
import tools
import wire

FINISHED, USAGE, TURN_LIMIT, LENGTH_LIMIT, GATEWAY = 0, 2, 3, 4, 5

DEFAULTS: dict[str, float] = {
    "seed": 0,
    "compaction": 0.0,
    "sub_agent": 0.0,
    "retry": 0.0,
    "max_turns": 8,
    "max_tokens": 128,
    "tool_delay": 0.0,
    "tool_spread": 0.0,
    "tool_timeout": 30.0,
    "tool_output": 1000,
}
"""Probabilities per execution (compaction, sub_agent) and per call (retry); mean seconds of the extra delay of a tool, and its spread
(`pause`); characters."""


class Agent:
    """One execution: the settings, the connection and what all its conversations share."""

    def __init__(self, settings: dict[str, float], environment: dict[str, str]) -> None:
        self.settings = settings
        self.draw = Random(int(settings["seed"])).random
        self.client = wire.Client(environment["ANTHROPIC_BASE_URL"], environment.get("GYRE_GATEWAY_SOCKET", ""))
        self.model = environment.get("ANTHROPIC_MODEL", "policy")
        self.key = environment.get("ANTHROPIC_API_KEY", "none")
        self.session = _uuid()
        self.calls = 0

    def run(self, instruction: str) -> int:
        """Work on the instruction to the end; returns the exit code."""
        lines = instruction.strip().split("\n")
        prompt = instruction
        if len(lines) > 1 and self.draw() < self.settings["sub_agent"]:
            sub = Conversation(self, texts.SUB_AGENT_SYSTEM, texts.sub_agent_prompt(lines[-1]), agent=_uuid())
            sub.work(compact_at=0)
            prompt = texts.delegated_prompt("\n".join(lines[:-1]), sub.report)
            lines.pop()
        compact_at = 1 + int(self.draw() * len(lines)) if self.draw() < self.settings["compaction"] else 0
        return Conversation(self, texts.SYSTEM, prompt).work(compact_at)

    def call(self, system: str, messages: list[dict[str, object]], agent: str) -> wire.Reply:
        """One model call; dropped in mid-stream and repeated with the configured probability."""
        body = {
            "model": self.model,
            "messages": messages,
            "system": [{"type": "text", "text": system}],
            "tools": texts.TOOLS,
            "metadata": {"user_id": json.dumps({"session_id": self.session})},
            "max_tokens": int(self.settings["max_tokens"]),
            "stream": True,
        }
        headers = [
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"x-api-key: {self.key}",
            "anthropic-version: 2023-06-01",
            "User-Agent: gyre-harness/1",
            "x-stainless-retry-count: 0",
            f"x-claude-code-session-id: {self.session}",
        ]
        if agent:
            headers.append(f"x-claude-code-agent-id: {agent}")
        drop_after = 1 + int(self.draw() * 4) if self.draw() < self.settings["retry"] else 0
        self.calls += 1
        return self.client.messages(json.dumps(body, ensure_ascii=False).encode(), headers, drop_after)

    def use_tool(self, block: dict[str, object]) -> dict[str, object]:
        """Do one tool call and word its result."""
        if self.settings["tool_delay"] > 0:
            time.sleep(pause(self.settings["tool_delay"], self.settings["tool_spread"], self.draw(), self.draw()))
        arguments = block.get("input")
        arguments = arguments if isinstance(arguments, dict) else {}
        output, code = tools.run(str(block["name"]), arguments, int(self.settings["tool_output"]), self.settings["tool_timeout"])
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": texts.tool_result(output, code)}
        return result if code == 0 else {**result, "is_error": True}


class Conversation:
    """The main conversation, or a sub-agent's (`agent`: its id)."""

    def __init__(self, agent_of: Agent, system: str, prompt: str, agent: str = "") -> None:
        self.parent = agent_of
        self.system = system
        self.prompt = prompt
        self.agent = agent
        self.report = ""
        self.messages: list[dict[str, object]] = [{"role": "user", "content": prompt}]

    def work(self, compact_at: int) -> int:
        """Turns until the model calls no tool. `compact_at`: compact after so many turns with tools (0: never)."""
        for turn in range(1, int(self.parent.settings["max_turns"]) + 1):
            reply = self.parent.call(self.system, self.messages, self.agent)
            blocks = [block for block in reply.blocks if block["type"] != "text" or str(block["text"]).strip()]
            uses = reply.tool_uses()
            self.report = reply.text().strip()
            if not uses or reply.stop_reason == "refusal":
                return LENGTH_LIMIT if reply.stop_reason in ("max_tokens", "model_context_window_exceeded") else FINISHED
            self.messages.append({"role": "assistant", "content": blocks})
            self.messages.append({"role": "user", "content": [self.parent.use_tool(block) for block in uses]})
            if turn == compact_at:
                self.compact()
        return TURN_LIMIT

    def compact(self) -> None:
        """Ask for a summary behind the last user message, then go on in a new conversation."""
        *earlier, last = self.messages
        content = last["content"]
        assert isinstance(content, list)
        asked: dict[str, object] = {"role": "user", "content": [*content, {"type": "text", "text": texts.COMPACT}]}
        summary = self.parent.call(self.system, [*earlier, asked], self.agent).text().strip()
        self.messages = [{"role": "user", "content": texts.compacted_prompt(self.prompt, summary)}]


def pause(mean: float, spread: float, u: float, v: float) -> float:
    """Seconds of a tool's extra delay from two uniform draws in [0, 1): exponential, or log-normal with `spread` as the sigma of
    its logarithm."""
    if spread <= 0:
        return -mean * math.log(1.0 - u)
    normal = math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)
    return mean * math.exp(spread * normal - spread * spread / 2)


def main(argv: list[str], environment: dict[str, str]) -> int:
    if len(argv) != 2 or "ANTHROPIC_BASE_URL" not in environment:
        print("usage: ANTHROPIC_BASE_URL=http://... main.py INSTRUCTION", file=sys.stderr)
        return USAGE
    try:
        settings = {**DEFAULTS, **json.loads(environment.get("GYRE_HARNESS", "{}"))}
        agent = Agent(settings, environment)
    except ValueError as error:
        print(f"harness: {error}", file=sys.stderr)
        return USAGE
    why = ""
    try:
        code = agent.run(argv[1])
    except wire.Refused as refused:
        why = f"{refused}, "
        code = LENGTH_LIMIT if refused.status in (400, 413) and "too long" in refused.body else GATEWAY
    except wire.Broken as broken:
        why = f"{broken}, "
        code = GATEWAY
    print(f"harness: {why}exit {code} after {agent.calls} calls", file=sys.stderr)
    return code


def _uuid() -> str:
    text = os.urandom(16).hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


if __name__ == "__main__":
    code = main(sys.argv, dict(os.environ))
    sys.stderr.flush()
    os._exit(code)  # no interpreter tear-down: nothing is left to flush
