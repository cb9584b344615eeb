"""Scoring only, compared with pycocotools: the same random detections of a large split, and equal AP.

    python -m benchmarks.metrics --images 5000 --detections 300

Reading files is excluded on both sides: the time of pycocotools starts when its objects are loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time

import numpy as np

from benchmarks.coco_scores import coco_ground_truth
from benchmarks.report import Comparison, show
from engine.evaluation.metrics import score_detections
from utils.structures import DetectionTable, GroundTruth


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.metrics", description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--detections", type=int, default=300, help="an image")
    parser.add_argument("--objects", type=int, default=7, help="an image")
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    gt, table = make_scene(options.images, options.detections, options.objects, options.classes)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.rounds):
        started = time.perf_counter()
        result = score_detections(gt, table, options.classes)
        seconds["ours"].append(time.perf_counter() - started)
        spent, stats = run_pycocotools(gt, table, options.classes)
        seconds["peer"].append(spent)
    ours = [
        *(result.metrics[name] for name in ("AP", "AP50", "AP75")),
        result.ap_small,
        result.ap_medium,
        result.ap_large,
    ]
    print(
        f"AP of ours {[round(v, 6) for v in ours]}, largest difference {np.abs(np.array(ours) - stats[:6]).max():.1e}"
    )
    title = f"Metrics, {options.images} images with {options.detections} detections, against pycocotools"
    show(title, [Comparison("scoring", "s", seconds["ours"], seconds["peer"], goal=20)], log=options.log)


def make_scene(images: int, detections: int, objects: int, classes: int) -> tuple[GroundTruth, DetectionTable]:
    """Objects, and detections of which some lie near an object of their class."""
    rng = np.random.default_rng(0)
    count = images * objects
    size = np.exp(rng.normal(4, 1, (count, 2))).clip(4, 400)
    boxes = np.concatenate([rng.uniform(0, 640 - size), size], 1)
    labels = rng.integers(0, classes, count)
    gt = GroundTruth(
        offsets=np.arange(images + 1) * objects,
        boxes_xywh_px=boxes,
        classes=labels,
        crowd=rng.random(count) < 0.01,
        area_px=boxes[:, 2:].prod(1),
        image_hw=np.full((images, 2), 640, np.int32),
        image_ids=tuple(range(1, images + 1)),
        category_ids=tuple(range(classes)),
    )
    found = images * detections
    image = np.repeat(np.arange(images), detections)
    source = image * objects + rng.integers(0, objects, found)
    near = boxes[source] * np.exp(rng.normal(0, 0.12, (found, 4)))
    is_right = rng.random(found) < 0.3
    table = DetectionTable(
        image_index=image,
        boxes_xyxy_px=np.concatenate([near[:, :2], near[:, :2] + near[:, 2:]], 1),
        scores=np.where(is_right, rng.beta(3, 2, found), rng.beta(1, 12, found)),
        classes=np.where(is_right, labels[source], rng.integers(0, classes, found)),
    )
    return gt, table


def run_pycocotools(gt: GroundTruth, table: DetectionTable, classes: int) -> tuple[float, np.ndarray]:
    """Seconds and the twelve figures."""
    from pycocotools.cocoeval import COCOeval

    truth = coco_ground_truth(gt, classes)
    boxes = np.concatenate([table.boxes_xyxy_px[:, :2], table.boxes_xyxy_px[:, 2:] - table.boxes_xyxy_px[:, :2]], 1)
    rows = np.column_stack([table.image_index + 1, boxes, table.scores, table.classes])
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
        started = time.perf_counter()
        evaluation.evaluate()
        evaluation.accumulate()
        seconds = time.perf_counter() - started
        evaluation.summarize()
    return seconds, evaluation.stats


if __name__ == "__main__":
    main()
