"""Weights over TCP arrive whole and equal, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from gyre_hpc import memory
from gyre_hpc.engines import weight_stream
from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_stream import Sender, receive

WEIGHTS = [
    ("a.weight", torch.arange(1000, dtype=torch.float32).reshape(10, 100)),
    ("a.half", torch.arange(7, dtype=torch.bfloat16)),
    ("scale", torch.tensor(3.5)),
    ("none", torch.empty(0, 4)),
    ("ids", torch.arange(5)),
]
LARGE = [("large", torch.zeros(48 << 20, dtype=torch.uint8)), ("last", torch.ones(3))]
"""More than the buffers of two sockets hold."""


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender("127.0.0.1", 3, WEIGHTS)
    yield made
    made.close()


def test_what_is_received_is_what_was_sent_in_its_order(sender: Sender) -> None:
    for _ in range(2):
        got = receive(sender.source, 3, 10.0)
        assert list(got) == [name for name, _ in WEIGHTS]
        for name, tensor in WEIGHTS:
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor)
    sent = sender.close()
    assert (sent.receivers, sent.bytes) == (2, 2 * sum(tensor.nbytes for _, tensor in WEIGHTS))


def test_many_at_once(sender: Sender) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(receive(sender.source, 3, 10.0)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [len(WEIGHTS)] * 8


def test_strangers_and_those_of_another_version_get_nothing(sender: Sender) -> None:
    with pytest.raises(NotReceived, match="the stream ended early"):
        receive(sender.source[:-1] + "_", 3, 10.0)
    with pytest.raises(NotReceived, match="the stream ended early"):
        receive(sender.source, 4, 10.0)
    with socket.create_connection(("127.0.0.1", int(sender.source.split("/")[0].split(":")[1]))) as stranger:
        stranger.sendall(b"\xff" * 5000)
        stranger.settimeout(10.0)
        with contextlib.suppress(ConnectionResetError):  # as good an answer
            assert stranger.recv(10) == b""
    assert len(receive(sender.source, 3, 10.0)) == len(WEIGHTS), "it still serves the others"


def test_who_comes_after_the_end_is_told(sender: Sender) -> None:
    sender.close()
    with pytest.raises(NotReceived, match="did not arrive whole"):
        receive(sender.source, 3, 10.0)
    sender.close()


def test_a_sender_that_ends_in_the_middle_leaves_nothing() -> None:
    sender = Sender("127.0.0.1", 3, LARGE)
    with _asked(sender) as slow:
        assert slow.recv(1)
        assert sender.close().receivers == 0
        slow.settimeout(10.0)
        got = 1
        try:
            while part := slow.recv(1 << 20):
                got += len(part)
        except ConnectionResetError:
            pass
    assert got < sum(tensor.nbytes for _, tensor in LARGE)


def test_a_receiver_that_dies_does_not_hold_up_others() -> None:
    sender = Sender("127.0.0.1", 3, LARGE)
    dead = _asked(sender)
    assert dead.recv(1)
    assert set(receive(sender.source, 3, 30.0)) == {"large", "last"}
    dead.close()
    assert sender.close().receivers == 1


def test_a_stream_that_stalls_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NotReceived, match="did not arrive whole"):
        receive(f"127.0.0.1:{silent.getsockname()[1]}/x", 1, 0.05)


def test_where_there_is_no_room_nothing_is_begun(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(NotReceived, match="leave 0 MiB"):
        receive(sender.source, 3, 10.0)


def test_room_that_others_take_on_the_way_ends_it(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def shrinking() -> int:
        nonlocal looks
        looks += 1
        return 1 << 20 if looks < 4 else 10

    monkeypatch.setattr(memory, "available", shrinking)
    assert receive(sender.source, 3, 10.0).keys() == dict(WEIGHTS).keys()
    assert looks == 2, "the head, and tensors that have no slice in all"
    looks = 0
    monkeypatch.setattr(weight_stream, "SLICE", 1)
    with pytest.raises(NotReceived, match="leave 0 MiB"):
        receive(sender.source, 3, 10.0)
    assert looks == 4, "the head, and the first tensors, had room"


def test_an_accept_that_fails_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Scarce:
        """In place of the listener: the first accept finds no descriptor."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.failed = real, False

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

        def accept(self) -> object:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "Too many open files")
            return self.real.accept()

    real = socket.create_server
    with monkeypatch.context() as patched:
        patched.setattr(weight_stream.socket, "create_server", lambda *address, **options: Scarce(real(*address, **options)))
        sender = Sender("127.0.0.1", 3, WEIGHTS)
    assert len(receive(sender.source, 3, 10.0)) == len(WEIGHTS)
    assert sender.close().receivers == 1
    assert [record.getMessage() for record in caplog.records] == [
        "a receiver of version 3 could not be accepted: [Errno 24] Too many open files"
    ]


def _asked(sender: Sender) -> socket.socket:
    """A receiver that has asked and reads no further."""
    place, secret = sender.source.split("/")
    host, port = place.split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(json.dumps({"secret": secret, "version": 3}).encode() + b"\n")
    return connection
