"""On N ranks: order, sizes, many outstanding, acknowledgements out of order, slow followers, closing; and, on 4 and more, that no follower
waits for another one that computes. Run by test_epochs.py."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
import pytest  # noqa: E402
from mpi4py import MPI  # noqa: E402

from cells.epochs import INLINE, Channel, wait  # noqa: E402

SIZES = [0, 10, 1500, 70_000, 3, 500_000, 1]
EXACT = [INLINE - 1, INLINE, INLINE + 1]
"""Whole payloads around what fits into a header."""
ROUNDS = 4
KINDS = len(SIZES) + len(EXACT)


def text_of(number: int) -> str:
    kind = number % KINDS
    if kind < len(SIZES):
        return "x" * SIZES[kind]
    empty = json.dumps({"number": number, "text": ""})
    return "x" * (EXACT[kind - len(SIZES)] - len(empty))


def root(channel: Channel) -> None:
    epochs = []
    for number in range(ROUNDS * KINDS):
        agree = number % 3 != 1
        epochs.append((channel.announce({"number": number, "text": text_of(number)}, agree), number, agree))
    assert [epoch for epoch, _, _ in epochs] == list(range(len(epochs)))
    for epoch, number, agree in epochs:
        if not agree:
            with pytest.raises(KeyError):
                channel.reports(epoch)
            continue
        reports = wait(lambda epoch=epoch: channel.reports(epoch), f"epoch {epoch}", 30, print)
        assert [r["rank"] for r in reports] == list(range(1, channel.size))
        assert all(r["number"] == number and r["text"] == text_of(number) for r in reports)


def follower(channel: Channel) -> None:
    chance = random.Random(channel.rank)
    seen, due = [], []
    while len(seen) < ROUNDS * KINDS or due:
        got = channel.poll()
        if got is not None:
            seen.append(got.epoch)
            assert got.message["number"] == got.epoch
            assert got.agree == (got.epoch % 3 != 1)
            assert got.message["text"] == text_of(got.epoch)
            if got.agree:
                due.append(got)
            if chance.random() < 0.1:
                time.sleep(0.02)
        elif due:
            answer = due.pop(chance.randrange(len(due)))  # not in order: the channel must put them in order
            channel.acknowledge(answer.epoch, {"rank": channel.rank, **answer.message})
        else:
            time.sleep(0.001)
    assert seen == sorted(seen)


def told(what: str) -> Path:
    """A file by which ranks tell one another without MPI: one that waits for it is one that computes."""
    return Path(tempfile.gettempdir()) / f"gyre-channel-{os.getppid()}-{what}"


def compute_until(what: str) -> None:
    wait(lambda: told(what).exists() or None, what, 30, print)


def independent(channel: Channel) -> None:
    """In a tree of ranks 3 is behind 2: it hears what is announced while 2 computes, and its answer arrives while 2 computes again."""
    if channel.is_root:
        epoch = channel.announce({"who": "all"})
        wait(lambda: channel.reports(epoch), "all answers", 60, print)
        told("answered").touch()
        channel.announce({"who": "all"}, agree=False)
        told("announced").touch()
        return
    if channel.rank == 2:
        compute_until("heard")
    got = wait(channel.poll, "the announcement", 60, print)
    if channel.rank == 3:
        told("heard").touch()
        compute_until("early")
    channel.acknowledge(got.epoch)
    if channel.rank == 2:
        told("early").touch()
        compute_until("answered")
    compute_until("announced")
    assert channel.poll() is not None, "one look between two micro-steps is enough"


def main() -> None:
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    world = MPI.COMM_WORLD
    if world.Get_size() > 3:
        first = Channel(world)
        independent(first)
        if first.is_root:
            first.close()
        wait(first.drain, "the first channel's end", 30, print)
        world.Barrier()
        if first.is_root:
            for name in ("heard", "early", "answered", "announced"):
                told(name).unlink()
    channel = Channel(world)
    if channel.is_root:
        root(channel)
        channel.close()
    else:
        follower(channel)
    wait(channel.drain, "the channel's end", 30, print)
    MPI.Finalize()
    print(f"passed {channel.rank} of {channel.size}", flush=True)


if __name__ == "__main__":
    main()
