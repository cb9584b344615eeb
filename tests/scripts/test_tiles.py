"""train.py, val.py and detect.py on tiles of large images, as their users start them."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

import train
import val
from engine.evaluation.evaluator import Evaluator
from engine.inference.predictor import load
from models.postprocess.detections import select_for_validation
from models.postprocess.selection import ValidationSettings
from models.postprocess.tiles import Tiles
from tests.helpers.same_content import assert_same_content
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table
from tests.helpers.scripts import PLAIN, SMALL, call, run_python
from tests.helpers.tiny import write_model, write_tiled_dataset
from tests.models.postprocess.stitching_reference import stitch, windows_of
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.files.torch_file import read_checkpoint


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A data set with ``tile: 96``, a model, and a cache."""
    root = tmp_path_factory.mktemp("inputs")
    write_tiled_dataset(root, [(220, 300), (250, 180), (60, 80)], tile=96, squares=8, seed=0)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path, *more: str) -> list[str]:
    model = ["--data", str(inputs / "data.yaml"), "--model", str(inputs / "tiny.yaml")]
    return [*model, "--project", str(project), "--cache-dir", str(inputs / "cache"), *SMALL, "--batch-size", "8", *more]


def test_val_and_detection_know_the_tiles_of_a_checkpoint(inputs, tmp_path, monkeypatch):
    """val.py finds what validation in training finds, also with a YAML without tiles; --tile 0 scales whole images."""
    tables = []
    original = Evaluator.run

    def recorded(evaluator, *args, **more):
        evaluation = original(evaluator, *args, **more)
        tables.append(evaluation.for_ap)
        return evaluation

    monkeypatch.setattr(Evaluator, "run", recorded)
    train.main(flags(inputs, tmp_path, "--epochs", "1", "--set", "warmup_epochs=0", "--optimizer", "SGD"))
    best = tmp_path / "exp" / "last.pt"
    content = read_checkpoint(best)
    assert content["tile"] == 96
    plain = tmp_path / "plain.yaml"
    plain.write_text((inputs / "data.yaml").read_text().replace("tile: 96", f"path: {inputs}"))
    common = ["--weights", best, *PLAIN, "--batch-size", "8", "--cache-dir", inputs / "cache"]
    found = {}
    choices = {"tiles": ["--data", plain], "whole": ["--tile", "0"], "overlap": ["--overlap", "0.5"]}
    for name, more in choices.items():
        call(val.main, *common, "--project", tmp_path / "val", "--name", name, *more)
        found[name] = (tmp_path / "val" / name / "predictions.json").read_bytes()
    assert len(set(found.values())) == 3
    in_training, after = tables[:2]
    assert len(after.scores) > 4
    for name in DetectionTable.__slots__:
        np.testing.assert_allclose(getattr(after, name), getattr(in_training, name), rtol=1e-5, atol=1e-3)
    assert load(best, device="cpu").image_detector.tiles == Tiles(96, full_image=False, scaled=True)
    assert load(best, device="cpu", tiles=False).image_detector.tiles is None
    flags_of_detect = {"weights": str(best), "source": "", "overlap": 0.5}
    assert Tiles.from_config(DetectConfig(**flags_of_detect), 96) == Tiles(96, 0.5, full_image=False, scaled=True)


def test_tiles_are_scored_as_pycocotools_scores_what_is_cut_and_stitched_by_hand(shared, tmp_path):
    """Two photos of COCO and a public checkpoint; labels, tiles, offsets and stitching without this program's code."""
    weights = shared / "weights/yolov8n.pt"
    source = shared / "datasets/coco128"
    tile = 320
    images = [source / f"images/train2017/{number:012d}.jpg" for number in (9, 25)]
    (tmp_path / "val.txt").write_text("".join(f"{path}\n" for path in images))
    names = yaml.safe_load((source / "coco128.yaml").read_text())["names"]
    content = {"path": str(source), "val": str(tmp_path / "val.txt"), "names": names, "tile": tile}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
    # coco128 has two label files without an image, which are much beside two images.
    common = ["--project", tmp_path, "--cache-dir", tmp_path, "--max-bad", "1", *PLAIN]
    call(val.main, "--weights", weights, "--data", tmp_path / "data.yaml", "--imgsz", tile, *common)
    results = json.loads((tmp_path / "exp/results.json").read_text())

    detector = load(weights, device="cpu").image_detector.model.detector
    labels = []
    found = []
    for number, path in enumerate(images):
        image = cv2.imread(str(path))[..., ::-1]
        height, width = image.shape[:2]
        rows = np.loadtxt(source / f"labels/train2017/{path.stem}.txt", ndmin=2)
        scale = np.array([width, height])
        corners = np.c_[rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2].clip(0, 1) * np.tile(scale, 2)
        labels += [(number, row[0], *box) for row, box in zip(rows, corners)]
        windows = windows_of(height, width, tile, 0.2)
        boxes = []
        for which, (x1, y1, x2, y2) in enumerate(windows.astype(int)):
            pixels = torch.from_numpy(image[y1:y2, x1:x2].copy()).permute(2, 0, 1)[None].float() / 255
            with torch.inference_mode():
                settings = ValidationSettings(conf_thres=0.001, iou_thres=0.7, max_det=300)
                views = select_for_validation(detector, detector(pixels), settings).for_ap
            for box, score, kind in zip(*(part[0, : int(views.counts)] for part in views[:3])):
                xyxy = (box.double().numpy() + np.tile([x1, y1], 2)).clip([x1, y1] * 2, [x2, y2] * 2)
                boxes.append((xyxy, float(score), int(kind), which))
        found += [(number, box, score, kind) for box, score, kind, _ in stitch(boxes, windows, 0.7)]
    image, classes, *corners = np.array(labels).T
    boxes = np.c_[corners[0], corners[1], corners[2] - corners[0], corners[3] - corners[1]]
    truth = make_ground_truth(
        boxes, classes=classes, area=boxes[:, 2:].prod(1), image=image, num_images=len(images), num_classes=len(names)
    )
    columns = dict(zip(("image", "boxes", "scores", "classes"), zip(*found)))
    stats, _ = coco_evaluate(truth, make_table(**columns))
    assert results["ap"] > 0.2
    np.testing.assert_allclose([results[name] for name in ("ap", "ap50", "ap75")], stats[:3], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--image-weights", "--multi-scale"], ["--cache", "ram", "--quad"]])
def test_two_processes_and_a_resumed_run_have_the_bits_of_one(inputs, tmp_path, more):
    more = ["--epochs", "2", "--virtual-ranks", "2", "--save-period", "1", *more]
    run_python("train.py", *flags(inputs, tmp_path, "--name", "one", *more))
    run_python("train.py", *flags(inputs, tmp_path, "--name", "two", "--spawn", "2", *more))
    one, two = (read_checkpoint(tmp_path / name / "last.pt") for name in ("one", "two"))
    assert one["progress"]["best_fitness"] == two["progress"]["best_fitness"]
    (tmp_path / "cut" / "exp").mkdir(parents=True)
    (tmp_path / "two" / "epoch1.pt").rename(tmp_path / "cut/exp/last.pt")
    done = run_python("train.py", "--resume", "--project", tmp_path / "cut", "--workers", "1")
    assert "have changed since" not in done.stdout + done.stderr
    resumed = read_checkpoint(tmp_path / "cut/exp/last.pt")
    for other in (two, resumed):
        for part in ("model", "ema", "optimizer"):
            assert_same_content(one[part], other[part])
