"""Resampled AP against pycocotools on repeated images."""

import numpy as np
import pytest

from benchmarks.accuracy.bootstrap import draw_images, resampled_ap
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table, random_case

pytestmark = pytest.mark.benchmarks


def repeated(gt, table, times):
    """Returns the data set that holds image i ``times[i]`` times, the copies next to each other."""
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    copies = [i for i, count in enumerate(times) for _ in range(count)]
    objects = [np.flatnonzero(image == i) for i in copies]
    rows = [np.flatnonzero(table.image_index == i) for i in copies]
    number = np.arange(len(copies))
    at = np.concatenate(objects)
    found = np.concatenate(rows)
    many = make_ground_truth(
        gt.boxes_xywh_px[at],
        classes=gt.classes[at],
        crowd=gt.crowd[at],
        area=gt.area_px[at],
        image=np.repeat(number, [len(o) for o in objects]),
        num_images=len(copies),
        num_classes=len(gt.category_ids),
    )
    image_index = np.repeat(number, [len(r) for r in rows])
    return many, make_table(
        image=image_index, boxes=table.boxes_xyxy_px[found], scores=table.scores[found], classes=table.classes[found]
    )


@pytest.mark.parametrize("seed", range(4))
def test_ap_of_a_draw_equals_pycocotools_on_the_repeated_images(seed):
    gt, table, num_classes = random_case(seed, per_image=60)
    rank = np.random.default_rng(seed).permutation(len(table.scores))
    table = make_table(image=table.image_index, boxes=table.boxes_xyxy_px, scores=1 / (2 + rank), classes=table.classes)
    times = draw_images(gt.num_images, 3, seed)
    ap = resampled_ap(gt, table, num_classes, times)
    for draw, of_classes in zip(times, ap):
        many = repeated(gt, table, draw)
        _, precision = coco_evaluate(*many)
        expected = precision[:, :, :, 0].mean((0, 1))
        np.testing.assert_allclose(np.where(np.isnan(of_classes), -1, of_classes), expected, rtol=0, atol=1e-12)
