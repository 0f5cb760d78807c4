"""Processes that die or stop inside a broadcast: nobody waits for them beyond the deadline, nobody keeps a part of the weights."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_broadcast import Broadcaster
from gyre_hpc.engines.weight_groups import Collector
from gyre_hpc.engines.weight_member import attend

pytestmark = pytest.mark.job

LARGE = [(f"layer.{number}", torch.full((16 << 20,), number, dtype=torch.uint8)) for number in range(3)]
"""Each is a bucket that no pair of sockets holds, so that the sender waits for everybody in the first of them."""
REFUSED = 3
Start = Callable[..., tuple[BaseProcess, Connection]]


class Gate(Collector):
    """Comes into the collective when it is told to, so that until then nobody gets through it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.opens = threading.Event(), threading.Event()

    def update(self, info: dict[str, Any]) -> None:
        self.inside.set()
        self.opens.wait(60.0)
        super().update(info)


class Telling(Collector):
    """Says when it goes into the collective."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def update(self, info: dict[str, Any]) -> None:
        self._pipe.send("inside")
        super().update(info)


@pytest.fixture
def sender() -> Iterator[Broadcaster]:
    made = Broadcaster(bucket=1)
    yield made
    made.close()


@pytest.fixture
def started() -> Iterator[Start]:
    """Runs a function with a pipe and arguments in a process of its own. Not a fork: gloo's threads would be missing in it."""
    context = multiprocessing.get_context("spawn")
    made: list[BaseProcess] = []

    def start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        made.append(process)
        return process, ours

    yield start
    for process in made:
        process.kill()
        process.join()


def _member(pipe: Connection, source: str, seconds: float) -> None:
    pipe.send("here")
    try:
        attend(source, 1, seconds, "other", Telling(pipe))
    except NotReceived:
        os._exit(REFUSED)
    os._exit(0)


def _leader(pipe: Connection) -> None:
    pipe.send(Broadcaster(bucket=1).offer("127.0.0.1", 1, LARGE, 2, 10.0))
    signal.pause()


def attending(source: str, seconds: float, **members: Collector) -> dict[str, Future[None]]:
    pool = ThreadPoolExecutor(len(members))
    return {name: pool.submit(attend, source, 1, seconds, name, member) for name, member in members.items()}


def all_inside(sender: Broadcaster, started: Start, seconds: float) -> tuple[Here, BaseProcess]:
    """A broadcast to a process and two threads, and all of them are in it."""
    source = sender.offer("127.0.0.1", 1, LARGE, 3, 10.0)
    process, pipe = started(_member, source, seconds)
    assert pipe.recv() == "here"
    here = Here(source, seconds)
    assert pipe.recv() == "inside"
    assert here.gate.inside.wait(60)
    return here, process


class Here:
    """Two receivers in threads of this process: one that is good, and a gate."""

    def __init__(self, source: str, seconds: float) -> None:
        self.good, self.gate = Collector(), Gate()
        self.futures = attending(source, seconds, good=self.good, gate=self.gate)

    def good_gets_nothing(self) -> None:
        with pytest.raises(NotReceived):
            self.futures["good"].result(60)
        assert self.good.weights == {}

    def neither_gets_it_once_the_gate_opens(self) -> None:
        self.gate.opens.set()
        with pytest.raises(NotReceived):
            self.futures["gate"].result(60)
        self.good_gets_nothing()


def test_a_receiver_that_is_killed_lets_the_others_go_at_once_and_the_next_broadcast_does_without_it(
    sender: Broadcaster, started: Start
) -> None:
    here, process = all_inside(sender, started, 60.0)
    process.kill()
    here.good_gets_nothing()
    here.neither_gets_it_once_the_gate_opens()
    assert sender.withdraw().receivers == 0
    again = sender.offer("127.0.0.1", 1, LARGE, 2, 10.0)
    for future in attending(again, 60.0, good=here.good, another=Collector()).values():
        future.result(60)
    assert all(torch.equal(here.good.weights[name], tensor) for name, tensor in LARGE)


def test_a_receiver_that_is_stopped_costs_the_others_their_deadline_and_gets_nothing_when_it_goes_on(
    sender: Broadcaster, started: Start
) -> None:
    here, process = all_inside(sender, started, 5.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    here.neither_gets_it_once_the_gate_opens()
    assert sender.withdraw().receivers == 0
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == REFUSED


def test_a_sender_that_is_killed_is_not_waited_for(started: Start) -> None:
    process, pipe = started(_leader)
    here = Here(pipe.recv(), 60.0)
    assert here.gate.inside.wait(60)
    process.kill()
    here.good_gets_nothing()
    here.neither_gets_it_once_the_gate_opens()
