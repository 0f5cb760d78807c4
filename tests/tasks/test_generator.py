"""Generated folders: the real verifier in real bash agrees with the score in Python, and hostile workspaces earn nothing."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.tasks.chores import Chore, Part, draw
from gyre_hpc.tasks.generator import check, generate, write
from gyre_hpc.tasks.harbor import Task, load


def verify(task: Task, workspace: Path, logs: Path) -> float:
    """Run test.sh without a box."""
    logs.mkdir(exist_ok=True)
    env = {"GYRE_WORKSPACE": str(workspace), "GYRE_LOGS": str(logs), "PATH": "/nowhere"}
    subprocess.run(["/bin/bash", task.tests / "test.sh"], env=env, check=True, timeout=10)
    return float(json.loads((logs / "reward.json").read_text())["reward"])


def workspace_of(chore: Chore, folder: Path) -> Path:
    folder.mkdir()
    for name, text in chore.initial.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("index", range(12))
def test_verifier_agrees_with_python(index: int, tmp_path: Path) -> None:
    difficulty = index % 3 + 1
    chore = draw(5, index, difficulty)
    task = generate(5, index, difficulty, tmp_path / "tasks")
    work = workspace_of(chore, tmp_path / "work")
    assert verify(task, work, tmp_path / "logs") == 0.0
    done = random.Random(index).sample(chore.parts, random.Random(index).randint(1, difficulty))
    for part in done:
        subprocess.run(["/bin/bash", "-c", part.shell], cwd=work, check=True)
    files = {path.name: path.read_text() for path in work.iterdir()}
    assert verify(task, work, tmp_path / "logs") == pytest.approx(chore.score(files), abs=1e-6) == pytest.approx(len(done) / difficulty)


def test_solution_scores_1(tmp_path: Path) -> None:
    for index in range(6):
        chore = draw(2, index, 3)
        task = generate(2, index, 3, tmp_path / "tasks")
        work = workspace_of(chore, tmp_path / f"work-{index}")
        subprocess.run(["/bin/bash", task.solution / "solve.sh"], cwd=work, check=True)
        assert verify(task, work, tmp_path / "logs") == 1.0


@pytest.fixture
def create(tmp_path: Path) -> Task:
    write(Chore((Part("create", "maple.txt", "48", "10"),)), tmp_path / "create")
    return load(tmp_path / "create")


@pytest.mark.parametrize("text", ["48", "48\n", "48\n\n"])
def test_line_ends_do_not_matter(create: Task, tmp_path: Path, text: str) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "maple.txt").write_text(text)
    assert verify(create, tmp_path / "w", tmp_path / "logs") == 1.0


@pytest.mark.parametrize("text", ["", "4", "480", " 48", "48 ", "48\0", "\0", "48\n" + "\n" * 70 + "junk", "48\nmore"])
def test_wrong_text_earns_nothing(create: Task, tmp_path: Path, text: str) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "maple.txt").write_text(text)
    assert verify(create, tmp_path / "w", tmp_path / "logs") == 0.0


def test_odd_files_earn_nothing_and_do_not_hang(create: Task, tmp_path: Path) -> None:
    work = tmp_path / "w"
    work.mkdir()
    name = work / "maple.txt"
    (tmp_path / "outside").write_text("48")
    name.symlink_to(tmp_path / "outside")
    assert verify(create, work, tmp_path / "logs") == 0.0
    name.unlink()
    os.mkfifo(name)
    assert verify(create, work, tmp_path / "logs") == 0.0
    name.unlink()
    name.mkdir()
    assert verify(create, work, tmp_path / "logs") == 0.0
    name.rmdir()
    with open(name, "wb") as file:
        file.truncate(1 << 40)
    assert verify(create, work, tmp_path / "logs") == 0.0


def test_a_dangling_link_is_not_gone(tmp_path: Path) -> None:
    write(Chore((Part("delete", "a.txt", "b.txt", "10"),)), tmp_path / "t")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "a.txt").symlink_to("nowhere")
    assert verify(load(tmp_path / "t"), tmp_path / "w", tmp_path / "logs") == 0.0


def test_the_same_folder_again(tmp_path: Path) -> None:
    first = generate(1, 2, 3, tmp_path / "a")
    other = generate(1, 2, 3, tmp_path / "b")
    for path in sorted(p.relative_to(first.path) for p in first.path.rglob("*") if p.is_file()):
        assert (first.path / path).read_bytes() == (other.path / path).read_bytes()
    (first.path / "instruction.md").write_text("as it is")
    assert generate(1, 2, 3, tmp_path / "a").instruction == "as it is"
    assert [p.name for p in (tmp_path / "a").iterdir()] == [first.name]


def test_check_refuses_a_part_that_asks_for_nothing() -> None:
    with pytest.raises(GyreError, match="fails its gate"):
        check(Chore((Part("append", "a.txt", "b c", "10"),)))


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GyreError, match="can't be written"):
        generate(0, 0, 1, tmp_path / "file")
