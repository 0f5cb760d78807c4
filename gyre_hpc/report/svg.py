"""Small pictures as inline SVG, coloured by the page's CSS variables so that they read in light and dark. No script, no outside file.

Invariant: all text is escaped; every mark that carries a number has a `<title>` that says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 30

STEP = "step"
"""The label of an axis that counts: it has no numbers between whole ones."""
MANY = 120
"""Points from which on a line has no marks; the pointer still finds them."""


@dataclass(frozen=True)
class Line:
    """One series of a line chart; `points` (x, y); `colour` a CSS variable's name."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def line_chart(lines: Sequence[Line], x_label: str, y_range: tuple[float, float] | None = None, height: int = 240) -> str:
    """A chart with a legend if there are several series; empty ones are left out."""
    lines = [line for line in lines if line.points]
    if not lines:
        return '<p class="none">nothing to show yet</p>'
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    scale = Scale.of((min(xs), max(xs)), y_range or _padded(min(ys), max(ys)), WIDTH, height)
    parts = [_axes(scale, x_label)]
    for line in lines:
        path = " ".join(f"{'M' if i == 0 else 'L'}{scale.x(x):.1f},{scale.y(y):.1f}" for i, (x, y) in enumerate(line.points))
        if not line.dots:
            many = len(line.points) > MANY
            parts.append(f'<path d="{path}" fill="none" stroke="var(--{line.colour})" stroke-width="{1.2 if many else 2}"/>')
        radius, opacity = (1.8, 0.45) if line.dots else (3, 0 if len(line.points) > MANY else 1)
        for x, y in line.points:
            parts.append(
                f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="{radius}" fill="var(--{line.colour})" opacity="{opacity}">'
                f"<title>{escape(line.name)}: {y:.4g} at {x:.4g}</title></circle>"
            )
    names = [line.name for line in lines]
    return _legend([(line.name, line.colour) for line in lines]) + picture(WIDTH, height, parts, ", ".join(names))


def bars(values: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars (name, value, colour)."""
    if not values:
        return '<p class="none">nothing to show yet</p>'
    top = max(value for _, value, _ in values) or 1.0
    parts = []
    for index, (name, value, colour) in enumerate(values):
        y = 6 + 26 * index
        width = (WIDTH - 340) * value / top
        parts.append(f'<text x="210" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="220" y="{y}" width="{max(width, 1):.1f}" height="20" rx="2" fill="var(--{colour})"/>')
        parts.append(f'<text x="{228 + width:.1f}" y="{y + 15}">{value:g}</text>')
    return picture(WIDTH, 12 + 26 * len(values), parts, "counts")


@dataclass(frozen=True)
class TreeNode:
    """A node of a drawn tree; `parent` is an index into the list, -1 for roots."""

    parent: int
    size: int
    colour: str
    title: str


def tree(nodes: Sequence[TreeNode]) -> str:
    """Left to right, one line a leaf; a node's width grows with its tokens. Parents stand before their children in `nodes`."""
    if not nodes:
        return '<p class="none">no tree yet</p>'
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    ends: dict[int, int] = {-1: 0}
    for index, node in enumerate(nodes):
        ends[index] = ends[node.parent] + node.size
    rows: dict[int, float] = {}
    leaves = _place(children, rows)
    unit = (WIDTH - 40) / max(ends.values())
    parts = []
    for index, node in enumerate(nodes):
        x, y = 20 + ends[node.parent] * unit, 10 + rows[index] * 34
        width = max(node.size * unit - 1, 1.5)
        if node.parent >= 0 and rows[node.parent] != rows[index]:
            above = 10 + rows[node.parent] * 34
            parts.append(
                f'<path d="M{x - 1:.1f},{above + 11:.1f} C{x + 6:.1f},{above + 11:.1f} {x - 8:.1f},{y + 11:.1f} {x:.1f},{y + 11:.1f}" '
                f'fill="none" stroke="var(--muted)"/>'
            )
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="22" rx="2" fill="var(--{node.colour})">'
            f"<title>{escape(node.title)}</title></rect>"
        )
    return picture(WIDTH, 20 + 34 * leaves, parts, "one trajectory tree")


def _place(children: dict[int, list[int]], rows: dict[int, float]) -> int:
    """Each leaf gets the next row, each inner node that of its first child; without recursion, trees may be deep. Returns the leaves."""
    count = 0
    order: list[int] = []
    stack = list(reversed(children.get(-1, [])))
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    for node in order:
        if node not in children:
            rows[node] = count
            count += 1
    for node in reversed(order):
        if node in children:
            rows[node] = rows[children[node][0]]
    return count


@dataclass(frozen=True)
class Scale:
    """From values to units of a picture."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int

    @classmethod
    def of(cls, x_range: tuple[float, float], y_range: tuple[float, float], width: int, height: int) -> Scale:
        if x_range[0] == x_range[1]:
            x_range = (x_range[0] - 0.5, x_range[1] + 0.5)
        return cls(x_range, y_range, width, height)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    raw = (high - low) / count
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 1.0
    while raw / power < 0.5:
        power /= 10
    step = next(power * factor for factor in (1, 2, 5, 10, 20, 50) if power * factor >= raw)
    first = -(-low // step) * step
    return [first + step * i for i in range(int((high - first) / step + 1e-9) + 1)]


def x_ticks(scale: Scale, label: str) -> str:
    """The axis below a picture."""
    y = scale.height - BOTTOM
    parts = [f'<line x1="{LEFT}" x2="{scale.width - RIGHT}" y1="{y}" y2="{y}" stroke="var(--muted)"/>']
    parts += [
        f'<text x="{scale.x(t):.1f}" y="{y + 14}" text-anchor="middle">{t:g}</text>'
        for t in _ticks(*scale.x_range, count=8)
        if label != STEP or t.is_integer()
    ]
    parts.append(f'<text x="{scale.width - RIGHT}" y="{y + 27}" text-anchor="end" class="label">{escape(label)}</text>')
    return "".join(parts)


def _axes(scale: Scale, x_label: str) -> str:
    parts = [x_ticks(scale, x_label)]
    for t in _ticks(*scale.y_range, count=5):
        y = scale.y(t)
        parts.append(f'<line x1="{LEFT}" x2="{scale.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{round(t, 10):g}</text>')
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    if len(entries) < 2:
        return ""
    items = "".join(f'<span><i style="background:var(--{colour})"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{items}</div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(name, colour) boxes above a picture."""
    return _legend(entries)


def picture(width: int, height: int, parts: Sequence[str], label: str) -> str:
    """The whole of it, as wide as what it stands in."""
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
