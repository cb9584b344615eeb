"""Scores by object size compared with pycocotools."""

import numpy as np
import pytest

from engine.evaluation.analysis import SIZES, score_sizes
from engine.evaluation.matching import match_detections
from engine.evaluation.metrics import score_detections
from engine.evaluation.report import size_rows
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table, random_case


@pytest.mark.parametrize("seed", range(5))
def test_ap_and_ar_by_size_equal_pycocotools(seed):
    gt, table, num_classes = random_case(seed, crowd_share=(0, 0.15, 0.6)[seed % 3], rounding=2)
    stats, precision = coco_evaluate(gt, table)
    sizes = score_sizes(match_detections(gt, table, num_classes))
    expected = precision.mean((0, 1))  # (C, A); -1 where there is no object
    np.testing.assert_allclose(np.where(np.isnan(sizes.ap), -1, sizes.ap), expected, atol=1e-12)
    for t, ours in ((0, sizes.ap50), (5, sizes.ap75)):
        np.testing.assert_allclose(np.where(np.isnan(ours), -1, ours), precision[t].mean(0), atol=1e-12)
    rows = {(name, size): scores for name, size, _, scores in size_rows(sizes, list("abcd"))}
    means = np.array([rows["all", size] for size in SIZES])
    np.testing.assert_allclose(np.nan_to_num(means[:, 2], nan=-1), stats[[0, 3, 4, 5]], atol=1e-12)
    np.testing.assert_allclose(np.nan_to_num(means[:, 3], nan=-1), stats[[8, 9, 10, 11]], atol=1e-12)
    assert len(rows) == 4 * (num_classes + 1)


def test_size_ranges_partition_the_objects():
    gt, table, num_classes = random_case(1)
    sizes = score_sizes(match_detections(gt, table, num_classes))
    result = score_detections(gt, table, num_classes)
    np.testing.assert_array_equal(sizes.targets[:, 0], result.class_targets)
    np.testing.assert_array_equal(sizes.ap[:, 0], result.class_ap)
    assert (sizes.targets[:, 1:].sum(1) >= sizes.targets[:, 0]).all()  # an object on a border counts in both ranges


@pytest.mark.filterwarnings("error")
def test_sizes_without_objects_are_nan():
    nothing = np.zeros(0, dtype=int)
    gt = make_ground_truth(np.zeros((0, 4)), nothing, nothing > 0, np.zeros(0), nothing, 2, 3)
    sizes = score_sizes(match_detections(gt, make_table([0], [[0, 0, 5, 5]], [0.5], [1]), 3))
    assert np.isnan(sizes.ap).all()
    assert np.isnan(sizes.recall).all()
