"""The interface that programs for YOLOv5's torch.hub models call, against `Results` and closed forms."""

from __future__ import annotations

import pickle

import cv2
import numpy as np
import pytest
import torch

from engine.inference.hub import Yolov5Model, Yolov5Results, load_yolov5
from engine.inference.predictor import load
from tests.engine.inference.conftest import picture
from utils.errors import UserError


@pytest.fixture
def model(weights) -> Yolov5Model:
    return load_yolov5(weights, device="cpu", conf=0.0, max_det=5)


@pytest.fixture
def files(tmp_path) -> list[str]:
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.jpg")]
    cv2.imwrite(paths[0], picture()[..., ::-1])
    cv2.imwrite(paths[1], picture(40, 80, seed=1)[..., ::-1])
    return paths


@pytest.fixture
def results(model, files) -> Yolov5Results:
    return model(files)


def test_boxes_in_all_forms(results, weights, files):
    expected = load(weights, device="cpu", conf=0.0, max_det=5)(files)
    assert len(results) == 2
    for form in ("xyxy", "xyxyn", "xywh", "xywhn"):
        for rows, result in zip(getattr(results, form), expected):
            assert rows.shape == (5, 6)
            assert torch.equal(rows[:, :4], getattr(result.boxes, form))
            assert torch.equal(rows[:, 4:], result.boxes.data[:, 4:])
    assert all(map(torch.equal, results.pred, results.xyxy))
    assert [result.boxes.data.tolist() for result in results] == [rows.tolist() for rows in results.xyxy]
    assert results.names == {0: "disc", 1: "ring"}
    assert len(results.t) == 3
    assert pickle.loads(pickle.dumps(results)).xywh[1].tolist() == results.xywh[1].tolist()


def test_images_are_given_as_yolov5_takes_them(model, files):
    """Arrays are RGB, ``size`` is the second argument."""
    rgb = picture()
    (expected,) = model(files[0], imgsz=96).xyxy
    for source in (rgb, [rgb], torch.from_numpy(rgb).permute(2, 0, 1)):
        assert torch.equal(model(source, 96).xyxy[0], expected)
    assert torch.equal(model(rgb[..., ::-1], size=96, color="bgr").xyxy[0], expected)
    assert not torch.equal(model(rgb).xyxy[0], expected)
    with pytest.raises(UserError, match="augment=True: unknown"):
        model(rgb, 96, True)


def test_settings_are_attributes(model, files):
    assert (model.conf, model.iou, model.classes, model.max_det, model.agnostic) == (0.0, 0.45, None, 5, False)
    everything = model(files).xyxy[0]
    model.max_det = 2
    assert model(files).xyxy[0].tolist() == everything[:2].tolist()
    model.max_det = 300
    model.conf = float(everything[1, 4])
    assert model(files).xyxy[0].tolist() == everything[:1].tolist()
    assert len(model(files, conf=0.0).xyxy[0]) > 5  # for one call
    model.conf = 0.0
    for classes in ([1], ["ring"]):
        model.classes = classes
        assert set(model(files).xyxy[0][:, 5].tolist()) == {1.0}
    model.classes = None
    model.iou = 0.01
    model.agnostic = True
    assert len(model(files).xyxy[0]) < len(model(files, iou=0.9, agnostic=False).xyxy[0])
    model.conf = None
    assert model.conf == 0.25


def test_unsupported_attributes_name_the_alternative(model, results):
    with pytest.raises(AttributeError, match=r'lockstep.load\(FILE, amp="fp16"\)'):
        model.half()
    with pytest.raises(AttributeError, match="boxes"):
        results.boxes  # noqa: B018
    assert model.eval().to("cpu").cpu() is model
    assert model.to(torch.device("cpu")) is model
    with pytest.raises(UserError, match=r"no CUDA GPU is available|the model is on cpu"):
        model.cuda()


def test_tables_of_pandas(results):
    pytest.importorskip("pandas")
    tables = results.pandas()
    assert list(tables.xyxy[0]) == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    assert list(tables.xywhn[1]) == ["xcenter", "ycenter", "width", "height", "confidence", "class", "name"]
    for table, rows in zip([*tables.xyxy, *tables.xywh], [*results.xyxy, *results.xywh]):
        np.testing.assert_array_equal(table.iloc[:, :5].to_numpy(), rows[:, :5])
        assert table["class"].tolist() == rows[:, 5].tolist()
        assert table["name"].tolist() == [results.names[int(c)] for c in rows[:, 5]]
    empty = Yolov5Results([results[0][[]]], results.names).pandas().xyxy[0]
    assert (len(empty), list(empty)) == (0, list(tables.xyxy[0]))
    records = results[0].to_df()
    assert records.to_dict("records") == results[0].summary()
    assert list(results[0][[]].to_df()) == ["name", "class", "confidence", "box"]


def test_drawn_images(results, tmp_path, monkeypatch, capsys):
    assert np.array_equal(results.ims[0], picture())
    drawn = results.render()
    assert np.array_equal(drawn[0], results[0].drawn())
    assert results.ims is drawn
    monkeypatch.chdir(tmp_path)
    results.save()
    results.save(labels=False)
    assert np.array_equal(cv2.imread("runs/detect/exp/a.png")[..., ::-1], drawn[0])
    assert np.array_equal(cv2.imread("runs/detect/exp2/a.png")[..., ::-1], results[0].drawn(labels=False))
    assert capsys.readouterr().out.splitlines()[0] == "Saved 2 images to runs/detect/exp"
    results.save(save_dir="found", exist_ok=True)
    results.save(save_dir="found", exist_ok=True)
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["a.png", "b.jpg"]
    with pytest.raises(UserError, match=r"save_dir='\.': is not the name of a new folder"):
        results.save(save_dir=".")


def test_crops_and_single_results(results, files, tmp_path, monkeypatch, capsys):
    """As YOLOv5's page of torch.hub describes them."""
    assert (results.n, len(results.tolist())) == (2, 2)
    single = results.tolist()[1]
    assert (single.n, single.xyxy[0].tolist()) == (1, results.xyxy[1].tolist())
    monkeypatch.chdir(tmp_path)
    crops = results.crop()
    assert len(crops) == 10
    assert all(crop["box"].tolist() == row[:4] for crop, row in zip(crops, torch.cat(results.xyxy).tolist()))
    image = cv2.imread(files[0])
    for row, crop in enumerate(crops[:5]):
        name = results.names[int(crop["cls"])]
        assert crop["label"] == f"{name} {crop['conf']:.2f}"
        x, y = ((crop["box"][:2] + crop["box"][2:]) / 2).int().tolist()
        assert (image[y, x] == crop["im"]).all(-1).any()
        written = cv2.imread(f"runs/detect/exp/crops/{name}/a_{row}.jpg")
        assert written.shape == crop["im"].shape
        assert np.abs(written.astype(int) - crop["im"]).mean() < 8  # JPEG
    assert capsys.readouterr().out == "Saved the crops of 2 images to runs/detect/exp\n"
    results.crop(save=False)
    assert [path.name for path in (tmp_path / "runs/detect").iterdir()] == ["exp"]
