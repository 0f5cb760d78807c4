from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import cast

import pytest

from cells.epochs import Announcement, Channel
from gyre_hpc.controller.hearing import Hearing
from gyre_hpc.controller.messages import Export, Message, Prefix, Work, encode
from tests.cells.ranks import check_ranks


class FakeChannel:
    """In place of a follower's end: what was announced, and which epochs were acknowledged."""

    def __init__(self, *messages: Message) -> None:
        agreed = enumerate((message, not isinstance(message, Work)) for message in messages)
        self.coming = deque(Announcement(epoch, encode(message), agree) for epoch, (message, agree) in agreed)
        self.acknowledged: list[int] = []

    def poll(self) -> Announcement | None:
        return self.coming.popleft() if self.coming else None

    def acknowledge(self, epoch: int) -> None:
        self.acknowledged.append(epoch)


@pytest.mark.parametrize(
    ("earlier", "acknowledged"),
    [([], [0]), ([Work(0, ()), Work(0, ())], [2]), ([Export(1, "")], []), ([Work(0, ()), Export(1, "")], [])],
    ids=["nothing", "work", "another message", "both"],
)
def test_what_is_settled_waits_for_no_work_but_for_all_else(earlier: list[Message], acknowledged: list[int]) -> None:
    channel = FakeChannel(*earlier, Prefix(2))
    hearing = Hearing(cast(Channel, channel), lambda message: isinstance(message, Prefix))
    hearing.listen()
    assert channel.acknowledged == acknowledged
    taken = [heard.message for heard in iter(hearing.take, None)]
    assert taken == (earlier if acknowledged else [*earlier, Prefix(2)])


def test_what_is_settled_waits_while_something_is_followed() -> None:
    channel = FakeChannel(Work(0, ()))
    hearing = Hearing(cast(Channel, channel), lambda message: isinstance(message, Prefix))
    assert hearing.take() is not None
    channel.coming.append(Announcement(1, encode(Prefix(2)), agree=True))
    hearing.listen()
    assert channel.acknowledged == []
    heard = hearing.take()
    assert heard is not None
    assert heard.message == Prefix(2)


def test_what_is_ahead_is_seen_before_its_turn_comes() -> None:
    channel = FakeChannel(Work(0, ()), Export(1, ""))
    hearing = Hearing(cast(Channel, channel), lambda message: False)
    assert not hearing.ahead(Export)
    hearing.listen()
    assert hearing.ahead((Prefix, Export))
    assert not hearing.ahead(Prefix)
    assert len([*iter(hearing.take, None)]) == 2, "and is still there"
    assert not hearing.ahead(Export)


def test_ranks_that_compute_hear_and_acknowledge_what_is_settled(tmp_path: Path) -> None:
    check_ranks("../controller/mpi_hearing.py", 7, str(tmp_path))
