"""A broadcast gives all members the sender's weights, bit for bit, or lets go of everybody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gyre_hpc import memory
from gyre_hpc.engines import weight_broadcast, weight_groups
from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_broadcast import Broadcaster, chosen_backends
from gyre_hpc.engines.weight_groups import Collector
from gyre_hpc.engines.weight_meeting import Member
from gyre_hpc.engines.weight_member import attend
from tests.engines.test_weight_meeting import line

HOST = "127.0.0.1"
WEIGHTS = [
    ("ids", torch.arange(5, dtype=torch.uint8)),
    ("a.half", torch.arange(7, dtype=torch.bfloat16)),
    ("a.weight", torch.arange(1000, dtype=torch.float32).reshape(10, 100)),
    ("none", torch.empty(0, 4)),
    ("scale", torch.tensor(3.5)),
]


@pytest.fixture
def sender() -> Iterator[Broadcaster]:
    made = Broadcaster(bucket=100)
    yield made
    made.close()


def attending(source: str, members: dict[str, Any], version: int = 1, seconds: float = 20.0) -> dict[str, Future[None]]:
    """All at once, each in a thread; by engine."""
    pool = ThreadPoolExecutor(len(members))
    return {name: pool.submit(attend, source, version, seconds, name, member) for name, member in members.items()}


def offer(sender: Broadcaster, engines: int, version: int = 1, shift: float = 0.0, patience: float = 10.0) -> str:
    return sender.offer(HOST, version, [(name, (tensor + shift).to(tensor.dtype)) for name, tensor in WEIGHTS], engines, patience)


def has(member: Collector, shift: float = 0.0) -> bool:
    got = member.take()
    return list(got) == [name for name, _ in WEIGHTS] and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], (tensor + shift).to(tensor.dtype)) for name, tensor in WEIGHTS
    )


def test_all_get_what_was_sent_and_the_group_serves_again(sender: Broadcaster) -> None:
    members = {"a": Collector(), "b": Collector()}
    held = []
    for version in (1, 2):
        for future in attending(offer(sender, 2, version, version), members, version).values():
            future.result()
        assert all(has(member, version) for member in members.values())
        held.append({name: member.member(name, 1.0).held for name, member in members.items()})
        sent = sender.withdraw()
        assert (sent.receivers, sent.bytes) == (2, 2 * sum(tensor.nbytes for _, tensor in WEIGHTS))
    assert held[0] == held[1], "no new group"
    assert held[0]["a"] == held[0]["b"] != ()


def test_one_that_takes_another_s_place_makes_a_new_group(sender: Broadcaster) -> None:
    old = Collector()
    for future in attending(offer(sender, 2), {"a": old, "b": Collector()}).values():
        future.result()
    first = old.member("a", 1.0).held
    for future in attending(offer(sender, 2, 2), {"a": old, "c": Collector()}, 2).values():
        future.result()
    assert old.member("a", 1.0).held != first
    assert has(old)


def test_one_that_has_left_the_group_is_not_taken_for_a_member_of_it(sender: Broadcaster) -> None:
    other, again = Collector(), Collector()
    for future in attending(offer(sender, 2), {"a": Collector(), "b": other}).values():
        future.result()
    for future in attending(offer(sender, 2, 2), {"a": again, "b": other}, 2).values():
        future.result()
    assert has(again)


def test_one_without_room_does_not_begin(sender: Broadcaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(NotReceived, match="MiB are wanted"):
        attend(offer(sender, 1), 1, 20.0, "a", Collector())


class Broken(Collector):
    """Fails in one of its parts."""

    def __init__(self, part: str) -> None:
        super().__init__()
        setattr(self, part, self._fail)

    def _fail(self, *told: object) -> None:
        raise RuntimeError("no room")


@pytest.mark.parametrize("part", ["start", "update", "finish"])
def test_one_that_fails_leaves_nobody_waiting_and_the_next_broadcast_is_whole(sender: Broadcaster, part: str) -> None:
    good = Collector()
    futures = attending(offer(sender, 2), {"good": good, "bad": Broken(part)})
    with pytest.raises(NotReceived, match=f"{part}: RuntimeError: no room"):
        futures["bad"].result(60)
    if part != "finish":  # then it had all before the other failed
        with pytest.raises(NotReceived):
            futures["good"].result(60)
    assert sender.withdraw().receivers == 0 if part != "finish" else sender.withdraw().receivers <= 1
    good = Collector()
    for future in attending(offer(sender, 2, 2), {"good": good, "better": Collector()}, 2).values():
        future.result(60)
    assert has(good)


def test_one_that_is_late_holds_the_others_up_until_their_deadline_only(sender: Broadcaster) -> None:
    asleep = threading.Event()

    class Late(Collector):
        def update(self, info: dict[str, Any]) -> None:
            asleep.wait(20.0)
            super().update(info)

    good, late = Collector(), Late()
    futures = attending(offer(sender, 2), {"good": good, "late": late}, seconds=0.6)
    with pytest.raises(NotReceived):
        futures["good"].result(60)
    assert not good.weights
    assert good.member("good", 1.0).held == (), "it has left the group"
    asleep.set()
    with pytest.raises(NotReceived):
        futures["late"].result(60)


def test_a_sender_that_withdraws_lets_go_of_those_who_wait(sender: Broadcaster) -> None:
    inside, waiting = threading.Event(), threading.Event()

    class Slow(Collector):
        def update(self, info: dict[str, Any]) -> None:
            inside.set()
            waiting.wait(20.0)
            super().update(info)

    futures = attending(offer(sender, 2), {"slow": Slow(), "good": Collector()})
    assert inside.wait(60)
    assert sender.withdraw().receivers == 0
    waiting.set()
    for future in futures.values():
        with pytest.raises(NotReceived):
            future.result(60)


def test_a_thread_that_nothing_can_end_is_left_behind_and_the_next_broadcast_is_whole(
    sender: Broadcaster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, over = threading.Event(), threading.Event()

    def stuck(*told: object) -> None:
        begun.set()
        over.wait(20.0)
        raise RuntimeError("nobody came")

    with monkeypatch.context() as patched:
        patched.setattr(weight_broadcast, "_LEAVE", 0.05)
        patched.setattr(weight_broadcast, "GlooSender", stuck)
        future = attending(offer(sender, 1), {"a": Collector()}, seconds=1.0)["a"]
        assert begun.wait(60)
        assert sender.withdraw().receivers == 0
    assert "its thread is left behind" in caplog.text
    good = Collector()
    attending(offer(sender, 1, 2), {"a": good}, 2)["a"].result(60)
    assert has(good)
    over.set()
    with pytest.raises(NotReceived):
        future.result(60)


def test_an_offer_that_is_withdrawn_while_others_are_led_sends_nobody_into_a_group(
    sender: Broadcaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*told: object) -> None:
        raise AssertionError("a group is formed")

    monkeypatch.setattr(weight_broadcast, "GlooSender", made)
    stopped = threading.Event()
    stopped.set()
    late, far = line("a")
    kept: dict[str, Any] = {}
    sender._lead("gloo", [late], WEIGHTS, kept, stopped)
    assert json.loads(far.readline()) == {"do": "end", "why": "the broadcast broke: the offer was withdrawn"}
    assert kept == {}


def test_who_comes_alone_is_served_after_a_while_and_who_comes_later_is_refused(sender: Broadcaster) -> None:
    source = offer(sender, 2, patience=0.05)
    one = Collector()
    attending(source, {"a": one})["a"].result(60)
    assert has(one)
    with pytest.raises(NotReceived):
        attend(source, 1, 5.0, "b", Collector())


def test_an_engine_takes_part_with_all_of_its_workers_or_not_at_all(sender: Broadcaster) -> None:
    class Half(Collector):
        def member(self, engine: str, seconds: float) -> Member:
            return Member(engine, 0, 2, ("gloo",), seconds)

    whole = Collector()
    futures = attending(offer(sender, 2, patience=0.2), {"whole": whole, "half": Half()})
    futures["whole"].result(60)
    with pytest.raises(NotReceived, match="not all workers"):
        futures["half"].result(60)
    assert has(whole)


def test_strangers_and_other_versions_stay_outside(sender: Broadcaster) -> None:
    source = offer(sender, 1)
    for wrong, version in ((source[:-1] + "_", 1), (source, 2)):
        with pytest.raises(NotReceived):
            attend(wrong, version, 5.0, "a", Collector())
    one = Collector()
    attend(source, 1, 5.0, "a", one)
    assert has(one)


def test_on_gpus_nobody_shares_one_within_the_collective() -> None:
    def gpu(engine: str, worker: int, device: str, workers: int = 1) -> Member:
        return Member(engine, worker, workers, ("nccl", "ipc"), 1.0, device)

    beside, tp0, tp1, second, on_cpu = (
        gpu("a", 0, "G0"),
        gpu("b", 0, "G1", 2),
        gpu("b", 1, "G2", 2),
        gpu("c", 0, "G1"),
        Member("d", 0, 1, ("gloo",), 1.0),
    )
    found = chosen_backends([beside, tp0, tp1, second, on_cpu], "G0")
    assert found == {"ipc": [beside], "nccl": [tp0, tp1], "": [second], "gloo": [on_cpu]}
    assert chosen_backends([tp0, on_cpu], "") == {"": [tp0], "gloo": [on_cpu]}, "a leader without a GPU reaches none"
    assert chosen_backends([gpu("c", 0, "G1"), gpu("b", 0, "G1", 2), tp1], "G0")[""] == [gpu("b", 0, "G1", 2), tp1], "an engine whole"


def test_buckets_are_those_of_both_sides() -> None:
    assert list(weight_groups.buckets([60, 60, 500, 0, 1], 100)) == [2, 1, 2]
    assert list(weight_groups.buckets([], 100)) == []
    assert weight_groups.metas(weight_groups.announced(WEIGHTS)) == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS]
