"""Labels on the canvases of augmented samples, and the limits below which they are dropped."""

from __future__ import annotations

import numpy as np
import pytest

from data.augment.labels import MAX_ASPECT, is_worth_keeping, transform_labels
from data.augment.projection import project_boxes, project_points


def test_small_thin_and_hidden_boxes_are_dropped():
    boxes = np.array([[0, 0, 10, 10], [0, 0, 1.9, 10], [0, 0, 10, 1.9], [0, 0, 202, 2], [0, 0, 200, 2]])
    full = np.array([100, 19, 19, 404, 400.0])
    assert MAX_ASPECT == 100
    assert is_worth_keeping(boxes, full).tolist() == [True, False, False, False, True]
    assert is_worth_keeping(np.array([[0, 0, 3, 3]] * 2), np.array([89.0, 91.0])).tolist() == [True, False]


def moved(patches: list, canvas_hw: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """`transform_labels` of patches given as labels, source size, region, matrix."""
    labels, sizes, regions, matrices = zip(*patches)
    owner = np.repeat(np.arange(len(patches)), [len(rows) for rows in labels])
    places = {"source_hw": np.array(sizes), "regions": np.array(regions), "matrices": np.array(matrices)}
    return transform_labels(np.concatenate(labels), owner, **places, canvas_hw=canvas_hw)


def test_labels_are_clipped_to_region_and_canvas():
    labels = np.array([[1, 0.5, 0.5, 0.5, 0.5], [2, 0.05, 0.05, 0.1, 0.1]], np.float32)
    patch = ((100, 100), (30, 30, 100, 100), np.diag([2.0, 2.0, 1.0]))
    rows, owner = moved([(labels[:0], *patch), (labels, *patch)], (120, 120))
    np.testing.assert_allclose(rows, [[1, 60, 60, 120, 120]])
    assert owner.tolist() == [1]
    assert moved([(labels[:0], *patch)], (120, 120))[0].shape == (0, 5)


def test_visible_pieces_of_regions_to_ignore_are_kept():
    """Without them, objects in the rest of the region would count as background."""
    thin = [0.5, 0.5, 0.01, 0.5]
    cut_off = [0.99, 0.5, 0.5, 0.5]  # 26 of 50 pixels are in the image, one of them in the patch
    outside = [0.1, 0.1, 0.1, 0.1]
    labels = np.array([[class_id, *box] for box in (thin, cut_off, outside) for class_id in (-1, 0)])
    rows, _ = moved([(labels, (100, 100), (40, 0, 75, 100), np.eye(3))], (100, 100))
    np.testing.assert_allclose(rows, [[-1, 49.5, 25, 50.5, 75], [-1, 74, 25, 75, 75]])


@pytest.mark.parametrize("tilt", [0.0, 1e-3])
@pytest.mark.parametrize("shear", [0.0, 0.3])
def test_a_batch_of_patches_equals_single_patches_and_hulls_contain_the_corners(tilt, shear):
    rng = np.random.default_rng(1)
    patches = []
    for count in (3, 0, 5, 1):
        matrix = np.diag([*rng.uniform(-2, 2, 2), 1.0])
        matrix[:2, 2] = rng.uniform(0, 200, 2)
        matrix[0, 1] = shear
        matrix[2, 0] = tilt
        labels = np.concatenate([rng.integers(0, 9, (count, 1)), rng.uniform(0.1, 0.5, (count, 4))], 1)
        patches.append((labels, (200, 300), (10, 20, 290, 180), matrix))
        sides = labels[:, 1:].reshape(-1, 2, 2) * (300, 200)
        low, high = sides[:, 0] - sides[:, 1] / 2, sides[:, 0] + sides[:, 1] / 2
        hulls = project_boxes(np.repeat(matrix[None], count, 0), low, high)
        for a, b, hull in zip(low, high, hulls):
            corners = project_points(matrix, np.array([a, (b[0], a[1]), b, (a[0], b[1])]))
            np.testing.assert_allclose(hull, [*corners.min(0), *corners.max(0)])

    alone = [moved([patch], (256, 320))[0] for patch in patches]
    together, owner = moved(patches, (256, 320))
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert owner.tolist() == [number for number, rows in enumerate(alone) for _ in rows]
