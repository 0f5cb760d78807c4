"""Weights broadcast in buckets over a gloo group of its own, beside whatever torch.distributed world a process is in.

On CPUs this is what NCCL is on GPUs: rank 0 sends, everybody else receives, and nobody gets out of a collective that a member has left
before some time-out ends it. Invariants: both sides cut the same buckets, from names and sizes alone; a bucket is bytes, so any dtype goes;
whoever waits looks for `abort` all the time, and what it left is kept until gloo lets go of it (the group's destructor would wait for
that, and nothing ends it before its time-out: torch 2.13's `abort` does not).
"""

from __future__ import annotations

import atexit
import ctypes
import math
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_meeting import Member
from gyre_hpc.engines.weight_stream import require_room

BUCKET = 64 << 20
"""Bytes."""
GLOO = "gloo"
FORMING = 20.0
"""Seconds for all ranks to come into a new group: who waits there for one that died can't be called off."""
_LOOK = timedelta(seconds=0.05)

_distributed: Any = torch.distributed

Meta = tuple[str, torch.dtype, tuple[int, ...]]


class Group:
    """One rank's end. Made by all ranks at the same time, within `FORMING` seconds; `seconds`: as long as gloo lets a broadcast take."""

    def __init__(self, store: Any, address: str, rank: int, world: int, seconds: float, bucket: int = BUCKET) -> None:
        """`address`: ours, under which the others reach us; `bucket`: bytes, for all the same. RuntimeError when somebody does not come."""
        _forget()
        gloo: Any = _distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=min(FORMING, seconds))
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(_distributed.PrefixStore("weights", store), rank, world, options)
        self._store, self._seconds, self.bucket = store, seconds, bucket
        self._left = threading.Event()

    def broadcast(self, data: torch.Tensor) -> None:
        """Rank 0's bytes, uint8[n], into everybody's. Raises RuntimeError: somebody left, was late, or `abort` was called."""
        if self._left.is_set():
            raise RuntimeError("the group was left")
        options = _distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self._seconds)
        work = self._group.broadcast([data], options)
        while not _over(work):
            if self._left.is_set():
                _left.append((self._group, work))
                raise RuntimeError("the group was left")

    def abort(self) -> None:
        """From any thread: whoever is in `broadcast` comes out of it."""
        self._left.set()


def _over(work: Any) -> bool:
    """Raises what went wrong."""
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


_left: list[tuple[Any, Any]] = []
"""(group, its last operation): of those that were left inside a broadcast."""


def _forget() -> None:
    """Those whose operation has ended by now."""
    _left[:] = [(group, work) for group, work in _left if not work.is_completed()]


@atexit.register
def _leave_behind() -> None:
    """At the end of the process nobody waits for those that have not: they are never destroyed."""
    _forget()
    for group, _ in _left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def buckets(sizes: Iterable[int], limit: int) -> Iterator[int]:
    """How many tensors of these sizes (bytes) go into each bucket, in their order; the one that fills it is its last."""
    count = held = 0
    for size in sizes:
        count, held = count + 1, held + size
        if held >= limit:
            yield count
            count = held = 0
    if count:
        yield count


def metas(info: dict[str, Any]) -> list[Meta]:
    """Of an update as it is announced: {names, dtype_names, shapes}."""
    rows = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
    return [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]


def announced(weights: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """The inverse of `metas`."""
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }


def send(group: Group, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """All of them, as rank 0, each bucket from the host's memory. Raises RuntimeError."""
    left = iter(weights)
    for count in buckets((tensor.nbytes for _, tensor in weights), group.bucket):
        parts = [_bytes(tensor.to("cpu")) for _, tensor in (next(left) for _ in range(count))]
        data = parts[0] if count == 1 else torch.cat(parts)
        if len(data):
            group.broadcast(data)


def receive(group: Group, expected: Sequence[Meta]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Bucket by bucket, in the host's memory. Raises RuntimeError."""
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in expected]
    at = 0
    for count in buckets(sizes, group.bucket):
        data = torch.empty(sum(sizes[at : at + count]), dtype=torch.uint8)
        if len(data):
            group.broadcast(data)
        found, offset = [], 0
        for (name, dtype, shape), size in zip(expected[at : at + count], sizes[at : at + count], strict=True):
            part = data[offset : offset + size]
            # a view must begin at a multiple of its own size
            found.append((name, (part.clone() if offset % dtype.itemsize else part).view(dtype).view(shape)))
            offset += size
        at += count
        yield found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def open_store(address: str, seconds: float) -> Any:
    """Where the ranks of a group find each other, on a free port (`.port`) of this process, and at this address alone: torch itself would
    listen on every network of the node."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return _distributed.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=min(FORMING, seconds)),
        master_listen_fd=listener.detach(),
    )


def join(info: dict[str, Any], worker: int, address: str) -> Group:
    """The group that the leader told us of: {master_address, master_port, rank_offset, world_size, seconds, bucket}."""
    seconds = float(info["seconds"])
    store = _distributed.TCPStore(
        info["master_address"],
        int(info["master_port"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=min(FORMING, seconds)),
    )
    return Group(store, address, info["rank_offset"] + worker, info["world_size"], seconds, int(info["bucket"]))


class Collector:
    """A `Receiver` of one worker that keeps all weights in the host's memory and touches no model."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        """Of the last broadcast that was attended."""
        self._group: Group | None = None
        self._name = ""

    def member(self, engine: str, seconds: float) -> Member:
        return Member(engine, 0, 1, (GLOO,), seconds, held=(self._name,) if self._group is not None else ())

    def enter(self, backend: str, group: str, info: dict[str, Any], address: str) -> None:
        self._group = None
        self._group, self._name = join(info, 0, address), group

    def start(self, backend: str) -> None:
        self.weights = {}

    def update(self, info: dict[str, Any]) -> None:
        if self._group is None:
            raise NotReceived("no group was entered")
        expected = metas(info)
        require_room(sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in expected))
        for bucket in receive(self._group, expected):
            self.weights.update(bucket)

    def finish(self) -> None:
        """All is in `weights`."""

    def take(self) -> dict[str, torch.Tensor]:
        """The weights, which are not kept."""
        weights, self.weights = self.weights, {}
        return weights

    def abort(self) -> None:
        group, self._group = self._group, None
        self.weights = {}
        if group is not None:
            group.abort()
