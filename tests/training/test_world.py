"""Where a cell's ranks find each other. Whole worlds: tests/training/test_sharded.py and tests/job."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import pytest

from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.place import hold_address
from gyre_hpc.training.world import Seat, _store, patience


def test_on_one_node_it_is_open_to_that_node_alone_also_where_its_port_was_held() -> None:
    with socket.socket() as held:
        seat = Seat(0, 1, hold_address(held))
        store = _store(seat, timedelta(seconds=60))
    store.set("key", "value")
    assert store.get("key") == b"value"
    port = int(seat.master.rsplit(":", 1)[1])
    listens = [found.laddr for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listens if address.port == port] == ["127.0.0.1"]


@pytest.mark.parametrize("longest", ["start", "step", "transfer"])
def test_a_collective_waits_longer_than_whoever_called_it(longest: str) -> None:
    assert patience(DeadlinesSection(**{longest: 5000.0})) > 5000.0
