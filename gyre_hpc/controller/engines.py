"""What the cells' leaders report of their engines at the start: addresses for the gateway, and how many executions each cell holds.

Ordering key: cell, then the engine's number inside it. Invariants: a cell's capacity is the sum of its engines'; where the configuration
says 0 it is what the engine measured, and both are told (event `engines`), never guessed in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cells.events import CapacityChanged
from gyre_hpc.config import Config

_MEASURED = ("pid", "kv_tokens", "holds")
"""Fields of a report that are no part of an address."""


class Engines:
    """Of all cells, standalone ones behind the others; `reports` in cell order, each with `engines`: {number: fields}."""

    def __init__(self, reports: Sequence[Mapping[str, Any]]) -> None:
        self._cells = [{int(number): fields for number, fields in sorted(report["engines"].items())} for report in reports]

    @property
    def capacities(self) -> list[int]:
        """Executions that each cell holds."""
        return [sum(int(fields["capacity"]) for fields in cell.values()) for cell in self._cells]

    def changed(self, cell: int, dead: Callable[[int], Collection[int]], training: int) -> CapacityChanged:
        """What the policy hears once engines of `cell` died or are back; `dead(cell)`: those that don't live now. The first `training`
        cells may train and count each, the others together are the standalone pool."""
        if cell < training:
            return CapacityChanged(cell, self._living(cell, dead(cell)))
        return CapacityChanged(None, sum(self._living(other, dead(other)) for other in range(training, len(self._cells))))

    def serving(self, cells: Iterable[int], dead: Callable[[int], Collection[int]]) -> int:
        """How many engines of `cells` live."""
        return sum(number not in dead(cell) for cell in cells for number in self._cells[cell])

    def _living(self, cell: int, dead: Collection[int]) -> int:
        return sum(int(fields["capacity"]) for number, fields in self._cells[cell].items() if number not in dead)

    def addresses(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(cell, engine, fields of EngineAddress)."""
        for cell, engines in enumerate(self._cells):
            for number, fields in engines.items():
                yield cell, number, {name: value for name, value in fields.items() if name not in _MEASURED}

    def facts(self, config: Config) -> dict[str, Any]:
        """The event's fields: `capacity` and `standalone` of the cells, `measured`, each engine's numbers, and what is too much.

        `over`: engines whose KV is too small for the configured executions, were the context of each to fill the window.
        """
        listed = [
            {"cell": cell, "engine": number, "capacity": fields["capacity"], "holds": fields["holds"], "kv_tokens": fields["kv_tokens"]}
            for cell, engines in enumerate(self._cells)
            for number, fields in engines.items()
        ]
        return {
            "capacity": self.capacities[: config.cells.count],
            "standalone": self.capacities[config.cells.count :],
            "measured": config.rollout.capacity == 0,
            "window": config.model.window,
            "over": sum(engine["capacity"] > engine["holds"] for engine in listed),
            "engines": listed,
        }
