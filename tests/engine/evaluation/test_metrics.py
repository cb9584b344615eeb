"""Scoring compared with pycocotools, brute force and closed forms."""

import gzip
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

from engine.evaluation.matching import match_detections
from engine.evaluation.metrics import CONFIDENCES, confusion_matrix, score_detections
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table, random_case
from utils.boxes import xywh_to_xyxy


def stats_of(result):
    """Returns the results in pycocotools' order."""
    overall = [result.metrics[name] for name in ("AP", "AP50", "AP75")]
    return np.array([*overall, result.ap_small, result.ap_medium, result.ap_large])


def assert_equals_coco(gt, table, num_classes):
    stats, precision = coco_evaluate(gt, table)
    result = score_detections(gt, table, num_classes).result
    ours = stats_of(result)
    np.testing.assert_allclose(np.where(np.isnan(ours), -1, ours), stats[:6], rtol=0, atol=1e-12)
    for t, name in ((None, "AP"), (0, "AP50"), (5, "AP75")):
        ours = result.class_metrics[name]
        values = precision[:, :, :, 0] if t is None else precision[t : t + 1, :, :, 0]
        np.testing.assert_allclose(np.where(np.isnan(ours), -1, ours), values.mean((0, 1)), rtol=0, atol=1e-12)
    ours = np.where(np.isnan(result.pr_precision), -1, result.pr_precision)
    np.testing.assert_array_equal(ours, precision[0, :, :, 0].T)
    return result


@pytest.mark.parametrize("seed", range(8))
def test_ap_equals_pycocotools_on_random_detections(seed):
    gt, table, num_classes = random_case(seed, crowd_share=(0, 0.15, 0.6)[seed % 3], rounding=(1, 2, 9)[seed % 3])
    group = table.image_index * num_classes + table.classes
    assert np.bincount(group).max() > 100
    assert_equals_coco(gt, table, num_classes)


def test_tied_scores_rank_by_image_id():
    gt, table, num_classes = random_case(5, rounding=1)
    ids = np.random.default_rng(0).permutation(gt.num_images) + 100
    assert_equals_coco(replace(gt, image_ids=tuple(ids.tolist())), table, num_classes)


@pytest.mark.parametrize(
    ("name", "first_id", "expected"),
    [
        ("yolov8n", 1, (0.4713, 0.6266, 0.5064, 0.2681, 0.5650, 0.6792)),
        pytest.param("yolov5n", 0, (0.3594, 0.5568, 0.3550, 0.1946, 0.4635, 0.5026), marks=pytest.mark.slow),
    ],
)
def test_ap_equals_pycocotools_on_detections_of_public_checkpoints(shared, name, first_id, expected):
    predictions = shared / f"golden/{name}_coco128_predictions.json.gz"
    annotations = shared / "datasets/coco128/annotations/instances_train2017.json"
    with gzip.open(predictions) as file:
        rows = json.load(file)
    labels = json.loads(annotations.read_text())
    ids = [image["id"] for image in labels["images"]]
    categories = sorted(c["id"] for c in labels["categories"])
    image_of = {v: i for i, v in enumerate(ids)}
    class_of = {v: i for i, v in enumerate(categories)}
    notes = labels["annotations"]
    boxes, crowd, area = (np.array([a[key] for a in notes]) for key in ("bbox", "iscrowd", "area"))
    classes = np.array([class_of[a["category_id"]] for a in notes])
    image = np.array([image_of[a["image_id"]] for a in notes])
    gt = make_ground_truth(
        boxes,
        classes=classes,
        crowd=crowd,
        area=area,
        image=image,
        num_images=len(ids),
        num_classes=len(categories),
        ids=ids,
    )
    assert gt.crowd.any()
    image, kinds = zip(*((image_of[int(r["image_id"])], r["category_id"] - first_id) for r in rows))
    table = make_table(
        image=image,
        boxes=xywh_to_xyxy(np.array([r["bbox"] for r in rows])),
        scores=[r["score"] for r in rows],
        classes=kinds,
    )
    assert np.bincount(table.image_index).max() > 100
    assert np.unique(table.scores).size < table.scores.size
    result = assert_equals_coco(gt, table, len(categories))
    np.testing.assert_allclose(stats_of(result), expected, atol=5e-5)


def test_confidence_curves_equal_counting():
    gt, table, num_classes = random_case(1, crowd_share=0)
    gt = replace(gt, max_det=10**6)
    result = score_detections(gt, table, num_classes).result
    # Without crowd every detection above a confidence is a true or a false positive; the true ones are those that
    # the greedy assignment finds among these detections alone.
    for step in (0, 200, 555, 900):
        c = result.curve_confidence[step]
        keep = table.scores > c
        part = table.take(keep)
        total = np.bincount(part.classes, minlength=num_classes)
        alone = score_detections(gt, part, num_classes).result
        np.testing.assert_allclose(alone.curve_recall[:, 0], result.curve_recall[:, step])
        true = result.curve_recall[:, step] * result.class_targets
        some = (total > 0) & (result.class_targets > 0)
        np.testing.assert_allclose(result.curve_precision[some, step], (true / np.maximum(total, 1))[some])
    f1 = 2 * result.curve_precision * result.curve_recall
    f1 = np.nan_to_num(f1[:-1] / np.maximum(result.curve_precision + result.curve_recall, 1e-300)[:-1])
    # The threshold is the middle of the run of confidences that lose at most one standard error of the best F1.
    mean = f1.mean(0)
    error = np.sqrt(mean.max() * (1 - mean.max()) / result.class_targets.sum())
    first = last = int(mean.argmax())
    while first > 0 and mean[first - 1] >= mean.max() - error:
        first -= 1
    while last < len(mean) - 1 and mean[last + 1] >= mean.max() - error:
        last += 1
    middle = (first + last) // 2
    assert first < middle < last
    assert result.threshold == result.curve_confidence[middle]
    assert result.metrics["f1"] == pytest.approx(mean[middle])
    assert result.metrics["precision"] == pytest.approx(np.nanmean(result.class_metrics["precision"]))


@pytest.mark.parametrize("score", [1.0, CONFIDENCES[928], CONFIDENCES[51]])
def test_a_score_of_exactly_the_threshold_is_not_above_it(score):
    """detect.py shows what is above the threshold: one that equals the best score would show nothing."""
    objects = np.array([[0, 0, 50, 50]], float)
    gt = make_ground_truth(
        objects, classes=np.zeros(1, int), area=np.full(1, 2500), image=np.zeros(1, int), num_images=1, num_classes=1
    )
    result = score_detections(
        gt, make_table(image=[0], boxes=xywh_to_xyxy(objects), scores=[score], classes=[0]), 1
    ).result
    assert result.metrics["f1"] == 1
    assert result.threshold < score
    assert result.curve_recall[0, np.searchsorted(CONFIDENCES, score)] == 0


def test_detections_that_are_too_bad_for_a_threshold_are_shown_above_the_default():
    zero = np.zeros(1, int)
    gt = make_ground_truth(
        np.array([[0, 0, 9, 9]]), classes=zero, area=np.array([81]), image=zero, num_images=1, num_classes=1
    )
    boxes = [[0, 0, 9, 9], *([50, 50, 60, 60] for _ in range(20))]
    scores = [0.08, *np.linspace(0.1, 0.4, 20)]
    result = score_detections(gt, make_table(image=[0] * 21, boxes=boxes, scores=scores, classes=[0] * 21), 1).result
    assert (result.threshold, result.shown_confidence) == (None, 0.25)
    assert (result.metrics["recall"], result.confusion.tolist()) == (0, [[0, 10], [1, 0]])
    assert result.best_f1[0][0] == pytest.approx(2 / 22)


def test_no_threshold_is_below_a_twentieth():
    """After an epoch, the best F1 was at 0.000, where detect.py drew 139 boxes on a photo."""
    zero = np.zeros(3, int)
    objects = np.array([[0, 0, 9, 9], [20, 0, 9, 9], [40, 0, 9, 9]])
    gt = make_ground_truth(objects, classes=zero, area=np.full(3, 81), image=zero, num_images=1, num_classes=1)

    def found(*scores):
        table = make_table(image=[0] * 3, boxes=xywh_to_xyxy(objects.astype(float)), scores=scores, classes=[0] * 3)
        return score_detections(gt, table, 1).result

    some = found(0.06, 0.01, 0.02)  # all that is found above 0.05, not all that is found
    assert 0.05 <= some.threshold < 0.06
    assert (some.metrics["recall"], some.best_f1[0][0]) == (pytest.approx(1 / 3), 1)
    none = found(0.04, 0.01, 0.02)
    assert (none.threshold, none.shown_confidence) == (None, 0.25)


@pytest.mark.parametrize("seed", range(8))
def test_the_confusion_matrix_has_the_counts_of_precision_and_recall(seed):
    gt, table, num_classes = random_case(seed, crowd_share=(0, 0.15)[seed % 2])
    result = score_detections(gt, table, num_classes).result
    correct = result.confusion.diagonal()[:-1]
    objects = result.confusion[:, :-1].sum(0)
    np.testing.assert_array_equal(objects, np.bincount(gt.classes[~gt.crowd], minlength=num_classes))
    has_objects = objects > 0
    recall = result.class_metrics["recall"][has_objects]
    np.testing.assert_allclose(correct[has_objects] / objects[has_objects], recall, rtol=1e-12)
    detections = result.confusion[:-1].sum(1)
    is_scored = has_objects & (detections > 0)
    precision = result.class_metrics["precision"]
    np.testing.assert_allclose(correct[is_scored] / detections[is_scored], precision[is_scored], rtol=1e-12)
    assert np.isnan(precision[~is_scored]).all()
    assert result.confusion[-1, -1] == 0
    assert correct.any()


def test_the_confusion_matrix_ignores_detections_in_crowd():
    """There are a crowd region of class 0 and an object of class 1, which is detected as 0."""
    objects = np.array([[0, 0, 100, 100], [200, 200, 50, 50]])
    crowd = np.array([True, False])
    gt = make_ground_truth(
        objects,
        classes=np.arange(2),
        crowd=crowd,
        area=np.array([1e4, 2500]),
        image=np.zeros(2, int),
        num_images=1,
        num_classes=2,
    )
    boxes = [[10, 10, 30, 30], [10, 10, 30, 30], [200, 200, 250, 250], [300, 300, 320, 320]]
    table = make_table(image=[0] * 4, boxes=boxes, scores=[0.9] * 4, classes=[0, 1, 0, 1])
    # One is in another class's crowd, one where nothing is.
    expected = [[0, 1, 0], [0, 0, 2], [0, 0, 0]]
    np.testing.assert_array_equal(confusion_matrix(match_detections(gt, table, 2)), expected)


@pytest.mark.parametrize(
    ("num_images", "objects", "detections"), [(0, 0, 0), (3, 0, 0), (3, 4, 0), (3, 0, 5), (3, 4, 5)]
)
def test_empty_input_scores_nan_or_zero_without_warnings(num_images, objects, detections):
    boxes = np.tile([10.0, 10, 20, 20], (objects, 1))
    zeros = np.zeros(objects, dtype=np.int64)
    gt = make_ground_truth(boxes, classes=zeros, area=zeros + 400, image=zeros, num_images=num_images, num_classes=2)
    table = make_table(
        image=[1] * detections,
        boxes=np.tile([0.0, 0, 5, 5], (detections, 1)),
        scores=[0.5] * detections,
        classes=[1] * detections,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = score_detections(gt, table, 2).result
    if objects:
        assert {*result.metrics.values()} == {0}
        assert result.class_targets.tolist() == [objects, 0]
        assert np.isnan(result.class_ap[1])
    else:
        assert np.isnan(list(result.metrics.values())).all()
        assert np.isnan(result.ap)
    assert result.confusion[:-1].sum() == detections
    assert result.confusion.shape == (3, 3)
    assert result.num_images == num_images
