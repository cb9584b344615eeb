import matplotlib
import numpy as np

from utils.drawing.draw import class_colors, draw_boxes
from utils.drawing.figures import AxisLabels, Chart, Line, bar_chart_picture, chart_picture

NAMES = ("Katze", "größer", "снег", "猫")


X = np.arange(5.0)


def test_names_are_drawn_as_text(recwarn):
    """Dollars are no formula, an underscore does not hide a line in the legend, and long names leave space for axes."""
    given = ("a", "$\\frac$", "_hidden", "x" * 300)
    shown = ("a", "$\\frac$", " _hidden", "x" * 39 + "…")
    drawn = []
    for names in (given, shown):
        lines = [Line(name, X, X + i) for i, name in enumerate(names)]
        labels = AxisLabels(names[1], names[3], names[3])
        drawn.append([chart_picture(Chart(labels, lines)), bar_chart_picture(names, X[:4], ["1"] * 4, labels)])
    assert all(map(np.array_equal, *drawn))
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]  # Matplotlib's


def test_a_figure_has_matplotlib_s_defaults_whatever_a_file_or_the_user_s_program_sets():
    """SECURITY.md: a matplotlibrc in the working folder could have LaTeX started."""
    chart = Chart(AxisLabels("x", "y", "title"), [Line("a", X, X)])
    expected = chart_picture(chart)
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "black"}):
        drawn = chart_picture(chart)
        assert matplotlib.rcParams["text.usetex"]
    assert np.array_equal(drawn, expected)


def test_a_box_is_drawn_on_its_pixels_and_the_input_is_unchanged():
    assert len(np.unique(class_colors(np.arange(80)), axis=0)) == 80
    image = np.zeros((60, 80, 3), np.uint8)
    drawn = draw_boxes(image, np.array([[10, 20, 30, 50]]), None, np.array([[255, 0, 0]], np.uint8), thickness=1)
    assert not image.any()
    ys, xs = np.nonzero(drawn[..., 0])
    assert (xs.min(), ys.min(), xs.max(), ys.max()) == (10, 20, 29, 49)  # boxes end before their far corner
    assert not drawn[21:49, 11:29].any()


def test_labels_in_any_script_stay_inside_the_image():
    image = np.full((40, 50, 3), 90, np.uint8)
    boxes = np.array([[0, 0, 10, 10], [45, 35, 60, 60], [-20, 10, 500, 20], [np.nan, 0, 5, 5]])
    drawn = draw_boxes(image, boxes, list(NAMES), class_colors(np.arange(4)))
    assert drawn.shape == image.shape
    assert (drawn != image).any()
