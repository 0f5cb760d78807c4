"""A member before a leader that is played by hand."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from typing import Any

import pytest

from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_groups import Collector
from gyre_hpc.engines.weight_meeting import speaking
from gyre_hpc.engines.weight_member import attend
from tests.engines.hand_leader import leader


def test_one_that_has_finished_has_the_version_whatever_became_of_the_others() -> None:
    broke = {"do": "end", "why": "the broadcast broke: b: no room"}
    with leader({"do": "start", "backend": "gloo"}, {"do": "finish"}, broke) as source:
        attend(source, 1, 20.0, "a", Collector())
    with leader({"do": "start", "backend": "gloo"}, broke) as source, pytest.raises(NotReceived, match="b: no room"):
        attend(source, 1, 20.0, "a", Collector())


def test_one_that_is_in_the_collective_is_taken_out_when_the_leader_says_the_end() -> None:
    inside, out = threading.Event(), threading.Event()

    class Waiting(Collector):
        def update(self, info: dict[str, Any]) -> None:
            inside.set()
            assert out.wait(60)

        def abort(self) -> None:
            out.set()

    words = {"do": "start", "backend": "gloo"}, {"do": "update", "info": {}}, {"do": "end", "why": "b died"}
    with leader(*words, interrupts=inside) as source, pytest.raises(NotReceived, match="b died"):
        attend(source, 1, 120.0, "a", Waiting())


def test_a_line_is_heard_whatever_its_descriptor_s_number_is() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 else max(soft, 4096), hard))
    near, far = socket.socketpair()
    with near, far, socket.socket(fileno=fcntl.fcntl(near.fileno(), fcntl.F_DUPFD, 1024)) as high:
        assert speaking([high], 0.0) == []
        far.sendall(b"{}\n")
        assert speaking([far, high], 5.0) == [high]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(ValueError, match="-1"):
        speaking([high], 0.0)
