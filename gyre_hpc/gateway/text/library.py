"""vLLM's tool-call and reasoning parsers, as they serve its own API, behind our pieces.

vLLM's parsers are read once, over the whole text, at the end: their streaming gives other results than their whole parsing, and a tool
call is held until the end anyway. Meanwhile what is certainly plain text streams: whole lines before the first character with which any
known format begins a call. Invariants:
- what is delivered depends on the text alone, never on how it was cut: the streamed part is a function of the text, too;
- what was streamed stays, and what the library says is laid behind it; where the two disagree its calls stand and its text is left;
- what the library doesn't read as whole calls is delivered as the text it is: a parser that fails, a call without a name, arguments that
  are no JSON object, and a call that a limit of tokens cut in two (some parsers make one of what they have: half a path in `rm -rf`);
- ids are ours, so that a replay gives the same ones.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.text.thoughts import Thoughts
from gyre_hpc.gateway.text.toolcalls import BlockText, Piece, PieceParser, ThinkingPiece, ToolPiece, shallow

log = logging.getLogger(__name__)
_OPENER = re.compile(r"[<\[\](){}`\uff5c\u25c1]")
"""Characters with which a format of vLLM's registry begins a call or a thought, on the same line at the latest."""
_PROBE = "gyre" + secrets.token_hex(8)
"""A word that no answer has."""
_HARMONY = {"tool_parser": "openai", "reasoning_parser": "openai_gptoss"}
"""Both read one grammar, and only together: without the second, what is thought would be lost."""
_CALL_ID = "[CALL_ID]"
"""Mistral's v11 writes an id behind the name of a call; vLLM's parser leaves it there."""
_ANALYSIS = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|$)", re.DOTALL)


@dataclass(frozen=True)
class Parsed:
    """What the library reads in a text: the thought, the text with and without the markup of calls, each call's name and arguments."""

    thought: str
    plain: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


Reader = Callable[[str], Parsed]


class Library:
    """vLLM's parsers of these names for the tokenizer in `directory`; a name None: that part is not asked of vLLM. ConfigError."""

    def __init__(self, tool: str | None, reasoning: str | None, directory: Path) -> None:
        names = " and ".join(name for name in (tool, reasoning) if name)
        chosen = {"tool_parser": tool, "reasoning_parser": reasoning}
        for key, other in (("tool_parser", "reasoning_parser"), ("reasoning_parser", "tool_parser")):
            if chosen[key] == _HARMONY[key] and chosen[other] != _HARMONY[other]:
                raise ConfigError(
                    f"model.{key} = {chosen[key]} reads nothing without its other half", f"set model.{other} = {_HARMONY[other]}"
                )
        try:
            from vllm.parser.parser_manager import ParserManager
            from vllm.tokenizers import get_tokenizer
        except ImportError as error:
            raise ConfigError(
                f"the parser {names} is vLLM's, which can't be imported ({error})",
                "install vLLM, or set model.tool_parser = hermes and model.reasoning_parser = think",
            ) from None
        for name in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a traceback for every text that is no call
        try:
            self._tokenizer = get_tokenizer(str(directory))
            self._harmony = tool == _HARMONY["tool_parser"] or reasoning == _HARMONY["reasoning_parser"]
            found: Any = ParserManager.get_parser(tool, reasoning, True, is_harmony=self._harmony, tokenizer=self._tokenizer)
            self._class = found
            made = found(self._tokenizer)
        except Exception as error:  # whatever a parser stumbles over in a tokenizer that is not its family's
            raise ConfigError(
                f"vLLM's parser {names} can't be used with {directory}: {' '.join(str(error).split())}",
                "choose model.tool_parser and model.reasoning_parser of the model's family",
            ) from error
        self._engine_based = bool(getattr(made, "_engine_based", False))
        opening = getattr(made.reasoning_parser, "reasoning_start_str", None) if reasoning else None
        self._opening = opening if isinstance(opening, str) else ""
        self._reasons = reasoning is not None

    def start(self, prefix: str, tools: Sequence[Mapping[str, Any]], thinking: bool, thoughts: bool) -> PieceParser:
        """The parser of one answer; `thoughts`: `<think>` is read by us, before the library sees the text."""
        ours = thoughts and not self._reasons
        opened = self._opening if self._reasons and thinking else ""
        begins = "thought" if opened else "unknown" if self._reasons else "text"
        return LibraryParser(prefix, self._reader(tools, opened), Thoughts(thinking and ours, ours), begins, self._engine_based)

    def _reader(self, tools: Sequence[Mapping[str, Any]], opened: str) -> Reader:
        """Reads one text; `opened`: what of it stands at the end of the prompt."""

        def read(text: str) -> Parsed:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            schemas = [
                {"type": "function", "function": {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}}
                for t in tools
            ]
            asked = ChatCompletionRequest.model_validate(
                {"messages": [{"role": "user", "content": ""}], "tools": schemas or None, "tool_choice": "auto" if schemas else None}
            )
            whole = opened + text
            parser = self._class(self._tokenizer, asked.tools)
            ids = self._tokenizer.encode(whole, add_special_tokens=False)
            thought, words, calls = parser.parse(whole, asked, enable_auto_tools=True, model_output_token_ids=ids)
            plain = text
            if self._harmony:
                plain = _ANALYSIS.sub("", text) if calls else words or ""
            elif self._reasons:
                plain = self._class(self._tokenizer, asked.tools).extract_reasoning(whole, asked)[1] or ""
            named = ((call.name.partition(_CALL_ID)[0], call.arguments) for call in calls or ())
            return Parsed(thought or "", plain, words or "", tuple(named))

        return read


class LibraryParser:
    """One answer. `read`: the library over a whole text; `split`: takes our own thoughts off.

    `begins`: what the text begins with, "text", "thought" or "unknown" (that is for the library to say, so nothing streams); `resumes`: the
    library gives text behind a call that is whole as text.
    """

    def __init__(self, prefix: str, read: Reader, split: Thoughts, begins: str, resumes: bool) -> None:
        self._prefix = prefix
        self._read = read
        self._thoughts = split
        self._begins = begins
        self._resumes = resumes
        self._streams = begins != "unknown"
        self._raw: list[str] = []
        self._line = ""
        self._sent = ""
        self._text = BlockText()

    def feed(self, text: str) -> list[Piece]:
        """What can be told for certain after this text."""
        return list(self._take(*self._thoughts.feed(text)))

    def finish(self, cut: bool) -> list[Piece]:
        """The rest, as the library reads the whole."""
        return [*self._take(*self._thoughts.finish()), *self._rest("".join(self._raw), cut)]

    def _take(self, thought: str, text: str) -> Iterator[Piece]:
        if thought:
            yield ThinkingPiece(thought)
        self._raw.append(text)
        if not self._streams:
            return
        self._line += text
        found = _OPENER.search(self._line)
        lines, end, rest = self._line[: found.start() if found else None].rpartition("\n")
        self._streams, self._line = found is None, rest
        self._sent += lines + end
        for piece in self._text.feed(lines + end):
            yield ThinkingPiece(piece.text) if self._begins == "thought" else piece

    def _rest(self, raw: str, cut: bool) -> Iterator[Piece]:
        parsed = self._parsed(raw, cut)
        self._text.end()
        thought, text = parsed.thought, parsed.text if parsed.calls else parsed.plain
        thinks = self._begins == "thought"
        more = _behind(thought, self._sent if thinks else "")
        if more:
            yield ThinkingPiece(more)
        yield from self._text.feed(_behind(text, "" if thinks else self._sent))
        for number, (name, arguments) in enumerate(parsed.calls):
            sayable = name.encode(errors="replace").decode()  # JSON of Python's may hold half a character, which nobody can send on
            yield ToolPiece(f"{self._prefix}_{number}", sayable, _arguments(arguments) or {})

    def _parsed(self, raw: str, cut: bool) -> Parsed:
        """What the library reads, without calls that can't be had."""
        if not raw.strip():
            return Parsed("", raw, raw)
        try:
            parsed = self._read(raw)
            whole = all(name and _arguments(arguments) is not None for name, arguments in parsed.calls)
            if parsed.calls and not (whole and (not cut or self._closed(raw))):
                parsed = Parsed(parsed.thought, parsed.plain, parsed.text)
        except Exception:
            log.warning("a parser of the library failed; the answer %s is delivered as text", self._prefix, exc_info=True)
            return Parsed("", raw, raw)
        return parsed

    def _closed(self, raw: str) -> bool:
        """Whether the last call was over before the text was cut off: more text would be text, and not of a call."""
        longer = self._read(raw + _PROBE)
        swallowed = any(_PROBE in name or _PROBE in arguments for name, arguments in longer.calls)
        return not swallowed and (_PROBE in longer.text or not self._resumes)


def _behind(whole: str, sent: str) -> str:
    """What of `whole` follows `sent`, blanks around not counted (parsers strip); nothing where `whole` begins otherwise."""
    head = sent.strip()
    if not head:
        return whole
    body = whole.lstrip()
    return body[len(head) :] if body.startswith(head) else ""


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and shallow(value) else None
