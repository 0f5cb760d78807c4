"""Sources: the same index gives the same task, folders are gated once, mistakes are named."""

from pathlib import Path

import pytest

from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.paths import RunPaths
from gyre_hpc.tasks.generator import generate
from gyre_hpc.tasks.harbor import Task
from gyre_hpc.tasks.source import ChoresSource, FolderSource, task_source


def test_chores(tmp_path: Path) -> None:
    source = ChoresSource(3, [1, 2, 3], tmp_path / "a")
    again = ChoresSource(3, [1, 2, 3], tmp_path / "b")
    tasks = [source.task(index) for index in range(30)]
    assert [t.instruction for t in tasks] == [again.task(index).instruction for index in range(30)]
    assert len({t.instruction for t in tasks}) == 30
    assert {t.metadata["difficulty"] for t in tasks} == {1, 2, 3}


def test_release_removes_only_what_was_generated(tmp_path: Path) -> None:
    source = ChoresSource(0, [1], tmp_path / "tasks")
    task = source.task(0)
    (tmp_path / "other").mkdir()
    source.release(str(tmp_path / "other"))
    source.release(str(task.path))
    assert not task.path.exists()
    assert (tmp_path / "other").exists()
    assert source.task(0).instruction == task.instruction


def test_a_grade_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.difficulty has 12"):
        ChoresSource(0, [1, 12], tmp_path)


class PretendedGate:
    """Scores 1 once solved, 0 before; refuses the names in `bad` (they score 1 untouched)."""

    def __init__(self, bad: set[str]) -> None:
        self.bad, self.scored = bad, 0

    def score(self, task: Task, workspace: Path) -> float:
        self.scored += 1
        return 1.0 if task.name in self.bad or (workspace / "solved").exists() else 0.0

    def solve(self, task: Task, workspace: Path) -> None:
        (workspace / "solved").touch()


def folder_of(tmp_path: Path) -> Path:
    for index in range(4):
        generate(0, index, 1, tmp_path / "suite")
    (tmp_path / "suite" / "broken").mkdir()
    (tmp_path / "suite" / "broken" / "task.toml").write_text("a = ")
    return tmp_path / "suite"


def test_folder_leaves_out_what_the_gate_refuses_and_remembers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    suite, kept = folder_of(tmp_path), tmp_path / "gate.json"
    pretended = PretendedGate({"chore-0-000002"})
    source = FolderSource(suite, 0, kept, pretended.score, pretended.solve)
    names = [source.task(index).name for index in range(6)]
    assert sorted(names[:3]) == sorted(names[3:]) == ["chore-0-000000", "chore-0-000001", "chore-0-000003"]
    assert "doing nothing scores 1, not 0" in caplog.text
    assert "is not TOML" in caplog.text
    before = pretended.scored
    again = FolderSource(suite, 0, kept, pretended.score, pretended.solve)
    assert pretended.scored == before
    assert [again.task(index).name for index in range(6)] == names


def test_gating_that_is_interrupted_goes_on_where_it_was_and_a_folder_without_task_is_named(tmp_path: Path) -> None:
    suite, kept = folder_of(tmp_path), tmp_path / "kept" / "gate.json"
    (suite / "data").mkdir()
    (suite / "README.md").touch()
    (suite / ".git").mkdir()
    pretended = PretendedGate(set())

    def killed(task: Task, workspace: Path) -> None:
        if task.name == "chore-0-000002":
            raise KeyboardInterrupt
        pretended.solve(task, workspace)

    with pytest.raises(KeyboardInterrupt):
        FolderSource(suite, 0, kept, pretended.score, killed)
    assert pretended.scored == 2 * 2 + 1
    source = FolderSource(suite, 0, kept, pretended.score, pretended.solve)
    assert pretended.scored == 2 * 4 + 1
    assert len(source.tasks) == 4
    broken, data = source.left_out
    assert "broken: task.toml is not TOML" in broken
    assert "data: task.toml is missing" in data


def test_folder_is_gated_again_after_a_change(tmp_path: Path) -> None:
    suite, kept = folder_of(tmp_path), tmp_path / "gate.json"
    pretended = PretendedGate(set())
    FolderSource(suite, 0, kept, pretended.score, pretended.solve)
    before = pretended.scored
    (suite / "chore-0-000001" / "tests" / "test.sh").write_text("exit 0\n")
    FolderSource(suite, 0, kept, pretended.score, pretended.solve)
    assert pretended.scored == before + 2


def test_folder_without_tasks(tmp_path: Path) -> None:
    pretended = PretendedGate(set())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no folder in it, so no task"):
        FolderSource(tmp_path / "empty", 0, tmp_path / "gate.json", pretended.score, pretended.solve)
    with pytest.raises(ConfigError, match="is no folder"):
        FolderSource(tmp_path / "none", 0, tmp_path / "gate.json", pretended.score, pretended.solve)


def test_task_source(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    config = check({"tasks": {"seed": 9}}, "test")
    assert task_source(config, paths).task(0).path.parent == paths.tasks
    with pytest.raises(ConfigError, match="builtin:puzzles is not known"):
        task_source(check({"tasks": {"source": "builtin:puzzles"}}, "test"), paths)
