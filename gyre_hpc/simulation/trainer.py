"""The training cells of one open step as a fluid: fed groups are work, cells in training do it together; pure, time is handed in.

Work is claimed in small pieces (cells/claims.py), so all cells finish together and a cell that joins helps at once. Invariant: work is
done at as many node-seconds a second as there are nodes in training, while there is any.
"""

from __future__ import annotations


class Trainer:
    """What is fed and not yet computed, in node-seconds."""

    def __init__(self) -> None:
        self.nodes = 0
        self.left = 0.0
        self.done = 0.0
        """Node-seconds of training in all."""
        self.changes = 0
        self._since = 0.0

    def advance(self, now: float) -> None:
        """Time goes on to `now`."""
        did = min(self.left, self.nodes * (now - self._since))
        self.left -= did
        self.done += did
        if self.left < 1e-6:
            self.left = 0.0
        self._since = now

    def feed(self, work: float, now: float) -> None:
        self.advance(now)
        self.left += work
        self.changes += 1

    def set_nodes(self, nodes: int, now: float) -> None:
        """How many nodes train from now on."""
        self.advance(now)
        self.nodes = nodes
        self.changes += 1

    def drop(self, now: float) -> None:
        """The attempt ended: what was not stepped is lost."""
        self.advance(now)
        self.left = 0.0
        self.nodes = 0
        self.changes += 1

    def empty_at(self) -> float | None:
        """When all that is fed is computed, if nothing changes."""
        return self._since + self.left / self.nodes if self.nodes else None
