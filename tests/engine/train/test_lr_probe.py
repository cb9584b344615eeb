"""What the data may change in loaded weights, by how well they detect the training objects."""

from __future__ import annotations

import math
from pathlib import Path

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
from engine.optim.schedule import StepPlan
from engine.run.choices import choose_lr_mult
from engine.train import lr_probe
from engine.train.lr_probe import lr_mult_by_score, probe_weights, score_on_objects
from models.detector import Detector, build_detector
from models.weights.load import load_detector
from models.weights.read import read_weights
from tests.helpers.scoring import reference_iou
from tests.helpers.scripts import SMALL, call
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_detector, write_weights
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext

SIDE = 64
ALONE = DistributedContext.single(torch.device("cpu"))


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


def samples(yaml: Path, cache: Path, **options) -> AugmentedImages:
    index = load_index(load_dataset_spec(yaml), "train", IndexSettings(cache_dir=str(cache), progress=False))
    return AugmentedImages(ImageReader(index, imgsz=SIDE), **options)


@pytest.fixture
def dataset(tmp_path) -> AugmentedImages:
    return samples(write_dataset(tmp_path / "set", train=12), tmp_path)


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


def choice(config: TrainConfig, dataset: AugmentedImages, model: Detector) -> tuple[float, str]:
    plan = StepPlan(accumulate=1, per_epoch=200, epochs=1)
    probe = probe_weights(ALONE, config, read_weights(config.weights), dataset, model)
    return choose_lr_mult(config, Hyperparameters(lr_mult=None), plan, probe)


def of_known_objects(monkeypatch, score: float) -> list[tuple]:
    """Gives the score to all detectors; returns what is asked for."""
    asked = []
    scores = (np.zeros(7, np.float32), np.full((7, 3), score))
    monkeypatch.setattr(lr_probe, "score_on_objects", lambda *given: asked.append(given) or scores)
    return asked


@pytest.mark.parametrize("channels", [3, 1])
def test_the_detector_that_is_scored_has_the_weights_of_the_file(dataset, tmp_path, monkeypatch, channels):
    """Gray images are scored as their copies with three channels."""
    asked = of_known_objects(monkeypatch, 0.2)
    path = write_weights(tmp_path / "a.pt", ["x", "X", "dark"])
    model = build_detector(TINY_MODEL, 2, channels=channels)
    assert choice(TrainConfig(data="d.yaml", weights=str(path)), dataset, model)[0] == 0.0625
    images = torch.rand(2, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    of_file = load_detector(path)[0].fuse()
    ours, theirs = (d.decode(d(x)) for d, x in ((asked[0][0], images), (of_file, images.expand(-1, 3, -1, -1))))
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if channels == 3 else {}))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (lambda tensors: {k: v for k, v in tensors.items() if k.startswith("model.0.")}, "its class layers are not"),
        (lambda tensors: tensors | {"model.0.conv.weight": torch.zeros(9, 3, 3, 3)}, "tensors are not in it"),
    ],
)
def test_weights_of_another_model_are_not_scored(dataset, tmp_path, monkeypatch, part, what):
    of_known_objects(monkeypatch, 0.9)
    model = build_detector(TINY_MODEL, 2)
    path = tmp_path / "part.pt"
    torch.save(part(model.state_dict()), path)
    lr_mult, reason = choice(TrainConfig(data="d.yaml", weights=str(path)), dataset, model)
    assert lr_mult == 0.125
    assert "cannot be tested" in reason
    assert what in reason


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
