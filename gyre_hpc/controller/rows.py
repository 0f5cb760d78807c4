"""The rows of micro-steps: the controller names (execution, path), each rank reads the tokens from the record by itself.

Invariants: the selection of paths is seeded by the run, so all ranks get the same; an execution is read once a step, when its record is
whole in this node's view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gyre_hpc.controller.messages import RowRef
from gyre_hpc.training.rows import TrainRow
from trees.selection import Path, select_paths
from trees.store import StoreReader


class Rows:
    """Reads them. `wait(test, name)` comes back when `test()` is true, or raises DeadlineExceeded by that name."""

    def __init__(self, reader: StoreReader, jmax: int, seed: int, wait: Callable[[Callable[[], Any], str], Any]) -> None:
        self._reader, self._jmax, self._seed, self._wait = reader, jmax, seed, wait
        self._selected: dict[int, list[Path]] = {}

    def of(self, ref: RowRef) -> TrainRow:
        """The row that is named. Raises DeadlineExceeded where its record does not come into view."""
        if ref.execution not in self._selected:
            # it was whole on the disk before the controller named it, but another node's file system may show that later
            self._wait(lambda: self._is_whole(ref.execution), f"the record of execution {ref.execution}")
            self._selected[ref.execution] = select_paths(self._reader.tree(ref.execution), self._jmax, self._seed)
        return TrainRow.of(self._selected[ref.execution][ref.path], ref.advantage, ref.branch)

    def forget(self) -> None:
        """The step is over."""
        self._selected = {}

    def _is_whole(self, execution: int) -> bool:
        """Its end and those of all its calls are in view; looks again only if they are not."""

        def seen() -> bool:
            return execution in self._reader.ends() and not self._reader.incomplete(execution)

        if not seen():
            self._reader.refresh()
        return seen()
