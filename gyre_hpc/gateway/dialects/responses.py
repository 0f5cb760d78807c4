"""The OpenAI Responses dialect: request bodies in. What goes out is in responses_answer.py. Pure: no sockets, no clock.

Invariants: a request holds its whole conversation; what needs an answer kept under an id (previous_response_id, conversation,
item_reference, background) is refused with 400 and says what to do. Unknown fields are accepted; sampling parameters and `text.format` are
not obeyed: the run's configuration rules. Rules of the canonical form, beside those of openai.py, each with its test in
tests/gateway/dialects/test_responses.py:
1. Items of the assistant that follow one another (reasoning, message, calls) are one turn, texts apart; every other item is a turn.
2. Ids and states of items mean nothing; `call_id` is the id of a call. Reasoning is a thought, which is not compared.
3. A function in a namespace is called `namespace.name`; a call comes back with the two apart.
4. A custom tool is a function with one text, `input`; a call of it with any other arguments comes back as their JSON text.
5. What OpenAI's own tools did (web_search_call, ...) and tools that only OpenAI runs are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gyre_hpc.gateway.calls import BadRequest
from gyre_hpc.gateway.dialects import openai
from gyre_hpc.gateway.dialects.bodies import Memory, Shape
from gyre_hpc.gateway.dialects.canonical import Block, Conversation, Message, normalise_message
from gyre_hpc.gateway.dialects.dialect import Asked, read_request
from gyre_hpc.gateway.dialects.responses_answer import ResponsesAnswer, Tools
from gyre_hpc.gateway.harnesses import GENERIC, Harness, harness_of
from gyre_hpc.gateway.request import CallRequest

ROLES = (*openai.SYSTEM_ROLES, "user", "assistant")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "tool_search_call", "tool_search_output")
_KEPT = "answers are not kept under ids; send the whole conversation as `input`"
REFUSED = {
    "previous_response_id": _KEPT,
    "conversation": _KEPT,
    "background": "not supported; stream the answer, or wait for it",
    "prompt": "prompts are not kept under ids; send `instructions`",
}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Responses(openai.Endpoint):
    """The endpoint of the dialect."""

    path = "/v1/responses"
    spent = 400

    def ask(self, raw: bytes, headers: Mapping[str, str], model: str, memory: Memory | None = None) -> Asked:
        """See Dialect."""
        harness = harness_of(headers)
        read = read_request(raw, SHAPE, harness, memory, conversation_of)
        body = read.fields
        call = call_request(read.digest, body, harness.agent(headers), harness, read.conversation)
        return Asked(call, bool(body.get("stream")), ResponsesAnswer(str(body.get("model") or model), tools_of(body)[1]))


def call_request(
    raw: bytes, body: Mapping[str, Any], agent: str, harness: Harness = GENERIC, read: Callable[[], Conversation] | None = None
) -> CallRequest:
    """What the recorder needs of a request; `raw`: what a retry has too; `read` makes its conversation. Raises BadRequest."""
    openai.refuse(body, REFUSED)
    limit = openai.limit_of(body, "max_output_tokens")
    tools = tools_of(body)[1]

    def delivered(reply: Message) -> Message:
        """An answer as it comes back (rule 4)."""
        return Message(reply.role, tuple(tools.delivered(block) for block in reply.blocks))

    conversation = read() if read else conversation_of(body, harness)
    return CallRequest(conversation, limit, agent, openai.digest_of(Responses.path, agent, raw), delivered)


def conversation_of(body: Mapping[str, Any], harness: Harness = GENERIC) -> Conversation:
    """The canonical conversation of a request. Raises BadRequest."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else openai.items_of(given, "input")
    if not items:
        raise BadRequest("input: a text or at least one item is required")
    definitions, _ = tools_of(body)
    usable = [] if body.get("tool_choice") == "none" else definitions
    return openai.conversation_of(items, body.get("instructions"), _above, _turns, usable, harness)


def tools_of(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Tools]:
    """Definitions in the neutral form, and how calls of them are told. Raises BadRequest."""
    definitions: list[dict[str, Any]] = []
    tools = Tools()
    for tool in openai.objects(body.get("tools"), "tools"):
        if tool.get("type") == "namespace":
            name = str(tool.get("name") or "")
            inner = [(name, part) for part in openai.objects(tool.get("tools"), f"tools of {name}")]
        else:
            inner = [("", tool)]
        for namespace, part in inner:
            if part.get("type") in ("function", "custom") and part.get("name"):
                definitions.append(_define(namespace, part, tools))
    return definitions, tools


def _define(namespace: str, tool: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    own = str(tool["name"])
    name = full_name(namespace, own)
    if namespace:
        tools.spaces[name] = (namespace, own)
    if tool["type"] == "function":
        return openai.tool_of(tool, name)
    tools.custom.add(name)
    form = tool.get("format")
    syntax = form.get("definition") if isinstance(form, dict) else None
    described = "\n".join(str(text) for text in (tool.get("description"), syntax) if text)
    return {"name": name, "description": described, "input_schema": _INPUT}


def full_name(namespace: Any, name: Any) -> str:
    """What the model calls a function (rule 3)."""
    return f"{namespace}.{name or ''}" if namespace else str(name or "")


def _above(item: Any) -> bool:
    """Part of the system prompt, when only such stand before it."""
    return not isinstance(item, Message) and _kind(item) == "message" and item.get("role") in openai.SYSTEM_ROLES


def _closed(item: Any) -> bool:
    """What follows it is another turn (rule 1)."""
    return isinstance(item, Message) or not (_speaks(item) or _kind(item) in HOSTED)


def _speaks(item: Mapping[str, Any]) -> bool:
    kind = _kind(item)
    return kind in (*CALLS, "reasoning") or (kind == "message" and item.get("role") == "assistant")


def _turns(items: Iterable[Any]) -> list[Message]:
    turns: list[Message] = []
    said: list[Block] = []
    for item in items:
        if isinstance(item, Message):
            turns.append(item)
            continue
        kind = _kind(item)
        if kind in HOSTED:
            continue
        if _speaks(item):
            said += _spoken(kind, item)
            continue
        turns.append(normalise_message("assistant", said))
        said = []
        turns.append(_heard(kind, item))
    return [*turns, normalise_message("assistant", said)]


def _spoken(kind: str, item: Mapping[str, Any]) -> list[Block]:
    """Blocks of an item of the assistant."""
    if kind == "message":
        return list(openai.text_blocks(openai.texts_of(item.get("content"), "an assistant message")))
    if kind == "reasoning":
        parts = openai.texts_of(item.get("content"), "reasoning") or openai.texts_of(item.get("summary"), "reasoning")
        return [{"type": "thinking", "thinking": "\n".join(parts)}] if parts else []
    name = full_name(item.get("namespace"), item.get("name"))
    arguments = openai.arguments_of(item.get("arguments")) if kind == "function_call" else {"input": str(item.get("input") or "")}
    return [{"type": "tool_use", "id": item.get("call_id") or "", "name": name, "input": arguments}]


def _heard(kind: str, item: Mapping[str, Any]) -> Message:
    """The turn of an item that the assistant did not say."""
    if kind in OUTPUTS:
        texts = openai.texts_of(item.get("output"), "the output of a call", told=True)
        return normalise_message("user", [{"type": "tool_result", "tool_use_id": item.get("call_id") or "", "content": texts}])
    if kind == "item_reference":
        raise BadRequest(f"item_reference: {_KEPT}")
    if kind != "message":
        raise BadRequest(f"input: {kind} items are not supported")
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"input: each message needs a role ({', '.join(ROLES)})")
    blocks = openai.text_blocks(openai.texts_of(item.get("content"), f"a {role} message"))
    return normalise_message("system" if role in openai.SYSTEM_ROLES else "user", blocks)


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or "message")


SHAPE = Shape(Responses.path, "input", _turns, alone=False, closed=_closed, above=_above)
