"""Random detections and objects for the tests of scoring, and their pycocotools scores."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import numpy as np
import pytest

from engine.evaluation.metrics import score_detections
from engine.evaluation.result import EvalResult, Evaluation
from utils.boxes import xywh_to_xyxy, xyxy_to_xywh
from utils.detections import DetectionTable
from utils.labels import GroundTruth


def evaluation_of(result: EvalResult) -> Evaluation:
    """Returns the evaluation with this result and no detections."""
    none = make_table()
    no_objects = make_ground_truth(
        none.boxes_xyxy_px, classes=none.classes, area=none.scores, image=none.classes, num_images=0, num_classes=1
    )
    _, sizes, matches, shown = score_detections(no_objects, none, 1)
    return Evaluation(result, sizes, matches, shown, for_ap=none, detected=none, preview=None)


def make_result(targets=(5, 0, 3, 1)) -> EvalResult:
    """Returns scores with smooth curves of classes that have ``targets`` objects."""
    n = len(targets)
    confidence = np.linspace(0, 1, 200)
    present = np.array(targets) > 0
    per_class = np.where(present, 0.6, np.nan)
    recall = np.where(present[:, None], 1 - confidence**2, np.nan)
    return EvalResult(
        metrics={"AP50": 0.7, "f1": 0.5}, class_metrics={"AP50": per_class}, threshold=0.4,
        shown_confidence=0.4, ap_small=np.nan,
        ap_medium=0.5, ap_large=np.nan, class_targets=np.array(targets), confusion=np.eye(n + 1, dtype=int),
        curve_confidence=confidence,
        curve_precision=np.where(present[:, None], 0.5 + confidence / 2, np.nan), curve_recall=recall,
        pr_recall=np.linspace(0, 1, 101), pr_precision=np.where(present[:, None], np.linspace(1, 0, 101), np.nan),
        num_images=4,
    )  # fmt: skip


def make_ground_truth(boxes, *, classes, area, image, num_images, num_classes, crowd=None, ids=None):
    """Returns ground truth with objects in any order: ``boxes`` (N, 4) x, y, w, h in pixels, ``image`` (N,) their
    images. Without ``crowd`` none is a crowd region, and without ``ids`` the images are numbered from 1."""
    crowd = np.zeros(len(image), bool) if crowd is None else crowd
    order = np.argsort(image, kind="stable")
    return GroundTruth(
        offsets=np.searchsorted(image[order], np.arange(num_images + 1)).astype(np.int64),
        boxes_xywh_px=boxes[order].astype(np.float64).reshape(-1, 4),
        classes=classes[order].astype(np.int64),
        crowd=crowd[order].astype(bool),
        area_px=area[order].astype(np.float64),
        image_hw=np.full((num_images, 2), 512, dtype=np.int32),
        image_ids=tuple(range(1, num_images + 1)) if ids is None else tuple(ids),
        category_ids=tuple(range(1, num_classes + 1)),
    )


def make_table(*, image=(), boxes=(), scores=(), classes=()):
    """Returns detections: ``boxes`` (N, 4) x1, y1, x2, y2 in pixels, ``image`` (N,) the images that they are in."""
    return DetectionTable(
        image_index=np.asarray(image, dtype=np.int64),
        boxes_xyxy_px=np.asarray(boxes, dtype=np.float64).reshape(-1, 4),
        scores=np.asarray(scores, dtype=np.float64),
        classes=np.asarray(classes, dtype=np.int64),
    )


def reference_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the IoU of two boxes x1, y1, x2, y2."""
    inside = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside
    return inside / union if union > 0 else 0.0


def coco_evaluate(gt, table):
    """Returns pycocotools' stats (12,) and precision (T, R, C, A) for the same boxes. ``table``: may be a file."""
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    reference = coco.COCO()
    reference.dataset = {
        "info": {},
        "images": [{"id": i} for i in gt.image_ids],
        "categories": [{"id": c} for c in gt.category_ids],
        "annotations": [
            {
                "id": n + 1,
                "image_id": gt.image_ids[image[n]],
                "category_id": gt.category_ids[gt.classes[n]],
                "bbox": gt.boxes_xywh_px[n].tolist(),
                "area": float(gt.area_px[n]),
                "iscrowd": int(gt.crowd[n]),
            }
            for n in range(len(gt.classes))
        ],
    }
    predictions = str(table)
    if isinstance(table, DetectionTable):
        ids = np.array(gt.image_ids)[table.image_index]
        kinds = np.array(gt.category_ids)[table.classes]
        rows = zip(ids.tolist(), kinds.tolist(), xyxy_to_xywh(table.boxes_xyxy_px).tolist(), table.scores.tolist())
        predictions = [dict(zip(("image_id", "category_id", "bbox", "score"), row)) for row in rows]
    with contextlib.redirect_stdout(io.StringIO()):
        reference.createIndex()
        evaluation = cocoeval.COCOeval(reference, reference.loadRes(predictions), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats, evaluation.eval["precision"][..., -1]


def random_case(seed, num_images=12, num_classes=4, crowd_share=0.15, per_image=200, rounding=2):
    """Returns ground truth, detections and the number of classes. There are objects of all sizes, crowd, duplicates,
    exact copies, ties, more than 100 detections of a class in an image, images without objects or detections, and a
    class without objects."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 25, num_images)
    count[0] = 0
    image = np.repeat(np.arange(num_images), count)
    size = np.exp(rng.uniform(np.log(2), np.log(250), (image.size, 2)))
    boxes = np.round(np.c_[rng.uniform(0, 260, (image.size, 2)), size], 1)
    if image.size > 6:
        boxes[3], boxes[5] = boxes[2], boxes[2]  # equal boxes: equal IoUs
        boxes[4, 2:] = 32.0  # an area exactly on the border of two ranges
    classes = rng.integers(0, num_classes - 1, image.size)  # the last class has none
    crowd = rng.random(image.size) < crowd_share
    area = np.where(rng.random(image.size) < 0.5, boxes[:, 2] * boxes[:, 3], boxes[:, 2] * boxes[:, 3] * 0.6)
    gt = make_ground_truth(
        boxes, classes=classes, crowd=crowd, area=area, image=image, num_images=num_images, num_classes=num_classes
    )

    rows = rng.integers(0, image.size, per_image * num_images // 2)
    near = boxes[rows] + rng.normal(0, 1, (rows.size, 4)) * boxes[rows][:, [2, 3, 2, 3]] * rng.choice([0, 0.1, 0.3])
    near[: rows.size // 8] = boxes[rows[: rows.size // 8]]  # IoU exactly 1
    det_image = np.r_[image[rows], rng.integers(0, num_images - 1, rows.size)]
    far = np.c_[rng.uniform(0, 400, (rows.size, 2)), rng.uniform(1, 120, (rows.size, 2))]
    det_boxes = np.r_[near, far]
    det_boxes[:, 2:] = np.maximum(det_boxes[:, 2:], 0)
    det_classes = np.r_[classes[rows], rng.integers(0, num_classes, rows.size)]
    det_classes[det_image == 2] = 0  # a crowded image: far more than 100 of one class
    scores = np.round(rng.random(det_image.size), rounding)  # many ties, within images and across them
    shuffle = rng.permutation(det_image.size)
    table = make_table(
        image=det_image[shuffle],
        boxes=xywh_to_xyxy(det_boxes)[shuffle],
        scores=scores[shuffle],
        classes=det_classes[shuffle],
    )
    return gt, table, num_classes
