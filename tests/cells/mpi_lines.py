"""On N ranks: questions and answers in any order and size, notes, a rank that is busy meanwhile, the end. Run by test_lines.py."""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

from cells.lines import Lines  # noqa: E402
from cells.waiting import wait  # noqa: E402
from tests.cells.mpi_channel import compute_until, told  # noqa: E402

SIZES = (0, 100, 70_000, 2_000_000, 5)


def root(lines: Lines) -> None:
    asked = [
        (lines.ask(rank, {"i": i, "text": "x" * size}), rank, i, size) for i, size in enumerate(SIZES) for rank in range(1, lines.size)
    ]
    for number, rank, i, size in reversed(asked):  # in any order
        answer = wait(lambda number=number: lines.answer_to(number), f"answer {number}", 30, print)
        assert answer == {"rank": rank, "i": i, "length": size}
        assert lines.answer_to(number) is None, "once"
    notes: dict[int, list[int]] = {rank: [] for rank in range(1, lines.size)}
    while sum(map(len, notes.values())) < 3 * (lines.size - 1):
        rank, note = wait(lines.note, "a note", 30, print)
        notes[rank].append(note["n"])
    assert all(found == [0, 1, 2] for found in notes.values())
    # one that does not answer holds up nobody else
    slow = lines.ask(1, {"held": True})
    if lines.size > 2:
        quick = lines.ask(lines.size - 1, {"held": False})
        wait(lambda: lines.answer_to(quick), "the quick one", 30, print)
        assert lines.answer_to(slow) is None
    BESIDE.send(None, dest=1)
    wait(lambda: lines.answer_to(slow), "the slow one", 30, print)
    for rank in range(1, lines.size):
        if rank not in (1, lines.size - 1):
            lines.ask(rank, {"held": False})
    final = [lines.ask(rank, {}) for rank in range(1, lines.size)]
    told("asked").touch()
    for number in final:
        wait(lambda number=number: lines.answer_to(number), f"answer {number}", 30, print)
    told("asked").unlink()


def other(lines: Lines) -> None:
    questions = [wait(lines.poll, "a question", 30, print) for _ in SIZES]
    assert [q.message["i"] for q in questions] == list(range(len(SIZES))), "in the order asked"
    for question in questions:
        lines.answer(question.number, {"rank": lines.rank, "i": question.message["i"], "length": len(question.message["text"])})
    for n in range(3):
        lines.tell({"n": n})
    last = wait(lines.poll, "the last question", 30, print)
    if last.message["held"]:
        BESIDE.recv(source=0)
    lines.answer(last.number, {"slept": 1})
    compute_until("asked")
    assert lines.ahead() == [{}], "one look between two micro-steps is enough"
    question = lines.poll()
    assert question is not None
    assert lines.ahead() == []
    lines.answer(question.number, {})


MPI.Init()
LINES = Lines(MPI.COMM_WORLD)
BESIDE = MPI.COMM_WORLD.Dup()
"""Lets the slow one go."""
(root if LINES.rank == 0 else other)(LINES)
wait(LINES.drain, "the end of the lines", 30, print)
MPI.Finalize()
print(f"passed {LINES.rank} of {LINES.size}", flush=True)
