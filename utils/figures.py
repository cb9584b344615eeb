"""Matplotlib, drawn off screen and imported only when a figure is made."""

from __future__ import annotations

import warnings
from pathlib import Path

from utils.whole_file import replacing


def new_figure(width: float, height: float):
    """A figure that belongs to nobody's pyplot: no global state, no display. Inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure, out: Path) -> None:
    """Writes a PNG whole."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")  # class names in a script matplotlib lacks
        with replacing(out) as file:
            figure.savefig(file, format="png", dpi=130)
