"""Ordered announcements from one rank to the others of a communicator, and their answers; never blocking.

An announcement is an *epoch*: a dense number and a JSON message. Root broadcasts; followers `poll`; when root asked for agreement every
follower answers with `acknowledge`, and root sees the `reports` of an epoch when the last has come.

Invariants: all ranks see all epochs in the same order; the collectives of each of the two private communicators (announcements,
answers) are posted in epoch order on every rank, whatever the order in which the caller acknowledges; nothing waits inside MPI: every
request is polled with Test, and a rank makes progress whenever it polls. One thread at a time calls MPI (cells/pump.py).

Both communicators are stars: their collectives (neighbourhood ones) go between root and each follower directly. A broadcast or a gather of
MPI goes over other followers, and there waits for whoever computes: one micro-step a hop, each way.

Frames: a header of HEADER bytes (epoch, length, agree; then as much of the payload as fits), and a second collective for a longer
payload. Answers: one of lengths, then one of as many bytes.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cells.waiting import DeadlineExceeded, wait

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Announcement", "Channel", "DeadlineExceeded", "wait"]

HEADER = 2048
_FIELDS = 3 * 8
INLINE = HEADER - _FIELDS
LOOKS = 3
_CLOSE = -1
_NOTHING: NDArray[np.uint8] = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Announcement:
    """One epoch, as a follower sees it. `agree`: root waits for `acknowledge`."""

    epoch: int
    message: dict[str, Any]
    agree: bool


@dataclass
class _Posted:
    """Requests whose buffers must stay alive until they are done."""

    requests: list[Any]
    buffers: list[Any] = field(default_factory=list)

    def done(self) -> bool:
        self.requests = [r for r in self.requests if not _done(r)]
        return not self.requests


def _done(request: Any) -> bool:
    """Whether a collective is over that all others have done their part of: one look lets MPI take what has come, the next ones act on it,
    and who goes back to a micro-step in between would be heard of after it."""
    return any(request.Test() for _ in range(LOOKS))


class Channel:
    """One end of the announcements over `comm`. Made collectively by all its ranks; rank `root` announces.

    With only one rank in `comm` announcing and agreeing work too: there are no reports to wait for.
    """

    def __init__(self, comm: MPI.Intracomm, root: int = 0) -> None:
        self.root = root
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        here, others = [root], [rank for rank in range(self.size) if rank != root]
        sources, targets = ([], others) if self.is_root else (here, [])
        self._announcements = comm.Create_dist_graph_adjacent(sources, targets)
        self._answers = comm.Create_dist_graph_adjacent(targets, sources)
        self._epoch = 0
        self._sent: deque[_Posted] = deque()
        self._closed = False
        # root: agreed epochs in order, and the answers that have come
        self._awaited: deque[int] = deque()
        self._gather: _Gather | None = None
        self._reports: dict[int, list[dict[str, Any]]] = {}
        # follower: the broadcast being received; agreed epochs in order, and answers given ahead of their turn
        self._incoming = None if self.is_root else _Incoming(self._announcements)
        self._due: deque[int] = deque()
        self._given: dict[int, bytes] = {}

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    # -- root ---------------------------------------------------------------------------------------------------------------------

    def announce(self, message: dict[str, Any], agree: bool = True) -> int:
        """Root: send `message` to every follower; returns its epoch. Does not wait, any number may be on the way."""
        if not self.is_root:
            raise ValueError("only the root announces")
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._broadcast(epoch, json.dumps(message).encode(), agree)
        if agree:
            self._awaited.append(epoch)
        self.progress()
        return epoch

    def reports(self, epoch: int) -> list[dict[str, Any]] | None:
        """Root: the followers' answers to an agreed epoch, by rank (root left out), or None while one is missing.

        Handed out once; KeyError for an epoch that was not agreed or was handed out before.
        """
        self.progress()
        if epoch in self._reports:
            return self._reports.pop(epoch)
        if epoch not in self._awaited:
            raise KeyError(f"epoch {epoch} has no reports to come")
        return None

    # -- followers ----------------------------------------------------------------------------------------------------------------

    def poll(self) -> Announcement | None:
        """Follower: the next announcement, or None when none is there (yet)."""
        self.progress()
        if self._incoming is None or self._closed:
            return None
        frame = self._incoming.poll()
        if frame is None:
            return None
        epoch, payload, agree = frame
        if epoch == _CLOSE:
            self._closed = True
            return None
        if agree:
            self._due.append(epoch)
        self._incoming.post()
        return Announcement(epoch, json.loads(payload), agree)

    def acknowledge(self, epoch: int, report: dict[str, Any] | None = None) -> None:
        """Follower: answer an agreed epoch. The answer leaves when those of all earlier epochs have left. KeyError if none is due."""
        if epoch not in self._due or epoch in self._given:
            raise KeyError(f"epoch {epoch} has no answer due")
        self._given[epoch] = json.dumps(report if report is not None else {}).encode()
        while self._due and self._due[0] in self._given:
            self._answer(self._given.pop(self._due.popleft()))
        self.progress()

    # -- both ---------------------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Root called `close`, or the follower has seen it."""
        return self._closed

    def progress(self) -> None:
        """Let MPI work on what is posted. Called by every other method; call it in long computations."""
        while self._sent and self._sent[0].done():
            self._sent.popleft()
        if self.is_root:
            self._collect()

    def close(self) -> None:
        """Root: the last announcement. Followers see `closed` when they poll; every rank then calls `drain` before MPI_Finalize."""
        if self.is_root and not self._closed:
            self._broadcast(_CLOSE, b"", False)
            self._closed = True

    def drain(self) -> bool:
        """Whether all that this rank posted is done; poll it after `close`."""
        if not self.is_root and not self._closed:
            self.poll()
        self.progress()
        return self._closed and not self._sent and not self._awaited

    def _broadcast(self, epoch: int, payload: bytes, agree: bool) -> None:
        header = np.zeros(HEADER, np.uint8)
        header[:_FIELDS].view(np.int64)[:] = (epoch, len(payload), agree)
        inline = payload[:INLINE]
        header[_FIELDS : _FIELDS + len(inline)] = np.frombuffer(inline, np.uint8)
        posted = _Posted([self._announcements.Ineighbor_allgather(header, _NOTHING)], [header])
        if len(payload) > INLINE:
            rest = np.frombuffer(payload[INLINE:], np.uint8).copy()
            posted.requests.append(self._announcements.Ineighbor_allgather(rest, _NOTHING))
            posted.buffers.append(rest)
        self._sent.append(posted)

    def _answer(self, data: bytes) -> None:
        length = np.array([len(data)], np.int64)
        body = np.frombuffer(data, np.uint8).copy()
        to = self._answers
        requests = [to.Ineighbor_allgather(length, _NOTHING), to.Ineighbor_allgatherv(body, [_NOTHING, ([], [])])]
        self._sent.append(_Posted(requests, [length, body]))

    def _collect(self) -> None:
        while self._awaited:
            if self._gather is None:
                self._gather = _Gather(self._answers, self.size - 1)
            reports = self._gather.poll()
            if reports is None:
                return
            self._reports[self._awaited.popleft()] = reports
            self._gather = None


class _Incoming:
    """A follower's side of one broadcast after the other."""

    def __init__(self, comm: MPI.Distgraphcomm) -> None:
        self._comm = comm
        self._header: NDArray[np.uint8] = np.zeros(HEADER, np.uint8)
        self._rest: NDArray[np.uint8] | None = None
        self._request: Any = None
        self.post()

    def post(self) -> None:
        self._rest = None
        self._request = self._comm.Ineighbor_allgather(_NOTHING, self._header)

    def poll(self) -> tuple[int, bytes, bool] | None:
        """(epoch, payload, agree) of a whole frame."""
        if not _done(self._request):
            return None
        epoch, length, agree = (int(x) for x in self._header[:_FIELDS].view(np.int64))
        if length > INLINE and self._rest is None:
            self._rest = np.zeros(length - INLINE, np.uint8)
            self._request = self._comm.Ineighbor_allgather(_NOTHING, self._rest)
            return self.poll()
        payload = self._header[_FIELDS : _FIELDS + min(length, INLINE)].tobytes()
        if self._rest is not None:
            payload += self._rest.tobytes()
        return epoch, payload, bool(agree)


class _Gather:
    """Root's side of one epoch's answers: lengths first, then the bytes."""

    def __init__(self, comm: MPI.Distgraphcomm, followers: int) -> None:
        self._comm = comm
        self._lengths = np.zeros(followers, np.int64)
        self._body: NDArray[np.uint8] | None = None
        self._request: Any = comm.Ineighbor_allgather(_NOTHING, self._lengths)

    def poll(self) -> list[dict[str, Any]] | None:
        if not self._request.Test():
            return None
        ends = np.cumsum(self._lengths)
        starts = ends - self._lengths
        if self._body is None:
            self._body = np.zeros(int(self._lengths.sum()), np.uint8)
            layout = [self._body, (self._lengths.tolist(), starts.tolist())]
            self._request = self._comm.Ineighbor_allgatherv(_NOTHING, layout)
            return self.poll()
        data = self._body.tobytes()
        return [json.loads(data[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
