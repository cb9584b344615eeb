"""Positions of patches whose edges are moved to whole pixels of the canvas."""

from __future__ import annotations

import numpy as np
import pytest

from data.augment.placement import place_patches
from data.augment.projection import project_points


def test_a_patch_is_cropped_to_its_visible_pixels_before_its_edges_move():
    """The numbers are those of the example in data/augment/placement.py, along both axes."""
    frame_to_canvas = np.array([[[0.5, 0, -10.3], [0, 0.5, -10.3], [0, 0, 1]]])
    side = np.full((1, 2), 101)
    placed = place_patches(
        side,
        corners=np.zeros((1, 2)),
        sizes=side,
        frame_wh=side,
        frame_to_canvas=frame_to_canvas,
        canvas_wh=np.full((1, 2), 30.0),
    )
    assert placed.region.tolist() == [[20, 20, 81, 81]]
    edges = project_points(placed.matrix[0], np.array([[20.0, 20.0], [81.0, 81.0]]))
    np.testing.assert_allclose(edges, [[0, 0], [30, 30]], atol=1e-12)
    assert placed.matrix[0, 0, 0] == pytest.approx(30 / 61)
