"""The interface that programs for YOLOv5's torch.hub models call, against `Results` and closed forms."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from engine.inference.hub import HubModel, load_from_hub
from engine.inference.predict import load
from engine.inference.results import ResultList
from tests.engine.inference.conftest import picture
from utils.errors import UserError


@pytest.fixture
def model(weights) -> HubModel:
    return load_from_hub(weights, device="cpu", conf=0.0, max_det=5)


@pytest.fixture
def files(tmp_path) -> list[str]:
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.jpg")]
    cv2.imwrite(paths[0], picture()[..., ::-1])
    cv2.imwrite(paths[1], picture(40, 80, seed=1)[..., ::-1])
    return paths


@pytest.fixture
def results(model, files) -> ResultList:
    return model(files)


def test_images_are_given_as_yolov5_takes_them(model, weights, files, results):
    """Arrays are RGB, ``size`` is the second argument; boxes are a tensor an image."""
    expected = [result.boxes.data for result in load(weights, device="cpu", conf=0.0, max_det=5)(files)]
    assert [rows.shape for rows in expected] == [(5, 6)] * 2
    assert all(map(torch.equal, results.xyxy, expected))
    rgb = picture()
    (larger,) = model(files[0], imgsz=96).xyxy
    for source in (rgb, [rgb], torch.from_numpy(rgb).permute(2, 0, 1)):
        assert torch.equal(model(source, 96).xyxy[0], larger)
    assert not torch.equal(model(rgb).xyxy[0], larger)
    with pytest.raises(UserError, match="augment=True: unknown"):
        model(rgb, 96, augment=True)
    assert model.eval().to("cpu").cpu() is model
    with pytest.raises(UserError, match=r"no CUDA GPU is available|the model is on cpu"):
        model.cuda()


def test_settings_are_attributes(model, files):
    assert (model.conf, model.iou, model.classes, model.max_det, model.agnostic) == (0.0, 0.45, None, 5, False)
    everything = model(files).xyxy[0]
    model.max_det = 300
    model.conf = float(everything[1, 4])
    assert model(files).xyxy[0].tolist() == everything[:1].tolist()
    model.conf = 0.0
    model.classes = ["ring"]
    assert set(model(files).xyxy[0][:, 5].tolist()) == {1.0}
    model.classes = None
    model.iou = 0.01
    model.agnostic = True
    assert len(model(files).xyxy[0]) < len(model(files, iou=0.9, agnostic=False).xyxy[0])
    model.conf = None
    assert model.conf == 0.25


def test_tables_of_pandas(results):
    pytest.importorskip("pandas")
    tables = results.pandas().xyxy
    assert list(tables[0]) == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    for table, rows, result in zip(tables, results.xyxy, results):
        np.testing.assert_array_equal(table.iloc[:, :6].to_numpy(), rows)
        assert table["name"].tolist() == [result.names[int(c)] for c in rows[:, 5]]
    empty = ResultList([results[0][[]]]).pandas().xyxy[0]
    assert (len(empty), list(empty)) == (0, list(tables[0]))


def test_images_are_printed_and_saved(model, results, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results.print()
    assert capsys.readouterr().out.splitlines()[1] == f"image 2/2: 40x80 {results[1].verbose()}"
    for folder in ("exp", "exp2"):
        model([*files, files[0]]).save()
        names = sorted(path.name for path in (tmp_path / "runs/detect" / folder).iterdir())
        assert names == ["a_0.png", "a_2.png", "b.jpg"]
    assert np.array_equal(cv2.imread("runs/detect/exp/a_0.png")[..., ::-1], results[0].drawn())
