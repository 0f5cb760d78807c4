"""Announcements survive JSON."""

from __future__ import annotations

import json

import pytest

from gyre_hpc.controller.messages import (
    Close,
    Command,
    Export,
    Message,
    Prefix,
    RowRef,
    Save,
    Share,
    Start,
    Stop,
    Update,
    Work,
    decode,
    encode,
)

MESSAGES: list[Message] = [
    Work(first=3, items=((RowRef(1, 0, 0.5), RowRef(2, 1, -1.25)), ())),
    Share(4),
    Start(2),
    Prefix(2),
    Command("lend", 4, "weights/version-000004", 30.0, 1),
    Close(5, 7, 2, 16, True, True, {"step": 5}, {"schedule": {"consumed": [1, 2]}}),
    Save(5, {"step": 5}, {"branches": [[2, 3, 4]]}, 8.5),
    Export(3, "weights/version-000003"),
    Export(4, "weights/version-000004", offer="broadcast", engines=3),
    Update(3, "weights/version-000003", (0, 2)),
    Update(4, "weights/version-000004", (1,), "node7:4000/secret"),
    Stop("done"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_was_encoded_is_decoded_equal(message: Message) -> None:
    assert decode(json.loads(json.dumps(encode(message)))) == message


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Wrok"):
        decode({"kind": "Wrok"})
