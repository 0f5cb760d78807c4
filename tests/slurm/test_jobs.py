"""The driver under real Slurm: sbatch, requeue, the warning before the time limit, submitit, a sweep, the death of a rank.

The gateway, the supervisors and the MPI step are the small programs of tests/driver/actors.py; everything else is as in a real job.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.config import Config
from gyre_hpc.configfile import check, dump
from gyre_hpc.driver import sweep
from gyre_hpc.driver.allocation import parse_job
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.driver.submit import submit_run
from gyre_hpc.driver.topology import expand, parse_topology, topology_command
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from tests.driver.actors import hold, programs
from tests.slurm.cluster import Cluster, Spec, cluster

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]


def make_config(folder: Path, **sections: Any) -> Config:
    tree = {"run": {"dir": str(folder / "run"), "name": "t", "min_free_mb": 1}, "deadlines": {"start": 60, "stop": 3}, **sections}
    return check(tree, "test")


def kinds(paths: RunPaths, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(paths.events) if event["kind"] == kind]


def until(what: str, condition: Callable[[], object], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.1)


def job(slurm: Cluster, number: str) -> dict[str, str]:
    return parse_job(slurm.run("scontrol", "--oneliner", "show", "job", number))


def sbatch(slurm: Cluster, folder: Path, config: Config, steps: int, *options: str) -> str:
    """Submit sbatch/gyre.sbatch with a Python that puts the small programs in place of the real ones."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\nshift 5\nexec {sys.executable} -u -m tests.driver.actors drive_config "$1" {steps}\n')
    python.chmod(0o755)
    dump(config, folder / "config.yaml")
    environment = {"GYRE_PYTHON": str(python)}
    script = ["sbatch/gyre.sbatch", str(folder / "config.yaml")]
    said = slurm.run("sbatch", f"--output={folder}/out.log", *options, *script, env=environment, cwd=ROOT)
    return re.search(r"\d+", said)[0]  # type: ignore[index]


def assert_each_step_once(paths: RunPaths, steps: int) -> None:
    assert [event["step"] for event in kinds(paths, "step.end")] == list(range(1, steps + 1))


def test_sbatch_requeued_twice_resumes_and_takes_every_step_once(slurm: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    paths = RunPaths(config.run_dir)
    hold(paths.root, 15)
    number = sbatch(slurm, tmp_path, config, steps=60)
    for attempt in (1, 2):
        until(
            f"step in attempt {attempt}", lambda n=attempt: len(kinds(paths, "run.start")) == n and len(kinds(paths, "step.end")) >= 10 * n
        )  # type: ignore[misc]
        slurm.run("scontrol", "requeue", number)
        until("next attempt", lambda n=attempt: len(kinds(paths, "run.start")) > n)  # type: ignore[misc]
        hold(paths.root, 25 if attempt == 1 else None)
    until("end", lambda: any(event["status"] == "done" for event in kinds(paths, "run.end")))
    assert_each_step_once(paths, 60)
    assert [event["attempt"] for event in kinds(paths, "run.start")] == [1, 2, 3]
    assert sorted(p.name for p in paths.logs.iterdir()) == ["attempt-001", "attempt-002", "attempt-003"]
    assert {p.name: p.read_text() for p in paths.root.glob("seen-*-3")} == {f"seen-n{i}-3": f"n{i}" for i in range(1, 5)}
    assert [(paths.root / f"rank-{rank}-3").read_text() for rank in range(4)] == ["n1", "n2", "n3", "n4"]
    until("end of the job", lambda: job(slurm, number)["JobState"] == "COMPLETED")
    assert job(slurm, number)["Restarts"] == "2"
    assert "step 60" in (tmp_path / "out.log").read_text()


def test_three_nodes_share_the_first_with_the_controller_and_two_are_refused(slurm: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    number = sbatch(slurm, tmp_path, config, 3, "--nodes=3")
    until("end of the job", lambda: job(slurm, number)["JobState"] == "COMPLETED")
    nodes = [(config.run_dir / f"rank-{rank}-1").read_text() for rank in range(4)]
    assert nodes[0] == nodes[1]
    assert len(set(nodes)) == 3
    number = sbatch(slurm, tmp_path, config, 3, "--nodes=2")
    until("refusal", lambda: job(slurm, number)["JobState"] == "FAILED")
    assert job(slurm, number)["ExitCode"] == "2:0"
    assert "cells.count = 3 with cells.nodes_per_cell = 1 needs 3 nodes, the allocation has 2" in (tmp_path / "out.log").read_text()


def test_cells_follow_the_switches_and_what_is_over_stands_alone(tmp_path: Path) -> None:
    switches = "SwitchName=s0 Nodes=n[1,3]\nSwitchName=s1 Nodes=n[2,4-5]\nSwitchName=top Switches=s[0-1]\n"
    with tempfile.TemporaryDirectory(prefix="gyre-topology-") as folder, cluster(Path(folder), Spec(nodes=5, topology=switches)) as slurm:
        found = parse_topology(slurm.run(*topology_command()))
        assert (found.kind, found.paths["n3"], found.paths["n5"]) == ("tree", ("top", "s0"), ("top", "s1"))
        hosts = "n[08-11],rack[0-1]x[1-2,7],login"
        assert expand(hosts) == slurm.run("scontrol", "show", "hostnames", hosts).split()
        config = make_config(tmp_path, cells={"count": 2, "nodes_per_cell": 2})
        paths = RunPaths(config.run_dir)
        number = sbatch(slurm, tmp_path, config, 1, "--nodelist=n[1-4]", "--nodes=4")
        until("the run to end", lambda: kinds(paths, "run.end"))
        assert job(slurm, number)["NodeList"] == "n[1-4]"
        (start,) = kinds(paths, "run.start")
        assert (start["cells"], start["switches"], start["topology"]) == ([["n1", "n3"], ["n2", "n4"]], [["s0"], ["s1"]], "tree")
        assert (start["standalone"], start["idle"]) == ([], [])
        assert (paths.root / "rank-2-1").read_text() == "n3", "rank 2 runs where the placement says"
        (tmp_path / "other").mkdir()
        other = make_config(tmp_path / "other", cells={"count": 1, "nodes_per_cell": 2})
        sbatch(slurm, tmp_path / "other", other, 1, "--nodes=5")
        until("the run to end", lambda: kinds(RunPaths(other.run_dir), "run.end"))
        (start,) = kinds(RunPaths(other.run_dir), "run.start")
        assert (start["cells"], start["standalone"]) == ([["n2", "n4"]], ["n3", "n5"]), "the controller has n1 for itself"
        assert (RunPaths(other.run_dir).root / "rank-4-1").read_text() == "n5", "standalone nodes have one rank each"


def test_the_warning_before_the_time_limit_stops_requeues_and_resumes(slurm: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    paths = RunPaths(config.run_dir)
    hold(paths.root, 10)
    number = sbatch(slurm, tmp_path, config, 30)
    until("step", lambda: kinds(paths, "step.end"))
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    until("end of the first attempt", lambda: kinds(paths, "run.end"))
    assert kinds(paths, "run.end")[0]["status"] == "stopped"
    hold(paths.root, None)
    until("end", lambda: kinds(paths, "run.end")[-1]["status"] == "done")
    assert_each_step_once(paths, 30)
    until("end of the job", lambda: job(slurm, number)["JobState"] == "COMPLETED")
    assert job(slurm, number)["Restarts"] == "1"


def test_a_preemptions_sigterm_to_the_steps_alone_stops_in_good_order(slurm: Cluster, tmp_path: Path) -> None:
    """Ranks and supervisors get it, the batch script with the driver does not."""
    paths = RunPaths(tmp_path / "run")
    number = sbatch(slurm, tmp_path, make_config(tmp_path), 500)
    until("two steps", lambda: len(kinds(paths, "step.end")) >= 2)
    slurm.run("scancel", "--signal=TERM", number)
    until("the end of the job", lambda: job(slurm, number)["JobState"] not in ("RUNNING", "COMPLETING"))
    assert job(slurm, number)["ExitCode"] == "75:0"
    assert (tmp_path / "out.log").read_text().splitlines()[-1] == "stopped by SIGTERM; the same command resumes"
    assert [event["status"] for event in kinds(paths, "run.end")] == ["stopped"]
    assert kinds(paths, "failure") == []


def test_a_killed_rank_ends_the_job_with_75_and_one_line(slurm: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    paths = RunPaths(config.run_dir)
    number = sbatch(slurm, tmp_path, config, 10000)
    until("step", lambda: kinds(paths, "step.end"))
    mark = json.loads((paths.runtime(1) / "started-mpi.2.json").read_text())
    assert mark["node"] == "n3"
    slurm.run("kill", "-9", str(mark["pid"]))
    until("end of the job", lambda: job(slurm, number)["JobState"] == "FAILED")
    assert job(slurm, number)["ExitCode"] == "75:0"
    last = (tmp_path / "out.log").read_text().splitlines()[-1]
    assert re.search(r"rank 2 \(a cell\) was killed by SIGKILL; log: .*mpi.log; the same command resumes", last)


def test_submitit_job_requeued_and_warned_resumes_and_gives_its_result(inside: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    paths = prepare(config)
    hold(paths.root, 10)
    number = submit_run(config, paths, programs(60, 0.1))
    until("step", lambda: len(kinds(paths, "step.end")) > 5)
    inside.run("scontrol", "requeue", number)
    until("next attempt", lambda: len(kinds(paths, "run.start")) == 2)
    hold(paths.root, 20)
    until("second attempt", lambda: len(kinds(paths, "run.start")) == 2 and len(kinds(paths, "step.end")) > 15)
    ended = len(kinds(paths, "run.end"))
    inside.run("scancel", "--batch", "--signal=USR1", number)
    until("stop", lambda: len(kinds(paths, "run.end")) > ended)
    hold(paths.root, None)
    until("end", lambda: kinds(paths, "run.end")[-1]["status"] == "done")
    assert_each_step_once(paths, 60)
    until("end of the job", lambda: job(inside, number)["JobState"] == "COMPLETED")
    assert (paths.root / "submitit" / f"{number}_0_result.pkl").exists()


def test_sweep_of_two_by_two_points_in_one_array(
    inside: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of them can't begin on their node, which no submitting machine could have known: the table says why."""
    grid = {"training.lr": [0.001, 0.002], "rollout.threads": [1, 1_000_000]}
    points = sweep.plan(make_config(tmp_path, sweep={"grid": grid}))
    number = sweep.submit_points(points, programs(3, 0.1))
    monkeypatch.setattr(sweep, "READ_EVERY", 0.2)
    rows = sweep.wait(points, number)
    assert [(row.point, row.status, row.steps, row.score_last) for row in rows] == [
        (f"lr={lr},threads={threads}", *end)
        for lr in (0.001, 0.002)
        for threads, end in ((1, ("done", 3, 0.5)), (1_000_000, ("failed", 0, None)))
    ]
    assert sweep.exit_code(rows) == 1
    sweep.print_table(rows)
    assert "lr=0.002,threads=1000000: rollout.threads = 1000000 on a node with " in capsys.readouterr().out
