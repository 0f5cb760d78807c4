from __future__ import annotations

import subprocess
import sys

import pytest

from cells.communicators import Layout, WorldMismatch, check_world
from tests.cells.ranks import check_ranks, clean_environment


def test_layout_numbers_the_ranks_cell_by_cell() -> None:
    layout = Layout(cells=3, ranks_per_cell=2)
    assert layout.world_size == 7
    assert [layout.cell_of(r) for r in range(7)] == [None, 0, 0, 1, 1, 2, 2]
    assert [layout.slot_of(r) for r in range(7)] == [None, 0, 1, 0, 1, 0, 1]
    assert layout.control_ranks() == [0, 1, 3, 5]
    assert layout.prefix_ranks(2, 1) == [2, 4]


def test_standalone_cells_of_one_rank_stand_behind_the_others() -> None:
    layout = Layout(cells=2, ranks_per_cell=2, standalone=2)
    assert layout.world_size == 7
    assert [layout.cell_of(r) for r in range(7)] == [None, 0, 0, 1, 1, 2, 3]
    assert [layout.slot_of(r) for r in range(7)] == [None, 0, 1, 0, 1, 0, 0]
    assert layout.control_ranks() == [0, 1, 3, 5, 6]
    assert [layout.ranks_of(cell) for cell in range(layout.all_cells)] == [[1, 2], [3, 4], [5], [6]]
    assert [layout.is_standalone(cell) for cell in range(4)] == [False, False, True, True]


def test_a_world_of_the_right_size_is_accepted_whatever_slurm_says() -> None:
    check_world(4, Layout(3), {"SLURM_STEP_NUM_TASKS": "1"})


def test_singletons_are_named_with_the_remedy() -> None:
    with pytest.raises(WorldMismatch, match=r"1 rank in a Slurm step of 4 tasks.*--mpi=pmi2"):
        check_world(1, Layout(3), {"SLURM_STEP_NUM_TASKS": "4"})


def test_another_size_is_named_with_both_numbers() -> None:
    with pytest.raises(WorldMismatch, match=r"has 3 ranks, needs 4 \(1 controller \+ 3 cells x 1\)") as caught:
        check_world(3, Layout(3), {})
    assert "\n" not in str(caught.value)
    with pytest.raises(WorldMismatch, match=r"needs 6 \(1 controller \+ 3 cells x 1 \+ 2 standalone\)"):
        check_world(3, Layout(3, standalone=2), {})


def test_importing_the_package_does_not_start_mpi() -> None:
    modules = ["claims", "communicators", "epochs", "events", "policy", "reduce", "roles", "waterlevel", "waiting"]
    load = f"import sys, importlib\nfor m in {modules}: importlib.import_module('cells.' + m)\n"
    code = load + "print('mpi4py' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(("ranks", "ranks_per_cell", "standalone"), [(2, 1, 0), (4, 1, 1), (6, 2, 1)])
def test_communicators_claims_and_sums_over_real_ranks(ranks: int, ranks_per_cell: int, standalone: int) -> None:
    check_ranks("mpi_planes.py", ranks, str(ranks_per_cell), str(standalone))
