"""The open step: which groups were fed to it, and how much of their work is claimed; pure.

Invariant: at most `size` groups; claims only grow until the step is done.
"""

from __future__ import annotations


class OpenStep:
    """Groups fed to the step that is open (or closing), in that order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._fed: dict[int, None] = {}
        self._claimed = 0

    def __contains__(self, group: int) -> bool:
        return group in self._fed

    def __len__(self) -> int:
        return len(self._fed)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(self._fed)

    @property
    def full(self) -> bool:
        return len(self._fed) >= self._size

    @property
    def all_claimed(self) -> bool:
        """Whether nothing is left of the work fed so far."""
        return self._claimed >= len(self._fed)

    def feed(self, group: int) -> None:
        self._fed[group] = None

    def claim(self, groups: int) -> None:
        """The work of the first `groups` groups is claimed."""
        self._claimed = max(self._claimed, groups)

    def done(self) -> tuple[int, ...]:
        """The step is over: its groups; the next one is open and empty."""
        groups = self.groups
        self._fed = {}
        self._claimed = 0
        return groups
