"""The core's weights on their way to satellites that join, beside everything else that the ranks do.

Ordering key: between two ranks MPI keeps the order, so the n-th receive gets what was sent n-th. Invariant: for every snapshot that the
core has sent exactly one receive is posted, also when nobody waits for it any more: a pull that was given up stays first in line, or
the next one would get its older weights.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cells.reduce import Pending, start_receive, start_send

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)
_TAG = 7


class Snapshots:
    """One rank's end; `comm`: this slot's ranks of all cells, the core's is rank 0."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sending: list[Pending] = []
        self._coming: deque[tuple[Pending, NDArray[np.float32]]] = deque()

    def lend(self, weights: NDArray[np.float32], cell: int) -> None:
        """Core: send float32[n], which nobody changes any more, to `cell`; does not wait."""
        self._sending.append(start_send(self._comm, weights, cell, _TAG))

    def pull(self, size: int, deadline: float) -> NDArray[np.float32]:
        """Satellite: the weights float32[size] that were lent last. DeadlineExceeded after `deadline` seconds."""
        flat = np.empty(size, np.float32)
        self._coming.append((start_receive(self._comm, flat, 0, _TAG), flat))
        end = time.monotonic() + deadline
        while True:
            self._coming[0][0].wait("the core's weights", max(0.0, end - time.monotonic()), logger.warning)
            _, weights = self._coming.popleft()
            if not self._coming:
                return weights

    def progress(self) -> bool:
        """Let MPI work; whether nothing is on its way in either direction."""
        self._sending = [pending for pending in self._sending if not pending.test()]
        while self._coming and self._coming[0][0].test():
            self._coming.popleft()
        return not self._sending and not self._coming
