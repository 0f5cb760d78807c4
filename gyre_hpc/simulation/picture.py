"""A run, simulated or real, as one SVG file: what every cell did, by the pictures of the report; needs no page around it."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_hpc.report.summary import Span, Summary
from gyre_hpc.report.timeline import Row, every, gantt, pool_row
from gyre_hpc.simulation.outcome import Outcome

_COLOURS = {"starting": "muted", "rollout": "blue", "training": "pink", "transfer": "amber", "down": "muted", "ending": "muted"}
_STYLE = (
    "<style>svg{--blue:#4c78a8;--pink:#d6568c;--amber:#e0a030;--muted:#8a8f98;--grid:#e4e6ea;background:#fff}"
    "text{font:12px sans-serif;fill:#333}</style>"
)
MOST_CELLS = 40
NUMBERED = 18
"""Steps whose numbers stand above the rows, at most."""


def draw(found: Outcome, standalone: int = 0) -> str:
    """The SVG text of a run that was simulated with `record`. Beyond 40 cells only the first ones are drawn, as its axis says."""
    return _drawn(found.spans, found.steps, found.seconds, standalone)


def draw_work(found: Outcome, standalone: int = 0) -> str:
    """The same from the first dispatch to the last step's end, to stand beside `draw_run` of a real run."""
    start = found.began
    return _drawn(_from(start, found.spans), [at - start for at in found.steps], max(found.steps) - start, standalone)


def draw_run(summary: Summary, zero: float, began: float | None = None, lead: float = 5.0) -> str:
    """The same of a real run, from the clock `began` on, or from `lead` seconds before its first transfer; `zero`: time of the log's first
    event."""
    first = min((t.at for t in summary.transfers), default=0.0) - lead if began is None else began - zero
    start = max(0.0, first)
    steps = [float(step["t"]) - zero - start for step in summary.steps]
    return _drawn(_from(start, summary.spans), steps, max(steps, default=summary.seconds - start), summary.standalone)


def _from(start: float, spans: Sequence[Span]) -> list[Span]:
    """What is later than `start`, counted from there."""
    return [Span(s.cell, s.state, max(s.start, start) - start, s.end - start) for s in spans if s.end > start]


def _drawn(spans: Sequence[Span], steps: Sequence[float], seconds: float, standalone: int) -> str:
    unit, name = (3600.0, "hours") if seconds >= 7200 else (1.0, "seconds")
    cells = sorted({span.cell for span in spans})
    rows: list[Row] = []
    for cell in cells:
        mine = [(s.start / unit, min(s.end, seconds) / unit, s.state) for s in spans if s.cell == cell and s.start < seconds]
        rows.append((f"cell {cell}", [(a, b, _COLOURS[state], f"{state} from {a:.2f} to {b:.2f}") for a, b, state in mine]))
    most = len(rows) if len(rows) <= MOST_CELLS else MOST_CELLS
    if standalone:
        rows.insert(most, pool_row(standalone, seconds / unit))
    few = f", the first {most} of {len(cells)} cells" if most < len(cells) else ""
    marks = [(at / unit, f"step {number}") for number, at in enumerate(steps, start=1)]
    each = every(len(steps), NUMBERED)
    shown = {span.state for span in spans} | ({"rollout"} if standalone else set())
    svg = gantt(
        rows,
        seconds / unit,
        marks,
        name + few,
        [(state, colour) for state, colour in _COLOURS.items() if state in shown],
        numbers=[(at / unit, str(number)) for number, at in enumerate(steps, start=1) if number % each == 0],
        names={"blue": "rollout", "pink": "training", "amber": "transfer", "muted": "starting or down"},
        most=most + bool(standalone),
    )
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{_STYLE}", 1)
