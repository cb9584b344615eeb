"""Figures with axes, drawn by Matplotlib, which is imported on first use."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from utils.drawing.text import font_with, with_code_points
from utils.machine.packages import import_quietly

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABEL_CHARACTERS = 40  # limit for a name in a figure
TITLE_CHARACTERS = 50  # limit for a row of a title
MAX_TITLE_ROWS = 3
MAX_MARKED_POINTS = 30  # points of a line that are marked
WIDTH = 4.2  # inches of a figure with one chart, without its legend
HEIGHT = 2.8
LEGEND_CHARACTERS = 74  # limit for a row of the legend below a chart
LEGEND_ROW = 0.18  # inches
LETTER_WIDTH = 0.06  # inches, of a label at a bar
DPI = 140
LINE_COLORS = (
    "#2563c8",
    "#d9480f",
    "#2b8a3e",
    "#9c36b5",
    "#b08900",
    "#0b7285",
    "#c2255c",
    "#5c7080",
    "#7048e8",
    "#66a80f",
)
MARK_COLOR = "#7f7f7f"


class Line(NamedTuple):
    """``x`` and ``y``: float (n,); points without a finite ``y`` are left out."""

    name: str
    x: np.ndarray
    y: np.ndarray
    is_strong: bool = False


class AxisLabels(NamedTuple):
    """Texts around a chart."""

    x: str
    y: str
    title: str


class Chart(NamedTuple):
    """Lines over shared axes. A range that is None is fitted to the values."""

    labels: AxisLabels
    lines: Sequence[Line]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float | None] | None = None
    x_is_whole: bool = False  # whether x axis ticks are integers only
    mark: float | None = None  # x of a vertical line


def draw_figure(width: float, height: float, draw: Callable[[Axes], None]) -> np.ndarray:
    """Renders a figure of this size in inches, whose axes ``draw`` fills: uint8 (H, W, 3) RGB.

    Uses Matplotlib's own defaults, whatever a matplotlibrc in the working folder or the user's program has set, and not
    pyplot, which keeps global state and may need a display.
    """
    matplotlib = import_quietly("matplotlib")
    backend = import_quietly("matplotlib.backends.backend_agg")
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        canvas = backend.FigureCanvasAgg(figure)
        draw(figure.subplots())
        for label in figure.findobj(Text):  # class names in other scripts
            text = label.get_text()
            font = "" if text.isascii() else font_with(text)
            if font:
                properties = label.get_fontproperties().copy()
                properties.set_file(font)
                label.set_fontproperties(properties)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def chart_picture(chart: Chart) -> np.ndarray:
    """Draws a chart with its title, and a legend below if it has several lines: uint8 (H, W, 3) RGB."""
    names = [short_label(line.name) for line in chart.lines]
    columns = int(np.clip(LEGEND_CHARACTERS // (max(map(len, names), default=0) + 6), 1, 4))
    rows = -(-len(names) // columns) if len(chart.lines) > 1 else 0

    def draw(axes: Axes) -> None:
        for number, line in enumerate(chart.lines):
            finite = np.isfinite(line.y)
            axes.plot(
                line.x[finite],
                line.y[finite],
                color=LINE_COLORS[number % len(LINE_COLORS)],
                linestyle="-" if number < len(LINE_COLORS) else "--",
                linewidth=2.5 if line.is_strong else 1.3,
                zorder=3 if line.is_strong else 2,
                marker="." if finite.sum() <= MAX_MARKED_POINTS else None,
                markersize=4,
                label=names[number],
            )
        label_axes(axes, chart.labels)
        axes.set(xlim=chart.x_range, ylim=chart.y_range)
        if chart.x_is_whole:
            axes.locator_params(axis="x", integer=True)
        if chart.mark is not None:
            axes.axvline(chart.mark, color=MARK_COLOR, linewidth=1, linestyle="--")
        if rows:
            axes.figure.legend(loc="outside lower center", ncols=columns, fontsize=7.5, frameon=False, labelspacing=0.2)

    return draw_figure(WIDTH, HEIGHT + LEGEND_ROW * rows, draw)


def label_axes(axes: Axes, labels: AxisLabels) -> None:
    """Writes the labels, and applies the axes style that all figures share."""
    axes.set_xlabel(short_label(labels.x), fontsize=8)
    axes.set_ylabel(short_label(labels.y), fontsize=8)
    words = " ".join(map(short_label, labels.title.split()))
    title = textwrap.wrap(words, TITLE_CHARACTERS, max_lines=MAX_TITLE_ROWS, placeholder="…")
    axes.set_title("\n".join(title), fontsize=9, pad=5)
    axes.tick_params(labelsize=8, color=MARK_COLOR)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(MARK_COLOR)


def bar_chart_picture(names: Sequence[str], values: np.ndarray, texts: Sequence[str], labels: AxisLabels) -> np.ndarray:
    """Draws a bar with text above it for each name: uint8 (H, W, 3) RGB."""
    bar_labels = [*map(short_label, names)]
    is_rotated = len(names) > 4
    height = HEIGHT + LETTER_WIDTH * max(map(len, bar_labels), default=0) if is_rotated else HEIGHT

    def draw(axes: Axes) -> None:
        axes.bar(np.arange(len(names)), values, color=LINE_COLORS[0])
        label_axes(axes, labels)
        axes.set_xticks(np.arange(len(names)), bar_labels, rotation=90 if is_rotated else 0)
        for bar, (value, text) in enumerate(zip(values, texts)):
            axes.annotate(text, (bar, value), (0, 2), textcoords="offset points", ha="center", fontsize=6)
        axes.margins(y=0.15)

    return draw_figure(max(WIDTH, 0.4 * len(names) + 1), height, draw)


def short_label(text: str) -> str:
    """Prepares a name for Matplotlib: shortens it to leave space for the axes, writes letters that no font has as code
    points, escapes dollar signs, which would begin a formula, and puts a space before a leading underscore, which would
    hide the line from the legend."""
    if len(text) > MAX_LABEL_CHARACTERS:
        text = f"{text[: MAX_LABEL_CHARACTERS - 1]}…"
    label = with_code_points(text, font_with(text)).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label
