"""Which conversations wait where."""

from __future__ import annotations

import numpy as np

from gyre_hpc.engines.handover_waiting import KEPT, WaitingConversations
from gyre_hpc.engines.prompt import Prompt, Run


def left(waiting: WaitingConversations, cell: int) -> list[tuple[int, list[int]]]:
    return [(c.execution, list(c.tokens)) for c in waiting.leave(cell)]


def test_what_goes_on_waits_no_longer_and_the_last_to_end_comes_first() -> None:
    waiting = WaitingConversations()
    assert waiting.begin(1, [1, 2, 3]) is None
    waiting.end(1, 0, [1, 2, 3, 4])
    waiting.end(2, 0, [5, 6])
    waiting.end(1, 1, [1, 2, 9])  # a sub-agent, elsewhere
    assert waiting.begin(1, [1, 2, 3, 4, 7]) == 0
    waiting.end(1, 0, Prompt([Run(np.array([1, 2, 3], np.int32)), Run(np.array([4, 7, 8], np.int32))]))
    assert left(waiting, 0) == [(1, [1, 2, 3, 4, 7, 8]), (2, [5, 6])]
    assert left(waiting, 0) == []
    assert left(waiting, 1) == [(1, [1, 2, 9])]


def test_a_call_knows_the_cell_with_most_of_its_kv() -> None:
    waiting = WaitingConversations()
    waiting.end(1, 0, [1])
    waiting.end(1, 3, [1, 2, 3])
    waiting.end(1, 2, [1, 2, 4])
    assert waiting.begin(1, Prompt([Run(np.array([1, 2, 3, 5], np.int32))])) == 3
    assert left(waiting, 2) == [(1, [1, 2, 4])]
    assert left(waiting, 0) == left(waiting, 3) == []


def test_few_are_kept_of_an_execution_and_none_of_one_that_ended() -> None:
    waiting = WaitingConversations()
    for i in range(KEPT + 3):
        waiting.end(1, 0, [i])
    waiting.end(2, 0, [1])
    waiting.forget(2)
    waiting.forget(3)
    assert left(waiting, 0) == [(1, [i]) for i in range(KEPT + 2, 2, -1)]
