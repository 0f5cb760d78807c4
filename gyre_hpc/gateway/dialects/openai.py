"""What the two dialects of OpenAI share: their conversations, error bodies, limits, tool arguments, text parts. Pure.

Rules of the canonical form that are theirs (canonical.py has those of all dialects), each with its test
in tests/gateway/dialects/test_openai.py:
1. `arguments` is a JSON text and compared as the value it means; an empty text means no arguments. What is no JSON object is kept under
   the one key `raw`: the policy's own calls are always objects, so that is a call that the client wrote.
2. Content that is null, absent, blank or without parts is the same as none; a string is one part.
   An image in the result of a tool is told as left out: Codex ends when it is refused. Elsewhere it is refused.
3. System and developer messages above the first other turn are the system prompt; further down they are system turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson
from blake3 import blake3

from gyre_hpc.gateway.calls import BadRequest, PromptTooLong
from gyre_hpc.gateway.dialects.canonical import (
    Conversation,
    Items,
    Message,
    UnsupportedContent,
    head_of,
    known_of,
    left_out,
    normalise_system,
    normalise_tools,
)
from gyre_hpc.gateway.harnesses import Harness

UNLIMITED = 1 << 40
"""Tokens where the client names no limit: the window is the limit."""
SYSTEM_ROLES = ("system", "developer")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, error: Exception | None = None) -> bytes:
    """The body of a refused or failed request; harnesses compact by the code of a prompt that is too long, or by its wording."""
    code = {401: "invalid_api_key", 404: "not_found"}.get(status)
    if isinstance(error, PromptTooLong):
        code = "context_length_exceeded"
        message = f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in {error.tokens} tokens."
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


class Endpoint:
    """What an endpoint of OpenAI has in common with the other (see Dialect)."""

    def error_body(self, status: int, message: str, error: Exception | None = None) -> bytes:
        """See Dialect."""
        return error_body(status, message, error)


def conversation_of(
    items: list[Any],
    instructions: Any,
    above: Callable[[Any], bool],
    turns_of: Callable[[list[Any]], list[Message]],
    tools: Sequence[dict[str, Any]],
    harness: Harness,
) -> Conversation:
    """The canonical conversation of what a client sent. Raises BadRequest.

    `instructions`, and the first items for which `above` is true, are the system prompt; `turns_of` makes turns of the others, blank ones
    too, which are left out; `tools` in the neutral form.
    """
    first = list(takewhile(above, items))
    try:
        system = texts_of(instructions, "instructions")
        system += [text for item in first for text in texts_of(item.get("content"), "a system message")]
        turns = turns_of(items[len(first) :])
    except UnsupportedContent as error:
        raise BadRequest(str(error)) from None
    head = head_of(normalise_system(system), normalise_tools(tools))
    return Conversation(head, (*known_of(items), *(turn for turn in turns if not turn.blank)), harness)


def digest_of(path: str, agent: str, raw: bytes) -> bytes:
    """16 bytes over endpoint, agent and body: equal for a retry alone."""
    hashed = blake3()
    for part in (path.encode(), agent.encode(), raw):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest(16)


def limit_of(body: Mapping[str, Any], *names: str) -> int:
    """The first limit that is named, or UNLIMITED. Raises BadRequest."""
    for name in names:
        limit = body.get(name)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequest(f"{name}: a positive integer")
        return limit
    return UNLIMITED


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse what would change the answer and can't be done: fields that are set. Raises BadRequest."""
    for name, reason in reasons.items():
        if body.get(name):
            raise BadRequest(f"{name}: {reason}")


def arguments_of(text: Any) -> dict[str, Any]:
    """The arguments of a call as a JSON object (rule 1)."""
    value = text
    if isinstance(text, str):
        try:
            value = orjson.loads(text) if text.strip() else {}
        except orjson.JSONDecodeError:
            value = text
    return {} if value is None else value if isinstance(value, dict) else {"raw": value}


def texts_of(content: Any, where: str, told: bool = False) -> list[str]:
    """The texts of a message's content that say something (rule 2). Raises UnsupportedContent, but parts may be `told` as left out."""
    if content is None or isinstance(content, str):
        parts = [content or ""]
    elif isinstance(content, list):
        parts = [_text_of(part, where, told) for part in content]
    else:
        raise UnsupportedContent(f"content of {where} must be a string or a list of parts")
    return [part for part in parts if part.strip()]


def text_blocks(texts: Iterable[str]) -> list[dict[str, str]]:
    """Texts as neutral blocks."""
    return [{"type": "text", "text": text} for text in texts]


def tool_of(function: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """A function's definition in the neutral form; `name` instead of its own."""
    parameters = function.get("parameters")
    return {
        "name": name or str(function.get("name") or ""),
        "description": function.get("description"),
        "input_schema": parameters if isinstance(parameters, dict) else None,
    }


def items_of(value: Any, name: str) -> list[Any]:
    """A list of objects, or of what was read of it. Raises BadRequest."""
    return value if isinstance(value, Items) else objects(value, name)


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects, or nothing. Raises BadRequest."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{name}: a list of objects")
    return value


def _text_of(part: Any, where: str, told: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS and told and isinstance(part, Mapping):
        return left_out(str(kind))
    if kind not in _TEXT_PARTS:
        raise UnsupportedContent(f"{kind} parts in {where} are not supported: this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    return "" if text is None else str(text)
