"""Claude Code's own session files (`~/.claude/projects/*/*.jsonl`): an entry a line, a tree by `uuid` and `parentUuid`.

Only `user` and `assistant` entries are messages; others with a `uuid` (progress, system, attachments) are links of the chain. An answer
stands there as one entry a block with one `message.id`: those are joined. Results of calls that were made together hang each on the entry
of its call: they are chained in the order of the file, as they were sent. After a compaction the chain begins anew (`compact_boundary`,
`isCompactSummary`). Sub-agents are entries with `isSidechain` and an `agentId`, in the same file or in `agent-*.jsonl` beside or below it.
Text is all there is: no tokens, no system prompt, no tools. What a text model can't read becomes a word in brackets.

Invariants: turns come in the order of the file, a parent before its children (an unknown or later parent makes a root); one session is
read at a time. Every departure from the format is a ConfigError that names the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.dialects.canonical import Message, UnsupportedContent, normalise_message

_STOPS = {"max_tokens": "length"}


@dataclass(frozen=True)
class Turn:
    """One message. `parent`: the place of the turn before it in the session, -1: a root; `agent`: the sub-agent whose it is, or "".

    `finish` of an answer: stop or length; `anew`: the chain begins behind a compaction.
    """

    parent: int
    message: Message
    agent: str
    finish: str
    anew: bool


@dataclass(frozen=True)
class Session:
    """The turns of one session in the order of its files."""

    name: str
    turns: tuple[Turn, ...]


def is_entry(line: bytes) -> bool:
    """Whether a line is an entry of such a file."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(row, dict) and isinstance(row.get("type"), str) and "requests" not in row


def find_files(path: Path) -> dict[str, list[Path]]:
    """Session -> its files, below a folder or of one file: the session's own first. ConfigError: none."""
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
    found: dict[str, list[Path]] = {}
    for file in files:
        name = next((str(row["sessionId"]) for _, row in _entries(file) if row.get("sessionId")), "")
        if name:
            found.setdefault(name, []).append(file)
    if not found:
        raise ConfigError(f"{path} holds no session of Claude Code", "give a session's .jsonl file, or a folder of them")
    return {name: sorted(own, key=lambda file: (file.stem.startswith("agent-"), file.name)) for name, own in found.items()}


def read_session(name: str, files: Iterable[Path]) -> Session:
    """One session of its files. ConfigError: not such a file; OSError: can't be read."""
    reading = _Reading()
    for file in files:
        for number, row in _entries(file):
            try:
                reading.take(row)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{file} line {number} is no entry of a session ({error!r})", "give a session file as Claude Code wrote it"
                ) from error
    return Session(name, tuple(reading.turns))


def _entries(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, entry). A last line that was not written to its end is passed over."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not line.endswith(b"\n"):
                    return
                raise ConfigError(f"{file} line {number} is not JSON ({error})", "give a session file as Claude Code wrote it") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{file} line {number} is no object", "give a session file as Claude Code wrote it")
            yield number, row


class _Reading:
    """Entries on their way to turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._place: dict[str, int] = {}
        """uuid -> the turn that it is, or that it hangs behind (-1: none)."""
        self._anew: set[str] = set()
        """uuids of links behind a compaction, before any turn."""
        self._answers: dict[tuple[str, str], int] = {}
        """(agent, message.id) -> its turn."""
        self._results: dict[int, int] = {}
        """Answer -> the last of the results of its calls."""

    def take(self, row: Mapping[str, Any]) -> None:
        """One entry. TypeError, ValueError: it is none."""
        uuid, parent = row.get("uuid"), row.get("parentUuid")
        if not isinstance(uuid, str) or uuid in self._place:
            return
        if parent is not None and not isinstance(parent, str):
            raise ValueError("parentUuid is no text")
        before = self._place.get(parent, -1) if parent else -1
        anew = parent in self._anew or row.get("subtype") == "compact_boundary" or bool(row.get("isCompactSummary"))
        kind = row.get("type")
        message = _message(kind, row["message"]) if kind in ("user", "assistant") else None
        if message is None or not message.blocks:
            self._place[uuid] = before
            if anew and before < 0:
                self._anew.add(uuid)
            return
        agent = str(row.get("agentId") or "sub-agent") if row.get("isSidechain") else ""
        self._place[uuid] = self._add(row, message, before, agent, anew and before < 0)

    def _add(self, row: Mapping[str, Any], message: Message, before: int, agent: str, anew: bool) -> int:
        turns = self.turns
        if message.role == "assistant":
            name = row["message"].get("id")
            finish = _STOPS.get(str(row["message"].get("stop_reason")), "stop")
            at = self._answers.get((agent, name), -1) if isinstance(name, str) else -1
            if at >= 0:
                joined = Message("assistant", (*turns[at].message.blocks, *message.blocks))
                turns[at] = replace(turns[at], message=joined, finish=finish)
                return at
            turns.append(Turn(before, message, agent, finish, anew))
            if isinstance(name, str):
                self._answers[agent, name] = len(turns) - 1
            return len(turns) - 1
        answer = before
        result = any(block["type"] == "tool_result" for block in message.blocks)
        if result and answer in self._results:
            before = self._results[answer]
        turns.append(Turn(before, message, agent, "", anew))
        if result and answer >= 0 and turns[answer].message.role == "assistant":
            self._results[answer] = len(turns) - 1
        return len(turns) - 1


def _message(role: Any, body: Mapping[str, Any]) -> Message:
    content = body.get("content")
    if isinstance(content, list):
        content = [_readable(block) for block in content]
    try:
        return normalise_message(str(role), content)
    except UnsupportedContent as error:
        raise ValueError(str(error)) from None


def _readable(block: Any) -> Any:
    """A block that a text model can read."""
    if not isinstance(block, Mapping):
        return block
    kind = block.get("type", "text")
    if kind == "tool_result" and isinstance(block.get("content"), list):
        return {**block, "content": [_readable(part) for part in block["content"]]}
    known = (
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "server_tool_use",
        "web_search_tool_result",
        "tool_reference",
    )
    return block if kind in known else {"type": "text", "text": f"[{kind}]"}
