"""A line between the root and each other rank of a communicator: questions with one answer each, and notes that nobody asked for.

Beside the epochs (cells/epochs.py), which all ranks hear in one order and which are over when the last has answered: a line concerns two
ranks only, so nobody waits for a third that is in the middle of a long computation.

Invariants: nothing waits inside MPI (matched probes, every request polled with Test); per rank questions arrive in the order asked, and
notes in the order told; a question is answered once. There is no order between lines and epochs: whoever needs one waits for the answer
before it announces. One thread at a time calls MPI. Payloads are JSON.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

LOOKS = 3
_QUESTION, _ANSWER, _NOTE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True)
class Question:
    """What root wants of this rank; `number` belongs into `answer`."""

    number: int
    message: dict[str, Any]


class Lines:
    """One rank's end of its lines. Made collectively by all ranks of `comm`."""

    def __init__(self, comm: MPI.Intracomm, root: int = 0) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self.root, self.rank, self.size = root, comm.Get_rank(), comm.Get_size()
        self._sent: deque[tuple[Any, NDArray[np.uint8]]] = deque()
        self._coming: list[tuple[Any, NDArray[np.uint8], int, int]] = []
        """Receives under way: request, buffer, source, tag."""
        self._asked = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._questions: deque[Question] = deque()
        self._notes: deque[tuple[int, dict[str, Any]]] = deque()
        self._ended: set[int] = set()
        self._said_last = False

    # -- root ---------------------------------------------------------------------------------------------------------------------

    def ask(self, rank: int, message: dict[str, Any]) -> int:
        """Root: a question to `rank`; its number. Does not wait."""
        number, self._asked = self._asked, self._asked + 1
        self._send(rank, _QUESTION, {"number": number, "message": message})
        return number

    def answer_to(self, number: int) -> dict[str, Any] | None:
        """Root: the answer, once; None while it is not there."""
        self.progress()
        return self._answers.pop(number, None)

    def note(self) -> tuple[int, dict[str, Any]] | None:
        """Root: the next (rank, note), or None."""
        self.progress()
        return self._notes.popleft() if self._notes else None

    # -- the others ---------------------------------------------------------------------------------------------------------------

    def poll(self) -> Question | None:
        """The next question, or None."""
        self.progress()
        return self._questions.popleft() if self._questions else None

    def ahead(self) -> list[dict[str, Any]]:
        """What the questions say that have come and that nobody has taken yet; looks at once."""
        self.progress()
        return [question.message for question in self._questions]

    def answer(self, number: int, report: dict[str, Any]) -> None:
        self._send(self.root, _ANSWER, {"number": number, "message": report})

    def tell(self, note: dict[str, Any]) -> None:
        """Say something to root unasked."""
        self._send(self.root, _NOTE, note)

    # -- both ---------------------------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Let MPI work on what is under way, and take what has come.

        Several looks: by the first one MPI takes what has arrived, a later one tells of it; who goes back to a micro-step after a single
        one answers after it.
        """
        for _ in range(LOOKS):
            self._look()

    def _look(self) -> None:
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        status = self._mpi.Status()
        while (found := self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)) is not None:
            buffer = np.zeros(status.Get_count(self._mpi.BYTE), np.uint8)
            self._coming.append((found.Irecv(buffer), buffer, status.Get_source(), status.Get_tag()))
        while self._coming and self._coming[0][0].Test():
            _, buffer, source, tag = self._coming.pop(0)
            self._take(buffer.tobytes(), source, tag)

    def drain(self) -> bool:
        """Whether nothing of this rank is under way; poll it before MPI_Finalize, when no more is asked, answered or told."""
        if not self._said_last:
            self._said_last = True
            for rank in range(self.size) if self.rank == self.root else [self.root]:
                if rank != self.rank:
                    self._send(rank, _LAST, {})
        self.progress()
        others = self.size - 1 if self.rank == self.root else 1
        return not self._sent and not self._coming and len(self._ended) == others

    def _take(self, data: bytes, source: int, tag: int) -> None:
        content = json.loads(data)
        if tag == _QUESTION:
            self._questions.append(Question(content["number"], content["message"]))
        elif tag == _ANSWER:
            self._answers[content["number"]] = content["message"]
        elif tag == _NOTE:
            self._notes.append((source, content))
        else:
            self._ended.add(source)

    def _send(self, rank: int, tag: int, content: dict[str, Any]) -> None:
        buffer = np.frombuffer(json.dumps(content).encode(), np.uint8)
        self._sent.append((self._comm.Isend([buffer, self._mpi.BYTE], rank, tag), buffer))
        self.progress()
