"""The lines between a leader and its members, before a made-up network."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any, cast

import pytest

from gyre_hpc.engines import weight_meeting
from gyre_hpc.engines.weight_meeting import Circle, Line, Lost, Meeting, Member, greeting


class FakeConnection:
    """In place of a socket of a node that this machine does not have: only its ends are looked at."""

    def __init__(self, ours: str, theirs: str) -> None:
        self._ours, self._theirs = ours, theirs
        self.near, self.far = socket.socketpair()

    def getsockname(self) -> tuple[str, int]:
        return self._ours, 1

    def getpeername(self) -> tuple[str, int]:
        return self._theirs, 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self.near, name)


def line(engine: str, ours: str = "127.0.0.1", theirs: str = "127.0.0.1", worker: int = 0, seconds: float = 10.0) -> tuple[Line, Any]:
    """And the member's own end, with `readline` and `write`."""
    connection = FakeConnection(ours, theirs)
    return Line(cast(socket.socket, connection), Member(engine, worker, 1, ("gloo",), seconds)), connection.far.makefile("rwb", buffering=0)


def entered(*ends: tuple[Line, Any]) -> list[dict[str, Any]]:
    """What each member is told when it is to enter a group."""
    circle = Circle([there for there, _ in ends], "gloo", "g", threading.Event())
    for _, far in ends:
        far.write(b"{}\n")
    circle.init_weight_transfer_engine({"rank_offset": 1, "master_address": circle.address})
    return [json.loads(far.readline()) for _, far in ends]


def test_nobody_is_told_an_address_that_leads_nowhere_from_its_node() -> None:
    same_node, other_node = line("a", "127.0.1.1", "127.0.1.1"), line("b", "10.0.0.1", "10.0.0.2")
    told = entered(same_node, other_node)
    assert [message["address"] for message in told] == ["10.0.0.1", "10.0.0.2"]
    assert {message["info"]["master_address"] for message in told} == {"10.0.0.1"}
    assert [message["address"] for message in entered(line("a", "127.0.1.1", "127.0.1.1"))] == ["127.0.1.1"], "all on one node"


def test_workers_are_numbered_through_as_vllm_adds_up() -> None:
    told = entered(line("a", worker=0), line("a", worker=1), line("b", worker=0))
    ranks = [message["info"]["rank_offset"] + worker for message, worker in zip(told, (0, 1, 0), strict=True)]
    assert ranks == [1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b'{"failed": "no room"}\n', "a: no room"), (b"[]\n", r"a was lost: it answered \[\]"), (b"", "1 of 1 were late, a among them")],
)
def test_a_member_that_fails_lies_or_is_late_ends_it_after_our_own_side_is_out(answer: bytes, words: str) -> None:
    member, far = line("a", seconds=0.05)
    far.write(answer)
    circle, told = Circle([member], "gloo", "g", threading.Event()), []
    circle.abort = lambda: told.append("abort")
    with pytest.raises(Lost, match=words):
        circle.start_weight_update()
    assert told == ["abort"]
    assert not member.done


def test_our_own_side_can_end_it_and_so_can_a_withdrawal() -> None:
    stopped = threading.Event()
    circle = Circle([line("a")[0]], "gloo", "g", stopped)
    circle.leave("out of memory")
    with pytest.raises(Lost, match="out of memory"):
        circle.start_weight_update()
    stopped.set()
    with pytest.raises(Lost, match="withdrawn"):
        circle.start_weight_update()


def test_one_that_left_before_the_beginning_is_not_led() -> None:
    meeting = Meeting("127.0.0.1", 1)
    place, secret = meeting.source.split("/")
    gone, there = (socket.create_connection(("127.0.0.1", int(place.split(":")[1]))) for _ in range(2))
    for name, connection in (("gone", gone), ("there", there)):
        connection.sendall(greeting(secret, 1, Member(name, 0, 1, ("gloo",), 5.0)))
    gone.close()
    lines = meeting.gather(2, 5.0, threading.Event())
    assert [led.member.engine for led in lines] == ["there"]
    lines[0].over("enough")
    assert json.loads(there.makefile().readline()) == {"do": "end", "why": "enough"}
    there.close()


def greet(meeting: Meeting, said: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(meeting.source.split("/")[0].split(":")[1])))
    connection.sendall(said)
    return connection


def test_strangers_keep_nobody_waiting_however_slowly_they_speak(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Some say nothing, some a part, some too much; the only one that knows the secret says it in two parts, and comes last."""
    monkeypatch.setattr(weight_meeting, "_GUESTS", 4)
    meeting = Meeting("127.0.0.1", 1)
    strangers = [greet(meeting, said) for said in (b"", b"{", b"x" * (1 << 15), b"[1]\n", b"{}\n{}\n", b'{"secret": "a"}\n')]
    word = greeting(meeting.source.split("/")[1], 1, Member("a", 0, 1, ("gloo",), 5.0))
    member = greet(meeting, word[:20])
    found: list[Line] = []
    thread = threading.Thread(target=lambda: found.extend(meeting.gather(1, 600.0, threading.Event())))
    thread.start()
    until = time.monotonic() + 60.0
    while len(caplog.messages) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    member.sendall(word[20:])
    thread.join(60.0)
    assert [line.member.engine for line in found] == ["a"]
    for message in ("did not say who it is", "does not know the secret", "Extra data"):
        assert any(message in line for line in caplog.messages), caplog.messages
    for connection in (*strangers, member):
        connection.close()
    found[0].over("")


def test_who_trickles_is_turned_away_and_a_meeting_to_which_nobody_comes_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_meeting, "_GREETING", 0.0)
    meeting = Meeting("127.0.0.1", 1)
    stranger = greet(meeting, b"{")
    assert meeting.gather(1, 600.0, threading.Event(), 0.15) == []
    assert caplog.messages == ["somebody was turned away from the broadcast of version 1: it takes too long to say who it is"]
    stranger.settimeout(10.0)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
