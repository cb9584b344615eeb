"""Images of five channels of 12 bits through train.py, val.py, detect.py, export.py and tools.check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

import detect
import export
import train
import val
from engine.inference.model import open_model
from engine.inference.predict import load
from tests.helpers.messages import refused
from tests.helpers.scripts import PLAIN, SMALL, call
from tests.helpers.tiny import write_dataset, write_model
from tools.check import __main__ as check
from utils.pixels import PixelFormat, as_rgb8

FIVE12 = {"channels": 5, "bits": 12}


def as_arrays(data: Path) -> Path:
    """Replaces the images of a data set by arrays of five channels of 12 bits."""
    for path in data.parent.glob("images/*/*.png"):
        image = cv2.imread(str(path))[..., [2, 1, 0, 1, 0]].astype(np.uint16)
        np.save(path.with_suffix(".npy"), image * 16)
        path.unlink()
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | FIVE12))
    return data


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """The YAML, and a run of one epoch."""
    root = tmp_path_factory.mktemp("five")
    data = as_arrays(write_dataset(root / "set"))
    model = write_model(root / "tiny.yaml")
    flags = ["--data", data, "--model", model, "--epochs", "1", "--project", root, "--cache", "disk"]
    call(train.main, *flags, "--optimizer", "SGD", "--cache-dir", root / "cache", *SMALL)
    return data, root / "exp"


def test_files_arrays_and_tensors_give_the_same_detections(trained, tmp_path):
    data, run = trained
    predictor = load(run / "best.pt", device="cpu", conf=0.0, max_det=5)
    assert predictor.model.pixels == PixelFormat(5, 12)
    path = sorted(data.parent.glob("images/val/*.npy"))[0]
    image = np.load(path)
    (expected,) = predictor(path)
    assert len(expected) == 5
    assert np.array_equal(expected.image, as_rgb8(np.rint(image * (65535 / 4095)).astype(np.uint16)))
    tensor = torch.from_numpy(image.astype(np.float32) / 4095).permute(2, 0, 1)
    for other in (image, tensor, torch.from_numpy(image).permute(2, 0, 1)):
        assert torch.equal(predictor(other)[0].boxes.data, expected.boxes.data)
    assert torch.equal(next(predictor.stream(path)).boxes.data, expected.boxes.data)
    assert expected.plot().shape == (64, 64, 3)
    for wrong in (image[..., :4], image[..., 0], np.full_like(image, 65535)):
        with refused("image0.jpg: ...; correct '...' in the YAML..."):
            predictor(wrong, color="rgb")


def test_the_folder_is_detected_scored_and_checked(trained, tmp_path):
    data, run = trained
    weights = ["--weights", run / "best.pt", "--device", "cpu"]
    project = ["--project", tmp_path]
    source = ["--source", data.parent / "images/val", "--conf-thres", "0"]
    call(detect.main, *weights, *source, "--save-crop", "--name", "d", *project)
    assert len(list((tmp_path / "d").glob("*.jpg"))) == 5
    call(val.main, *weights, *PLAIN, "--cache-dir", tmp_path, "--name", "v", *project)
    assert json.loads((tmp_path / "v" / "results.json").read_text())
    copied = shutil.copytree(data.parent, tmp_path / "set")
    for kind, suffix in (("images", ".npy"), ("labels", ".txt")):  # near-duplicates are shown
        shutil.copy(copied / kind / f"train/000{suffix}", copied / kind / f"val/again{suffix}")
    with pytest.raises(SystemExit, match=r"^1$"):
        check.main([str(word) for word in (copied / data.name, *weights, "--out", tmp_path / "c")])
    assert "data:image/jpeg" in (tmp_path / "c" / "report.html").read_text()


def test_an_exported_file_computes_the_same_and_knows_the_format(trained, tmp_path):
    _, run = trained
    weights = tmp_path / "best.pt"
    weights.write_bytes((run / "best.pt").read_bytes())
    call(export.main, "--weights", weights, "--format", "torchscript", "--no-check")
    model = open_model(weights, device=torch.device("cpu"))
    exported = open_model(tmp_path / "best.torchscript", device=torch.device("cpu"), trust=True)
    assert exported.pixels == PixelFormat(5, 12)
    images = torch.rand(1, 5, 64, 64)
    boxes, scores = model.decode(model(images))
    found_boxes, found_scores = exported.decode(exported(images))
    torch.testing.assert_close(found_boxes, boxes, rtol=0, atol=1e-3)
    torch.testing.assert_close(found_scores, scores, rtol=0, atol=1e-4)
