"""A run in a notebook, and its scores."""

from __future__ import annotations

import base64
import re

import cv2
import numpy as np
import pytest

import lockstep
from tests.helpers.messages import refused
from utils.files.torch_file import write_checkpoint


def test_a_notebook_shows_scores_and_curves(tmp_path):
    run = lockstep.Run(tmp_path / "<b>")
    run.folder.mkdir()
    assert "<b>" not in run._repr_html_()
    (run.folder / "results.json").write_text('{"ap": 0.5, "ap50": null, "images": 4, "seconds": 2.5}')
    assert run.metrics == pytest.approx({"AP50": np.nan, "AP": 0.5}, nan_ok=True)
    assert "<th>AP</th><td>0.500</td>" in run._repr_html_()
    (run.folder / "results.csv").write_text("epoch,time,train/box,metrics/AP\n1,5,2.5,0.1\n2,9,2.0,0.2\n")
    (png,) = re.findall('src="data:image/png;base64,(.+)"', run._repr_html_())
    height, width, _ = cv2.imdecode(np.frombuffer(base64.b64decode(png), np.uint8), cv2.IMREAD_COLOR).shape
    assert 2.5 * height < width < 3.5 * height  # a panel for the loss, and one for AP


def test_a_validation_has_scores_of_classes_and_hints(tmp_path):
    run = lockstep.Run(tmp_path)
    with refused(f"{tmp_path}: contains no scores of classes; lockstep.val computes them", lockstep.Error):
        _ = run.class_metrics
    rows = '[{"class": "cat", "images": 3, "instances": 4, "AP": 0.5, "P": null}, {"class": "dog", "AP": 0.25}]'
    (tmp_path / "results.json").write_text(f'{{"ap": 0.5, "classes": {rows}}}')
    assert run.class_metrics["dog"] == {"AP": 0.25}
    assert run.class_metrics["cat"] == pytest.approx(
        {"images": 3, "instances": 4, "AP": 0.5, "precision": np.nan}, nan_ok=True
    )
    with pytest.raises(AttributeError, match=r"a run has no attribute 'box': write run.metrics"):
        _ = run.box
    pytest.importorskip("pandas")
    assert run.to_df().loc["cat", "AP"] == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"ap": 0.5', "results.json: malformed JSON (...)"),
        ('{"ap": "good"}', "results.json: ap: must be a number or null, got 'good'"),
    ],
)
def test_damaged_scores_are_refused(tmp_path, content, message):
    (tmp_path / "results.json").write_text(content)
    run = lockstep.Run(tmp_path)
    with refused(f"{tmp_path}/{message}", lockstep.Error):
        _ = run.metrics


def test_a_checkpoint_without_scores_is_an_error(tmp_path):
    write_checkpoint({"model": {}, "metrics": {}}, tmp_path / "best.pt")
    with refused(f"{tmp_path}/best.pt: contains no scores; lockstep.val computes them", lockstep.Error):
        _ = lockstep.Run(tmp_path).metrics
