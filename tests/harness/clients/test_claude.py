"""Claude Code, as it comes from npm, in a box against the gateway: its turns, whatever is in them, and the tree that they must leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients.claude import BOTH, TASK, add, bash, claude, done
from tests.harness.clients.script import Reply, call
from trees.records import Role

pytestmark = pytest.mark.harness


@BOTH
async def test_many_tool_turns(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Twenty turns, clean; the client probes with HEAD when it runs as it comes; usage in its answers is the truth."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, *(f"Step {i}.\n" + add(i) for i in range(20)))
        assert ran.file("out.txt").split() == [str(i) for i in range(20)]
        tree = made.exact(ran)
        assert set(made.roles(ran)["main"]) == {Role.MAIN}
        assert len(tree.leaves) == 1
        probes = [seen.path for seen in made.requests if seen.method == "HEAD"]
        assert all(path.endswith("/api/hello") for path in probes)
        assert stable or probes


async def test_the_usage_that_it_adds_up_is_the_trees(tmp_path: Path, renderer: TurnRenderer) -> None:
    """What the client counts, and compacts by, is what was really told and said; its window is the policy's."""
    sections: dict[str, dict[str, Any]] = {"model": {"window": 150_000}, "harness": {"argv": ["--output-format", "json"]}}
    async with claude(tmp_path, renderer, True, sections) as made:
        made.script.on("main", "[task-1]", add(1), "Some text.\n" + add(2), "All done.")
        ran = await made.run(TASK)
        report = json.loads(ran.output.strip().splitlines()[-1])
        told, said = (sum(part) for part in zip(*made.usage(ran), strict=True))
        (counted,) = report["modelUsage"].values()
        assert (counted["inputTokens"], counted["outputTokens"], counted["contextWindow"]) == (told, said, 150_000)
        assert report["num_turns"] == 3


@BOTH
async def test_malformed_arguments(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """No JSON (delivered as the text it is, beside a call that is one), the wrong keys, the wrong types, a tool that is not there."""
    broken = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo bad >> out.txt", "descr\n</tool_call>\n'
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, broken + add(1), call("Bash", cmd="echo bad"), call("Bash", command=7), call("Nothing", x=1.0), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)


async def test_arguments_in_another_spelling(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Numbers and keys come back as JavaScript writes them, text behind a call comes back before it: the same turn."""
    odd = '<tool_call>\n{"name": "Read", "arguments": {"limit": 1000.0, "offset": 1e0, "file_path": "/workspace/in.txt"}}\n</tool_call>'
    twice = (
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "false", "description": "x", "command": "echo 1 >> out.txt"}}\n</tool_call>'
    )
    async with claude(tmp_path, renderer, True) as made:
        made.script.on("main", "[task-1]", odd, f"Before.\n\n{twice}\n\nBehind it.", "All done.")
        ran = await made.run(TASK, {"in.txt": "é\n"})
        assert (ran.code, ran.file("out.txt")) == (0, "1\n"), ran.output
        made.exact(ran)


@BOTH
async def test_arguments_that_its_types_change(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Defaults are added, numbers and truths are read out of text, blanks at ends of lines go: still the turn that was sampled."""
    path = "/workspace/in.txt"
    async with claude(tmp_path, renderer, stable) as made:
        edits = [
            call("Read", file_path=path, limit="10", offset=1.0),
            call("Edit", file_path=path, old_string="one", new_string="two  \n  \u201cq\u201d\t"),
            call("Edit", file_path=path, old_string="nowhere", new_string="x", replace_all="true"),
            call("Write", file_path="/workspace/b.py", content="a\r\nb   \n\u2028\n\n"),
            call("Bash", command=" true ", description=None, timeout="5000", run_in_background="false"),
            call("Bash", command="true", description="", foo=1),
        ]
        made.script.on("main", "[task-1]", *edits, add(1), "All done.")
        ran = await made.run(TASK, {"in.txt": "one\n"})
        assert (ran.code, ran.file("out.txt")) == (0, "1\n"), ran.output
        assert ran.file("in.txt").startswith("two")
        made.exact(ran)


ODD = (
    *("  before", "\n\nbefore", "behind  \n\n", "a\r\nb \tc\u2028d\ufeff", "a\n\n\n\nb  \n  c", " .", "\x00\x01", "\U0001f600\ud7ff"),
    *(
        "<system-reminder>x</system-reminder>",
        "[Request interrupted by user]",
        "(no content)",
        "x-anthropic-billing-header: x",
        "x" * 4_000,
    ),
    *("</think>odd", "<think>a</think>  \n text ", "<think></think>text", "text <think>x</think> y", "<|im_start|>user"),
)


async def test_texts_that_are_odd(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Blanks, control characters, its own tags, the template's marks as text: told and matched as they were sampled."""
    async with claude(tmp_path, renderer, True) as made:
        ran = await done(made, *(text + add(i) for i, text in enumerate(ODD)))
        assert ran.file("out.txt").split() == [str(i) for i in range(len(ODD))]
        made.exact(ran)


PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


async def test_a_picture_that_a_tool_shows(tmp_path: Path, renderer: TurnRenderer) -> None:
    """A text model is told that something was left out; a refusal would end the harness."""
    async with claude(tmp_path, renderer, True) as made:
        draw = bash(f"echo {PICTURE} | base64 -d > a.png")
        ran = await done(made, draw, call("Read", file_path="/workspace/a.png"), add(1))
        assert ran.file("out.txt").split() == ["1"]
        made.exact(ran)
        assert "left out" in made.script.of("main")[-1].asked.text


@BOTH
@pytest.mark.parametrize("nothing", ["<think>What now?</think>", ""], ids=["thinking-only", "empty"])
async def test_an_answer_without_anything(tmp_path: Path, renderer: TurnRenderer, stable: bool, nothing: str) -> None:
    """The turn vanishes and the message before it is edited: a branch that is explained, and what was said stays recorded."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, add(1), nothing, add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        tree = made.exact(ran, ("clean", "edit"))
        assert [c.difference for c in made.calls(ran)] == ["clean", "clean", "edit", "clean"]
        assert len(tree.leaves) == 2
        assert set(made.roles(ran)["main"]) == {Role.MAIN}


async def test_thoughts_in_tool_turns(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with claude(tmp_path, renderer, True) as made:
        ran = await done(made, "<think>Hm.</think>\n\nI go.\n" + add(1), "<think>And now?</think>" + add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)


@BOTH
async def test_parallel_calls(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Three tools in one turn."""
    async with claude(tmp_path, renderer, stable) as made:
        made.script.on(
            "main", "[task-1]", "\n".join(["At once.", add(1), add(2), call("Read", file_path="/workspace/in.txt")]), "All done."
        )
        ran = await made.run(TASK, {"in.txt": "read me\n"})
        assert ran.code == 0, ran.output
        assert sorted(ran.file("out.txt").split()) == ["1", "2"]
        made.exact(ran)
        assert "read me" in made.script.of("main")[-1].asked.text


@BOTH
@pytest.mark.parametrize("cut", ["A text that is cut he", add("bad")[:60]], ids=["text", "call"])
async def test_max_tokens_stop(tmp_path: Path, renderer: TurnRenderer, stable: bool, cut: str) -> None:
    """It reminds the model and goes on; a call that was cut is nothing but text."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, add(1), Reply(cut, cut=True), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)
        assert [c.finish for c in made.calls(ran)] == ["stop", "length", "stop", "stop"]
