"""Charts as SVG text for a page (page.py): lines, histograms and heat maps, each with names and units on its axes.

Frames: a chart is `WIDTH` x `HEIGHT` user units, and scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 42  # margins of the plotting area
MOST_POINTS = 300  # of a line
SERIES = 10  # colors
HALF_LETTER = 3.6  # width of half a digit in a wide font, user units
FAINT = "faint"
Marks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Line:
    """``x`` and ``y``: float (n,); where y is nan, the line has a gap."""

    name: str
    x: np.ndarray
    y: np.ndarray
    style: str = ""  # a class of the style sheet, or `FAINT` for a line without an entry in the legend; "": by position


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    x_is_whole: bool = False,
    marks: Marks = (),
) -> Markup:
    """A chart of ``lines`` with their legend; a sentence if none of them has a finite value.

    Args:
        title: the caption, and the text that screen readers say.
        x_range, y_range: of the axes; None: those of the values.
        x_is_whole: the x axis has no fractions, as epochs have none.
        marks: vertical lines: position and text.
    """
    known = [np.isfinite(line.x) & np.isfinite(line.y) for line in lines]
    if not any(mask.any() for mask in known):
        return _figure(title, Markup('<p class="muted">No values yet.</p>'))
    xs = np.concatenate([line.x[mask] for line, mask in zip(lines, known)])
    ys = np.concatenate([line.y[mask] for line, mask in zip(lines, known)])
    frame = _Frame(x_range or _span(xs), y_range or _span(ys))
    x_ticks = [tick for tick in _ticks(frame.x_range) if tick[0] == round(tick[0])] if x_is_whole else None
    numbered = [line.style or f"s{number % SERIES}" for number, line in enumerate(lines)]
    drawn = [_polyline(frame, line, style) for line, style in zip(lines, numbered)]
    body = Markup("").join([frame.axes(x_label, y_label, x_ticks), *frame.marks(marks), *drawn])
    shown = [(line.name, style) for line, style in zip(lines, numbered) if style != FAINT]
    return _figure(title, _svg(body, title), legend(shown) if len(lines) > 1 else "")


def histogram(
    edges: np.ndarray,
    counts: np.ndarray,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log2: bool = False,
    y_range: tuple[float, float] | None = None,
    marks: Marks = (),
    lines: Sequence[Line] = (),
) -> Markup:
    """Bars of ``counts`` (K,), which may be nan, between ``edges`` (K + 1,), and lines over them.

    Args:
        log2: the x axis is logarithmic; edges are above 0.
    """
    edges = np.asarray(edges, np.float64)
    heights = np.nan_to_num(np.asarray(counts, np.float64))
    if not heights.any():
        return _figure(title, Markup('<p class="muted">Nothing to count.</p>'))
    place = np.log2 if log2 else np.asarray
    frame = _Frame((float(place(edges[0])), float(place(edges[-1]))), y_range or (0.0, float(heights.max())))
    bars = []
    for low, high, height in zip(place(edges[:-1]), place(edges[1:]), heights):
        if height > 0:
            x0, x1, y = frame.x(low), frame.x(high), frame.y(min(height, frame.y_range[1]))
            bars.append(_rect(x0 + 0.5, y, max(x1 - x0 - 1, 0.5), HEIGHT - BOTTOM - y, "bar"))
    drawn = [_polyline(frame, line, line.style or f"s{number + 1}") for number, line in enumerate(lines)]
    ticks = [2.0**k for k in range(math.ceil(np.log2(edges[0])), math.floor(np.log2(edges[-1])) + 1)] if log2 else None
    x_ticks = [(math.log2(value), f"{value:g}") for value in ticks] if ticks else None
    at = [(float(place(x)), text) for x, text in marks]
    body = Markup("").join([frame.axes(x_label, y_label, x_ticks), *bars, *frame.marks(at), *drawn])
    return _figure(title, _svg(body, title), legend([(line.name, line.style) for line in lines]) if lines else "")


def heat_map(values: np.ndarray, *, title: str, x_label: str, y_label: str, unit: str) -> Markup:
    """Cells of ``values`` (rows, columns), row 0 at the top, over axes from 0 to 1; a stronger color means more.

    Args:
        unit: of the values, for the largest one, which is written below.
    """
    rows, columns = values.shape
    top = float(values.max(initial=0))
    if top <= 0:
        return _figure(title, Markup('<p class="muted">Nothing to count.</p>'))
    frame = _Frame((0.0, 1.0), (1.0, 0.0))
    width, height = (WIDTH - LEFT - RIGHT) / columns, (HEIGHT - TOP - BOTTOM) / rows
    cells = [
        Markup(
            '<rect class="cell" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill-opacity="{:.2f}"/>'
        ).format(LEFT + column * width, TOP + row * height, width + 0.1, height + 0.1, values[row, column] / top)
        for row, column in np.argwhere(values > 0)
    ]
    body = Markup("").join([frame.axes(x_label, y_label), *cells])
    return _figure(
        title, _svg(body, title), Markup('<p class="muted">The strongest color: {:,g} {}.</p>').format(top, unit)
    )


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names beside the colors of their styles."""
    items = Markup("").join(
        Markup('<li class="{}"><span>{}</span></li>').format(style, name) for name, style in entries
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


class _Frame:
    """The plotting area: values to user units, and axes."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str, x_ticks: Sequence[tuple[float, str]] | None = None) -> Markup:
        base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for value, text in _ticks(self.y_range):
            y = self.y(value)
            parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, y, right))
            parts.append(_text(LEFT - 6, y + 4, text, "end"))
        end = -math.inf  # of the last text
        for value, text in x_ticks or _ticks(self.x_range):
            x, half = self.x(value), HALF_LETTER * len(text)
            parts.append(Markup('<path class="grid" d="M{:.1f} {}V{}"/>').format(x, base, base + 4))
            center = min(x, WIDTH - half)
            if center - half > end:
                parts.append(_text(center, base + 16, text, "middle"))
                end = center + half + HALF_LETTER
        parts.append(_text((LEFT + right) / 2, HEIGHT - 6, x_label, "middle"))
        turned = Markup('<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>')
        parts.append(turned.format((TOP + base) / 2, y_label))
        return Markup("").join(parts)

    def marks(self, marks: Marks) -> list[Markup]:
        """Vertical dashed lines with their texts, on the side with more space."""
        parts = []
        for number, (value, text) in enumerate(marks):
            x = min(max(self.x(value), LEFT), WIDTH - RIGHT)
            parts.append(Markup('<path class="mark" d="M{:.1f} {}V{}"/>').format(x, TOP, HEIGHT - BOTTOM))
            is_left = x > (LEFT + WIDTH) / 2
            y = TOP + 10 + 13 * number
            parts.append(_text(x - 4 if is_left else x + 4, y, text, "end" if is_left else "start"))
        return parts


def _polyline(frame: _Frame, line: Line, style: str) -> Markup:
    x, y = np.asarray(line.x, np.float64), np.asarray(line.y, np.float64)
    if x.size > MOST_POINTS:
        some = np.linspace(0, x.size - 1, MOST_POINTS).round().astype(int)
        x, y = x[some], y[some]
    known = np.isfinite(x) & np.isfinite(y)
    low, high = sorted(frame.y_range)
    points = [(frame.x(a), frame.y(min(max(b, low), high))) for a, b in zip(x[known], y[known])]
    starts = np.r_[True, np.diff(np.flatnonzero(known)) > 1] if known.any() else []
    commands = "".join(f"{'M' if first else 'L'}{a:.1f} {b:.1f}" for first, (a, b) in zip(starts, points))
    dots = (
        [Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2"/>').format(a, b) for a, b in points] if len(points) <= 30 else []
    )
    shape = Markup('<g class="{}"><title>{}</title><path class="line" d="{}"/>{}</g>')
    return shape.format(style, line.name, commands, Markup("").join(dots))


def _rect(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    text = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    return Markup(text).format(kind, x, y, width, height)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _svg(body: Markup, title: str) -> Markup:
    head = '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(head).format(WIDTH, HEIGHT, title, body)


def _figure(title: str, body: Markup, below: Markup | str = "") -> Markup:
    return Markup("<figure><figcaption>{}</figcaption>{}{}</figure>").format(title, body, below)


def _span(values: np.ndarray) -> tuple[float, float]:
    """The range of an axis: that of the values, with a margin; from 0 if they are near it."""
    low, high = float(values.min()), float(values.max())
    if high == low:
        margin = abs(high) or 1.0
        return low - margin / 2, high + margin / 2
    if 0 <= low < 0.5 * high:
        low = 0.0
    return low, high


def _ticks(span: tuple[float, float], most: int = 6) -> list[tuple[float, str]]:
    """Round values inside ``span`` and their texts."""
    low, high = sorted(span)
    rough = (high - low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    values = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(value, f"{value + 0.0:.6g}") for value in values]
