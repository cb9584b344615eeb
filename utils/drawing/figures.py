"""Figures with axes, drawn by Matplotlib, saved as PNG files and put into pages as SVG. Matplotlib is imported when a
figure is created."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from utils.files.safe_io import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LETTERS = 40  # of a name in a figure
MOST_DOTS = 30  # points of a line that are marked
WIDTH, HEIGHT = 4.2, 2.6  # inches of a figure with one chart, without its legend
LEGEND_LETTERS, LEGEND_ROW = 74, 0.16  # of a row of the legend below it, and inches
LABELS_PT, DIGIT_PT = 22, 5.1  # width of a y axis: of its name and ticks, and of each digit
# The style sheet of pages has the same colors as s0, s1, ..., and inverts charts on a dark background.
COLORS = (
    "#2563c8", "#d9480f", "#2b8a3e", "#9c36b5", "#b08900", "#0b7285", "#c2255c", "#5c7080", "#7048e8", "#66a80f",
)  # fmt: skip
FAINT, MARK = "#d9dde2", "#7f7f7f"
_TOOLTIP = "tooltip:"  # before the text that page.js shows for a line


@dataclass(frozen=True)
class Line:
    """``x`` and ``y``: float (n,); points without a finite ``y`` are left out."""

    name: str
    x: np.ndarray
    y: np.ndarray
    style: str = ""  # "strong", or "faint" for a gray line without an entry in the legend


@dataclass(frozen=True)
class Chart:
    """Lines over shared axes, whose ranges are those of the values where they are None."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float | None] | None = None
    x_is_whole: bool = False  # the x axis has no fractions
    mark: tuple[float, str] | None = None  # a vertical line: position and text


def new_figure(width: float, height: float, layout: str = "constrained") -> Figure:
    """A figure of this size in inches, created without pyplot, which has global state and needs a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, out: Path, dpi: int = 130) -> None:
    """Writes a PNG file atomically."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")  # class names in a script that the font lacks
        with atomic_write(out) as file:
            figure.savefig(file, format="png", dpi=dpi)


def svg(figure: Figure, title: str) -> Markup:
    """The figure in an HTML page, below its title. Equal figures give equal text."""
    from matplotlib import rc_context

    text = io.StringIO()
    with warnings.catch_warnings(), rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    box, _, drawn = text.getvalue().partition(' viewBox="')[2].partition('"')
    start = Markup('<svg class="chart" viewBox="{}" role="img" aria-label="{}">').format(box, title)
    return in_page(start + Markup(drawn.partition(">")[2]), title)


def in_page(body: Markup, title: str) -> Markup:
    return Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(title, body)


def chart_svg(chart: Chart) -> Markup:
    """A chart in an HTML page; a sentence if it has no finite value."""
    if not any(np.isfinite(line.y).any() for line in chart.lines):
        return in_page(Markup('<p class="muted">No values yet.</p>'), chart.title)
    return svg(chart_figure(chart), chart.title)


def chart_figure(chart: Chart) -> Figure:
    """A figure of one chart without its title, with a legend below."""
    names = [short_label(line.name) for line in chart.lines if line.style != "faint"]
    columns = int(np.clip(LEGEND_LETTERS // (max(map(len, names), default=0) + 6), 1, 4))
    rows = -(-len(names) // columns) if len(chart.lines) > 1 else 0
    figure, axes = _one_chart(LEGEND_ROW * rows)
    _draw_lines(axes, chart)
    if rows:
        handles = axes.get_legend_handles_labels()
        figure.legend(*handles, loc="lower center", ncols=columns, fontsize=7.5, frameon=False, labelspacing=0.2)
    return _fit(figure)


def grid_figure(charts: Sequence[Chart], across: int) -> Figure | None:
    """Charts with their titles, at most ``across`` side by side; None if there are none."""
    if not charts:
        return None
    across = min(across, len(charts))
    down = math.ceil(len(charts) / across)
    figure = new_figure(3.4 * across, 2.6 * down)
    for axes, chart in zip(figure.subplots(down, across, squeeze=False).flat, charts):
        _draw_lines(axes, chart)
        axes.set_title(short_label(chart.title), fontsize=10)
        if len(chart.lines) > 1:
            axes.legend(fontsize=7)
    for axes in figure.axes[len(charts) :]:
        axes.set_visible(False)
    return figure


def _one_chart(below: float = 0.0) -> tuple[Figure, Axes]:
    """A figure and its axes, with space for ``below`` inches under the labels."""
    figure = new_figure(WIDTH, HEIGHT + below, "none")
    low = (0.45 + below) / (HEIGHT + below)
    return figure, figure.add_axes((0, low, 1, 0.97 - low))


def _fit(figure: Figure) -> Figure:
    """Leaves space for the labels of the y axis: a layout engine takes as long as the whole figure."""
    (axes,) = figure.axes
    ticks = axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())
    low, left = axes.get_position().y0, (LABELS_PT + DIGIT_PT * max(map(len, ticks))) / (72 * WIDTH)
    axes.set_position((left, low, 0.97 - left, 0.97 - low))
    return figure


def label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(short_label(x_label), fontsize=8)
    axes.set_ylabel(short_label(y_label), fontsize=8)
    axes.tick_params(labelsize=8, color=MARK)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(MARK)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for number, line in enumerate(chart.lines):
        known, is_faint = np.isfinite(line.y), line.style == "faint"
        (drawn,) = axes.plot(
            line.x[known],
            line.y[known],
            color=FAINT if is_faint else COLORS[number % len(COLORS)],
            linestyle="-" if is_faint or number < len(COLORS) else "--",
            linewidth=2.5 if line.style == "strong" else 1 if is_faint else 1.3,
            zorder=1.9 if is_faint else 3 if line.style == "strong" else 2,
            marker="." if known.sum() <= MOST_DOTS else None,
            markersize=4,
            label="_" if is_faint else short_label(line.name),
        )
        drawn.set_gid(f"{_TOOLTIP}{line.name}")
    label_axes(axes, chart.x_label, chart.y_label)
    axes.set(xlim=chart.x_range, ylim=chart.y_range)
    if chart.x_is_whole:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if chart.mark:
        _draw_mark(axes, *chart.mark)


def _draw_mark(axes: Axes, x: float, text: str) -> None:
    """A vertical line with its text, on the side with more space."""
    axes.axvline(x, color=MARK, linewidth=1, linestyle="--")
    is_left = axes.transData.transform((x, 0))[0] > axes.bbox.x0 + axes.bbox.width / 2
    axes.annotate(
        text, (x, 1), (-4 if is_left else 4, -8), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="right" if is_left else "left", fontsize=8,
    )  # fmt: skip


def bars_figure(
    edges: np.ndarray, counts: np.ndarray, x_label: str, y_label: str, mark: tuple[float, str] | None = None
) -> Figure:
    """Bars of ``counts`` (K,) between ``edges`` (K + 1,), which are above 0, on an axis of powers of 2."""
    figure, axes = _one_chart()
    axes.bar(edges[:-1], counts, np.diff(edges) * 0.97, align="edge", color=COLORS[0])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.get_major_locator().set_params(numticks=10)
    axes.minorticks_off()
    axes.set_xlim(edges[0], edges[-1])
    label_axes(axes, x_label, y_label)
    if mark:
        _draw_mark(axes, *mark)
    return _fit(figure)


def heat_figure(counts: np.ndarray, x_label: str, y_label: str) -> Figure:
    """Cells of ``counts`` (rows, columns), row 0 at the top, over axes from 0 to 1; a stronger color means more."""
    from matplotlib.colors import to_rgb

    figure, axes = _one_chart()
    cells = np.empty((*counts.shape, 4))
    cells[..., :3], cells[..., 3] = to_rgb(COLORS[0]), counts / max(counts.max(), 1)
    axes.imshow(cells, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest")
    label_axes(axes, x_label, y_label)
    return _fit(figure)


def short_label(text: str) -> str:
    """A name as Matplotlib shall show it: shortened to leave space for the axes; with dollars that do not begin a
    formula; and with a space before a first underscore, which would leave the line out of the legend."""
    text = (text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
