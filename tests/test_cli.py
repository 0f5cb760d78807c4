"""The command line is frozen: names, exit codes, one line an error, --json, and a quick --help."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gyre_hpc.cli import main
from gyre_hpc.configfile import check, load
from gyre_hpc.driver import provenance
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.events import EventLog
from trees.records import Execution, ExecutionEnd, Group
from trees.store import StoreWriter


@dataclass(frozen=True)
class Said:
    returncode: int
    stdout: str
    stderr: str


Gyre = Callable[..., Said]


@pytest.fixture
def gyre(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Gyre:
    """`gyre ARGUMENTS` in the test's folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["gyre", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return Said(int(caught.value.code or 0), *capsys.readouterr())

    return run


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """Under 0.5 s of CPU: the wall clock of a busy machine says nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "gyre_hpc.cli", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    code = "import sys, gyre_hpc.cli; print([m for m in ('torch', 'numpy', 'h5py', 'pydantic', 'aiohttp', 'submitit') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_commands_are_these() -> None:
    from gyre_hpc.cli import app
    from gyre_hpc.commands import trees

    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == {"init", "run", "submit", "sweep", "status", "watch", "report", "doctor", "gateway", "simulate", "plan"}
    assert {command.name for command in trees.app.registered_commands} == {"ls", "show", "stats", "verify", "repair", "import", "export"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nope.yaml"], "gyre: config nope.yaml: No such file or directory; give the path"),
        (["run", "c.yaml", "training.lrr=1"], "unknown key training.lrr; did you mean training.lr?"),
        (["run", "c.yaml", "run.steps=many"], "run.steps = 'many'"),
        (["run", "c.yaml", "run.steps"], "override 'run.steps' has no `=`"),
        (["run", "c.yaml", "model.path=nope", "run.dir=r"], "nope does not exist; give a Hugging Face model directory"),
        (["run"], "Missing argument 'CONFIG'; `--help` behind the command"),
        (["walk"], "No such command 'walk'"),
        (["status", "."], "is not a run directory"),
        (["trees", "stats", "nowhere"], "nowhere does not exist"),
        (["trees", "stats", "c.yaml"], "c.yaml is no folder"),
        (["sweep", "c.yaml"], "sweep.grid is empty"),
        (["init", "a/b"], "is no name for a run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(gyre: Gyre, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "c.yaml").write_text("run: {name: c, min_free_mb: 1}\n")
    done = gyre(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["trees"]])
def test_without_a_command_the_help_is_all_that_is_said(gyre: Gyre, arguments: list[str]) -> None:
    done = gyre(*arguments)
    assert (done.returncode, done.stderr) == (2, "")


def test_init_writes_a_configuration_that_loads_as_the_defaults(gyre: Gyre, tmp_path: Path) -> None:
    assert gyre("init", "mine.yaml").returncode == 0
    assert load(tmp_path / "mine.yaml") == check({"run": {"name": "mine"}}, "test")
    again = gyre("init", "mine")
    assert (again.returncode, "mine.yaml exists" in again.stderr) == (2, True)


def test_status_reads_files_only_and_speaks_json(gyre: Gyre, tmp_path: Path) -> None:
    paths = prepare(check({"run": {"dir": str(tmp_path / "run"), "name": "t"}}, "test"))
    EventLog(paths.events).emit("run.start", attempt=1)
    found = json.loads(gyre("status", str(paths.root), "--json").stdout)
    assert (found["steps"], found["attempt"]) == (20, 1)
    assert len(gyre("status", str(paths.root)).stdout.splitlines()) >= 1


def test_a_path_that_something_else_is_at_is_one_line(gyre: Gyre, tmp_path: Path) -> None:
    paths = prepare(check({"run": {"dir": str(tmp_path / "run"), "name": "t"}}, "test"))
    paths.events.mkdir()
    done = gyre("status", str(paths.root))
    assert (done.returncode, done.stderr) == (
        1,
        f"gyre: {paths.events}: Is a directory; give another path, or see what is in the way there\n",
    )


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_run_directory_that_was_copied_or_moved_is_the_one_that_runs(gyre: Gyre, tmp_path: Path, how: str) -> None:
    first, second = tmp_path / "run", tmp_path / "second"
    prepare(check({"run": {"dir": str(first), "name": "t", "min_free_mb": 10**9}}, "test"))
    if how == "copied":
        shutil.copytree(first, second)
    else:
        first.rename(second)
    before = sorted(tmp_path.rglob("*"))
    done = gyre("run", "second")
    assert f"{second}: " in done.stderr
    assert done.returncode == 75
    assert load(second / "config.yaml").run.dir == second
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [second / "events.jsonl"]


def test_a_run_directory_can_be_given_in_place_of_its_configuration(gyre: Gyre, tmp_path: Path) -> None:
    paths = prepare(check({"run": {"dir": str(tmp_path / "run"), "name": "t", "min_free_mb": 10**9}}, "test"))
    done = gyre("run", str(paths.root))
    assert done.returncode == 75
    assert "MiB free, a run starts with run.min_free_mb = 1000000000" in done.stderr


def test_the_configurations_in_the_repository_load() -> None:
    folder = Path(__file__).parents[1] / "configs"
    for path in sorted(folder.glob("*.yaml")):
        assert load(path).run.name == yaml.safe_load(path.read_text())["run"].get("name", path.stem)


def test_submitting_without_slurm_is_one_line_and_makes_nothing(gyre: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("run: {name: c}\nsweep: {grid: {run.seed: [1, 2]}}\n")
    monkeypatch.setenv("PATH", "/nowhere")
    for command in ("submit", "sweep"):
        done = gyre(command, "c.yaml")
        assert (done.returncode, done.stderr.startswith("gyre: no Slurm here: sbatch, srun not on PATH;")) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


def test_a_disk_that_takes_nothing_is_one_line_and_resumable(gyre: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/provenance.json")

    monkeypatch.setattr(provenance, "write", full)
    (tmp_path / "c.yaml").write_text("run: {steps: 1}")
    said = gyre("run", "c.yaml")
    assert said.returncode == 75
    assert said.stderr.startswith("gyre: run/provenance.json: No space left on device; ")
    assert said.stderr.count("\n") == 1


def test_trees_are_repaired_and_the_lost_named(gyre: Gyre, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "trees") as writer:
        writer.append(Group(0, "t", 1, 0, 0))
        writer.append(Execution(writer.allocate_execution(), 0, 0, 0))
        writer.append(ExecutionEnd(0, "done", 1.0, True, 0, 0, 0.0))
        (segment,) = writer.seal()
    assert json.loads(gyre("trees", "repair", str(tmp_path), "--json").stdout)["done"] == []
    segment.write_bytes(segment.read_bytes()[:-1000])
    assert gyre("trees", "verify", str(tmp_path)).returncode == 1
    (tmp_path / "config.yaml").write_text("run: {name: t}\n")
    drawn = gyre("report", str(tmp_path), "--json")
    assert (drawn.returncode, Path(json.loads(drawn.stdout)["report"]).is_file()) == (1, True)
    assert drawn.stderr.splitlines()[-1] == "gyre: the report lacks what can't be read: 1 of 1 executions can't be read: 0"
    found = gyre("trees", "repair", str(tmp_path), "--json")
    assert (found.returncode, json.loads(found.stdout)["lost"]) == (0, [0])
    assert gyre("trees", "verify", str(tmp_path)).returncode == 0
    assert gyre("report", str(tmp_path)).returncode == 0
    assert (tmp_path / "trees" / "damaged" / segment.name).exists()


def test_the_exit_code_tells_also_where_nobody_reads_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", ["gyre", "run", "nope.yaml"])
    with os.fdopen(write, "w") as lost, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", lost)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2


def test_a_current_folder_that_is_gone_is_one_line(gyre: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("run: {steps: 1}")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = gyre("run", str(tmp_path / "c.yaml"))
    assert (said.returncode, said.stderr) == (1, "gyre: the current folder is not there any more; cd to one that is\n")
