"""Names of parsers: ours, vLLM's as far as it is installed, and what is said of a wrong one; all without importing vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gyre_hpc.configfile import load
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.text import parsers
from gyre_hpc.gateway.text.parsers import OURS, check_names, make_parsers, registered
from gyre_hpc.gateway.text.toolcalls import blocks_of


def test_ours_need_no_vllm(model: Path) -> None:
    before = "vllm" in sys.modules
    assert make_parsers("hermes", "think", model) == OURS
    assert not make_parsers("hermes", "none", model).thoughts
    assert ("vllm" in sys.modules) == before


def test_without_a_reasoning_parser_thoughts_are_text(model: Path) -> None:
    for thinking in (False, True):
        parser = make_parsers("hermes", "none", model).start("t", [], thinking)
        pieces = [*parser.feed("<think>a</think>b"), *parser.finish(False)]
        assert blocks_of(pieces) == ({"type": "text", "text": "<think>a</think>b"},)


def test_names_are_those_of_the_installed_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, names in (("tool_parser", {"qwen3_coder", "glm45", "hf"}), ("reasoning_parser", {"qwen3", "hf"})):
        known = registered(key)
        assert known is None or names <= set(known)
    with pytest.raises(ConfigError) as caught:
        check_names("qwen3_codr", "think")
    assert "model.tool_parser = qwen3_codr" in caught.value.line
    assert "did you mean qwen3_coder" in caught.value.remedy
    assert "hermes" in caught.value.remedy


def test_the_configuration_refuses_a_wrong_name(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {reasoning_parser: tink}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: model\.reasoning_parser = tink is no parser; did you mean think"):
        load(file)


def test_where_vllm_is_lacking_the_gateway_says_so(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(parsers, "registered", lambda key: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"the parser qwen3_coder is vLLM's, .*; install vLLM, or set model\.tool_parser = hermes"):
        make_parsers("qwen3_coder", "think", model)
