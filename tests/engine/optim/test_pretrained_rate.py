"""The learning rate of loaded weights, chosen by how well they detect the training objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.dataset import LoadImagesAndLabels
from data.index.dataset_yaml import load_dataset_spec
from data.index.index import load_index
from data.index.tiles import TiledIndex
from engine.optim import pretrained_rate
from engine.optim.pretrained_rate import choose_lr_mult, lr_mult_by_score, score_on_objects
from tests.helpers.tiny import write_dataset, write_tiled_dataset, write_weights
from utils.config.pixels import PixelFormat
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext

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
        return self.answer


def planned(boxes: int = 40) -> Planned:
    rng = torch.Generator().manual_seed(0)
    corners = torch.rand(boxes, 2, generator=rng) * 40
    sides = 8 + torch.rand(boxes, 2, generator=rng) * 24
    return Planned(torch.cat([corners, corners + sides], 1), torch.rand(boxes, 3, generator=rng))


def samples(yaml: Path, cache: Path, **options) -> LoadImagesAndLabels:
    index = load_index(load_dataset_spec(yaml), "train", cache_dir=str(cache), progress=False)
    return LoadImagesAndLabels(index, imgsz=SIDE, augment=True, **options)


@pytest.fixture
def dataset(tmp_path) -> LoadImagesAndLabels:
    return samples(write_dataset(tmp_path / "set", train=12), tmp_path)


def iou(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(width, 0.0) * max(height, 0.0)
    return inside / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside)


def expected(detector: Planned, labels: list[str]) -> float:
    """One object and one box at a time; ``labels`` are the files."""
    boxes, scores = (part[0].double().tolist() for part in detector.answer)
    found = []
    for line in "".join(labels).splitlines():
        _, x, y, w, h = (float(value) * SIDE for value in line.split())
        truth = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        found.append(max((max(s) for box, s in zip(boxes, scores) if iou(truth, box) >= 0.5), default=0.0))
    return sum(found) / len(found)


def test_the_score_is_the_mean_of_the_best_over_the_objects(dataset, tmp_path):
    detector = planned()
    files = sorted((tmp_path / "set" / "labels" / "train").iterdir())
    value = expected(detector, [file.read_text() for file in files])
    assert 0.1 < value < 0.9
    assert score_on_objects(detector, dataset, 100) == pytest.approx(value, abs=1e-6)
    assert all(image.shape == (1, 3, SIDE, SIDE) and 0 <= image.min() <= image.max() <= 1 for image in detector.seen)


def test_images_are_taken_at_equal_distances(dataset, tmp_path):
    detector = planned()
    files = sorted((tmp_path / "set" / "labels" / "train").iterdir())
    chosen = [files[i].read_text() for i in (0, 4, 7, 11)]
    assert score_on_objects(detector, dataset, 4) == pytest.approx(expected(detector, chosen), abs=1e-6)


def test_without_objects_the_score_is_zero(dataset, tmp_path):
    (tmp_path / "set" / "labels" / "train" / "000.txt").write_text("")
    assert score_on_objects(planned(), samples(tmp_path / "set" / "data.yaml", tmp_path / "other"), 1) == 0


def test_objects_of_tiles_are_those_of_the_resting_grid(tmp_path):
    yaml = write_tiled_dataset(tmp_path / "set", [(150, 200)] * 2, tile=SIDE, squares=6, seed=0)
    index = load_index(load_dataset_spec(yaml), "train", cache_dir=str(tmp_path), progress=False)
    hyp = Hyperparameters()
    grid = TiledIndex(index, SIDE, hyp=hyp)
    lines = []
    for i in range(len(grid.index)):
        labels = grid.index.labels(i)
        lines += [" ".join(map(repr, row)) + "\n" for row in labels[labels[:, 0] >= 0].astype(np.float64).tolist()]
    images = [cv2.imread(index.path(i))[..., ::-1] for i in range(len(index))]
    tiles = TiledIndex(index, SIDE, hyp=hyp, seed=3)
    moving = LoadImagesAndLabels(index, imgsz=SIDE, augment=True, seed=3, tiles=tiles, image_cache=images)
    detector = planned(200)
    assert score_on_objects(detector, moving, 100) == pytest.approx(expected(detector, lines), abs=1e-5)


@pytest.mark.parametrize(
    ("score", "epochs", "steps", "lr_mult"),
    [
        (0.0, 20, 40, 0.125),
        (0.049, 20, 180, 0.125),
        (0.049, 100, 900, 0.125),
        (0.051, 20, 40, 0.125),
        (0.051, 20, 80, 0.078125),
        (0.051, 20, 100, 0.0625),
        (0.051, 100, 200, 0.0625),
        (0.399, 20, 180, 0.0625),
        (0.399, 20, 40, 0.125),
        (0.399, 100, 900, 0.0625),
        (0.399, 100, 40, 0.125),
        (0.401, 20, 40, 0.0625),
        (0.401, 60, 540, 0.0625 / 3),
        (0.401, 300, 2700, 0.0625 / 3),
        (0.9, 40, 10_000, 0.03125),
        (0.9, 10, 10_000, 0.0625),
        (float("nan"), 100, 200, 0.125),
    ],
)
def test_known_objects_get_small_steps(dataset, tmp_path, monkeypatch, score, epochs, steps, lr_mult):
    monkeypatch.setattr(pretrained_rate, "score_on_objects", lambda *_: score)
    weights = str(write_weights(tmp_path / "a.pt", ["x", "y", "z"]))
    ctx, config = DistributedContext.single(torch.device("cpu")), TrainConfig(data="d.yaml", weights=weights)
    assert choose_lr_mult(ctx, replace(config, epochs=epochs), dataset, steps) == pytest.approx(lr_mult)


@pytest.mark.parametrize("steps", [1, 9, 100])
def test_well_known_objects_move_weights_as_far_in_long_runs_as_in_20_epochs(steps):
    """Rate times steps, up to 60 epochs."""
    moves = [lr_mult_by_score(0.9, epochs, steps * epochs)[0] * steps * epochs for epochs in (20, 21, 40, 60)]
    assert moves == pytest.approx([moves[0]] * 4)


def test_a_run_of_unknown_length_gets_the_rate_of_20_epochs(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained_rate, "score_on_objects", lambda *_: 0.9)
    config = TrainConfig(data="d.yaml", weights=str(write_weights(tmp_path / "a.pt", ["x"])), epochs=100, time=0.5)
    assert choose_lr_mult(DistributedContext.single(torch.device("cpu")), config, dataset, 1000) == 0.0625


def test_weights_of_no_detector_or_for_other_images_count_as_strange(dataset, tmp_path, monkeypatch):
    ctx = DistributedContext.single(torch.device("cpu"))
    part = tmp_path / "part.pt"
    torch.save({"model.0.conv.weight": torch.zeros(8, 3, 3, 3)}, part)
    assert choose_lr_mult(ctx, TrainConfig(data="d.yaml", weights=str(part)), dataset, 200) == 0.125
    monkeypatch.setattr(pretrained_rate, "score_on_objects", lambda *_: 0.9)
    four = write_weights(tmp_path / "four.pt", ["x"])
    assert choose_lr_mult(ctx, TrainConfig(data="d.yaml", weights=str(four)), dataset, 200) == 0.0625 / 3
    dataset.imgsz = 80  # the stride is 32
    assert choose_lr_mult(ctx, TrainConfig(data="d.yaml", weights=str(four)), dataset, 200) == 0.125
    dataset.imgsz = SIDE
    dataset.index = replace(dataset.index, pixels=PixelFormat(4))
    assert choose_lr_mult(ctx, TrainConfig(data="d.yaml", weights=str(four)), dataset, 200) == 0.125


@pytest.mark.parametrize(("epochs", "images"), [(1, 3), (2, 6), (100, 100)])
def test_the_choice_takes_a_small_part_of_the_run(dataset, tmp_path, monkeypatch, epochs, images):
    asked = []
    monkeypatch.setattr(pretrained_rate, "score_on_objects", lambda *given: asked.append(given[-1]) or 0.0)
    weights = str(write_weights(tmp_path / "a.pt", ["x"]))
    ctx = DistributedContext.single(torch.device("cpu"))
    choose_lr_mult(ctx, TrainConfig(data="d.yaml", weights=weights, epochs=epochs), dataset, 200)
    assert asked == [images]
