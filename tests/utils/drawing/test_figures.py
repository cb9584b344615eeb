import os
import subprocess
import sys
from pathlib import Path

import cv2
import matplotlib
import numpy as np
import pytest
from fontTools.ttLib import TTFont

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.settings import MAX_LINE_WIDTH
from utils.drawing import text
from utils.drawing.draw import class_colors, draw_boxes, tile_images
from utils.drawing.figures import AxisLabels, Chart, Line, Mark, Picture, bar_chart_picture, chart_picture
from utils.drawing.text import text_mask

NAMES = ("Katze", "größer", "снег", "猫")


X = np.arange(5.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("low", "high"), [(0, 1e-7), (-3, 5), (1e5, 1e5), (0, 0), (np.nan, np.nan)])
def test_a_line_of_any_values_is_drawn_and_joins_those_that_are_known(low: float, high: float):
    y = np.array([low, high, np.nan, high, low])
    known = np.isfinite(y)

    def drawn(x: np.ndarray, y: np.ndarray) -> Picture:
        lines = [Line("a", x, y), Line("猫", X, X / 4, is_strong=True)]
        return chart_picture(Chart("t", lines, "epoch", "loss", (0, 4), mark=Mark(3.0, "m"), note="n"))

    picture = drawn(X, y)
    assert picture.pixels.dtype == np.uint8
    assert picture.pixels.std() > 5
    assert np.array_equal(picture.pixels, drawn(X[known], y[known]).pixels)
    read = cv2.imdecode(np.frombuffer(picture.png, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert np.array_equal(read, picture.pixels)


def test_names_are_drawn_as_text(recwarn):
    """Dollars are no formula, an underscore does not hide a line in the legend, and long names leave space for axes."""
    given = ("a", "$\\frac$", "_hidden", "x" * 300)
    shown = ("a", "$\\frac$", " _hidden", "x" * 39 + "…")
    drawn = []
    for names in (given, shown):
        lines = [Line(name, X, X + i) for i, name in enumerate(names)]
        drawn.append(
            [
                chart_picture(Chart(names[3], lines, names[1], names[3])).pixels,
                bar_chart_picture(names, np.arange(4.0), ["1"] * 4, AxisLabels("", "", "")).pixels,
            ]
        )
    assert all(map(np.array_equal, *drawn))
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]  # Matplotlib's


BARS = "bar_chart_picture('ab', np.ones(2), 'ab', AxisLabels(*'xyt'))"
PLOT = f"run_main(lambda argv: open('c.png', 'wb').write({BARS}.png))"


@pytest.mark.parametrize(
    ("backend", "work"), [("module://no_such.backend_inline", PLOT), ("nonsense", "text_mask('a', 12)")]
)
def test_a_backend_that_is_not_there_changes_nothing(tmp_path, backend, work):
    """Notebooks set MPLBACKEND for the scripts that a cell starts, also for another Python."""
    code = "import numpy as np; from utils.drawing.text import text_mask; from utils.process.main import run_main"
    code += f"; from utils.drawing.figures import AxisLabels, bar_chart_picture; {work}"
    environ = {**os.environ, "MPLBACKEND": backend, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "c.png").exists() == (work == PLOT)


def test_a_box_is_drawn_on_its_pixels_and_the_input_is_unchanged():
    assert len(np.unique(class_colors(np.arange(80)), axis=0)) == 80
    image = np.zeros((60, 80, 3), np.uint8)
    drawn = draw_boxes(image, np.array([[10, 20, 30, 50]]), None, np.array([[255, 0, 0]], np.uint8), thickness=1)
    assert not image.any()
    ys, xs = np.nonzero(drawn[..., 0])
    assert (xs.min(), ys.min(), xs.max(), ys.max()) == (10, 20, 29, 49)  # boxes end before their far corner
    assert not drawn[21:49, 11:29].any()
    assert not drawn[..., 1:].any()


def test_labels_in_any_script_stay_inside_the_image():
    image = np.full((40, 50, 3), 90, np.uint8)
    boxes = np.array([[0, 0, 10, 10], [45, 35, 60, 60], [-20, 10, 500, 20], [np.nan, 0, 5, 5]])
    drawn = draw_boxes(image, boxes, list(NAMES), class_colors(np.arange(4)))
    assert drawn.shape == image.shape
    assert (drawn != image).any()
    assert draw_boxes(image, np.empty((0, 4)), []).tolist() == image.tolist()
    draw_boxes(image, boxes, thickness=MAX_LINE_WIDTH)
    with refused(f"line_width {MAX_LINE_WIDTH + 1}: must be at most {MAX_LINE_WIDTH}"):  # OpenCV refuses it
        draw_boxes(image, boxes, thickness=MAX_LINE_WIDTH + 1)


def test_every_letter_is_visible():
    masks = [text_mask(text, 16) for text in ("a", "ä", "ж", "猫", "犬", "🙂", " ")]
    assert all(mask.shape[0] == masks[0].shape[0] or i in (3, 4, 5) for i, mask in enumerate(masks))
    assert all(mask.max() > 100 for mask in masks[:-1])
    assert masks[-1].max() == 0
    assert masks[3].tobytes() != masks[4].tobytes()  # no two letters become the same replacement character


def test_names_in_charts_have_the_letters_of_system_fonts(tmp_path, monkeypatch):
    """yolov5#6522: all Chinese names became the same empty box. The font here shows 猫 as A."""
    font = TTFont(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"))
    for table in font["cmap"].tables:
        table.cmap = {ord("猫"): "A"}
    font.save(tmp_path / "font.ttf")
    monkeypatch.setattr(text, "_system_fonts", lambda: (str(tmp_path / "font.ttf"),))

    def drawn(name: str) -> bytes:
        return bar_chart_picture([name, "B"], X[1:3], ["", ""], AxisLabels("", "", name)).pixels.tobytes()

    assert drawn("猫") == drawn("A")
    assert drawn("犬") == drawn("<72AC>")  # no font has it


def test_text_is_drawn_without_matplotlib(monkeypatch):
    caches = text._default_font, text_mask
    for cached in caches:
        cached.cache_clear()
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    try:
        assert text_mask("abc", 14).max() > 100
    finally:
        for cached in caches:
            cached.cache_clear()


def test_tiles_fill_the_sheet_row_by_row():
    tiles = [np.full((4, 6, 3), i, np.uint8) for i in range(2)] + [np.full((3, 5, 3), 2, np.uint8)]
    sheet = tile_images(tiles, 2)
    assert sheet.shape == (10, 14, 3)
    assert (sheet[6:9, 0:5] == 2).all()
    assert (sheet[9, 0:6] == 255).all()
    assert (sheet[6:10, 8:] == 255).all()
