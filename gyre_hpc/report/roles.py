"""The section of the report on what every cell did: the picture and the words below it, from a summary; pure.

Invariant: the axis is time in which the run ran. The hours between two attempts, in a queue mostly, are left out: they would leave no room
for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gyre_hpc.report import svg, timeline
from gyre_hpc.report.summary import Summary

COLOURS = {"starting": "grey", "rollout": "blue", "training": "pink", "transfer": "amber", "ending": "grey"}
NAMES = {"grey": "starting, ending", "blue": "rollout", "pink": "training", "amber": "transfer"}
"""What colours stand for."""
MOST_CELLS = 128
"""Cells that are drawn."""
TOGETHER = 9
"""Cells from which on there is a row for all of them together."""
MARKED = 60
"""Steps whose ends are lines through all rows."""
NUMBERED = 18
"""Steps whose numbers stand above the rows, at most."""
STEPPED = timeline.COLUMNS // 5
"""Steps from which on columns end with steps: fewer have so many columns each that one sees into them."""
CLOSE = 4
"""Last steps that are drawn once more, where the whole run is too long for single changes."""
_HOUR = 3600.0
_LONG = 2 * _HOUR
"""Seconds from which on the axis counts hours."""


def draw(summary: Summary) -> str:
    """Legend, picture and note, as HTML; of a long run the last steps once more."""
    rows = _rows(summary)
    ends = [(summary.worked(float(step["t"]) - summary.zero), int(step["step"])) for step in summary.steps]
    attempts = [summary.worked(at) for at in summary.attempts]
    marks = [(at, f"attempt {i + 1}") for i, at in enumerate(attempts)]
    marks += [(at, f"step {number}") for at, number in ends] if len(ends) <= MARKED else []
    unit, label = (_HOUR, "hours") if summary.ran >= _LONG else (1.0, "seconds")
    each = timeline.every(len(ends), NUMBERED)
    numbers = [(at, number) for at, number in ends if number % each == 0]
    cuts = [*attempts, *(at for at, _ in ends[:: timeline.every(len(ends), timeline.COLUMNS)])] if len(ends) > STEPPED else []
    whole = _picture(summary, rows, (0.0, summary.ran), marks, numbers, (unit, f"{label} that the run ran"), cuts)
    dense = timeline.is_dense(rows[:MOST_CELLS])
    close = _close(summary, rows, ends) if dense and len(ends) > CLOSE else ""
    return svg.legend([(name, colour) for colour, name in NAMES.items()]) + whole + _note(summary, dense) + close


def _close(summary: Summary, rows: Sequence[timeline.Row], ends: Sequence[tuple[float, int]]) -> str:
    """The last steps, each change of each cell."""
    (begin, before), *last = ends[-CLOSE - 1 :]
    marks = [(at - begin, f"step {number}") for at, number in last]
    label = f"seconds since the end of step {before}"
    picture = _picture(summary, rows, (begin, last[-1][0]), marks, [(at - begin, number) for at, number in last], (1.0, label))
    return f'<p class="note">The last {CLOSE} of these steps:</p>{picture}'


def _picture(
    summary: Summary,
    rows: Sequence[timeline.Row],
    span: tuple[float, float],
    marks: Sequence[tuple[float, str]],
    numbers: Sequence[tuple[float, int]],
    axis: tuple[float, str],
    cuts: Sequence[float] = (),
) -> str:
    """What is between the two times of `span`; `marks`, `numbers` and `cuts` in seconds from there; `axis`: (seconds of a unit, label)."""
    (begin, end), (unit, label) = span, axis
    return timeline.gantt(
        [
            (name, [((max(a, begin) - begin) / unit, (min(b, end) - begin) / unit, c, t) for a, b, c, t in bars if b > begin and a < end])
            for name, bars in rows
        ],
        (end - begin) / unit,
        [(at / unit, title) for at, title in marks],
        label,
        numbers=[(at / unit, str(number)) for at, number in numbers],
        names=NAMES,
        together="all cells" if summary.cells >= TOGETHER else "",
        most=MOST_CELLS,
        cuts=[at / unit for at in cuts],
    )


def _rows(summary: Summary) -> list[timeline.Row]:
    """A row a cell, then one for the standalone nodes, in seconds that the run ran."""
    bars: list[list[timeline.Bar]] = [[] for _ in range(summary.cells)]
    for s in summary.spans:
        start, end = summary.worked(s.start), summary.worked(s.end)
        bars[s.cell].append((start, end, COLOURS.get(s.state, "grey"), f"{s.state}: {start:.1f} to {end:.1f} s"))
    rows: list[timeline.Row] = [("core" if cell == 0 else f"cell {cell}", drawn) for cell, drawn in enumerate(bars)]
    if summary.standalone:
        starts = [(start, end, title) for start, end, colour, title in bars[0] if colour == COLOURS["starting"]] if bars else []
        rows.insert(MOST_CELLS - 1 if len(rows) >= MOST_CELLS else len(rows), timeline.pool_row(summary.standalone, summary.ran, starts))
    return rows


def _note(summary: Summary, dense: bool) -> str:
    shares = ", ".join(f"{state} {summary.share(state):.0%}" for state in COLOURS if state != "ending" or summary.ended == "done")
    lines = [f"The first {MOST_CELLS} of {summary.cells} cells."] if summary.cells > MOST_CELLS else []
    lines.append(f"Share of the cells' time: {shares}.")
    if summary.standalone:
        lines.append("Standalone nodes are not counted in it.")
    if dense:
        each = timeline.every(len(summary.steps), timeline.COLUMNS)
        column = "column" if len(summary.steps) <= STEPPED else "step" if each == 1 else f"column of {each} steps"
        lines.append(
            f"There are too many changes to draw each: in every {column} the colours share a row's height as the roles shared its time."
        )
    lines += _lines(summary)
    lines.append(f"Hold the pointer over a {'row' if dense else 'bar or a line'} for its numbers.")
    return f'<p class="note">{escape(" ".join(lines))}</p>'


def _lines(summary: Summary) -> Sequence[str]:
    told = ["Dashed lines: starts of attempts" + (", and ends of steps." if 0 < len(summary.steps) <= MARKED else ".")]
    if summary.rests:
        away = sum(end - start for start, end in summary.rests)
        told.append(f"{away:.0f} s between attempts, when nothing ran, are left out.")
    return told
