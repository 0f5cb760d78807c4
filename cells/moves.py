"""Where the cells are during a run's bursts, and whose transfers failed; pure.

Invariants: what `cells.roles` allows; the returns of a boundary go down to the cells that stay (`boundary`), and until they are over
nothing may be fed. A transfer that failed is tried again, except a satellite's to training: the prefix just stays shorter for this burst.
"""

from __future__ import annotations

from cells.events import Decision, Role, Transfer, TransferDone, TransferFailed
from cells.roles import Roles
from cells.schedule import ScheduleStuck

TRANSFER_ATTEMPTS = 3
"""A transfer that fails this often in a row can't be expected to succeed."""


class Moves:
    """The cells' roles and what is known of their transfers."""

    def __init__(self, cells: int) -> None:
        self.roles = Roles.all_rollout(cells)
        self.returning = False
        """Whether cells of the last burst are still on their way back."""
        self._stays = 0
        """Cells of the last burst that stay in training."""
        self._refused: set[int] = set()
        """Satellites whose transfer to training failed in this burst."""
        self._failures = 0

    @property
    def moving(self) -> bool:
        """Whether a cell is in transit."""
        return self.roles.moving is not None

    @property
    def away(self) -> bool:
        """Whether a cell is in training, or on its way."""
        return self.roles.prefix > 0 or self.moving

    def refused(self, cell: int) -> bool:
        """Whether `cell` can't be had for training in this burst."""
        return cell in self._refused

    def begin_burst(self) -> None:
        """Every cell may be asked again."""
        self._refused = set()

    def boundary(self, stays: int) -> None:
        """All cells in training but the first `stays` are to return."""
        self._stays = stays
        self.returning = self.roles.prefix > stays

    def settle(self) -> None:
        """After any event: the returns may be over now."""
        self.returning = self.returning and (self.moving or self.roles.prefix > self._stays)

    def begin(self, cell: int, to: Role) -> list[Decision]:
        """Begin a transfer. ValueError for one that `Roles` does not allow."""
        self.roles = self.roles.begin(cell, to)
        return [Transfer(cell, to)]

    def done(self, event: TransferDone) -> None:
        self.roles = self.roles.end(event.cell, event.to)
        self._failures = 0

    def failed(self, event: TransferFailed) -> None:
        """The cell is where it was. ScheduleStuck when a transfer that the run can't do without fails again and again."""
        self.roles = self.roles.end(event.cell, event.to, undone=True)
        if event.to is Role.TRAINING and event.cell > 0:
            self._refused.add(event.cell)
            return
        self._failures += 1
        if self._failures >= TRANSFER_ATTEMPTS:
            raise ScheduleStuck(f"the transfer of cell {event.cell} to {event.to.value} failed {self._failures} times in a row")
