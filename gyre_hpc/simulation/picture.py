"""A simulated run as one SVG file: what every cell did, by the pictures of the report; needs no page around it."""

from __future__ import annotations

from gyre_hpc.report.svg import gantt
from gyre_hpc.simulation.outcome import Outcome

_COLOURS = {"rollout": "blue", "training": "pink", "transfer": "amber", "down": "muted"}
_STYLE = (
    "<style>svg{--blue:#4c78a8;--pink:#d6568c;--amber:#e0a030;--muted:#8a8f98;--grid:#e4e6ea;background:#fff}"
    "text{font:12px sans-serif;fill:#333}</style>"
)
MOST_CELLS = 40


def draw(found: Outcome, standalone: int = 0) -> str:
    """The SVG text of a run that was simulated with `record`. Beyond 40 cells only the first ones are drawn."""
    unit, name = (3600.0, "hours") if found.seconds >= 7200 else (1.0, "seconds")
    cells = sorted({span.cell for span in found.spans})
    rows = []
    for cell in cells[:MOST_CELLS]:
        bars = [
            (s.start / unit, s.end / unit, _COLOURS[s.state], f"{s.state} from {s.start / unit:.2f} to {s.end / unit:.2f}")
            for s in found.spans
            if s.cell == cell
        ]
        rows.append((f"cell {cell}", bars))
    if standalone:
        rows.append(("pool", [(0.0, found.seconds / unit, "blue", f"{standalone} standalone nodes: rollout")]))
    marks = [(at / unit, f"step {number}") for number, at in enumerate(found.steps, start=1)]
    svg = gantt(rows, found.seconds / unit, marks, label=name)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{_STYLE}", 1)
