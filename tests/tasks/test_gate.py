"""The gate, with pretended verifiers, and once with real scripts in real boxes."""

from pathlib import Path

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.executions.scoring import grade
from gyre_hpc.tasks import gate
from gyre_hpc.tasks.generator import generate
from gyre_hpc.tasks.harbor import Task, TaskError


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return generate(0, 0, 2, tmp_path / "tasks")


def scorer(nothing: float, reference: float):
    return lambda task, workspace: reference if (workspace / "solved").exists() else nothing


def solver(task: Task, workspace: Path) -> None:
    (workspace / "solved").touch()


def test_admitted(task: Task) -> None:
    assert gate.admit(task, scorer(0.0, 1.0), solver) == gate.Verdict(0.0, 1.0, "")


@pytest.mark.parametrize(
    ("nothing", "reference", "why"), [(0.925, 1.0, "doing nothing scores 0.925, not 0"), (0.0, 0.5, "reference solution scores 0.5, not 1")]
)
def test_refused(task: Task, nothing: float, reference: float, why: str) -> None:
    assert why in gate.admit(task, scorer(nothing, reference), solver).refusal
    with pytest.raises(TaskError, match=f"is refused.*{why}"):
        gate.check(task, scorer(nothing, reference), solver)


def test_a_broken_verifier_refuses(task: Task) -> None:
    def broken(task: Task, workspace: Path) -> float:
        raise GyreError("the verifier gives no score", "mend it")

    assert gate.admit(task, broken, solver).refusal == "the verifier gives no score"


def test_the_workspace_is_the_environment_without_its_dockerfile(task: Task) -> None:
    seen: list[set[str]] = []

    def look(task: Task, workspace: Path) -> float:
        seen.append({path.name for path in workspace.iterdir()})
        return 0.0

    gate.admit(task, look, lambda task, workspace: None)
    wanted = {path.name for path in task.environment.iterdir()} - {"Dockerfile"}
    assert seen == [wanted, wanted]


def test_real_boxes(task: Task) -> None:
    gate.check(task, grade, gate.solve_in_box)
    (task.solution / "solve.sh").write_text("exit 3\n")
    assert gate.admit(task, grade, gate.solve_in_box).refusal == "the reference solution ends with code 3"
    (task.solution / "solve.sh").unlink()
    assert "solution/solve.sh is missing" in gate.admit(task, grade, gate.solve_in_box).refusal
