"""`Results` and `Boxes` against closed forms and the attributes that other programs read."""

from __future__ import annotations

import json
import pickle

import cv2
import numpy as np
import pytest
import torch

from engine.inference import results as results_module
from engine.inference.results import Boxes, Results
from engine.inference.sources import Frame
from tests.engine.inference.conftest import picture
from utils.errors import UserError

HEIGHT, WIDTH = 40, 80
NAMES = {0: "disc", 1: "box/größe"}
ROWS = [[8.0, 4.0, 24.0, 20.0, 0.9, 1.0], [0.0, 0.0, 80.0, 40.0, 0.5, 0.0], [10.5, 3.25, 12.5, 9.25, 0.25, 1.0]]
SPEED = {"preprocess": 1.0, "inference": 2.0, "postprocess": 3.0}


@pytest.fixture
def result() -> Results:
    boxes = Boxes(torch.tensor(ROWS), (HEIGHT, WIDTH))
    return Results(Frame("folder/a.jpg", picture(HEIGHT, WIDTH)), NAMES, boxes, SPEED)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_formats_of_boxes(result, kind):
    boxes = (result.cpu().numpy() if kind is np.ndarray else result).boxes
    assert isinstance(boxes.xywhn, kind)
    assert (len(boxes), boxes.shape, boxes.orig_shape, boxes.id) == (3, (3, 6), (HEIGHT, WIDTH), None)
    assert boxes.xyxy[0].tolist() == [8, 4, 24, 20]
    assert boxes.xywh[0].tolist() == [16, 12, 16, 16]
    np.testing.assert_allclose(boxes.xyxyn[0].tolist(), [0.1, 0.1, 0.3, 0.5], rtol=1e-6)
    np.testing.assert_allclose(boxes.xywhn[0].tolist(), [0.2, 0.3, 0.2, 0.4], rtol=1e-6)
    assert boxes.conf.tolist() == [row[4] for row in np.float32(ROWS).tolist()]
    assert boxes.cls.tolist() == [1, 0, 1]
    assert boxes[boxes.conf > 0.4].data.tolist() == boxes.data[:2].tolist()
    assert [box.xyxy.shape for box in boxes] == [(1, 4)] * 3
    assert [one.boxes.cls.item() for one in pickle.loads(pickle.dumps(result))] == [1, 0, 1]
    with pytest.raises(AttributeError, match=r"result\.boxes\.xyxy"):
        _ = result.xyxy


def test_images_are_bgr(result, tmp_path, monkeypatch):
    assert result.orig_shape == (HEIGHT, WIDTH)
    assert np.array_equal(result.orig_img, picture(HEIGHT, WIDTH)[..., ::-1])
    drawn = result.plot()
    for other in (result.orig_img, result.plot(labels=False), result.plot(conf=False), result.plot(line_width=5)):
        assert drawn.shape == other.shape
        assert (drawn != other).any()
    assert np.array_equal(result[[]].plot(), result.orig_img)
    monkeypatch.chdir(tmp_path)
    assert result.save() == "results_a.jpg"
    assert cv2.imread("results_a.jpg").shape == drawn.shape
    result.save("b.png")
    assert np.array_equal(cv2.imread("b.png"), drawn)
    with pytest.raises(UserError, match=r"c\.xyz"):
        result.save("c.xyz")
    monkeypatch.setattr(results_module.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="no display"):
        result.show()


def test_crops_have_the_margin_that_other_programs_give_them(result, tmp_path):
    """Ultralytics' save_crop and YOLOv5's save_one_box: gain=1.02, pad=10."""
    result.save_crop(tmp_path, file_name="a.jpg")
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.jpg"))
    assert files == ["box_größe/a_0.jpg", "box_größe/a_2.jpg", "disc/a_1.jpg"]
    shapes = [cv2.imdecode(np.fromfile(tmp_path / file, np.uint8), 1).shape for file in files]
    assert shapes == [(25, 27, 3), (14, 12, 3), (HEIGHT, WIDTH, 3)]


def test_records_and_labels(result, tmp_path):
    assert result.save_txt(tmp_path / "new" / "a.txt", save_conf=True) == str(tmp_path / "new" / "a.txt")
    rows = np.loadtxt(tmp_path / "new" / "a.txt")
    np.testing.assert_allclose(rows[0], [1, 0.2, 0.3, 0.2, 0.4, 0.9], atol=1e-6)
    result.save_txt(tmp_path / "b.txt")
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "b.txt"), rows[:, :5])
    record = {"name": "box/größe", "class": 1, "confidence": 0.9, "box": {"x1": 8.0, "y1": 4.0, "x2": 24.0, "y2": 20.0}}
    assert result.summary()[0] == record
    assert json.loads(result.to_json()) == result.numpy().summary() == result.summary()
    assert result.summary(normalize=True, decimals=3)[0]["box"] == {"x1": 0.1, "y1": 0.1, "x2": 0.3, "y2": 0.5}
    assert result.verbose() == "disc 1, box/größe 2"
    assert result[[]].summary() == []
