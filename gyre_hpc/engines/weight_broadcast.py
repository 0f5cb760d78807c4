"""The core's newest weights, broadcast to all engines that serve: the leader's side.

Ordering key: meet, group, start, update (the collective), finish; one thread does that for a version, and has ended after `withdraw`.
Invariants: a group is kept as long as the same workers come again, all still in it, and is left for ever when anything went wrong in it;
who is not led (its engine came late or in part, or no backend reaches it) is told so and loads files; nobody waits for a member that died
or is late: the lines say it (weight_meeting.py), our own end is aborted, everybody is told the end, and all of them load files.
Which backend: NCCL between GPUs; CUDA IPC for a worker on the leader's own GPU, for NCCL refuses two ranks on one (a second worker on a
GPU that is in the group already loads files); gloo between CPUs.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from gyre_hpc.engines import weight_groups
from gyre_hpc.engines.weight_meeting import Circle, Line, Lost, Meeting, Member
from gyre_hpc.engines.weight_member import SCHEME
from gyre_hpc.engines.weight_stream import Sent, Weights

log = logging.getLogger(__name__)

NCCL, IPC, GLOO = "nccl", "ipc", weight_groups.GLOO
_LEAVE = 10.0
"""Seconds for the thread to come out of a collective that was aborted."""


class Sender(Protocol):
    """Our end of one backend's group. `send` ends by Lost or any other exception when a member can't go on."""

    def send(self, circle: Circle, weights: Weights) -> None:
        """Start, update, finish, with all members."""
        ...

    def abort(self) -> None:
        """From another thread: `send` comes out of the collective. The group is of no use any more."""
        ...


class GlooSender:
    """Rank 0 of a gloo group; what vLLM's own trainer side is for NCCL."""

    def __init__(self, circle: Circle, bucket: int) -> None:
        """Forms the group. Raises Lost, RuntimeError."""
        address = circle.address
        seconds = max(1.0, circle.end - time.monotonic())
        store = weight_groups.open_store(address, seconds)
        world = len(circle.lines) + 1
        info = {"master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": world}
        beside = ThreadPoolExecutor(1, thread_name_prefix="weights-ask")
        try:
            entered = beside.submit(circle.init_weight_transfer_engine, {**info, "seconds": seconds, "bucket": bucket})
            try:
                self._group = weight_groups.Group(store, address, 0, world, seconds, bucket)
            except RuntimeError:
                if entered.done():
                    entered.result()  # knows who did not come
                raise
            entered.result()
        finally:
            beside.shutdown(wait=False)

    def send(self, circle: Circle, weights: Weights) -> None:
        circle.start_weight_update()
        beside = ThreadPoolExecutor(1, thread_name_prefix="weights-ask")
        try:
            updated = beside.submit(circle.update_weights, weight_groups.announced(weights))
            try:
                weight_groups.send(self._group, weights)
            except RuntimeError as error:
                circle.leave(f"the broadcast broke: {error}")
                raise
            finally:
                updated.result()  # who is to blame, if anybody is, is in there
        finally:
            beside.shutdown(wait=False)
        circle.finish_weight_update()

    def abort(self) -> None:
        self._group.abort()


@dataclass
class _Kept:
    """A group that may serve again."""

    name: str
    members: tuple[tuple[str, int], ...]
    sender: Sender


class Broadcaster:
    """Of the core's leader, for all of its publications; `device` is that of its own process, `bucket` the bytes of one over gloo."""

    def __init__(self, device: torch.device | None = None, bucket: int = weight_groups.BUCKET) -> None:
        self._bucket = bucket
        self._device = device or torch.device("cpu")
        self._kept: dict[str, _Kept] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._sent = Sent(0, 0, 0.0)

    def offer(self, host: str, version: int, weights: Weights, engines: int, patience: float, seconds: float = 600.0) -> str:
        """Broadcast `weights` once `engines` have come, or to those that have `patience` seconds after the first, or `seconds` from now.

        Returns the source. Raises OSError. The weights must not change before `withdraw` has returned.
        """
        self.withdraw()
        meeting = Meeting(host, version)
        self._stopped, self._sent = threading.Event(), Sent(0, 0, 0.0)
        arguments = (meeting, weights, engines, (patience, seconds), self._kept, self._stopped)
        self._thread = threading.Thread(target=self._run, args=arguments, name="weights", daemon=True)
        self._thread.start()
        return SCHEME + meeting.source

    def withdraw(self) -> Sent:
        """Nobody reads the weights any more when this returns; who was not done loads files."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join(_LEAVE)
            if self._thread.is_alive():  # in a rendezvous, say, which nothing can end from outside
                log.warning("a broadcast that was given up does not end: its thread is left behind, with its groups")
                self._kept = {}
            self._thread = None
        return self._sent

    @property
    def kept(self) -> Mapping[str, str]:
        """By backend: the group that may serve again."""
        return {backend: kept.name for backend, kept in self._kept.items()}

    def close(self) -> None:
        """Leave all groups."""
        self.withdraw()
        for kept in self._kept.values():
            kept.sender.abort()
        self._kept = {}

    def _run(
        self,
        meeting: Meeting,
        weights: Weights,
        engines: int,
        limits: tuple[float, float],
        kept: dict[str, _Kept],
        stopped: threading.Event,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        began = time.monotonic()
        patience, seconds = limits
        lines = meeting.gather(engines, patience, stopped, seconds)
        met = time.monotonic()
        grouped = 0.0
        try:
            for backend, chosen in chosen_backends([line.member for line in lines], device_name(self._device)).items():
                mine = [line for line in lines if line.member in chosen]
                if backend:
                    grouped += self._lead(backend, mine, weights, kept, stopped)
        finally:
            for line in lines:
                line.over("" if line.done else "no backend reaches it")
        done = sum(line.done for line in lines)
        size = sum(tensor.nbytes for _, tensor in weights)
        if not stopped.is_set() or done:
            self._sent = Sent(done, done * size, round(time.monotonic() - met - grouped, 4), round(met - began + grouped, 4))

    def _lead(self, backend: str, lines: list[Line], weights: Weights, kept: dict[str, _Kept], stopped: threading.Event) -> float:
        """Seconds until the group stood; logs what went wrong, who is done is marked."""
        began, grouped = time.monotonic(), 0.0
        members = tuple((line.member.engine, line.member.worker) for line in lines)
        old = kept.pop(backend, None)
        again = old is not None and old.members == members and all(old.name in line.member.held for line in lines)
        circle = Circle(lines, backend, old.name if old is not None and again else secrets.token_hex(8), stopped)
        sender: Sender | None = old.sender if old is not None and again else None
        try:
            if old is not None and not again:
                old.sender.abort()
            if stopped.is_set():  # while another backend's were led: nobody is sent into a rendezvous that can't be called off
                raise Lost("the offer was withdrawn")
            if sender is None:
                sender = self._sender(backend, circle)
            circle.abort = sender.abort
            grouped = time.monotonic() - began
            sender.send(circle, weights)
            kept[backend] = _Kept(circle.group, members, sender)
        except Exception as error:  # whatever broke it, files are there
            if sender is not None:
                sender.abort()
            log.warning(
                "the broadcast over %s to %d workers broke, they load files: %s", backend, len(lines), error or type(error).__name__
            )
            log.debug("as it was", exc_info=True)
            for line in lines:
                line.over("" if line.done else f"the broadcast broke: {error}")
        return grouped

    def _sender(self, backend: str, circle: Circle) -> Sender:
        if backend == GLOO:
            return GlooSender(circle, self._bucket)
        from gyre_hpc.engines import vllm_senders

        return vllm_senders.NcclSender(circle) if backend == NCCL else vllm_senders.IpcSender(circle)


def chosen_backends(members: Sequence[Member], device: str) -> Mapping[str, list[Member]]:
    """Who is reached how, in the order given; under "" those who are not: of an engine that is not reached whole, all.

    `device`: the leader's accelerator, "" for none.
    """
    ways: dict[Member, str] = {}
    taken = {device}
    for member in members:
        if device and device == member.device and IPC in member.backends:
            ways[member] = IPC
        elif device and member.device and member.device not in taken and NCCL in member.backends:
            taken.add(member.device)
            ways[member] = NCCL
        else:
            ways[member] = GLOO if GLOO in member.backends else ""
    unreached = {member.engine for member, way in ways.items() if not way}
    found: dict[str, list[Member]] = {}
    for member, way in ways.items():
        found.setdefault("" if member.engine in unreached else way, []).append(member)
    return found


def device_name(device: torch.device) -> str:
    """The same in every process for one GPU; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
