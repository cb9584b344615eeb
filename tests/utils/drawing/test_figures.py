import re

import numpy as np
import pytest

from tests.helpers.html_page import HtmlPage
from utils.drawing.figures import Chart, Line, bars_figure, chart_figure, chart_svg, grid_figure, heat_figure, svg

X = np.arange(5.0)


def points_of(text: str, name: str) -> np.ndarray:
    """Where a line is in the SVG, float (n, 2)."""
    (path,) = re.findall(rf'<g id="tooltip:{name}">\s*<path d="([^"]*)"', text)
    return np.array(re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path), float)


def test_a_line_is_where_its_values_are_and_joins_those_that_are_known():
    y = np.array([0.0, 1, np.nan, 0.5, 1])
    chart = Chart("t", [Line("a", X, y), Line("b", X, X / 4)], "epoch", "loss", (0, 4), (0, 1))
    text = chart_svg(chart)
    axes = chart_figure(chart).axes[0]
    known = np.isfinite(y)
    at = axes.transData.transform(np.c_[X[known], y[known]]) * 72 / axes.figure.dpi
    height = axes.figure.get_figheight() * 72
    np.testing.assert_allclose(points_of(text, "a"), np.c_[at[:, 0], height - at[:, 1]], atol=1e-3)
    for label in ("epoch", "loss", "a", "b"):
        assert f">{label}<" in text


def test_names_that_look_like_svg_stay_as_they_are():
    names = (' id="tooltip:x">', "\"font-family: 'a'", "<title>", "</svg>")
    page = HtmlPage(str(chart_svg(Chart("t", [Line(name, X, X) for name in names], "x", "y"))))
    assert [name for name in names if page.text.count(name) == 1] == list(names)  # in the legend
    tooltips = [a["id"] for _, a in page.tags if a.get("id", "").startswith("tooltip:")]
    assert tooltips == [f"tooltip:{name}" for name in names]


def test_equal_figures_are_equal_text():
    chart = Chart("t", [Line("a", X, X), Line("b", X, -X)], "x", "y")
    assert chart_svg(chart) == chart_svg(chart)


def test_faint_lines_have_a_tooltip_and_no_entry_in_the_legend():
    text = chart_svg(
        Chart("t", [Line("mean", X, X, "strong"), Line("one", X, X), Line("gray", X, X, "faint")], "x", "")
    )
    assert text.count("tooltip:") == 3
    assert (text.count(">one<"), text.count(">gray<")) == (1, 0)


@pytest.mark.parametrize(("low", "high"), [(0, 1e-7), (-3, 5), (1e5, 1e5), (0.1, 0.10001), (0, 0)])
def test_any_range_has_axes(low: float, high: float):
    text = chart_svg(Chart("t", [Line("a", np.array([0.0, 1]), np.array([low, high]))], "x", "y"))
    assert "nan" not in text
    assert text.count("<text") >= 4


def test_nothing_to_draw_is_said():
    nothing = np.full(3, np.nan)
    assert "No values yet." in chart_svg(Chart("t", [Line("a", nothing, nothing)], "x", "y"))
    assert "No values yet." in chart_svg(Chart("t", [], "x", "y"))
    assert grid_figure([], 4) is None


def test_bars_and_cells_are_those_given():
    bars = bars_figure(2.0 ** np.arange(1, 4), np.array([3, 5]), "x", "y", (3.0, "m")).axes[0]
    assert [patch.get_height() for patch in bars.patches] == [3, 5]
    assert bars.get_xlim() == (2, 8)
    counts = np.array([[0, 1], [2, 4]])
    figure = heat_figure(counts, "x", "y")
    (cells,) = figure.axes[0].images
    np.testing.assert_allclose(cells.get_array()[..., 3] * 4, counts)
    assert 'href="data:image/png;base64,' in svg(figure, "t")
    assert heat_figure(np.zeros((2, 2)), "x", "y").axes[0].images[0].get_array()[..., 3].max() == 0
