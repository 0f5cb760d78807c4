"""What cells did over time, as a picture: a row a cell, a bar a state; for runs of any length and any number of cells.

Where a row has more bars than a screen has room for, the picture is made of columns: in each the colours share the height of the row as the
states shared its time. So nothing is left out or drawn over, a picture costs a few kilobytes a row however long the run was, and the
eye reads the same shares. What happens in turns (steps) should have columns that end with them (`cuts`), or both beat against each other.
Above many cells one row shows the mean of all of them, those that are not drawn included.

Invariants: bars of one row do not overlap; all text is escaped (svg.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_hpc.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale, picture, x_ticks

Bar = tuple[float, float, str, str]
"""(start, end, colour, title)."""
Row = tuple[str, Sequence[Bar]]
FEW = 150
"""Bars of a row up to which each is drawn."""
TALL = 20
"""Rows up to which each is 30 units high; more are lower."""
COLUMNS = (WIDTH - LEFT - RIGHT) // 3
"""Of a picture."""
_LAYERS = ("pink", "amber", "green", "violet", "blue", "grey", "muted")
"""Colours of a column from the bottom to the top."""
_NUMBERS = 14
"""Units above the rows for the numbers of steps."""


def gantt(
    rows: Sequence[Row],
    seconds: float,
    marks: Sequence[tuple[float, str]] = (),
    label: str = "seconds since the first start",
    key: Sequence[tuple[str, str]] = (),
    *,
    numbers: Sequence[tuple[float, str]] = (),
    names: Mapping[str, str] | None = None,
    together: str = "",
    most: int | None = None,
    cuts: Sequence[float] = (),
) -> str:
    """Rows of bars over time in seconds (or what `label` says).

    `marks` are vertical lines with a title; `numbers` stand above the rows; `key`: (name, colour), for a picture with no legend above it;
    `names`: what a colour stands for; `together`: the name of a row with the mean of all, above those of the first `most`; `cuts`: times at
    which columns end, if there are columns.
    """
    drawn = rows if most is None else rows[:most]
    dense = any(len(bars) > FEW for _, bars in drawn)
    pitch = 30 if len(drawn) + bool(together) <= TALL else 15
    top = TOP + (_NUMBERS if numbers else 0)
    height = top + pitch * (len(drawn) + bool(together)) + BOTTOM
    scale = Scale.of((0.0, max(seconds, 1e-3)), (0.0, 1.0), WIDTH, height)
    parts = [_line(scale, at, top - 6, height - BOTTOM, title) for at, title in marks]
    parts += _numbers(scale, numbers)
    edges = _edges(scale, cuts)
    y = float(top)
    if together:
        parts.append(_columns(scale, y, pitch, together, edges, _mean([_shares(bars, edges) for _, bars in rows]), names or {}))
        y += pitch
    for name, bars in drawn:
        if dense:
            parts.append(_columns(scale, y, pitch, name, edges, _shares(bars, edges), names or {}))
        else:
            parts += [_name(y, pitch, name), *(_bar(scale, y, pitch, bar) for bar in bars)]
        y += pitch
    parts.append(x_ticks(scale, label))
    for index, (name, colour) in enumerate(key):
        x = LEFT + 92 * index
        parts.append(f'<rect x="{x}" y="{height - 11}" width="9" height="9" rx="1.5" fill="var(--{colour})"/>')
        parts.append(f'<text x="{x + 13}" y="{height - 3}" class="label">{escape(name)}</text>')
    return picture(WIDTH, height, parts, "roles of the cells over time")


def is_dense(rows: Sequence[Row]) -> bool:
    """Whether a picture of these rows is made of columns."""
    return any(len(bars) > FEW for _, bars in rows)


def every(count: int, most: int) -> int:
    """1, 2, 5, 10, ...: each so manieth of `count` things is shown, so that no more than `most` are."""
    step, factors = 1, (2.0, 2.5, 2.0)
    turn = 0
    while count // step > most:
        step = round(step * factors[turn % 3])
        turn += 1
    return step


def pool_row(nodes: int, end: float, away: Sequence[tuple[float, float, str]] = ()) -> Row:
    """The row of standalone nodes: in rollout, however many executions they have, but for when they start or end (start, end, title)."""
    title = f"{nodes} standalone {'node' if nodes == 1 else 'nodes'}: rollout"
    bars: list[Bar] = []
    at = 0.0
    for start, stop, what in sorted(away):
        if start > at:
            bars.append((at, start, "blue", title))
        bars.append((start, stop, "grey", what))
        at = max(at, stop)
    if end > at:
        bars.append((at, end, "blue", title))
    return f"pool ×{nodes}", bars


def _edges(scale: Scale, cuts: Sequence[float]) -> NDArray[np.float64]:
    """Where columns begin and end, ascending: at the cuts, none narrower than a unit, or all of one width."""
    low, high = scale.x_range
    if not cuts:
        return np.linspace(low, high, COLUMNS + 1)
    least = (high - low) / (WIDTH - LEFT - RIGHT)
    edges = [low]
    for cut in sorted(cuts):
        if cut - edges[-1] >= least and high - cut >= least:
            edges.append(cut)
    return np.array([*edges, high])


def _shares(bars: Sequence[Bar], edges: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Of every column, which part of its time was in each colour."""
    found = {}
    for colour in dict.fromkeys(bar[2] for bar in bars):
        spans = np.array(sorted((start, end) for start, end, name, _ in bars if name == colour))
        done = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
        spent = np.interp(edges, spans.ravel(), np.repeat(done, 2)[1:-1])
        found[colour] = np.diff(spent) / np.diff(edges)
    return found


def _mean(rows: Sequence[Mapping[str, NDArray[np.float64]]]) -> dict[str, NDArray[np.float64]]:
    colours = dict.fromkeys(colour for row in rows for colour in row)
    nothing: Any = 0.0
    return {colour: sum((row.get(colour, nothing) for row in rows), nothing) / len(rows) for colour in colours}


def _columns(
    scale: Scale,
    y: float,
    pitch: int,
    name: str,
    edges: NDArray[np.float64],
    shares: Mapping[str, NDArray[np.float64]],
    names: Mapping[str, str],
) -> str:
    """One row as stepped areas, the upper ones first, so that each needs its upper edge only."""
    layers = [colour for colour in _LAYERS if colour in shares]
    layers += [colour for colour in shares if colour not in layers]
    high, bottom = pitch - _gap(pitch), y + pitch - _gap(pitch) / 2
    tops = np.cumsum([shares[colour] for colour in layers], axis=0) if layers else np.zeros((0, 0))
    parts = [_name(y, pitch, name)]
    xs, wide = [round(scale.x(edge), 1) for edge in edges], np.diff(edges)
    told = ", ".join(f"{names.get(colour, colour)} {float(np.average(shares[colour], weights=wide)):.0%}" for colour in layers)
    parts.append(f"<g><title>{escape(name)}: {escape(told)}</title>")
    for colour, edge in reversed(list(zip(layers, tops, strict=True))):
        at = np.round(bottom - high * np.clip(edge, 0.0, 1.0), 1).tolist()
        path, last = [f"M{LEFT} {bottom:g}"], bottom
        for column, value in enumerate(at):
            if value != last:
                path.append(f"H{xs[column]:g}V{value:g}")
                last = value
        parts.append(f'<path d="{"".join(path)}H{xs[-1]:g}V{bottom:g}Z" fill="var(--{colour})"/>')
    return "".join([*parts, "</g>"])


def _numbers(scale: Scale, numbers: Sequence[tuple[float, str]]) -> list[str]:
    """In a line above the rows, without those that would stand on the one before."""
    found = [f'<text x="{LEFT - 6}" y="{TOP - 2}" text-anchor="end" class="label">step</text>'] if numbers else []
    free = 0.0
    for at, text in numbers:
        x, half = scale.x(at), 3.5 * len(text) + 2
        if x - half >= free:
            found.append(f'<text x="{x:.1f}" y="{TOP - 2}" text-anchor="middle" class="label">{escape(text)}</text>')
            free = x + half
    return found


def _gap(pitch: int) -> int:
    return 8 if pitch >= 30 else 3


def _name(y: float, pitch: int, name: str) -> str:
    return f'<text x="{LEFT - 6}" y="{y + pitch / 2 + 4:g}" text-anchor="end">{escape(name)}</text>'


def _bar(scale: Scale, y: float, pitch: int, bar: Bar) -> str:
    start, end, colour, title = bar
    width = max(scale.x(end) - scale.x(start), 0.8)
    return (
        f'<rect x="{scale.x(start):.2f}" y="{y + _gap(pitch) / 2:g}" width="{width:.2f}" height="{pitch - _gap(pitch)}" rx="1.5" '
        f'fill="var(--{colour})"><title>{escape(title)}</title></rect>'
    )


def _line(scale: Scale, at: float, top: float, bottom: float, title: str) -> str:
    return (
        f'<line x1="{scale.x(at):.1f}" x2="{scale.x(at):.1f}" y1="{top:g}" y2="{bottom:g}" stroke="var(--muted)" '
        f'stroke-dasharray="2 3"><title>{escape(title)}</title></line>'
    )
