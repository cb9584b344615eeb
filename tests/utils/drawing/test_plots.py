import builtins
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from utils.drawing.draw import class_colors, draw_boxes, text_mask
from utils.drawing.figures import Chart, Line, bars_picture, chart_picture, heat_picture, histogram_picture, png
from utils.drawing.plots import (
    confusion_picture,
    draw_batch,
    draw_detections,
    history_charts,
    metric_charts,
    tile_images,
)
from utils.structures import Detections, EvalResult

NAMES = ("Katze", "größer", "снег", "猫")


def make_result(targets=(5, 0, 3, 1)) -> EvalResult:
    n = len(targets)
    confidence = np.linspace(0, 1, 200)
    present = np.array(targets) > 0
    per_class = np.where(present, 0.6, np.nan)
    recall = np.where(present[:, None], 1 - confidence, np.nan)
    return EvalResult(
        metrics={"AP50": 0.7, "f1": 0.5}, class_metrics={"AP50": per_class}, best_confidence=0.4, ap_small=np.nan,
        ap_medium=0.5, ap_large=np.nan, class_targets=np.array(targets),
        confusion=np.diag([5, 0, 3, 1, 0])[: n + 1, : n + 1], confusion_confidence=0.4, curve_confidence=confidence,
        curve_precision=np.where(present[:, None], confidence, np.nan), curve_recall=recall,
        pr_recall=np.linspace(0, 1, 101), pr_precision=np.where(present[:, None], np.linspace(1, 0, 101), np.nan),
        num_images=4,
    )  # fmt: skip


def columns(text: str) -> dict[str, np.ndarray]:
    names, *rows = (line.split(",") for line in text.splitlines())
    return dict(
        zip(names, np.array([[float(cell or "nan") for cell in row] for row in rows]).reshape(-1, len(names)).T)
    )


X = np.arange(5.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("low", "high"), [(0, 1e-7), (-3, 5), (1e5, 1e5), (0, 0), (np.nan, np.nan)])
def test_a_line_of_any_values_is_drawn_and_joins_those_that_are_known(low: float, high: float):
    y = np.array([low, high, np.nan, high, low])
    known = np.isfinite(y)

    def drawn(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        lines = [Line("a", x, y), Line("猫", X, X / 4, "strong"), Line("gray", X, X, "faint")]
        return chart_picture(Chart("t", lines, "epoch", "loss", (0, 4), mark=(3.0, "m"), note="n"))

    picture = drawn(X, y)
    assert picture.dtype == np.uint8
    assert picture.std() > 5
    assert np.array_equal(picture, drawn(X[known], y[known]))
    assert np.array_equal(cv2.imdecode(np.frombuffer(png(picture), np.uint8), cv2.IMREAD_COLOR)[..., ::-1], picture)


def test_columns_share_a_chart_by_what_they_measure():
    charts = history_charts(
        columns("epoch,train/box,val/box,metrics/AP50,lr/0,lr/1\n1,3,,,0.1,0.2\n2,2,2.5,nan,0.1,0.1")
    )
    assert [(chart.title, [line.name for line in chart.lines]) for chart in charts] == [
        ("box loss", ["train/box", "val/box"]),
        ("Learning rates", ["lr/0", "lr/1"]),
    ]
    assert history_charts(columns("epoch,train/box")) == []


def test_of_many_classes_the_worst_have_colors_and_not_all_are_drawn():
    result = make_result((1,) * 150)
    result.class_metrics["AP50"][:] = np.linspace(1, 0, 150)
    pr = metric_charts(result, [f"c{i}" for i in range(150)])["PR"]
    colored = [line.name for line in pr.lines if not line.style]
    assert colored == [f"c{i} {1 - i / 149:.3f}" for i in range(149, 141, -1)]
    assert sum(line.style == "faint" for line in pr.lines) == 100
    assert pr.note == "the 8 classes with the lowest AP50 have colors, 100 of the other 142 are gray"
    few = metric_charts(make_result(), NAMES)
    assert [line.style for line in few["F1"].lines] == ["strong", "", "", ""]
    assert metric_charts(make_result((0, 0, 0, 0)), NAMES) == {}


def test_names_are_drawn_as_text(recwarn):
    """Dollars are no formula, an underscore does not hide a line in the legend, and long names leave space for axes."""
    given, shown = ("a", "$\\frac$", "_hidden", "x" * 300), ("a", "$\\frac$", " _hidden", "x" * 39 + "…")
    drawn = []
    for names in (given, shown):
        lines = [Line(name, X, X + i) for i, name in enumerate(names)]
        drawn.append([
            chart_picture(Chart(names[3], lines, names[1], names[3])),
            confusion_picture(np.eye(5, dtype=int), names, "t"),
            bars_picture(names, np.arange(4.0), ["1"] * 4, ("", "", "")),
        ])  # fmt: skip
    assert all(map(np.array_equal, *drawn))
    assert not recwarn.list


@pytest.mark.filterwarnings("error")
def test_other_figures_are_drawn():
    many = confusion_picture(np.eye(91, dtype=int), [f"c{i}" for i in range(90)], "t")
    sizes = histogram_picture(2.0 ** np.arange(1, 4), np.array([3, 5]), ("x", "y", "t"), (3.0, "m"))
    heat = heat_picture(np.array([[0, 1], [2, 4]]), ("x", "y", "t"), "n")
    assert min(picture.std() for picture in (many, sizes, heat)) > 5
    from matplotlib import _pylab_helpers

    assert not _pylab_helpers.Gcf.figs  # pyplot, which has global state, is not used


PLOT = "run_main(lambda argv: open('c.png', 'wb').write(png(confusion_picture(np.eye(2, dtype=int), ['a'], 't'))))"


@pytest.mark.parametrize(
    ("backend", "work"), [("module://no_such.backend_inline", PLOT), ("nonsense", "text_mask('a', 12)")]
)
def test_a_backend_that_is_not_there_changes_nothing(tmp_path, backend, work):
    """Notebooks set MPLBACKEND for the scripts that a cell starts, also for another Python."""
    code = "import numpy as np; from utils.drawing.draw import text_mask; from utils.drawing.figures import png; "
    code += f"from utils.drawing.plots import confusion_picture; from utils.entrypoint import run_main; {work}"
    environ = {**os.environ, "MPLBACKEND": backend, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "c.png").exists() == (work == PLOT)


def test_class_colors_are_fixed_and_distinct():
    colors = class_colors(np.arange(80))
    assert np.array_equal(colors[[3, 3]], class_colors(np.array([3, 3])))
    assert len(np.unique(colors, axis=0)) == 80
    assert class_colors(np.empty(0, int)).shape == (0, 3)


def test_a_box_is_drawn_on_its_pixels_and_the_input_is_unchanged():
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


def test_every_letter_is_visible():
    masks = [text_mask(text, 16) for text in ("a", "ä", "ж", "猫", "犬", "🙂", " ")]
    assert all(mask.shape[0] == masks[0].shape[0] or i in (3, 4, 5) for i, mask in enumerate(masks))
    assert all(mask.max() > 100 for mask in masks[:-1])
    assert masks[-1].max() == 0
    assert masks[3].tobytes() != masks[4].tobytes()  # no two letters become the same replacement character


def test_text_is_drawn_without_matplotlib(monkeypatch):
    from utils.drawing import draw as lettering

    true_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    lettering._default_font.cache_clear()
    text_mask.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    try:
        assert text_mask("abc", 14).max() > 100
    finally:
        monkeypatch.undo()
        lettering._default_font.cache_clear()
        text_mask.cache_clear()


def test_tiles_fill_the_sheet_row_by_row():
    tiles = [np.full((4, 6, 3), i, np.uint8) for i in range(2)] + [np.full((3, 5, 3), 2, np.uint8)]
    sheet = tile_images(tiles, 2, gap=1)
    assert sheet.shape == (9, 13, 3)
    assert (sheet[5:8, 0:5] == 2).all()
    assert (sheet[8, 0:6] == 255).all()
    assert (sheet[5:9, 7:] == 255).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_sheet_shows_targets_of_the_right_image(channels_last):
    images = torch.zeros(3, 3, 64, 64, dtype=torch.uint8)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.tensor([[1, 0, 0.5, 0.5, 0.5, 0.5]])
    sheet = draw_batch(images, targets, (), ["thing"])
    assert sheet.shape == (130, 130, 3)
    assert sheet[:64, 66:].any()
    assert not sheet[:64, :64].any()
    assert not sheet[66:, :64].any()
    assert draw_batch(images[:0], targets[:0], (), ["thing"]) is None


def test_detection_sheet_pairs_labels_with_predictions():
    images = np.zeros((2, 3, 64, 64), np.uint8)
    detections = Detections(
        boxes_xyxy=torch.tensor([[[8.0, 30, 24, 60], [30, 30, 60, 60]], [[0, 0, 0, 0], [0, 0, 0, 0]]]),
        scores=torch.tensor([[0.9, 0.1], [0.0, 0.0]]),
        classes=torch.zeros(2, 2, dtype=torch.long),
        counts=torch.tensor([2, 0]),
    )
    sheet = draw_detections(images, detections, np.zeros((0, 6)), ["a/x.jpg", "y.jpg"], ["t"])
    right = sheet[:64, 66:130]
    assert sheet.shape == (64, 4 * 66 - 2, 3)
    assert right[31:48, 8:24].any()
    assert not right[31:48, 30:].any()  # below the confidence threshold
    assert not sheet[:48, 132:196].any()  # the second image has neither
    assert not sheet[:48, 198:].any()
