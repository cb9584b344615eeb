"""Tests of the additions of docs/extending.md, which test_extending.py runs in a copy of the code that has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data.augment.erasing import RandomErasing

import export
import train
from data.formats.yolo import YOLO
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from engine.inference.model import open_model
from models.detector import build_detector
from models.weights.load import load_detector
from tests.helpers.exports import calibrated_detector
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import TINY_MODEL, make_batch, write_dataset, write_detector, write_model
from utils.config.settings import Hyperparameters

CENTER = TINY_MODEL | {"head": [[[2, 3, 4], 1, "CenterDetect", ["nc", 16]]]}


def test_a_model_with_the_head_learns():
    model = build_detector(CENTER, 2)
    batch = make_batch(4)
    criterion = model.head.build_loss(Hyperparameters())
    images = batch.images.float() / 255
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        output = criterion(model(images), batch.targets)
        loss = output.total / output.normalizer.clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0], losses
    assert all(p.grad is not None for p in model.parameters())
    boxes, scores = model.decode(model(images))
    assert boxes.shape == (4, 64 + 16 + 4, 4)
    assert scores.shape == (4, 84, 2)


def test_each_object_has_one_cell():
    model = build_detector(CENTER, 2)
    batch = make_batch(4)
    output = model.head.build_loss(Hyperparameters())(model(batch.images / 255), batch.targets)
    assert 1 <= output.normalizer <= len(batch.targets.rows)


def test_ignored_cells_without_object_have_no_class_loss():
    model = build_detector(CENTER, 2)
    batch = make_batch(4)
    raw = [level.detach().requires_grad_() for level in model(batch.images / 255)]
    everything = np.array([[1, -1, 0.5, 0.5, 1, 1]], np.float32)  # the whole second image, all classes
    output = model.head.build_loss(Hyperparameters())(raw, replace(batch.targets, ignore=everything))
    output.total.backward()
    has_gradient = torch.cat([level.grad[:, 4:].abs().amax(1).flatten(1) for level in raw], 1) > 0
    assert has_gradient[[0, 2, 3]].all()
    assert has_gradient[1].sum() <= (batch.targets.rows[:, 0] == 1).sum()


def test_tsv_gives_the_boxes_of_yolo_txt(tmp_path: Path):
    data = write_dataset(tmp_path / "set", train=6, val=2)
    content = yaml.safe_load(data.read_text())
    size = 64
    rows = []
    for label in sorted((tmp_path / "set" / "labels" / "train").iterdir()):
        rows.append(f"{label.stem}.png")
        for line in label.read_text().splitlines():
            kind, x, y, w, h = (float(v) for v in line.split())
            corners = [(x - w / 2) * size, (y - h / 2) * size, (x + w / 2) * size, (y + h / 2) * size]
            rows.append("\t".join([f"{label.stem}.png", content["names"][int(kind)], *map(str, corners)]))
    (tmp_path / "set" / "train.tsv").write_text("\n".join(rows))
    found = []
    for extra in ({}, {"annotations": {"train": "train.tsv"}}):
        data.write_text(yaml.safe_dump(content | extra))
        spec = load_dataset_spec(data)
        assert (spec.split("train").label_format is YOLO) is not bool(extra)
        found.append(load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"))).ground_truth())
    np.testing.assert_array_equal(found[0].classes, found[1].classes)
    np.testing.assert_allclose(found[0].boxes_xywh_px, found[1].boxes_xywh_px, atol=1e-3)


@pytest.mark.parametrize(("dtype", "gray"), [(np.uint8, 114), (np.uint16, 29298)])
def test_erasing_fills_a_rectangle_with_gray(dtype, gray):
    operation = RandomErasing(Hyperparameters(erasing=1.0))
    assert operation.is_active
    assert not RandomErasing(Hyperparameters()).is_active
    for row in operation.parameters(np.random.default_rng(0).random((8, 4)), np.tile([[48, 64]], (8, 1))):
        image = np.full((48, 64, 3), 200, dtype)
        expected = image.copy()
        x1, y1, x2, y2 = row.astype(int)
        expected[y1:y2, x1:x2] = gray
        erased = operation.apply(image, row, np.empty_like(image))
        np.testing.assert_array_equal(erased, expected)
        assert 0.01 < (erased == gray).mean() < 0.25


@pytest.mark.slow
def test_a_training_with_everything(tmp_path: Path):
    data = write_dataset(tmp_path / "set", train=8, val=4)
    model = write_model(tmp_path / "center.yaml", CENTER)
    given = ["--data", data, "--model", model, "--epochs", "2", "--set", "erasing=0.5"]
    train.main([*map(str, given), *SMALL, "--project", str(tmp_path)])
    assert "metrics/f1_25" in (tmp_path / "exp" / "results.csv").read_text().splitlines()[0].split(",")
    assert load_detector(tmp_path / "exp" / "last.pt")[0].head.validation_iou == 0.6


@pytest.mark.slow
def test_an_ort_file_detects_what_the_checkpoint_detects(tmp_path: Path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    data = write_dataset(tmp_path / "set", train=4, val=4)
    weights = write_detector(tmp_path / "best.pt", calibrated_detector(TINY_MODEL, ("light", "dark")))
    export.main(["--weights", str(weights), "--format", "ort", "--data", str(data)])
    model = open_model(tmp_path / "best.ort", device=torch.device("cpu"))
    assert model.names == ("light", "dark")
