"""Placement of ranks, and the parsers of Slurm's answers (texts as Slurm 22.05 printed them)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config import CellsSection
from gyre_hpc.driver.allocation import parse_hostnames, parse_job, parse_time, place
from gyre_hpc.driver.launcher import parse_steps, srun_command
from gyre_hpc.driver.requeue import job_name
from gyre_hpc.errors import ConfigError

JOB = (
    "JobId=12 JobName=gyre UserId=root(0) GroupId=root(0) MCS_label=N/A JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
    "Restarts=1 RunTime=00:00:05 TimeLimit=01:00:00 StartTime=2026-11-29T18:55:26 EndTime=2026-11-29T19:55:26 NodeList=n[1-4] NumNodes=4 "
    "TRES=cpu=4,node=4,billing=4 Command=/a/gyre.sbatch --plain x.yaml WorkDir=/a StdOut=/a/out.log Power= \n"
)


def test_with_as_many_nodes_as_the_cells_need_the_controller_shares_the_first() -> None:
    placed = place(("a", "b", "c"), CellsSection(count=3), local=False)
    assert placed.ranks == ("a", "a", "b", "c")
    assert placed.cells == (("a",), ("b",), ("c",))


def test_with_one_node_more_the_controller_has_its_own() -> None:
    placed = place(("a", "b", "c", "d", "e"), CellsSection(count=2, nodes_per_cell=2, ranks_per_node=2), local=False)
    assert placed.ranks == ("a", "b", "b", "c", "c", "d", "d", "e", "e")
    assert placed.cells == (("b", "c"), ("d", "e"))


def test_too_few_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="needs 6 nodes, the allocation has 5"):
        place(tuple("abcde"), CellsSection(count=3, nodes_per_cell=2), local=False)


def test_one_machine_without_slurm_holds_everything() -> None:
    assert place(("me",), CellsSection(count=3, nodes_per_cell=2), local=True).ranks == ("me",) * 7


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_cells_are_whole_nodes_in_order_and_never_share(count: int, width: int, ranks: int, spare: int) -> None:
    nodes = tuple(f"n{i}" for i in range(count * width + spare))
    cells = CellsSection(count=count, nodes_per_cell=width, ranks_per_node=ranks, leftover=False)
    placed = place(nodes, cells, local=False)
    used = [node for cell in placed.cells for node in cell]
    assert placed.ranks[0] == nodes[0]
    assert len(placed.ranks) == 1 + count * width * ranks
    assert len(set(used)) == len(used) == count * width
    assert used == sorted(used, key=nodes.index)
    assert placed.ranks[1:] == tuple(node for node in used for _ in range(ranks))
    with_pool = place(nodes, cells.model_copy(update={"leftover": True}), local=False)
    assert (with_pool.cells, with_pool.standalone, with_pool.idle) == (placed.cells, placed.idle, ())
    assert len(placed.idle) == max(0, spare - 1)
    assert with_pool.ranks == placed.ranks + placed.idle


def test_job_facts_and_times() -> None:
    facts = parse_job(JOB)
    assert {key: facts[key] for key in ("JobState", "NodeList", "Restarts", "Command")} == {
        "JobState": "RUNNING",
        "NodeList": "n[1-4]",
        "Restarts": "1",
        "Command": "/a/gyre.sbatch",
    }
    end, start = parse_time(facts["EndTime"]), parse_time(facts["StartTime"])
    assert end is not None
    assert start is not None
    assert end - start == 3600
    assert parse_time("Unknown") is None
    assert parse_hostnames("n1\nn2\n") == ("n1", "n2")


def test_only_our_steps_are_cancelled() -> None:
    assert parse_steps("12.0 gyre-mpi\n12.1 gyre-supervisor-n2\n12.batch batch\n12.3 bash\n") == ["12.0", "12.1"]


def test_an_srun_command_overlaps_and_kills_on_a_bad_exit() -> None:
    command = srun_command("mpi", ["python", "x"], ["--mpi=pmi2"])
    assert command[0] == "srun"
    assert {"--job-name=gyre-mpi", "--overlap", "--kill-on-bad-exit=1", "--mpi=pmi2"} <= set(command)
    assert command[-2:] == ["python", "x"]


def test_an_array_element_is_requeued_by_its_own_name() -> None:
    assert job_name({"SLURM_JOB_ID": "41"}) == "41"
    assert job_name({"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "1"}) == "40_1"
    assert job_name({}) is None
