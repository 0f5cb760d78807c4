"""Demonstrations: well-formed always, right as often as asked, in the harness's dialect."""

import os
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from gyre_hpc.harness import texts
from gyre_hpc.policy import transcripts
from gyre_hpc.policy.shell import Shell
from gyre_hpc.policy.transcripts import Habits, demonstrate, drill, tools_for_template
from gyre_hpc.tasks import chores

CAREFUL = Habits(care=1.0, compaction=0.5, sub_agent=0.5)


def calls_of(conversations: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [c["function"] for conversation in conversations for m in conversation for c in m.get("tool_calls", [])]


def score(seed: int, habits: Habits, monkeypatch: pytest.MonkeyPatch) -> float:
    """Replay an execution's calls on its chore's files."""
    drawn = []
    monkeypatch.setattr(transcripts, "draw_demonstrated", lambda rng, d: drawn.append(chores.draw_demonstrated(rng, d)) or drawn[-1])
    conversations = demonstrate(random.Random(seed), habits, 3)
    shell = Shell(drawn[0].initial)
    for conversation in conversations:
        for message in conversation:
            for call in message.get("tool_calls", []):
                shell.call(call["function"]["name"], call["function"]["arguments"])
    return float(drawn[0].score(shell.files))


def test_a_careful_demonstrator_scores_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(score(seed, CAREFUL, monkeypatch) == 1.0 for seed in range(60))


def test_a_careless_one_scores_about_its_care(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [score(seed, Habits(care=0.25, stops=0.0), monkeypatch) for seed in range(400)]
    assert 0.18 < sum(scores) / len(scores) < 0.32


def test_every_call_is_well_formed() -> None:
    schemas = {tool["name"]: tool["input_schema"] for tool in texts.TOOLS}
    rng = random.Random(0)
    conversations = [c for _ in range(300) for c in demonstrate(rng, Habits(), 3)] + [drill(rng, 2) for _ in range(50)]
    for call in calls_of(conversations):
        assert set(call["arguments"]) == set(schemas[call["name"]]["required"])
        assert all(isinstance(value, str) for value in call["arguments"].values())


def test_roles_take_turns_and_the_harness_speaks_its_texts() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(300):
        for conversation in demonstrate(rng, Habits(compaction=0.5, sub_agent=0.5), 3):
            system, user, *rest = conversation
            assert system["role"], user["role"] == ("system", "user")
            seen.add(system["content"])
            assert rest[-1]["role"] == "assistant"
            assert "tool_calls" not in rest[-1]
            for message, after in pairwise(rest):
                assert after["role"] in (("tool",) if "tool_calls" in message else ("assistant", "user"))
            seen |= {"summary" for m in rest if m["role"] == "user" and m["content"] == texts.COMPACT}
            seen |= {name for name in ("So far: ", "Helper: ") if name in user["content"]}
    assert seen == {texts.SYSTEM, texts.SUB_AGENT_SYSTEM, "summary", "So far: ", "Helper: "}


def test_drills_are_right_and_short() -> None:
    for seed in range(20):
        conversation = drill(random.Random(seed), 3)
        lines = conversation[0]["content"].split("\n")
        assert [m["role"] for m in conversation] == ["user"] + ["assistant"] * 3
        for line, call in zip(lines, calls_of([conversation]), strict=True):
            words = [word for word in line.split()[1:] if word.endswith(".txt") or word.isdigit()]
            said = " ".join(call["arguments"].values()).split()
            assert [word for word in said if word in words] == words


def test_tools_for_template() -> None:
    assert [tool["function"]["name"] for tool in tools_for_template()] == ["bash", "write_file"]


def test_the_same_in_every_process() -> None:
    """No order of a set, which changes with the interpreter's hash seed, gets into a demonstration."""
    program = (
        "import hashlib, random; from gyre_hpc.policy.transcripts import Habits, demonstrate; rng = random.Random(0)\n"
        "print(hashlib.sha256(repr([demonstrate(rng, Habits(), 3) for _ in range(200)]).encode()).hexdigest())"
    )
    said = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
