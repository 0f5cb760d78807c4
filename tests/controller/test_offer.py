"""Weights are offered one version at a time, and never while they may change."""

from __future__ import annotations

import pytest
import torch

from gyre_hpc import memory
from gyre_hpc.controller.offer import Offer
from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_groups import Collector
from gyre_hpc.engines.weight_member import attend
from gyre_hpc.engines.weight_stream import Weights, receive


def test_one_version_at_a_time_until_it_is_withdrawn() -> None:
    offer = Offer()
    assert offer.close() == {}
    first = offer.open("127.0.0.1", 1, lambda: [("w", torch.ones(3))])
    second = offer.open("127.0.0.1", 2, lambda: [("w", torch.zeros(3))])
    with pytest.raises(NotReceived):
        receive(first, 1, 5.0)
    assert receive(second, 2, 5.0)["w"].tolist() == [0.0] * 3
    sent = offer.close()
    assert (sent["receivers"], sent["bytes"]) == (1, 12)
    with pytest.raises(NotReceived):
        receive(second, 2, 5.0)


def test_a_broadcast_takes_the_place_of_a_stream_and_keeps_its_group_until_the_end() -> None:
    offer, engine = Offer(), Collector()
    stream = offer.open("127.0.0.1", 1, lambda: [("w", torch.ones(3))])
    for version in (2, 3):
        weights: Weights = [("w", torch.full((3,), float(version)))]
        source = offer.broadcast("127.0.0.1", version, lambda weights=weights: weights, 0, torch.device("cpu"), 1, 5.0)  # type: ignore[misc]
        attend(source, version, 10.0, "engine", engine)
        assert engine.take()["w"].tolist() == [version] * 3
        sent = offer.close()
        assert (sent["receivers"], sent["bytes"]) == (1, 12)
        assert offer.close() == {}
    with pytest.raises(NotReceived):
        receive(stream, 1, 5.0)
    offer.end()
    offer.end()


def test_where_the_copies_would_not_fit_none_is_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory, "available", lambda: 5 << 20)
    asked: list[str] = []

    def weights() -> Weights:
        asked.append("weights")
        return [("w", torch.ones(3))]

    offer = Offer()
    assert offer.open("127.0.0.1", 1, weights, 6 << 20) == ""
    assert asked == []
    assert [record.getMessage() for record in caplog.records] == [
        "version 1 can't be sent from memory, engines load it from files: 6 MiB are wanted, this host and the job's limit leave 5 MiB"
    ]
    assert offer.open("127.0.0.1", 1, weights, 5 << 20)
    offer.close()


def test_where_there_is_no_memory_for_it_files_are_left(caplog: pytest.LogCaptureFixture) -> None:
    def too_large() -> Weights:
        raise RuntimeError("not enough memory")

    offer = Offer()
    assert offer.open("127.0.0.1", 1, too_large) == ""
    assert offer.close() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "version 1 can't be sent from memory, engines load it from files: not enough memory"
    ]
