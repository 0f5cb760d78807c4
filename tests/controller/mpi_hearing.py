"""On N ranks: ranks that compute pass announcements on and acknowledge what is settled for them. By test_hearing.py; argument: a folder.

Each follower's computation ends by what the root does once all have acknowledged: without the pump nobody would ever come to an end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

from cells.epochs import Channel  # noqa: E402
from cells.pump import Pump  # noqa: E402
from cells.waiting import wait  # noqa: E402
from gyre_hpc.controller.hearing import Heard, Hearing  # noqa: E402
from gyre_hpc.controller.messages import Message, Prefix, Stop, encode  # noqa: E402

MINE = 99
"""A prefix that changes something for every follower."""


def root(channel: Channel, folder: Path) -> None:
    for cells in range(1, 6):
        epoch = channel.announce(encode(Prefix(cells)))
        reports = wait(lambda epoch=epoch: channel.reports(epoch), f"prefix {cells}", 20.0, print)
        assert reports == [{}] * (channel.size - 1)
    last = channel.announce(encode(Prefix(MINE)))
    behind = channel.announce(encode(Prefix(1)))
    (folder / "acknowledged").touch()
    answers = wait(lambda: channel.reports(last), "what is not settled", 20.0, print)
    assert [answer["rank"] for answer in answers] == list(range(1, channel.size))
    assert wait(lambda: channel.reports(behind), "what came behind it", 20.0, print) == [{"late": True}] * (channel.size - 1)
    channel.announce(encode(Stop("done")), agree=False)
    channel.close()


def follower(channel: Channel, folder: Path) -> None:
    def settled(message: Message) -> bool:
        return isinstance(message, Prefix) and message.cells != MINE

    hearing = Hearing(channel, settled)
    with Pump(hearing.listen).working():
        until = time.monotonic() + 20.0
        while not (folder / "acknowledged").exists():
            assert time.monotonic() < until, "the root never heard of all"
            time.sleep(0.01)
    heard: list[Heard] = []
    while not heard or not isinstance(heard[-1].message, Stop):
        taken = hearing.take()
        if taken is None:
            time.sleep(0.001)
            continue
        heard.append(taken)
        if len(heard) == 1:
            # the one behind must be there before the first is answered: it waits, settled or not
            wait(lambda: (hearing.listen(), hearing._waiting)[1], "the next", 20.0, print)
        if taken.agree:
            channel.acknowledge(taken.epoch, {"rank": channel.rank} if len(heard) == 1 else {"late": True})
    assert [h.message for h in heard] == [Prefix(MINE), Prefix(1), Stop("done")]


def main() -> None:
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    channel = Channel(MPI.COMM_WORLD)
    (root if channel.is_root else follower)(channel, Path(sys.argv[1]))
    wait(channel.drain, "the end", 20.0, print)
    print(f"passed {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}", flush=True)
    MPI.Finalize()


if __name__ == "__main__":
    main()
