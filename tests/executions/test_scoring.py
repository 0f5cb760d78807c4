"""Scores by real verifiers in real boxes, and the attacks that they must survive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre_hpc.config import Config, HarnessSection
from gyre_hpc.errors import GyreError
from gyre_hpc.executions import sandbox, scoring, workspace
from gyre_hpc.executions.scoring import Unusable, Verdict
from gyre_hpc.executions.workspace import Folder
from gyre_hpc.tasks import gate, harbor
from tests.executions.tasks import HALVES, write_task

CONFIG = Config.model_validate({"verifier": {"timeout": 10.0, "retries": 1}, "harness": {"disk_mb": 4, "inodes": 500, "processes": 64}})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "e")
    made.work.mkdir(parents=True)
    return made


async def scored(tmp_path: Path, folder: Folder, verifier: str = HALVES, timeout: float = 20.0) -> Verdict:
    return await scoring.score(harbor.load(write_task(tmp_path / "task", verifier, verifier_timeout=timeout)), folder, CONFIG)


async def agent(folder: Folder, script: str) -> sandbox.Exit:
    """What an agent does, in a box as an agent's."""
    box = sandbox.Box(folder.work, limits=scoring.limits_of(CONFIG.harness))
    return await sandbox.start(sandbox.detect(), box, ["bash", "-c", script], -3).wait(10.0)


@pytest.mark.parametrize(("files", "score"), [({}, 0.0), ({"a.txt": "one"}, 0.5), ({"a.txt": "one", "b.txt": "two"}, 1.0)])
async def test_fractional_and_repeatable(tmp_path: Path, folder: Folder, files: dict[str, str], score: float) -> None:
    for name, content in files.items():
        (folder.work / name).write_text(content)
    task = harbor.load(write_task(tmp_path / "task", HALVES + "rm -f a.txt; echo junk > junk"))
    for _ in range(2):
        assert await scoring.score(task, folder, CONFIG) == Verdict(score, True, "scored", "", 1)
    assert sorted(path.name for path in folder.work.iterdir()) == sorted(files)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("exit 0", "verifier-missing"),
        ("kill -SEGV $$", "verifier-crash"),
        ("sleep 60", "verifier-timeout"),
        ("echo -1 > /logs/verifier/reward.txt", "verifier-reward"),
        ("echo nan > /logs/verifier/reward.txt", "verifier-reward"),
        ("echo 1.5 > /logs/verifier/reward.txt", "verifier-reward"),
        ("echo > /logs/verifier/reward.txt", "verifier-reward"),
        ("""echo '{"reward": Infinity}' > /logs/verifier/reward.json""", "verifier-reward"),
        ("""echo '{"reward": true}' > /logs/verifier/reward.json""", "verifier-reward"),
        ("""echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json""", "verifier-reward"),
        ("ln -s /workspace/given.txt /logs/verifier/reward.txt", "verifier-reward"),
        ("mkfifo /logs/verifier/reward.txt", "verifier-reward"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "verifier-reward"),
    ],
)
async def test_a_failed_verifier_is_no_zero(tmp_path: Path, folder: Folder, verifier: str, reason: str) -> None:
    verdict = await scored(tmp_path, folder, verifier, timeout=0.3)
    assert (verdict.valid, verdict.reason, verdict.attempts) == (False, reason, 2)


async def test_a_verifier_that_works_the_second_time_counts(tmp_path: Path, folder: Folder) -> None:
    # only the number of the run differs between the two: the name of the folder that is bound to /logs/verifier
    flaky = "grep -q verifier-2 /proc/self/mountinfo && echo 0.25 > /logs/verifier/reward.txt"
    assert await scored(tmp_path, folder, flaky) == Verdict(0.25, True, "scored", "", 2)


@pytest.mark.parametrize("text", ["1", "0.25\n", " 1e-1 "])
async def test_plain_text_rewards(tmp_path: Path, folder: Folder, text: str) -> None:
    (tmp_path / "reward.txt").write_text(text)
    assert scoring.read_reward(tmp_path) == float(text)


def test_no_reward_at_all(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="verifier-missing"):
        scoring.read_reward(tmp_path)


ATTACKS = {
    "forged reward in the workspace": "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; echo 1 > reward.txt",
    "reward where the verifier writes": "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
    "tests planted": "mkdir -p tests; echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh; mkdir /tests && cp tests/test.sh /tests",
    "shell start-up files": "for f in .bashrc .profile; do echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee $f ~/$f; done",
    "commands shadowed": "for c in cat bash echo; do printf '#!/bin/bash\\necho one' > $c; chmod +x $c; done",
    "closed": "chmod 000 .",
    "links out": "ln -s /etc/passwd a.txt; ln -s / root; ln -s loop loop",
    "special files": "mkfifo pipe; mknod device c 1 3; mkdir -p a/b; ln given.txt hard",
    "sparse": "truncate -s 3M a.txt; truncate -s 900G big",
    "many files": "for i in {1..1500}; do : > f$i; done",
    "odd names": "touch -- -rf '*' $'new\\nline' $'\\xff'",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_attacks_give_no_score_and_break_nothing(tmp_path: Path, folder: Folder, attack: str) -> None:
    (folder.work / "given.txt").write_text("given")
    await agent(folder, attack)
    verdict = await scored(tmp_path, folder)
    assert verdict.valid, verdict
    assert verdict.score == 0.0
    workspace.remove(folder.root)
    assert not os.path.lexists(folder.root)


async def test_what_the_agent_left_running_is_dead_before_the_verifier_looks(tmp_path: Path, folder: Folder) -> None:
    await agent(folder, "setsid -f bash -c 'n=0; while :; do echo $((n++)) > ticks; done'; sleep 0.05")
    before = (folder.work / "ticks").read_text()
    verdict = await scored(tmp_path, folder, "sleep 0.1; echo 1 > /logs/verifier/reward.txt")
    assert verdict.score == 1.0
    assert (folder.work / "ticks").read_text() == before


async def test_candidate_code_that_outlives_the_verifier_cannot_change_the_reward(tmp_path: Path, folder: Folder) -> None:
    (folder.work / "run.sh").write_text("setsid -f bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done'\n")
    verdict = await scored(
        tmp_path, folder, "bash run.sh; sleep 0.05; rm -f /logs/verifier/*; echo '{\"reward\": 0}' > /logs/verifier/reward.json"
    )
    assert verdict.score == 0.0
    assert verdict.valid


async def test_a_fork_bomb_in_the_verifier_is_contained(tmp_path: Path, folder: Folder) -> None:
    (folder.work / "run.sh").write_text("bomb() { bomb | bomb & }; bomb\n")
    verdict = await scored(tmp_path, folder, "bash run.sh 2>/dev/null; printf 0.5 > /logs/verifier/reward.txt", timeout=5.0)
    assert verdict == Verdict(0.5, True, "scored", "", 1)


def test_grade_has_the_shape_of_the_gate(tmp_path: Path) -> None:
    task = harbor.load(write_task(tmp_path / "task"))
    verdict = gate.admit(task, scoring.grade, gate.solve_in_box)
    assert (verdict.nothing, verdict.reference, verdict.refusal) == (0.0, 1.0, "")
    broken = harbor.load(write_task(tmp_path / "broken", "exit 1"))
    with pytest.raises(GyreError, match="no score"):
        scoring.grade(broken, tmp_path)


async def test_without_overlays_a_copy_is_verified(tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    host = sandbox.detect()
    plain = sandbox.Host(host.bwrap, host.disable_userns, overlay=False, cgroup=host.cgroup)
    monkeypatch.setattr(sandbox, "detect", lambda: plain)
    (folder.work / "a.txt").write_text("one")
    (folder.work / "a.txt").chmod(0o400)
    (folder.work / "closed").mkdir(mode=0)
    (folder.work / "out").symlink_to("/etc/passwd")
    assert (await scored(tmp_path, folder, HALVES + "rm -rf a.txt")).score == 0.5
    assert (folder.work / "a.txt").read_text() == "one"
    with open(folder.work / "big", "wb") as file:
        file.truncate(1 << 34)
    assert (await scoring.score(harbor.load(tmp_path / "task"), folder, CONFIG)) == Verdict(0.0, True, "scored", "", 1)


def test_the_clock_ends_a_long_execution_and_no_limit_of_cpu_time() -> None:
    assert scoring.limits_of(HarnessSection()).cpu >= 3600
    assert scoring.limits_of(HarnessSection(overall_timeout=100_000.5)).cpu >= 100_001
