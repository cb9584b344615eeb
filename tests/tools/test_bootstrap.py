"""Resampled AP against pycocotools on repeated images, and the coverage of the intervals against a known population."""

import numpy as np
import pytest

from engine.evaluation.metrics import score_detections
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table, random_case
from tools import bootstrap
from tools.bootstrap import (
    class_outcomes,
    difference_interval,
    draw_images,
    mean_ap,
    resampled_ap,
)


def repeated(gt, table, times):
    """The data set that holds image i ``times[i]`` times, the copies next to each other."""
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    copies = [i for i, count in enumerate(times) for _ in range(count)]
    objects = [np.flatnonzero(image == i) for i in copies]
    rows = [np.flatnonzero(table.image_index == i) for i in copies]
    number = np.arange(len(copies))
    at, found = np.concatenate(objects), np.concatenate(rows)
    many = make_ground_truth(
        gt.boxes_xywh_px[at],
        gt.classes[at],
        gt.crowd[at],
        gt.area_px[at],
        np.repeat(number, [len(o) for o in objects]),
        len(copies),
        len(gt.category_ids),
    )
    image_index = np.repeat(number, [len(r) for r in rows])
    return many, make_table(image_index, table.boxes_xyxy_px[found], table.scores[found], table.classes[found])


@pytest.mark.parametrize("seed", range(4))
def test_ap_of_a_draw_equals_pycocotools_on_the_repeated_images(seed):
    gt, table, num_classes = random_case(seed, per_image=60)
    rank = np.random.default_rng(seed).permutation(len(table.scores))
    table = make_table(table.image_index, table.boxes_xyxy_px, 1 / (2 + rank), table.classes)
    times = draw_images(gt.num_images, 3, seed)
    ap = resampled_ap(class_outcomes(gt, table, num_classes), times)
    for draw, of_classes in zip(times, ap):
        many = repeated(gt, table, draw)
        _, precision = coco_evaluate(*many)
        expected = precision[:, :, :, 0].mean((0, 1))
        np.testing.assert_allclose(np.where(np.isnan(of_classes), -1, of_classes), expected, rtol=0, atol=1e-12)


def test_each_image_once_is_the_metric_itself():
    gt, table, num_classes = random_case(7)
    once = np.ones((1, gt.num_images), np.int64)
    ap = resampled_ap(class_outcomes(gt, table, num_classes), once)
    assert mean_ap(ap)[0] == pytest.approx(score_detections(gt, table, num_classes).ap, abs=1e-12)


def test_chunks_change_nothing(monkeypatch):
    gt, table, num_classes = random_case(2)
    outcomes, times = class_outcomes(gt, table, num_classes), draw_images(gt.num_images, 20)
    whole = resampled_ap(outcomes, times)
    monkeypatch.setattr(bootstrap, "_CELLS", 1)
    np.testing.assert_array_equal(resampled_ap(outcomes, times), whole)


def test_without_detections_or_objects():
    gt, _, num_classes = random_case(1)
    times = draw_images(gt.num_images, 5)
    nothing = make_table([], [], [], [])
    ap = resampled_ap(class_outcomes(gt, nothing, num_classes), times)
    assert ((ap == 0) | np.isnan(ap)).all()
    assert np.isnan(ap[:, -1]).all()  # the class without objects
    assert np.isnan(difference_interval(np.full(5, np.nan), 12)).all()


def population(seed, images, skill):
    """Objects of two classes and the detections of two detectors, of which one finds ``skill`` more of them."""
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 6, images)
    image = np.repeat(np.arange(images), count)
    boxes = np.c_[rng.uniform(0, 300, (image.size, 2)), rng.uniform(20, 120, (image.size, 2))]
    classes = rng.integers(0, 2, image.size)
    gt = make_ground_truth(boxes, classes, np.zeros(image.size, bool), boxes[:, 2] * boxes[:, 3], image, images, 2)
    hardness = rng.uniform(0, 1, images)[image]  # the same images are hard for both
    tables = []
    for more in (0.0, skill):
        found = rng.uniform(0, 1, image.size) < 0.85 - 0.5 * hardness + more
        at = boxes[found]
        shift = rng.normal(0, 0.06, (len(at), 4)) * np.tile(at[:, 2:], 2)
        xyxy = np.c_[at[:, :2], at[:, :2] + at[:, 2:]] + shift
        false = rng.uniform(0, 1, image.size) < 0.3
        anywhere = rng.uniform(0, 300, (false.sum(), 2))
        xyxy = np.r_[xyxy, np.c_[anywhere, anywhere + rng.uniform(20, 120, (false.sum(), 2))]]
        scores = np.r_[rng.beta(4, 2, len(at)), rng.beta(2, 4, false.sum())]
        tables.append(
            make_table(np.r_[image[found], image[false]], xyxy, scores, np.r_[classes[found], classes[false]])
        )
    return gt, tables


def coverage(images, trials, draws):
    """How often the interval for the difference of two detectors holds that of the population it is drawn from."""
    whole = 20_000
    gt, tables = population(0, whole, 0.05)
    outcomes = [class_outcomes(gt, table, 2) for table in tables]
    once = np.ones((1, whole), np.int64)
    truth = np.subtract(*(mean_ap(resampled_ap(o, once))[0] for o in outcomes[::-1]))
    covered = 0
    for trial in range(trials):
        times = np.zeros((draws, whole), np.int64)
        chosen = np.random.default_rng(trial).choice(whole, images, replace=False)
        times[:, chosen] = draw_images(images, draws, trial)
        local = [restrict(o, chosen) for o in outcomes]
        first, second = (mean_ap(resampled_ap(o, times[:, chosen])) for o in local)
        interval = difference_interval(second - first, images)
        covered += interval.low <= truth <= interval.high
    return covered / trials


def restrict(outcomes, chosen):
    """The outcomes on some of the images, which are numbered anew."""
    number = np.full(len(outcomes[0].targets), -1)
    number[np.sort(chosen)] = np.arange(len(chosen))
    parts = []
    for o in outcomes:
        keep = number[o.image] >= 0
        position = np.cumsum(keep) - 1
        among = keep[o.overlapping]
        parts.append(
            o._replace(
                image=number[o.image[keep]],
                counted=o.counted[keep],
                overlapping=position[o.overlapping[among]],
                true_positive=o.true_positive[among],
                ignored=o.ignored[among],
                targets=o.targets[np.sort(chosen)],
            )
        )
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("images", [60, 200])
def test_intervals_hold_the_difference_of_the_population_in_95_of_100_cases(images):
    assert 0.93 <= coverage(images, trials=1000, draws=400) <= 0.97


def test_intervals_hold_the_difference_of_the_population():
    assert coverage(100, trials=60, draws=200) >= 0.85
