"""Where a rank stands, and the address that the core's world meets at."""

from __future__ import annotations

import socket

import pytest

from gyre_hpc.controller.place import Place, hold_address, own_host


def test_the_first_slot_leads_and_the_first_cell_is_the_core() -> None:
    assert [Place(cell, slot, 2).is_leader for cell, slot in ((0, 0), (0, 1), (1, 0))] == [True, False, True]
    assert [Place(cell, slot, 2).is_core for cell, slot in ((0, 0), (0, 1), (1, 0))] == [True, True, False]


def test_on_one_machine_the_host_is_the_loopback_and_in_a_job_the_nodes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert own_host() == socket.gethostname()


def test_the_address_is_kept_from_others_until_the_world_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with socket.socket() as held, socket.socket() as world, socket.socket() as other:
        host, port = hold_address(held).rsplit(":", 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("", int(port)))
        world.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's rendezvous does
        world.bind(("", int(port)))
        world.listen()
        with socket.create_connection((host, int(port)), timeout=5.0):
            pass
