"""What the data may change in loaded weights, by how well they detect the training objects."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import train
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from engine.train.lr_probe import lr_mult_by_score, score_on_objects
from models.detector import build_detector
from models.weights.load import load_detector
from tests.helpers.scoring import reference_iou
from tests.helpers.scripts import SMALL, call
from tests.helpers.tiny import TINY_ANCHOR_MODEL, write_dataset, write_detector

SIDE = 64


class Planned(nn.Module):
    """Predicts the same boxes, with the same scores of three classes, in every image."""

    channels = 3

    def __init__(self, boxes_xyxy: Tensor, scores: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.answer = boxes_xyxy[None], scores[None]
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> list[Tensor]:
        self.seen.append(images)
        return [images]

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        boxes, scores = self.answer
        return boxes.expand(len(raw[0]), -1, -1), scores.expand(len(raw[0]), -1, -1)


def planned(boxes: int = 40) -> Planned:
    rng = torch.Generator().manual_seed(0)
    corners = torch.rand(boxes, 2, generator=rng) * 40
    sides = 8 + torch.rand(boxes, 2, generator=rng) * 24
    return Planned(torch.cat([corners, corners + sides], 1), torch.rand(boxes, 3, generator=rng))


@pytest.fixture
def dataset(tmp_path) -> AugmentedImages:
    spec = load_dataset_spec(write_dataset(tmp_path / "set", train=12))
    index = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path), progress=False))
    return AugmentedImages(ImageReader(index, imgsz=SIDE))


def expected_scores(detector: Planned, labels: list[str]) -> list[tuple[int, list[float]]]:
    """The class of each object, and the scores of the three classes at it: one object and one box at a time. ``labels``
    are the files."""
    boxes, scores = (part[0].double().tolist() for part in detector.answer)
    found = []
    for line in "".join(labels).splitlines():
        label, *sides = line.split()
        x, y, w, h = (float(value) * SIDE for value in sides)
        truth = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        fitting = [s for box, s in zip(boxes, scores) if reference_iou(truth, box) >= 0.5] or [[0.0] * 3]
        found.append((int(float(label)), [max(column) for column in zip(*fitting)]))
    return found


def test_the_score_of_a_class_at_an_object_is_the_best_of_the_boxes_there(dataset, tmp_path):
    detector = planned()
    files = sorted((tmp_path / "set" / "labels" / "train").iterdir())
    expected = expected_scores(detector, [file.read_text() for file in files])
    labels, scores = score_on_objects(detector, dataset, 100)
    assert labels.tolist() == [label for label, _ in expected]
    np.testing.assert_allclose(scores, [best for _, best in expected], atol=1e-6)
    assert 0.1 < scores.max(1).mean() < 0.9
    assert all(image.shape[1:] == (3, SIDE, SIDE) and 0 <= image.min() <= image.max() <= 1 for image in detector.seen)
    detector.seen.clear()
    score_on_objects(detector, dataset, 5)
    assert sum(map(len, detector.seen)) == 5


@pytest.mark.parametrize(("score", "epochs", "steps", "lr_mult"), [
    (0.049, 100, 900, 0.125), (0.051, 20, 80, 0.078125), (0.401, 300, 2700, 0.0625 / 3), (math.nan, 100, 10, 0.125),
])  # fmt: skip
def test_known_objects_get_small_steps(score, epochs, steps, lr_mult):
    assert lr_mult_by_score(score, epochs, steps)[0] == pytest.approx(lr_mult)


@pytest.mark.parametrize(("objectness", "keeps"), [(2.0, True), (-9.0, False)], ids=["detects", "detects nothing"])
@pytest.mark.parametrize("lr_mult", ["null", "0.1"])
def test_weights_that_detect_the_objects_keep_their_anchors(tmp_path, objectness, keeps, lr_mult):
    """yolov5#13629: every pretrained box was wrong after the anchors had been refitted."""
    detector = build_detector({**TINY_ANCHOR_MODEL, "anchors": [[16, 16, 24, 24, 40, 20]] * 3}, 2, names=["x", "y"])
    with torch.no_grad():
        for conv in detector.head.m:
            conv.bias.view(3, 7)[:, 4:] = objectness
    weights = write_detector(tmp_path / "old.pt", detector)
    data = write_dataset(tmp_path / "set")
    call(train.main, "--data", data, "--weights", weights, "--epochs", "1", "--project", tmp_path, *SMALL, "--set",
         "anchor_t=1.2", f"lr_mult={lr_mult}")  # fmt: skip
    trained = load_detector(tmp_path / "exp" / "last.pt")[0]
    assert torch.equal(trained.head.anchors, detector.head.anchors) == keeps
