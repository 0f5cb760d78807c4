"""What OpenAI's two dialects share: the rules of the canonical form, limits, refusals, error bodies."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gyre_hpc.gateway.calls import BadRequest, PromptTooLong
from gyre_hpc.gateway.dialects.canonical import UnsupportedContent
from gyre_hpc.gateway.dialects.openai import UNLIMITED, arguments_of, digest_of, error_body, limit_of, refuse, texts_of, tool_of


def test_arguments_are_compared_by_value() -> None:
    assert arguments_of('{"a": 1, "b": 2}') == arguments_of('{"b":2,"a":1}') == {"a": 1, "b": 2}
    assert arguments_of("") == arguments_of(" ") == arguments_of(None) == arguments_of("{}") == {}
    assert arguments_of({"a": 1}) == {"a": 1}


def test_arguments_that_are_no_object_are_kept_raw() -> None:
    assert arguments_of('{"a": ') == {"raw": '{"a": '}
    assert arguments_of("[1]") == {"raw": [1]}
    assert arguments_of("null") == {}


@pytest.mark.parametrize("content", [None, "", " \n", [], [{"type": "text", "text": ""}], [{"type": "text", "text": None}]])
def test_content_that_says_nothing_is_none(content: Any) -> None:
    assert texts_of(content, "x") == []


def test_a_string_is_one_part() -> None:
    assert texts_of("a", "x") == texts_of(["a"], "x") == texts_of([{"type": "text", "text": "a"}], "x") == ["a"]
    kinds = ("input_text", "output_text", "summary_text", "reasoning_text")
    assert texts_of([{"type": kind, "text": kind} for kind in kinds], "x") == list(kinds)
    assert texts_of([{"type": "refusal", "refusal": "no"}], "x") == ["no"]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "input_audio"}, {"type": "file"}, 5])
def test_what_a_text_model_cannot_read_is_refused(part: Any) -> None:
    with pytest.raises(UnsupportedContent, match="reads text only"):
        texts_of([part], "a user message")
    with pytest.raises(UnsupportedContent, match="string or a list"):
        texts_of(5, "a user message")


def test_limits() -> None:
    assert limit_of({}, "a", "b") == limit_of({"a": None}, "a") == UNLIMITED
    assert limit_of({"a": 3, "b": 4}, "a", "b") == 3
    for wrong in (0, -1, True, "3", 1.5):
        with pytest.raises(BadRequest, match="a: a positive integer"):
            limit_of({"a": wrong}, "a")


def test_only_what_is_set_is_refused() -> None:
    refuse({"stop": None, "logprobs": False, "x": []}, {"stop": "no", "logprobs": "no", "x": "no"})
    with pytest.raises(BadRequest, match="stop: no"):
        refuse({"stop": ["a"]}, {"stop": "no"})


def test_the_digest_is_that_of_endpoint_agent_and_body() -> None:
    assert digest_of("p", "a", b"x") == digest_of("p", "a", b"x")
    assert len({digest_of(p, a, x) for p in ("p", "q") for a in ("", "a") for x in (b"", b"x", b"ax")}) == 12


def test_tools_in_the_neutral_form() -> None:
    function = {"name": "t", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert tool_of(function) == {"name": "t", "description": "d", "input_schema": {"type": "object"}}
    assert tool_of({"name": "t", "parameters": 5}, "n.t") == {"name": "n.t", "description": None, "input_schema": None}


def test_error_bodies() -> None:
    def error(*args: Any) -> Any:
        return orjson.loads(error_body(*args))["error"]

    assert error(400, "no") == {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
    assert (error(401, "no")["type"], error(401, "no")["code"]) == ("authentication_error", "invalid_api_key")
    assert error(500, "no")["type"] == error(529, "no")["type"] == "server_error"
    too_long = error(400, "x", PromptTooLong(9, 8))
    assert too_long["code"] == "context_length_exceeded"
    assert too_long["message"].startswith("This model's maximum context length is 8 tokens.")


def test_what_a_tool_shows_of_an_image_is_told_as_left_out() -> None:
    assert texts_of([{"type": "image_url"}], "a tool message", told=True) == ["[image_url left out: this model reads text only]"]
    with pytest.raises(UnsupportedContent, match="reads text only"):
        texts_of([5], "a tool message", told=True)
