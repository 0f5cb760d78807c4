"""What fits into a cell: training ranks, engines and their devices, and what is refused with which numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.layout import Seat, cell_capacities, cell_seats, crowd, seats, waste


def config(**sections: dict[str, Any]) -> Config:
    return check(sections, "test")


def test_one_engine_sees_all_devices_of_its_node() -> None:
    assert seats(2, 4, 1, 4) == (Seat(0, 0),)


def test_engines_are_spread_over_nodes_and_devices() -> None:
    assert seats(1, 4, 2, 4) == (Seat(0, 0, (0, 1)), Seat(1, 2, (2, 3)))
    assert seats(2, 4, 2, 4) == (Seat(0, 0, (0, 1, 2, 3)), Seat(1, 4, (0, 1, 2, 3)))
    assert seats(2, 1, 2, 1) == (Seat(0, 0, (0,)), Seat(1, 1, (0,)))


def test_engines_may_share_a_rank_where_there_are_fewer_ranks() -> None:
    assert seats(1, 1, 2, 1) == (Seat(0, 0, (0,)), Seat(1, 0, (0,)))
    assert seats(1, 4, 4, 1) == tuple(Seat(e, 0, (e,)) for e in range(4)), "a standalone node has one rank for all of its devices"


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 32))
def test_every_engine_has_devices_of_one_node_and_none_shares_one_without_need(nodes: int, devices: int, engines: int) -> None:
    found = seats(nodes, devices, engines, devices)
    assert [seat.engine for seat in found] == list(range(engines))
    assert [seat.slot for seat in found] == sorted(seat.slot for seat in found)
    taken = [(seat.slot // devices, device) for seat in found for device in seat.devices]
    if engines > 1:
        assert all(seat.devices and seat.devices[0] == seat.slot % devices for seat in found)
        assert all(device < devices for _, device in taken)
    if engines <= nodes * devices:
        assert len(set(taken)) == len(taken)


def test_a_standalone_node_has_a_cells_engines_per_node() -> None:
    wide = config(
        cells={"count": 2, "nodes_per_cell": 2, "ranks_per_node": 4, "standalone": 3}, rollout={"engines_per_cell": 4, "capacity": 5}
    )
    assert [seat.slot for seat in cell_seats(wide, standalone=False)] == [0, 2, 4, 6]
    assert [seat.devices for seat in cell_seats(wide, standalone=True)] == [(0, 1), (2, 3)]
    assert {seat.slot for seat in cell_seats(wide, standalone=True)} == {0}
    assert cell_capacities(wide) == [20, 20, 10, 10, 10]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"cells": {"nodes_per_cell": 2, "ranks_per_node": 4}, "training": {"tensor_parallel": 3}},
            r"2 x 3 x 1 = 6, but a cell has .* = 2 x 4 = 8 ranks; the nearest that fit: data_parallel = 4, tensor_parallel = 2, pipeline_p",
        ),
        (
            {"training": {"data_parallel": 2}},
            r"2 x 1 x 1 = 2, but a cell has .* = 1 x 1 = 1 ranks; the nearest that fit: data_parallel = 1,",
        ),
        (
            {"cells": {"ranks_per_node": 4}, "training": {"tensor_parallel": 2}},
            r"training.tensor_parallel = 2 is not supported: every rank",
        ),
        ({"cells": {"ranks_per_node": 4}, "training": {"pipeline_parallel": 4}}, r"training.pipeline_parallel = 4 is not supported"),
        ({"schedule": {"trainers": 4}}, r"schedule.trainers = 4 with cells.count = 3; 1 to 3"),
        ({"schedule": {"mode": "async"}}, r"async needs cells that only roll out: set cells.standalone"),
        ({"rollout": {"capacity": 0}}, r"the torch engine holds what it is told; set rollout.capacity, or rollout.options.rows"),
        (
            {"cells": {"ranks_per_node": 4}, "rollout": {"engine": "vllm", "engines_per_cell": 2, "options": {"tensor-parallel-size": 4}}},
            r"vLLM engine wants 4 devices .*engines_per_cell = 2 leaves it 2 of a cell's 1 nodes x 4; tensor-parallel-size = 2 or less",
        ),
        (
            {"cells": {"nodes_per_cell": 2, "ranks_per_node": 4}, "rollout": {"engine": "vllm", "options": {"tensor_parallel_size": 8}}},
            r"wants 8 devices .* leaves it 4 of a cell's 2 nodes x 4; .*an engine stays on one node",
        ),
        (
            {"cells": {"ranks_per_node": 2}, "rollout": {"engine": "vllm", "engines_per_cell": 3}},
            r"a cell has 2 devices .*; 2 engines at most",
        ),
        ({"rollout": {"engine": "vllm", "options": {"tensor-parallel-size": "two"}}}, r"tensor-parallel-size = 'two'; a whole number"),
    ],
)
def test_what_can_not_be_is_refused_with_the_numbers(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**sections)


def test_what_can_be() -> None:
    config(cells={"ranks_per_node": 4}, training={"data_parallel": 4})
    config(cells={"standalone": 1}, schedule={"mode": "async"})
    config(rollout={"capacity": 0, "options": {"rows": 8}})
    config(rollout={"engine": "vllm", "capacity": 0})
    whole = {"cells": {"ranks_per_node": 4}, "rollout": {"engine": "vllm", "options": {"tensor-parallel-size": 4}}}
    assert waste(config(**whole)) == []


def test_what_lies_idle_is_said() -> None:
    lines = waste(config(cells={"nodes_per_cell": 4, "ranks_per_node": 2}, rollout={"engine": "vllm"}))
    assert len(lines) == 2
    assert "3 nodes of each cell have no engine" in lines[0]
    assert "engines_per_cell = 1 with 1 devices each use 1 of the 2 devices on their nodes" in lines[1]
    (line,) = waste(config(cells={"nodes_per_cell": 2, "ranks_per_node": 4}, rollout={"engine": "vllm", "engines_per_cell": 3}))
    assert "3 with 1 devices each use 3 of the 8 devices" in line


def test_an_engine_at_the_end_of_a_node_must_have_the_devices_that_it_wants() -> None:
    cells = {"nodes_per_cell": 3, "ranks_per_node": 4}
    rollout = {"engine": "vllm", "engines_per_cell": 5, "options": {"tensor-parallel-size": 2}}
    with pytest.raises(ConfigError, match=r"one vLLM engine wants 2 devices .* leaves it 1 of a cell's 3 nodes x 4"):
        config(cells=cells, rollout=rollout)
    config(cells=cells, rollout={**rollout, "engines_per_cell": 6})


def test_a_crowd_on_one_machine_is_said_and_a_mob_refused() -> None:
    assert crowd(config(), cores=2) is None
    line = crowd(config(cells={"count": 6, "standalone": 1}), cores=2)
    assert line is not None
    assert line.startswith("8 ranks and 7 engines on 2 cores")
    with pytest.raises(ConfigError, match=r"101 ranks and 100 engines on 2 cores .*: more than 32 processes a core; lower cells.count"):
        crowd(config(cells={"count": 100}), cores=2)
