"""A model's weights from the trainer's memory into engines, over TCP: a `Sender` offers one version, any number of engines `receive` it.

Protocol: the receiver sends one line {secret, version}; the sender answers with 8 bytes of length (big endian), JSON {version, tensors:
[[name, dtype, shape], ...]}, then the tensors' bytes in that order, in slices of `SLICE` bytes, nothing behind. Names, dtypes and order are
those of the published files, so an engine takes both in the same way.
Invariants: a receiver holds a version whole or gets NotReceived: nothing of it goes near the model before the last byte is there; what is
offered never changes, its owner closes the sender before it lets a step touch the weights, and who is not done then has a short stream;
receivers do not wait for one another, as they would in a collective: one that dies, or is slow, costs nobody else anything.
A receiver needs room for the whole model in the memory of its host; it refuses beforehand where there is none, and on the way where others
take it: the workers of one engine receive at the same time, each of them the whole, and all see the same free memory when they begin.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gyre_hpc import memory
from gyre_hpc.engines.protocol import NotReceived

log = logging.getLogger(__name__)

SLICE = 16 << 20
"""Bytes of a slice: a sender that is closed stops behind one."""
_SILENCE = 30.0
"""Seconds for a slice after which the sender gives a receiver up."""
_PAUSE = 0.1
"""Seconds before the sender accepts again after it could not (no descriptor is left, say)."""
_LONGEST_REQUEST = 4096
_LOOPBACK = "127.0.0.1"

Weights = Sequence[tuple[str, torch.Tensor]]
"""(name as in the files, contiguous CPU tensor)."""


@dataclass(frozen=True)
class Sent:
    """What a sender did: receivers that got everything, bytes over all, seconds from the first request to the last byte.

    A receiver is a worker: an engine may have several. `meet`: seconds before, in which those of a broadcast came together
    (weight_broadcast.py).
    """

    receivers: int
    bytes: int
    seconds: float
    meet: float = 0.0


class Sender:
    """Offers `weights` as `version` on a port of its own until `close`; `host`: the name under which this node is reached."""

    def __init__(self, host: str, version: int, weights: Weights) -> None:
        """Listens when it returns. Raises OSError."""
        self._version, self._weights = version, weights
        self._secret = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._done, self._bytes = 0, 0
        self._first, self._last = 0.0, 0.0
        self._listener = socket.create_server((host if host == _LOOPBACK else "", 0), backlog=1024)
        self.source = f"{host}:{self._listener.getsockname()[1]}/{self._secret}"
        """To be given to `receive`; whoever knows it may read the weights."""
        self._acceptor = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._acceptor.start()

    def close(self) -> Sent:
        """Nobody reads the weights any more when this returns; whoever was not done is cut off."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for connection in [self._listener, *left]:
            with contextlib.suppress(OSError):  # it may have ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        return Sent(self._done, self._bytes, max(0.0, self._last - self._first))

    def _accept(self) -> None:
        threads = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    break
                log.warning("a receiver of version %d could not be accepted: %s", self._version, error)
                time.sleep(_PAUSE)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    break
                self._open.add(connection)
            threads.append(threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SILENCE)
            self._answer(connection)
        except (OSError, ValueError) as error:
            log.warning("a receiver of version %d was given up: %s", self._version, error)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            asked = json.loads(lines.readline(_LONGEST_REQUEST) or b"{}")
        if not isinstance(asked, dict) or not hmac.compare_digest(str(asked.get("secret")).encode(), self._secret.encode()):
            raise ValueError("it does not know the secret")
        if asked.get("version") != self._version:
            raise ValueError(f"it wants version {asked.get('version')!r}")
        with self._lock:
            self._first = self._first or time.monotonic()
        tensors = [[name, _name(tensor.dtype), list(tensor.shape)] for name, tensor in self._weights]
        head = json.dumps({"version": self._version, "tensors": tensors}).encode()
        connection.sendall(struct.pack(">Q", len(head)) + head)
        sent = 0
        for _, tensor in self._weights:
            view = _bytes(tensor)
            for at in range(0, len(view), SLICE):
                if self._closed:
                    raise OSError("the offer was withdrawn")
                connection.sendall(view[at : at + SLICE])
            sent += len(view)
        with self._lock:
            self._done += 1
            self._bytes += sent
            self._last = time.monotonic()


def receive(source: str, version: int, deadline: float) -> dict[str, torch.Tensor]:
    """All tensors of `version` from a sender, in its order, on the CPU. Raises NotReceived: gone, late, another version, no room."""
    end = time.monotonic() + deadline
    place, _, secret = source.rpartition("/")
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=max(0.1, deadline)) as connection:
            connection.sendall(json.dumps({"secret": secret, "version": version}).encode() + b"\n")
            (length,) = struct.unpack(">Q", _exactly(connection, memoryview(bytearray(8)), end))
            require_room(length)
            head = json.loads(bytes(_exactly(connection, memoryview(bytearray(length)), end)))
            if head["version"] != version:
                raise NotReceived(f"version {head['version']} was sent in place of {version}")
            weights = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, dtype, shape in head["tensors"]}
            left, unlooked = sum(tensor.nbytes for tensor in weights.values()), SLICE
            for name, like in weights.items():
                if unlooked >= SLICE:  # a look costs as much as to receive half a megabyte, and a mixture has many small tensors
                    require_room(left)
                    unlooked = 0
                left, unlooked = left - like.nbytes, unlooked + like.nbytes
                weights[name] = torch.empty_like(like, device="cpu")
                _exactly(connection, _bytes(weights[name]), end)
            return weights
    except (OSError, ValueError) as error:
        raise NotReceived(f"version {version} from {place} did not arrive whole: {error or type(error).__name__}") from error


def _exactly(connection: socket.socket, target: memoryview, end: float) -> memoryview:
    """Fill `target`. Raises OSError where the stream ends first or `end` passes."""
    at = 0
    while at < len(target):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        connection.settimeout(left)
        got = connection.recv_into(target[at:])
        if not got:
            raise ConnectionError("the stream ended early")
        at += got
    return target


def require_room(wanted: int) -> None:
    """Raises NotReceived where this host, or the job's own limit on it, leaves less memory than `wanted` bytes."""
    free = memory.available()
    if wanted > free:
        raise NotReceived(f"{wanted >> 20} MiB are wanted, this host and the job's limit leave {free >> 20} MiB")


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
