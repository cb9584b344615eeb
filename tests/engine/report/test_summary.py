"""Each sentence about a model has the numbers that it is about."""

from __future__ import annotations

import numpy as np
import pytest

from engine.evaluation.analysis import BACKGROUND, CLASS, LOCATION, MISSED
from engine.evaluation.metrics import score_detections
from engine.evaluation.result import Evaluation
from engine.report.summary import error_sentences, small_boxes, verdict
from tests.engine.report.known_results import errors_of, index, scored
from tests.helpers.scoring import make_ground_truth, make_table
from utils.boxes import xywh_to_xyxy


def test_errors_are_named_by_their_cost_with_their_number_and_class():
    result = scored(74, 50)
    result.confusion[1, 0] = 2  # a as b
    result.confusion[0, 2] = 12
    counts = {(0, MISSED): 22, (1, MISSED): 3, (1, CLASS): 2, (0, BACKGROUND): 12, (0, LOCATION): 5}
    errors = errors_of({MISSED: 0.2, BACKGROUND: 0.1, CLASS: 0.02, LOCATION: 0.009}, counts)
    missed, false, confused, weakest = error_sentences(result, errors, ["triangle", "ball"])
    assert {"25", "124", "triangle", "(22"} < set(missed.split())
    assert {"12", "triangle"} < set(false.split())
    assert "(12 of 12)" in false  # of its detections, not of its objects
    assert {"triangle", "ball", "(2"} < set(confused.split())
    assert "ball" in weakest
    assert "0.250" in weakest


def evaluation(images: int, found: dict[int, int], objects: int = 20) -> Evaluation:
    """Returns the evaluation of ``images`` with ``objects`` of each class on each, 100 px wide. So many of each class
    are ``found``, and there is a false detection for each class."""
    boxes = np.array([[120.0 * n, 200.0 * c, 100, 100] for c in found for n in range(objects)])
    classes = np.repeat(list(found), objects)
    gt = make_ground_truth(
        np.tile(boxes, (images, 1)),
        classes=np.tile(classes, images),
        area=np.full(images * len(boxes), 1e4),
        image=np.repeat(np.arange(images), len(boxes)),
        num_images=images,
        num_classes=len(found),
    )
    rows = np.concatenate([np.flatnonzero(classes == c)[:number] for c, number in found.items()])
    far = np.array([[5000.0, 200 * c, 100, 100] for c in found])
    corners = np.r_[xywh_to_xyxy(boxes[rows]), xywh_to_xyxy(far)]
    table = make_table(
        image=np.repeat(np.arange(images), len(corners)),
        boxes=np.tile(corners, (images, 1)),
        scores=[0.9] * (images * len(corners)),
        classes=np.tile(np.r_[classes[rows], list(found)], images),
    )
    return Evaluation(*score_detections(gt, table, len(found)), for_ap=table, detected=table, preview=None)


def verdict_of(scored: Evaluation) -> list[str]:
    """Returns the sentences about images that all have a label file."""
    return list(verdict(scored, index([1, 1], 50.0, images=scored.result.num_images)))


def test_the_verdict_counts_what_is_found():
    text = " ".join(verdict_of(evaluation(10, {0: 18, 1: 19})))
    assert "370 of 400 objects (92%)" in text
    assert "370 of 390 detections" in text
    assert "nothing about other images" not in text


@pytest.mark.parametrize("images", [1, 2, 9])
def test_few_validation_images_prove_nothing(images):
    assert "nothing about other images" in verdict_of(evaluation(images, {0: 20}))[-1]


@pytest.mark.parametrize(
    ("side", "tile", "words"),
    [
        (16.0, 0, ()),
        (8.0, 0, ("--imgsz 640 ",)),
        (15.9, 0, ("--imgsz 352 ",)),
        (2.4, 0, ("tile: 640",)),  # a size at which nobody trains is not advised
        (8.0, 320, ("--imgsz 640 ", "tile: 160")),
        (2.4, 320, ("tile: 32",)),
    ],
)
def test_small_boxes_are_named_with_a_size_at_which_they_are_not(side, tile, words):
    text = small_boxes(index([10], side, tile=tile), imgsz=320, stride=32)
    assert bool(text) == bool(words)
    assert all(word in text for word in words)
