"""What can be wrong with a store. One line each: what; remedy."""

from __future__ import annotations


class StoreError(Exception):
    """The store can't be used as asked."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}; {remedy}")


class Damaged(StoreError):
    """Acknowledged data were changed or removed by somebody else: no further try helps, only a copy of the file."""


class Missing(Damaged):
    """A segment is not there: lost, or merged into another since its journal was read."""
