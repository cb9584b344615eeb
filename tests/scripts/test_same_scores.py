"""A model has one AP on a split, wherever it is computed, and the threshold yields the scores that it promises."""

from __future__ import annotations

import json
from itertools import product
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
from models.detector import Detector, build_detector
from tests.helpers.same_content import read_csv
from tests.helpers.scoring import reference_iou
from tests.helpers.scripts import call
from tests.helpers.session import session_file
from tests.helpers.tiny import write_detector
from utils.files.torch_file import read_checkpoint

NAMES = ["light", "dark"]
# Height and width: of the canvas, smaller, larger, much larger (JPEGs that training decodes at half of their size).
SIZES = [(64, 64), (48, 64), (40, 50), (90, 120), (128, 256), (256, 128), (192, 128)]
CPU = ["--device", "cpu", "--workers", "0"]


def write_squares(root: Path) -> Path:
    """Writes squares on noise, as JPEGs of several sizes and shapes. Returns the YAML.

    Bright and dark squares are objects, of 16 pixels on a canvas of 64, and paler ones are not; but one of twelve has
    the wrong shade. In x and y, they are about 2 pixels away from the center of a cell of the detector, whether the
    canvas has a padding of half a cell, as in a validation, or none, as in a file.
    """
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 35)):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for number in range(count):
            height, width = SIZES[number % len(SIZES)]
            image = rng.integers(60, 190, (height, width, 3), dtype=np.uint8)
            scale = max(height, width) / 64
            side = round(16 * scale)
            labels = []
            for row, column in product((16, 48), repeat=2):
                if (row + 11) * scale > height or (column + 11) * scale > width:
                    continue
                kind = int(rng.integers(2))
                is_object = rng.random() < 0.6
                is_pale = is_object == (rng.random() < 1 / 12)
                shade = int(rng.integers(160, 180) if is_pale else rng.integers(198, 203))
                center = (column, row) + rng.choice((-1, 1), 2) * rng.uniform(1.5, 2.5, 2)
                x, y = np.rint(center * scale - side / 2).astype(int)
                image[y : y + side, x : x + side] = 250 - shade if kind else shade
                if is_object:
                    box = ((x + side / 2) / width, (y + side / 2) / height, side / width, side / height)
                    labels.append(f"{kind} {' '.join(map(str, box))}\n")
            cv2.imwrite(str(root / "images" / split / f"{number}.jpg"), image)
            (root / "labels" / split / f"{number}.txt").write_text("".join(labels))
    path = root / "data.yaml"
    path.write_text(yaml.safe_dump({"train": "images/train", "val": "images/val", "names": NAMES}))
    return path


@torch.no_grad()
def detector_of_shades() -> Detector:
    """Builds a detector that scores each cell of 8 pixels by its mean brightness.

    It finds nine equal boxes in each cell, whose votes raise the score s of the box that is kept to 1 - (1 - s)^1.8. So
    the best threshold, between the scores of pale squares and of others, is 0.47 without votes and 0.68 with them. A
    square also gets a lower score for the other class: where this is a detection of its own, the best one is 0.72.
    """
    spec = {
        "nc": 2,
        "anchors": [[16, 16] * 9],
        "backbone": [[-1, 1, "Conv", [8, 8, 8, 0]]],
        "head": [[[0], 1, "Detect", ["nc", "anchors"]]],
    }
    detector = build_detector(spec, 2, names=NAMES)
    mean, head = detector.model
    mean.conv.weight.zero_()
    for class_number, (gain, shade) in enumerate(((20.0, 0.55), (-20.0, 0.43))):  # positive above, below the shade
        mean.conv.weight[class_number] = gain / (3 * 8**2)
        mean.bn.bias[class_number] = -gain * shade
    weight = head.m[0].weight.zero_().view(9, 7, 8)
    bias = head.m[0].bias.zero_().view(9, 7)
    bias[:, 4] = 5
    bias[:, 5:] = -5.5
    weight[:, 5:, :2] = 1.25 * torch.tensor([[1, 0.92], [0.92, 1]])
    return detector


@pytest.fixture(scope="module")
def trained() -> tuple[Path, Path]:
    """A data set, and the folder of a run on it, in the default type of the device, that validates its only epoch."""
    folder = session_file("trained-on-squares", train_on_squares)
    return folder / "set" / "data.yaml", folder / "run"


def train_on_squares(folder: Path) -> None:
    """Takes a step that changes the statistics of batch norm, but hardly the averaged weights, which are validated."""
    data = write_squares(folder / "set")
    weights = write_detector(folder / "shades.pt", detector_of_shades())
    call(
        train.main, "--data", data, "--weights", weights, "--imgsz", 64, "--batch-size", 4, "--epochs", 1,
        "--set", "lr0=0", "bn_momentum=0.5", "ema_tau=0.001", "--noautoanchor", *CPU, "--noplots", "--project", folder,
        "--name", "run",
    )  # fmt: skip


def last_scores(run: Path) -> dict[str, float]:
    """Returns the metrics of a run's last epoch."""
    row = read_csv(run / "results.csv")[-1]
    return {name.removeprefix("metrics/"): float(value) for name, value in row.items() if name.startswith("metrics/")}


def detected(weights: Path, data: Path, tmp_path: Path, *flags: object) -> list[dict]:
    """Returns what detect.py writes for the validation images."""
    call(
        detect.main, "--weights", weights, "--source", data.parent / "images/val", "--device", "cpu",
        "--save-json", "--nosave", "--project", tmp_path, "--name", "detected", "--exist-ok", *flags,
    )  # fmt: skip
    return json.loads((tmp_path / "detected" / "predictions.json").read_text())


def labels_of(data: Path) -> list[tuple[int, int, list[float]]]:
    """Returns image, class and corners in pixels of each label."""
    found = []
    for path in (data.parent / "labels/val").glob("*.txt"):
        height, width = cv2.imread(str(data.parent / "images/val" / f"{path.stem}.jpg")).shape[:2]
        for row in path.read_text().splitlines():
            kind, cx, cy, w, h = map(float, row.split())
            corners = [(cx - w / 2) * width, (cy - h / 2) * height, (cx + w / 2) * width, (cy + h / 2) * height]
            found.append((int(path.stem), int(kind), corners))
    return found


def counted(rows: list[dict], data: Path) -> tuple[float, float, float]:
    """Returns mean P, R and F1 of the classes: each detection, the best first, takes the free label of its class
    that it overlaps most, by at least 0.5."""
    labels = labels_of(data)
    taken = set()
    true = [0, 0]
    total = [0, 0]
    for row in sorted(rows, key=lambda row: -row["score"]):
        kind = row["category_id"]
        x, y, w, h = row["bbox"]
        total[kind] += 1
        free = [
            (reference_iou([x, y, x + w, y + h], box), number)
            for number, (image, label, box) in enumerate(labels)
            if image == row["image_id"] and label == kind and number not in taken
        ]
        overlap, number = max(free, default=(0.0, -1))
        if overlap >= 0.5:
            taken.add(number)
            true[kind] += 1
    objects = [sum(label == kind for _, label, _ in labels) for kind in range(2)]
    precision = [true[kind] / max(total[kind], 1) for kind in range(2)]
    recall = [true[kind] / objects[kind] for kind in range(2)]
    f1 = [2 * true[kind] / max(total[kind] + objects[kind], 1) for kind in range(2)]
    return float(np.mean(precision)), float(np.mean(recall)), float(np.mean(f1))


@pytest.mark.parametrize("batch", [1, 16])
def test_training_and_validation_have_one_ap(trained, tmp_path, batch):
    _, run = trained
    expected = last_scores(run)
    assert expected["AP"] > 0.2
    call(val.main, "--weights", run / "last.pt", "--batch-size", batch, *CPU, "--project", tmp_path, "--noplots")
    results = json.loads((tmp_path / "exp" / "results.json").read_text())
    expected.pop("confidence")  # the threshold
    for name, value in expected.items():
        assert results[name.lower()] == pytest.approx(value, abs=1e-4), name


def standard_error(f1: float) -> float:
    """Of the best F1 of the 55 objects of the validation; the threshold loses at most this."""
    return float(np.sqrt(f1 * (1 - f1) / 55))


def test_detect_gives_what_the_threshold_promises(trained, tmp_path):
    data, run = trained
    expected = last_scores(run)
    found = counted(detected(run / "last.pt", data, tmp_path), data)
    assert found == pytest.approx([expected[name] for name in ("precision", "recall", "f1")], abs=1e-4)


def test_val_scores_the_detections_above_a_given_threshold(trained, tmp_path, capsys):
    """The matrix has the counts of precision and recall."""
    data, run = trained
    given = ["--conf-thres", 0.8, *CPU, "--project", tmp_path, "--name", "val", "--noplots"]
    call(val.main, "--weights", run / "last.pt", *given)
    assert "AP counts only detections above --conf-thres 0.8" in capsys.readouterr().out
    results = json.loads((tmp_path / "val" / "results.json").read_text())
    rows = detected(run / "last.pt", data, tmp_path, "--conf", 0.8)
    found = [results[name] for name in ("precision", "recall", "f1")]
    assert found == pytest.approx(counted(rows, data), abs=1e-4)
    counts = np.array(results["confusion"]["counts"])
    assert counts[:-1].sum() == len(rows) > 0
    assert counts[:, :-1].sum() == len(labels_of(data))


def test_without_box_voting_which_raises_scores_the_threshold_is_the_default(trained, tmp_path, capsys):
    data, run = trained
    shown = detected(run / "last.pt", data, tmp_path, "--no-box-voting")
    assert "confidence threshold 0.25 (" in capsys.readouterr().out
    everything = detected(run / "last.pt", data, tmp_path, "--no-box-voting", "--conf", 0.01)
    assert shown == [row for row in everything if row["score"] > 0.25]


@pytest.mark.parametrize("flags", [[], pytest.param(["--layout", "end2end"], marks=pytest.mark.slow)])
def test_an_exported_file_has_the_best_threshold_on_its_canvas(trained, tmp_path, flags: list[str]):
    """Whatever the checkpoint's is, which is measured on rectangles."""
    data, run = trained
    checkpoint = read_checkpoint(run / "last.pt")
    checkpoint["progress"]["confidence"] = 0.95
    torch.save(checkpoint, tmp_path / "last.pt")
    call(export.main, "--weights", tmp_path / "last.pt", "--format", "torchscript", *flags)
    (file,) = tmp_path.glob("*.torchscript")
    shown = detected(file, data, tmp_path, "--trust")
    everything = detected(file, data, tmp_path, "--trust", "--conf", 0.01)
    best = max(
        counted([row for row in everything if row["score"] > threshold], data)[2] for threshold in np.linspace(0, 1, 41)
    )
    assert counted(shown, data)[2] >= best - standard_error(best) > 0.5
    call(export.main, "--weights", tmp_path / "last.pt", "--format", "torchscript", "--half", "--no-check", *flags)
    (unchecked,) = tmp_path.glob("*half*.torchscript")
    threshold = open_model(unchecked, device="cpu", trust=True).threshold(box_voting=True)
    assert threshold == (0.25 if flags else 0.95)  # the training's is that of detections with box voting
