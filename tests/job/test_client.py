"""A whole training run whose agents are a real client: Claude Code in its boxes, on a policy whose window holds its prompt."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.clients.install import PINS, installed
from tests.job.jobs import GYRE, ROOT, Job, gyre_json, make
from tests.markov import MOST, WINDOW, Habits, counting_task, given, markov
from trees.records import Fate, NodeKind, Role
from trees.selection import select_paths
from trees.store import StoreReader

pytestmark = [pytest.mark.job, pytest.mark.harness, pytest.mark.timeout(600)]
STEPS = 2


def run(job: Job) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GYRE, "run", str(job.config), "--plain"], capture_output=True, text=True, timeout=400, cwd=ROOT)


def with_claude(folder: Path, window: int) -> Job:
    counting_task(folder / "tasks" / "count")
    return make(
        folder,
        run={"steps": STEPS},
        model={"path": str(markov(folder / "model", Habits(words=12.0, calls=0.8))), "window": window},
        tasks={"source": str(folder / "tasks")},
        harness={
            "kind": "claude-code",
            "path": str(installed("claude-code")),
            "argv": ["--tools", "Bash,Read,Write"],  # with all of them a prompt has 27,000 tokens: minutes of work for these engines
            "max_tokens": 2048,
            "timeout": 200,
        },
        rollout={"capacity": 16},
        cells={"count": 2},
        schedule={"groups_per_step": 1, "group_size": 3, "phi": 1.0},
        training={"lr": 1e-6, "tokens_per_microstep": 32_768},
    )


def test_a_run_trains_on_what_claude_code_did(tmp_path: Path) -> None:
    job = with_claude(tmp_path, WINDOW)
    done = run(job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.steps() == list(range(1, STEPS + 1))
    logs = job.paths.attempt_logs(1)
    said = "".join(log.read_text() for log in logs.glob("supervisor*"))
    assert f"harness claude-code, version {PINS['claude-code'].version}" in said
    for kind in ("execution.lost", "warning.fork", "failure"):
        assert job.events(kind) == []
    ends = {event["execution"]: event for event in job.events("execution.end")}
    assert {event["reason"] for event in ends.values()} == {"finished"}
    assert all(event["valid"] for event in ends.values())
    assert len({event["score"] for event in ends.values()}) > 1
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []

    trained = [group for event in job.events("step.end") for group in event["groups"]]
    with StoreReader(job.paths.trees) as reader:
        targets = 0
        for execution, event in ends.items():
            tree = reader.tree(execution)
            assert not tree.incomplete
            assert given(tree, tmp_path / "model", "Bash") == round(event["score"] * MOST)
            assert {call.role for call in tree.calls.values()} == {Role.MAIN}
            assert {call.difference for call in tree.calls.values()} <= {"clean", "retry"}
            assert {call.fate for call in tree.calls.values()} == {Fate.DELIVERED}
            assert event["calls"] == len(tree.calls)
            if event["group"] in trained:
                (path,) = select_paths(tree, 5, 0)  # one conversation, one row
                sampled = sum(node.length for node in tree.nodes.values() if node.kind is NodeKind.SAMPLED)
                assert int(path.targets.sum()) == sampled == event["tokens"]
                targets += sampled
    steps = job.events("step.end")
    assert sum(event["target_tokens"] for event in steps) == targets
    assert all(event["untrained"] == 0 for event in steps)
    assert sum(event["rows"] for event in steps) > 0
    assert max(event["logprob_difference"] for event in steps) < 1e-3, "what was trained on is what was sampled"
    assert not job.processes()


def test_a_window_without_room_for_its_prompt_is_refused_at_the_start(tmp_path: Path) -> None:
    job = with_claude(tmp_path, 8192)
    done = run(job)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.window = 8192 has no room for claude-code" in done.stderr + done.stdout
    assert job.events("execution.end") == []
    assert not job.processes()
