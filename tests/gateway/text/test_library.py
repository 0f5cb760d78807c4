"""The library's parsers behind our pieces: what streams and what is said at the end are one answer, and nothing it does breaks a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.dialects.canonical import Block
from gyre_hpc.gateway.text.library import Library, LibraryParser, Parsed, Reader
from gyre_hpc.gateway.text.parsers import Parsers, make_parsers
from gyre_hpc.gateway.text.thoughts import Thoughts
from gyre_hpc.gateway.text.toolcalls import PieceParser, ToolCallParser, blocks_of
from tests.gateway.fakes import tiny_model

TOOL = {
    "name": "bash",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
}
CODER = "<tool_call>\n<function=bash>\n<parameter=command>\nls <a>\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
_ARGUMENTS = "<arg_key>command</arg_key>\n<arg_value>ls <a></arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
GLM = "<tool_call>bash\n" + _ARGUMENTS + "</tool_call>"
CALL: Block = {"type": "tool_use", "id": "t_0", "name": "bash", "input": {"command": "ls <a>", "n": 3}}


def said(parser: PieceParser, text: str, cuts: list[int] | None = None, cut: bool = False) -> tuple[Block, ...]:
    """The blocks of a text that comes in pieces; `cut`: at a limit of tokens."""
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts or [])})
    pieces = [piece for start, end in pairwise(places) for piece in parser.feed(text[start:end])]
    return blocks_of([*pieces, *parser.finish(cut)])


def text(value: str) -> Block:
    return {"type": "text", "text": value}


def thought(value: str) -> Block:
    return {"type": "thinking", "thinking": value}


# -- without vLLM: a reader of `{name json}`, which strips, forgets the text behind a call, and takes a call that is cut for whole ---------
def fake(raw: str) -> Parsed:
    """Fake of the library: reads `{name|json}` calls; text before the first is the text; `hm.` at the start is a thought."""
    found = re.findall(r"\{(\w+)\|([^}|]*)(?:\}|$)", raw)
    begin = raw.find("{") if found else len(raw)
    thinks, dot, rest = raw[:begin].partition("hm.")
    hm = thinks + dot if dot else ""
    words = rest if dot else raw[:begin]
    return Parsed(hm, raw[len(hm) :], words.strip(), tuple((name, arguments.replace("'", '"') + "}") for name, arguments in found))


def parser(read: Reader = fake, begins: str = "text", resumes: bool = False, ours: bool = True, inside: bool = False) -> LibraryParser:
    return LibraryParser("t", read, Thoughts(inside and ours, ours), begins, resumes)


def test_a_call_without_a_name_is_text_and_half_a_character_in_one_is_replaced() -> None:
    def named(name: str) -> Reader:
        return lambda raw: Parsed("", raw, "", ((name, "{}"),))

    assert said(parser(named("")), "<call>") == (text("<call>"),)
    assert said(parser(named("a\ud800")), "<call>") == ({"type": "tool_use", "id": "t_0", "name": "a?", "input": {}},)


BITS = ["{bash|{'a': 1}", "{bash|oops}", "{", "}", "a\n", " b", "\n\n", "hm.", "<x>", "word", "<think>", "</think>", "\t"]


@given(st.lists(st.sampled_from(BITS), max_size=8).map("".join), st.lists(st.integers(0, 100), max_size=6), st.booleans(), st.booleans())
def test_cutting_the_stream_changes_nothing(raw: str, cuts: list[int], cut: bool, resumes: bool) -> None:
    for begins in ("text", "thought", "unknown"):
        whole = said(parser(begins=begins, ours=begins == "text", resumes=resumes), raw, cut=cut)
        assert said(parser(begins=begins, ours=begins == "text", resumes=resumes), raw, cuts, cut) == whole
        assert all(block.get("text", "x").strip() for block in whole)


@given(st.lists(st.sampled_from(BITS), max_size=8).map("".join), st.lists(st.integers(0, 100), max_size=6))
def test_what_the_library_breaks_at_is_delivered_as_text(raw: str, cuts: list[int]) -> None:
    def broken(raw: str) -> Parsed:
        raise IndexError("of a parser")

    assert said(parser(broken, ours=False), raw, cuts) == ((text(raw.rstrip()),) if raw.strip() else ())


def test_plain_lines_stream_and_the_rest_waits() -> None:
    made = parser()
    assert blocks_of(made.feed("<think>so</think>one\ntwo\nthree")) == (thought("so"), text("one\ntwo"))
    assert made.feed("\nfour {bash|{'a': 1}") == [*parser().feed("\nthree\n")]
    assert blocks_of(made.finish(False))[-1] == {"type": "tool_use", "id": "t_0", "name": "bash", "input": {"a": 1}}


def test_arguments_that_are_no_object_are_text() -> None:
    raw = "a\n{bash|oops}"
    assert said(parser(), raw) == (text(raw),)


def test_a_call_that_a_limit_cut_is_text_and_a_whole_one_a_call() -> None:
    def swallowing(raw: str) -> Parsed:
        """Takes whatever stands behind a call into it, until it is closed; then all is text again."""
        before, opened, rest = raw.partition("[")
        inner, _, behind = rest.partition("]")
        return Parsed("", raw, before + behind, (("bash", json.dumps({"a": inner})),) if opened else ())

    assert said(parser(swallowing, resumes=True), "go\n[rm -rf /home/x", cut=True) == (text("go\n[rm -rf /home/x"),)
    call = {"type": "tool_use", "id": "t_0", "name": "bash", "input": {"a": "ls"}}
    assert said(parser(swallowing, resumes=True), "go\n[ls]", cut=True) == (text("go"), call)
    assert said(parser(swallowing, resumes=True), "go\n[ls") == (text("go"), call)  # the policy was done: the library's word counts


def test_text_that_was_streamed_stays_where_the_library_says_other_words() -> None:
    def forgetful(raw: str) -> Parsed:
        return Parsed("", raw, "other words", (("bash", "{}"),))

    assert said(parser(forgetful), "I look.\n{") == (text("I look."), {"type": "tool_use", "id": "t_0", "name": "bash", "input": {}})


# -- with vLLM -------------------------------------------------------------------------------------------------------------------------
LLAMA = ("<|python_tag|>",)
DEEPSEEK = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
JSON = '{"command": "ls <a>", "n": 3}'
FORMATS: dict[str, str] = {
    "qwen3_coder": CODER,
    "qwen3_xml": CODER,
    "glm45": GLM,
    "hermes": '<tool_call>\n{"name": "bash", "arguments": ' + JSON + "}\n</tool_call>",
    "llama3_json": '{"name": "bash", "parameters": ' + JSON + "}",
    "mistral": "[TOOL_CALLS]bash[ARGS]" + JSON,
    "deepseek_v3": DEEPSEEK[0] + DEEPSEEK[2] + "function" + DEEPSEEK[4] + "bash\n```json\n" + JSON + "\n```" + DEEPSEEK[3] + DEEPSEEK[1],
    "kimi_k2": KIMI[0] + KIMI[2] + "functions.bash:0" + KIMI[4] + JSON + KIMI[3] + KIMI[1],
    "pythonic": '[bash(command="ls <a>", n=3)]',
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has the control tokens of all of these families."""
    folder = tiny_model(tmp_path_factory.mktemp("families"))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    control = [*LLAMA, *DEEPSEEK, *KIMI, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokens.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def made(families: Path) -> Callable[[str, str], Parsers]:
    kept: dict[tuple[str, str], Parsers] = {}

    def get(tool: str, reasoning: str = "think") -> Parsers:
        if (tool, reasoning) not in kept:
            if (tool, reasoning) == ("hermes", "think"):  # that is ours: here vLLM's
                kept[tool, reasoning] = Parsers(True, Library(tool, None, families))
            else:
                kept[tool, reasoning] = make_parsers(tool, reasoning, families)
        return kept[tool, reasoning]

    return get


def answer(parsers: Parsers, raw: str, thinking: bool = False, **more: Any) -> tuple[Block, ...]:
    started = parsers.start("t", [TOOL], thinking)
    return said(started, raw, **more)


@pytest.mark.vllm
@pytest.mark.parametrize("name", FORMATS)
def test_the_call_of_each_family(made: Callable[..., Parsers], name: str) -> None:
    parsers = made(name)
    assert answer(parsers, FORMATS[name]) == (CALL,)
    blocks = answer(parsers, "<think>so</think>" + FORMATS[name])
    assert blocks == (thought("so"), CALL)


@pytest.mark.vllm
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_text_breaks_a_parser_and_no_cut_changes_it(made: Callable[..., Parsers], name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    parts = st.sampled_from(
        ["I look.\n", " a ", "\n\n", form, form[: len(form) // 2], form[len(form) // 3 :], form + form, '{"a": ', "\u00e9"]
    )
    raw = data.draw(st.lists(parts, max_size=4).map("".join))
    cuts, cut = data.draw(st.lists(st.integers(0, 400), max_size=5)), data.draw(st.booleans())
    whole = answer(made(name), raw, cut=cut)
    assert answer(made(name), raw, cuts=cuts, cut=cut) == whole
    assert bool(whole) == bool(raw.strip())
    for block in whole:
        assert block["type"] != "tool_use" or isinstance(block["input"], dict)


@pytest.mark.vllm
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("hermes", "pythonic")])
def test_half_a_call_is_never_a_call(made: Callable[..., Parsers], name: str) -> None:
    """Cut by a limit inside the value: no parser's guess at the rest may be acted upon."""
    half = FORMATS[name][: FORMATS[name].index(" <a>")]
    assert answer(made(name), "go\n" + half, cut=True) == (text("go\n" + half),)


@pytest.mark.vllm
def test_thoughts_by_the_library(made: Callable[..., Parsers]) -> None:
    parsers = made("qwen3_coder", "qwen3")
    assert [b["type"] for b in answer(parsers, "<think>\nso\n</think>\n\nI look.\n" + CODER)] == ["thinking", "text", "tool_use"]
    opened = answer(parsers, "so\nand\n</think>\n\nI look.\n" + CODER, thinking=True)
    assert opened == (thought("so\nand\n"), text("I look."), CALL)
    assert answer(parsers, "so\n</think>\n\nNo <tool_call> yet", thinking=True)[-1]["text"].endswith("No <tool_call> yet")
    streamed = parsers.start("t", [TOOL], True).feed("so\nand\nmo")
    assert blocks_of(streamed) == (thought("so\nand"),)
    assert answer(made("hermes", "deepseek_r1"), "so</think>yes") == (thought("so"), text("yes"))


@pytest.mark.vllm
def test_mistral_writes_calls_in_three_ways(made: Callable[..., Parsers], tmp_path: Path) -> None:
    """By its tokenizer: a list of calls where that has no [ARGS] (Nemo), else name and arguments, an id between them or not."""
    assert answer(made("mistral"), "[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]" + JSON) == (CALL,)
    assert answer(made("mistral", "mistral"), "[THINK]so[/THINK]" + FORMATS["mistral"]) == (thought("so"), CALL)
    folder = tiny_model(tmp_path)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    tokens.save(str(folder / "tokenizer.json"))
    nemo = make_parsers("mistral", "think", folder)
    two = '[TOOL_CALLS][{"name": "bash", "arguments": ' + JSON + '}, {"name": "bash", "arguments": {}, "id": "abcdefghi"}]'
    assert answer(nemo, two) == (CALL, {"type": "tool_use", "id": "t_1", "name": "bash", "input": {}})


THOUGHT = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
TO_BASH = "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Parsers:
    """gpt-oss's parsers, with its own encoding in place of the tiny tokenizer's."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    class Encoded:
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return encoding.encode(text, allowed_special="all")

        def decode(self, ids: list[int], **_: Any) -> str:
            return encoding.decode(ids)

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

    library = Library("openai", "openai_gptoss", tiny_model(tmp_path_factory.mktemp("harmony")))
    plain, library._tokenizer = library._tokenizer, Encoded()
    return Parsers(False, library)


@pytest.mark.vllm
def test_harmony(harmony: Parsers) -> None:
    call = THOUGHT + TO_BASH + JSON
    assert answer(harmony, THOUGHT + "<|channel|>final<|message|>Done\né") == (thought("Think."), text("Done\né"))
    assert answer(harmony, call) == (thought("Think."), CALL)
    look = THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + TO_BASH + JSON
    assert answer(harmony, look) == (thought("Think."), text("I look."), CALL)
    assert answer(harmony, "<|channel|>analysis<|message|>cut in", cut=True) == (thought("cut in"),)
    assert answer(harmony, "no channel") == (text("no channel"),)


@pytest.mark.vllm
def test_a_call_of_harmony_that_is_none_is_text(harmony: Parsers) -> None:
    for raw, cut in ((TO_BASH + "oops", False), (TO_BASH + '{"command": "rm -rf /ho', True), (TO_BASH + JSON, True)):
        assert answer(harmony, THOUGHT + raw, cut=cut) == (thought("Think."), text("<|start|>assistant" + raw))


def test_half_of_harmony_is_refused(tmp_path: Path) -> None:
    for tool, reasoning, missing in (
        ("openai", None, "reasoning_parser = openai_gptoss"),
        ("hermes", "openai_gptoss", "tool_parser = openai"),
    ):
        with pytest.raises(ConfigError, match="without its other half") as refused:
            Library(tool, reasoning, tmp_path)
        assert missing in refused.value.remedy


@pytest.mark.vllm
def test_a_parser_of_another_family_is_refused_in_one_line(model: Path, families: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM's parser deepseek_v3 can't be used with.*; choose model\.tool_parser"):
        make_parsers("deepseek_v3", "think", model)
    with pytest.raises(ConfigError, match="hf parser cannot be combined"):
        make_parsers("hf", "qwen3", families)


@pytest.mark.vllm
def test_vllm_reads_hermes_calls_as_we_do(made: Callable[..., Parsers]) -> None:
    theirs = made("hermes")
    for raw in ("I look.\n" + FORMATS["hermes"], FORMATS["hermes"] + "\n" + FORMATS["hermes"], "nothing", "<think>a</think>b"):
        assert answer(theirs, raw) == said(ToolCallParser("t"), raw)
