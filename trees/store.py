"""The store of one run: one writer, any number of readers. Interface first; the body follows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trees.records import Execution, ExecutionEnd, Group, Record, Role
from trees.tree import Tree


class StoreError(Exception):
    """The store can't be used as asked; the message says what and the remedy."""


class StoreWriter:
    """The one writer of a directory. Recovers on open. Thread-safe; `commit` of several threads share one fsync."""

    def __init__(self, directory: Path, provenance: Mapping[str, Any] | None = None, *, take_over: bool = False) -> None:
        """`take_over`: also take the lock of a writer on another host (its owner knows that it is dead)."""
        raise NotImplementedError

    def allocate_node(self) -> int: ...  # type: ignore[empty-body]
    def allocate_call(self) -> int: ...  # type: ignore[empty-body]
    def allocate_execution(self) -> int: ...  # type: ignore[empty-body]

    def append(self, record: Record) -> None:
        """Buffer one record; durable after the next `commit`. ValueError for a record that breaks an invariant."""

    def context_node(self, parent: int, tokens: NDArray[np.int32], execution: int, call: int, role: Role) -> int:
        """The CONTEXT node with these tokens under `parent` (-1: root), appended unless any execution has it already."""
        raise NotImplementedError

    def commit(self) -> None:
        """Everything appended so far is durable on return. OSError (ENOSPC): nothing of it is; it stays buffered, call again."""

    def seal(self) -> list[Path]:
        """Move ended executions into immutable segments and rotate the journal; returns the new segments."""
        raise NotImplementedError

    def close(self) -> None: ...
    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class StoreReader:
    """Reads a store, also while another process writes and seals it. `refresh` costs what is new."""

    def __init__(self, directory: Path) -> None:
        raise NotImplementedError

    def refresh(self) -> None: ...
    def groups(self) -> Mapping[int, Group]: ...  # type: ignore[empty-body]
    def executions(self) -> Mapping[int, Execution]: ...  # type: ignore[empty-body]
    def ends(self) -> Mapping[int, ExecutionEnd]: ...  # type: ignore[empty-body]

    def incomplete(self, execution: int) -> bool:
        """A call of it has an intent and no end."""
        raise NotImplementedError

    def tree(self, execution: int, *, tokens: bool = True) -> Tree:
        """The tree of one execution, KeyError if unknown. `tokens` False: lengths only."""
        raise NotImplementedError
