"""Answers in the OpenAI Responses dialect: items as server-sent events, or one response. Pure: no sockets, no clock (`created_at` is 0).

Invariants: the order of events is response.created, response.in_progress, (output_item.added, what fills the item, output_item.done)*,
response.completed or response.incomplete; sequence numbers and output indices are dense; an item is done before the next is added; the
items of the stream are those of the last event and of the plain response. A ping before `created` is a comment; afterwards it is one more
response.in_progress with the last number, since Codex gives up after 300 s without an event (a comment is none to it).
How many of the sampled tokens are reasoning is not told apart: `reasoning_tokens` is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from gyre_hpc.gateway.calls import Ended, Event, Started
from gyre_hpc.gateway.dialects.canonical import Block
from gyre_hpc.gateway.dialects.dialect import sort_events
from gyre_hpc.gateway.text.toolcalls import TextPiece, ToolPiece

COMMENT = b": ping\n\n"
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


@dataclass
class Tools:
    """How calls are told. `spaces`: full name -> (namespace, name); `custom`: full names of tools that take a text."""

    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: set[str] = field(default_factory=set)

    def delivered(self, block: Block) -> Block:
        """A block of an answer as it comes back: the call of a custom tool is its text."""
        if block["type"] == "tool_use" and block["name"] in self.custom:
            return {**block, "input": {"input": _input_text(block["input"])}}
        return block

    def item(self, piece: ToolPiece) -> dict[str, Any]:
        """The item of a call, without id and status."""
        namespace, name = self.spaces.get(piece.name, (None, piece.name))
        named = {"call_id": piece.id, "name": name, **({"namespace": namespace} if namespace else {})}
        if piece.name in self.custom:
            return {"type": "custom_tool_call", **named, "input": _input_text(piece.input)}
        return {"type": "function_call", **named, "arguments": orjson.dumps(piece.input).decode()}


class ResponsesAnswer:
    """See Answer."""

    def __init__(self, model: str, tools: Tools) -> None:
        self._model = model
        self._tools = tools
        self._started: Started | None = None
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}

    def encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(part for event in events for part in self._event(event))

    def ping(self) -> bytes:
        if self._started is None:
            return COMMENT
        self._sequence -= 1
        return self._sse("response.in_progress", response=self._response("in_progress"))

    def broken(self, message: str, final: bool = False) -> bytes:
        return self._sse("error", code="server_error", message=message, param=None)

    def whole(self, events: Iterable[Event]) -> bytes:
        events = list(events)
        sort_events(events)
        self.encode(events)
        return orjson.dumps(self._last)

    def _event(self, event: Event) -> list[bytes]:
        if isinstance(event, Started):
            self._started = event
            states = ("created", "in_progress")
            return [self._sse(f"response.{state}", response=self._response("in_progress")) for state in states]
        if isinstance(event, Ended):
            return self._end(event)
        if isinstance(event, ToolPiece):
            return [*self._close(), *self._call(event)]
        kind, part = ("message", "output_text") if isinstance(event, TextPiece) else ("reasoning", "reasoning_text")
        opened = self._ensure(kind)
        item = self._item()
        item["content"][0]["text"] += event.text
        return [*opened, self._of_part(f"response.{part}.delta", delta=event.text, **_logprobs(part))]

    def _end(self, ended: Ended) -> list[bytes]:
        status = "incomplete" if ended.stop_reason == "max_tokens" else "completed"
        closed = self._close(status)
        self._last = self._response(status, ended)
        return [*closed, self._sse(f"response.{status}", response=self._last)]

    def _ensure(self, kind: str) -> list[bytes]:
        """An item of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        closed = self._close()
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open = {"id": self._new_id(kind), "type": kind, "status": "in_progress", **own, "content": []}
        added = self._of_output("response.output_item.added", item=self._open)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open["content"].append(part if kind == "message" else {"type": "reasoning_text", "text": ""})
        return [*closed, added, self._of_part("response.content_part.added", part=self._open["content"][0])]

    def _close(self, status: str = "completed") -> list[bytes]:
        if self._open is None:
            return []
        item = self._item()
        item["status"] = status
        part = item["content"][0]
        events = [
            self._of_part(f"response.{part['type']}.done", text=part["text"], **_logprobs(part["type"])),
            self._of_part("response.content_part.done", part=part),
            self._of_output("response.output_item.done", item=item),
        ]
        self._open = None
        self._output.append(item)
        return events

    def _call(self, piece: ToolPiece) -> list[bytes]:
        whole = self._tools.item(piece)
        item = {"id": self._new_id(whole["type"]), "status": "completed", **whole}
        key, kind = ("arguments", "function_call_arguments") if "arguments" in item else ("input", "custom_tool_call_input")
        where = {"item_id": item["id"]}
        events = [
            self._of_output("response.output_item.added", item={**item, "status": "in_progress", key: ""}),
            self._of_output(f"response.{kind}.delta", **where, delta=item[key]),
            self._of_output(f"response.{kind}.done", **where, **{key: item[key]}, **({"name": item["name"]} if key == "arguments" else {})),
            self._of_output("response.output_item.done", item=item),
        ]
        self._output.append(item)
        return events

    def _item(self) -> dict[str, Any]:
        if self._open is None:
            raise RuntimeError("no item is open")
        return self._open

    def _new_id(self, kind: str) -> str:
        return f"{_IDS[kind]}_{self._call_id():08x}_{len(self._output)}"

    def _call_id(self) -> int:
        return self._started.call if self._started else 0

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_output(kind, item_id=self._item()["id"], content_index=0, **fields)

    def _of_output(self, kind: str, **fields: Any) -> bytes:
        return self._sse(kind, output_index=len(self._output), **fields)

    def _sse(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, status: str, ended: Ended | None = None) -> dict[str, Any]:
        """The response as it stands: what the request said is not repeated."""
        return {
            "id": f"resp_{self._call_id():08x}",
            "object": "response",
            "created_at": 0,
            "status": status,
            "model": self._model,
            "output": self._output if ended else [],
            "usage": self._usage(ended.tokens) if ended else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
            "previous_response_id": None,
        }

    def _usage(self, sampled: int) -> dict[str, Any]:
        prompt = self._started.prompt_tokens if self._started else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }


def _logprobs(part: str) -> dict[str, list[Any]]:
    """The field that events of a text must have."""
    return {"logprobs": []} if part == "output_text" else {}


def _input_text(arguments: dict[str, Any]) -> str:
    """The text that a custom tool is called with."""
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else orjson.dumps(arguments).decode()
