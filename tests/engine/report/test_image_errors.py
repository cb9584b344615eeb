"""Errors by image, on cases whose outcome is known by construction."""

import numpy as np
import pytest

from engine.evaluation.analysis import CORRECT, IN_CROWD, KINDS, split_errors
from engine.evaluation.matching import match_detections
from engine.report.image_errors import ImageErrors, worst_images
from tests.helpers.scoring import make_ground_truth, make_table, random_case

CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(len(KINDS))
IDS = (30, 4, 100, 7, 1)  # not in the order of the images


def scene():
    """Returns five images: 0 has one error of each kind, 1 is perfect, 2 has a missed object, 3 is a background with
    two detections, 4 a background with none; an object of image 1 is crowd."""
    objects = [  # image, class, x, y, w, h
        (0, 0, 0, 0, 100, 100),
        (0, 1, 200, 0, 100, 100),
        (0, 0, 0, 200, 100, 100),
        (0, 1, 400, 400, 60, 60),
        (1, 0, 10, 10, 50, 50),
        (1, 1, 200, 200, 100, 100),
        (2, 1, 10, 10, 50, 50),
    ]
    rows = np.array(objects, float)
    crowd = np.zeros(len(rows), bool)
    crowd[5] = True
    image = rows[:, 0].astype(int)
    gt = make_ground_truth(
        rows[:, 2:],
        classes=rows[:, 1].astype(int),
        crowd=crowd,
        area=rows[:, 4] * rows[:, 5],
        image=image,
        num_images=5,
        num_classes=2,
        ids=IDS,
    )
    detections = [  # image, class, score, x1, y1, x2, y2, outcome
        (0, 0, 0.9, 0, 0, 100, 100, CORRECT),
        (0, 0, 0.8, 0, 0, 100, 98, DUPLICATE),
        (0, 0, 0.7, 200, 0, 300, 100, CLASS),  # of an object of class 1 that nothing finds
        (0, 0, 0.6, 0, 260, 100, 360, LOCATION),  # IoU 0.25
        (0, 0, 0.55, 430, 430, 490, 490, BOTH),  # IoU 1/7 with an object of class 1, which is thus missed
        (0, 1, 0.5, 150, 400, 180, 430, BACKGROUND),
        (1, 0, 0.95, 10, 10, 60, 60, CORRECT),
        (1, 1, 0.95, 210, 210, 290, 290, IN_CROWD),
        (3, 0, 0.4, 0, 0, 10, 10, BACKGROUND),
        (3, 1, 0.3, 50, 50, 80, 80, BACKGROUND),
        (4, 1, 0.01, 50, 50, 80, 80, None),  # below the threshold
    ]
    table = np.array([d[:7] for d in detections], float)
    kept = make_table(image=table[:, 0], boxes=table[:, 3:], scores=table[:, 2], classes=table[:, 1])
    return gt, kept, detections


def test_each_detection_has_its_outcome_in_its_image():
    gt, table, detections = scene()
    errors = ImageErrors.of(gt, table, 2, 0.25)
    found = {
        (int(i), int(c), round(float(s), 3)): int(o)
        for i, c, s, o in zip(errors.found.image, errors.found.classes, errors.found.scores, errors.found.outcome)
    }
    assert found == {d[:3]: d[7] for d in detections if d[7] is not None}
    objects = errors.objects
    missed = set(zip(objects.image[objects.missed].tolist(), objects.classes[objects.missed].tolist()))
    assert missed == {(0, 1), (2, 1)}
    expected = np.zeros((5, len(KINDS)), int)
    expected[0] = 1
    expected[2, MISSED] = 1
    expected[3, BACKGROUND] = 2
    np.testing.assert_array_equal(errors.counts(), expected)


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_error_split(seed: int):
    gt, table, classes = random_case(seed)
    errors = ImageErrors.of(gt, table, classes, -1.0)  # scores of 0 also count
    split = split_errors(match_detections(gt, table, classes))
    np.testing.assert_array_equal(errors.counts().sum(0), split.counts.sum(0))
    for kind in range(len(KINDS)):
        of_class = errors.all.classes[errors.all.kind == kind]
        np.testing.assert_array_equal(np.bincount(of_class, minlength=classes), split.counts[:, kind])


def test_worst_images_come_first_and_rare_errors_have_an_example():
    gt, table, _ = scene()
    errors = ImageErrors.of(gt, table, 2, 0.25)
    assert worst_images(errors, 10) == [0, 3, 2]
    assert worst_images(errors, 2) == [0, 3]  # of the other images' errors, most are in image 3
    nothing = make_table()
    assert worst_images(ImageErrors.of(gt, nothing, 2, 0.25), 10) == [0, 1, 2]
    assert [ImageErrors.of(gt, table, 2, least).backgrounds() for least in (0.25, 0.005, 0.5)] == [1, 2, 0]
    none = np.zeros(0, int)
    errors = ImageErrors.of(
        make_ground_truth(none, classes=none, area=none, image=none, num_images=2, num_classes=2), nothing, 2, 0.25
    )
    assert (worst_images(errors, 5), errors.backgrounds()) == ([], 0)
