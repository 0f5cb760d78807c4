"""What the leaders' reports become: routes, capacities, the event."""

from __future__ import annotations

from typing import Any

from cells.events import CapacityChanged
from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.controller.engines import Engines
from gyre_hpc.engines.protocol import EngineAddress


def report(*engines: tuple[int, int]) -> dict[str, Any]:
    """(capacity, holds) of each."""
    address = {"kind": "torch", "url": "u", "window": 100, "handover": "recompute"}
    fields = [{**address, "capacity": capacity, "pid": 1, "kv_tokens": 100 * holds, "holds": holds} for capacity, holds in engines]
    return {"actor_seconds": 1.0, "engines": {str(number): field for number, field in enumerate(fields)}}


def config(capacity: int) -> Config:
    return check({"cells": {"count": 1}, "rollout": {"capacity": capacity, "options": {"rows": 3}}, "model": {"window": 512}}, "test")


def test_capacities_add_up_and_addresses_are_those_of_the_gateway() -> None:
    engines = Engines([report((4, 4), (5, 5)), report((2, 2))])
    assert engines.capacities == [9, 2]
    addresses = list(engines.addresses())
    assert [(cell, number) for cell, number, _ in addresses] == [(0, 0), (0, 1), (1, 0)]
    assert EngineAddress(**addresses[1][2]).capacity == 5


def test_dead_engines_hold_nothing_and_the_pool_is_one() -> None:
    engines = Engines([report((4, 4), (5, 5)), report((2, 2)), report((3, 3))])
    dead = {0: {1}, 2: {0}}

    def of(cell: int) -> set[int]:
        return dead.get(cell, set())

    assert engines.changed(0, of, 1) == CapacityChanged(0, 4)
    assert [engines.serving(cells, of) for cells in ((0, 1, 2), (0,), (1,), (2,), ())] == [2, 1, 1, 0, 0]
    assert engines.changed(1, of, 1) == engines.changed(2, of, 1) == CapacityChanged(None, 2)
    dead.clear()
    assert engines.changed(0, of, 1) == CapacityChanged(0, 9)
    assert engines.changed(2, of, 3) == CapacityChanged(2, 3)


def test_what_the_configuration_asks_too_much_is_counted() -> None:
    facts = Engines([report((4, 4), (8, 3)), report((2, 2))]).facts(config(4))
    assert {key: facts[key] for key in ("capacity", "standalone", "measured", "window", "over")} == {
        "capacity": [12],
        "standalone": [2],
        "measured": False,
        "window": 512,
        "over": 1,
    }
    assert facts["engines"][1] == {"cell": 0, "engine": 1, "capacity": 8, "holds": 3, "kv_tokens": 300}
    assert Engines([report((3, 3))]).facts(config(0))["measured"] is True
