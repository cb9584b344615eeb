"""torch.hub.load from this folder, and the objects that it returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import engine.inference.results
import hubconf
from engine.inference.hub import HubModel
from engine.inference.predictor import load
from tests.engine.inference.conftest import picture
from tests.helpers.messages import refused
from tests.helpers.preloaded import python

ROOT = Path(__file__).parents[3]
NAMES = ("disc", "ring")


@pytest.fixture
def model(weights) -> HubModel:
    model = HubModel(weights, "cpu")
    model.conf, model.max_det = 0.0, 5
    return model


SCRIPT = """
import json, sys
import torch
root, weights, image = sys.argv[1:4]
import models  # the user's own
try:
    torch.hub.load(root, "custom", path=weights, source="local", device="cpu")
except ImportError as error:
    print(json.dumps(str(error)))
assert models.mine
del sys.modules["models"]
model = torch.hub.load(root, "custom", path=weights, source="local", device="cpu", _verbose=False).eval()
model.conf, model.max_det = 0.0, 4
results = model(image, size=64)
results.print()
print(json.dumps(results.xyxy[0].tolist()))
named = torch.hub.load(root, "yolov8n", source="local", device="cpu", _verbose=False)
print(json.dumps(named.names))
for missing in ("yolov8nn", "Path"):
    try:
        torch.hub.load(root, missing, source="local")
    except RuntimeError as error:
        print(json.dumps(str(error)))
results.save(save_dir="saved/exp")
"""


def test_torch_hub_load_from_another_folder(weights, tmp_path):
    """The working folder has modules named utils and models, of which the second is imported already at first."""
    (tmp_path / "utils.py").write_text("raise AssertionError('the wrong utils')\n")
    (tmp_path / "models.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    cv2.imwrite(str(tmp_path / "a.png"), picture()[..., ::-1])
    cache = tmp_path / "cache"
    (cache / "lockstep" / "weights").mkdir(parents=True)
    (cache / "lockstep" / "weights" / "yolov8n.pt").write_bytes(weights.read_bytes())  # no download
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python(), "script.py", ROOT, weights, "a.png"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    clash = json.loads(lines[0])
    assert clash.startswith(f"a module named models is already imported from {tmp_path}/models.py, but {ROOT} has a")
    assert "\n" not in clash
    assert lines[1].startswith("image 1/1: 48x64 ")
    expected = load(weights, device="cpu", conf=0.0, max_det=4)(tmp_path / "a.png")[0].boxes.data.tolist()
    assert json.loads(lines[3]) == expected
    assert json.loads(lines[4]) == {"0": "disc", "1": "ring"}
    assert [json.loads(line) for line in lines[5:7]] == [
        "Cannot find callable yolov8nn in hubconf",
        "Cannot find callable Path in hubconf",
    ]
    assert cv2.imread(str(tmp_path / "saved" / "exp" / "a.jpg")).shape == (48, 64, 3)


def test_arrays_are_rgb(model, tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), picture()[..., ::-1])
    from_file = model(str(tmp_path / "a.png"))
    assert torch.equal(model(cv2.imread(str(tmp_path / "a.png"))[..., ::-1]).xyxy[0], from_file.xyxy[0])
    assert np.array_equal(from_file.ims[0], picture())


def test_attributes_are_used(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("models.postprocess.detections.LEAST_VOTE", 0.0)  # the model is untrained
    monkeypatch.setattr("models.postprocess.box_voting.INDEPENDENCE", 0.0)  # boxes move, scores stay
    assert (HubModel(model._path, "cpu").conf, model.iou, model.stride, model.names[1]) == (0.25, 0.45, 32, "ring")
    image = picture()
    assert len(model(image).xyxy[0]) == 5
    model.max_det = 1000
    everything = model(image).xyxy[0]
    model.box_voting = False
    assert torch.equal(model(image).xyxy[0][:, 4:], everything[:, 4:])
    assert not torch.equal(model(image).xyxy[0], everything)
    model.box_voting = True
    model.conf = float(everything[:, 4].median())
    assert torch.equal(model(image).xyxy[0], everything[everything[:, 4] > model.conf])
    model.conf, model.classes = 0.0, [1]
    assert set(model(image).xyxy[0][:, 5].tolist()) == {1.0}
    model.classes, model.iou, model.agnostic = None, 0.0, True
    assert len(model(image).xyxy[0]) < len(everything)
    assert torch.equal(model(image, size=70).xyxy[0], model(image, size=96).xyxy[0])
    assert (model.to("cpu"), model.eval(), model.cpu()) == (model,) * 3
    with pytest.raises(AttributeError):
        model.multi_label = True  # not silently ignored
    with refused():
        model.cuda(7)
    with refused():
        model("https://example.com/a.jpg")
    model.classes = 0  # not taken for all classes
    with refused():
        model(image)


@pytest.mark.parametrize("size", [-3, 64.0, (64, 64), "64"])
def test_a_size_is_one_whole_number(model, size):
    with refused():
        model(picture(), size=size)


def test_boxes_in_four_forms(model):
    found = model([picture(), picture(30, 90)])
    for (height, width), corners, corners_n, centers, centers_n in zip(
        ((48, 64), (30, 90)), found.xyxy, found.xyxyn, found.xywh, found.xywhn
    ):
        x1, y1, x2, y2 = corners[:, :4].T
        scale = torch.tensor([width, height, width, height])
        torch.testing.assert_close(centers[:, :4], torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], 1))
        torch.testing.assert_close(corners_n[:, :4] * scale, corners[:, :4])
        torch.testing.assert_close(centers_n[:, :4] * scale, centers[:, :4])
        for other in (corners_n, centers, centers_n):
            assert torch.equal(other[:, 4:], corners[:, 4:])
    assert (len(found), found.n, found.files, found.names) == (
        2,
        2,
        ["image0.jpg", "image1.jpg"],
        dict(enumerate(NAMES)),
    )
    assert found.pred is found.xyxy
    one, two = found.tolist()
    assert torch.equal(two.xyxy[0], found.xyxy[1])
    assert len(one) == 1


def test_text(model, capsys):
    found = model([picture(), picture(30, 90)])
    found.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines == str(found).splitlines()
    assert [line.split(" ")[:3] for line in lines[:2]] == [["image", "1/2:", "48x64"], ["image", "2/2:", "30x90"]]
    assert lines[2].startswith("Speed: ")
    model.conf = 1.0
    assert "48x64 nothing found" in str(model(picture()))
    assert str(model([])) == ""


def test_files(model, tmp_path):
    found = model([picture(), picture(30, 90)])
    before = [image.copy() for image in found.ims]
    for folder in ("exp", "exp2"):
        assert found.save(save_dir=tmp_path / "exp") == tmp_path / folder
    assert sorted(p.name for p in (tmp_path / "exp2").iterdir()) == ["image0.jpg", "image1.jpg"]
    drawn = found.render()
    assert drawn is found.ims
    assert all((a != b).any() for a, b in zip(before, drawn))
    crops = found.crop(save_dir=tmp_path / "crops")
    assert len(crops) == 10
    assert len(list((tmp_path / "crops" / "crops").rglob("*.jpg"))) == 10
    first, row = crops[0], found.xyxy[0][0]
    assert first["label"] == f"{NAMES[int(row[5])]} {row[4]:.2f}"
    assert torch.equal(first["box"], row[:4])
    x1, y1, x2, y2 = first["box"].tolist()
    y, x = slice(int(np.floor(y1)), int(np.ceil(y2))), slice(int(np.floor(x1)), int(np.ceil(x2)))
    assert np.array_equal(first["im"], picture()[y, x])
    found.crop(save=False, save_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_windows(model, monkeypatch):
    found = model([picture(), picture(30, 90)])
    shown = []

    class FakeWindow:
        def show(self, image, *, wait):
            shown.append((image.shape, wait))
            return True

        def close(self):
            shown.append("closed")

    monkeypatch.setattr(engine.inference.results, "Window", FakeWindow)
    found.show()
    assert shown == [((48, 64, 3), True), ((30, 90, 3), True), "closed"]


def test_tables(model, monkeypatch):
    found = model([picture(), picture(30, 90)])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with refused():
            found.pandas()
    pytest.importorskip("pandas")
    tables = found.pandas()
    assert list(tables.xyxy[0].columns) == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    assert list(tables.xywhn[1].columns)[:4] == ["xcenter", "ycenter", "width", "height"]
    np.testing.assert_array_equal(tables.xywh[1].values[:, :6].astype(np.float32), found.xywh[1])
    assert tables.xyxy[0].name.tolist() == [NAMES[int(c)] for c in found.xyxy[0][:, 5]]
    model.conf = 1.0
    assert len(model(picture()).pandas().xyxy[0]) == 0


def test_parameters_have_the_order_of_yolov5(weights):
    assert hubconf.custom(weights, True, False, "cpu").names == dict(enumerate(NAMES))
    with pytest.raises(ValueError, match="load_detector"):
        hubconf.custom(weights, autoshape=False)
