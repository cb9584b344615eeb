"""The cells of regions in which a class is ignored, so that outputs there have no loss.

Legend: B images, I images with ignore regions, N cells over all levels, C classes, R rows of regions, K region slots of
an image, S any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.box_coding import cell_centers, from_host, grid_shapes
from utils.boxes import cxcywh_to_xyxy, scale_boxes


class IgnoredCells(NamedTuple):
    """Cells whose centers are in a region in which a class is ignored.

    Outputs there have no loss, unless they are assigned to an object. Only images with regions, which are few, have
    entries.
    """

    images: Tensor  # int64 (I,)
    cells: Tensor  # bool (I, N, C)

    def except_positive(self, positive: Tensor) -> IgnoredCells:
        """Removes the cells that are ``positive``, bool (B, N)."""
        return self._replace(cells=self.cells & ~positive[self.images][..., None])

    def of_best_class(self, class_logits: Tensor) -> Tensor:
        """Finds the outputs whose predicted class is ignored at their cell, so that their objectness has no loss.

        Args: logits (B, *S, C); ``cells`` must be (I, *S, C). Returns bool (B, *S).
        """
        predicted = class_logits.detach()[self.images].argmax(-1, keepdim=True)
        is_ignored = torch.zeros(class_logits.shape[:-1], dtype=torch.bool, device=class_logits.device)
        return is_ignored.index_copy_(0, self.images, self.cells.gather(-1, predicted)[..., 0])


def ignored_cells(ignore: np.ndarray, raw: Sequence[Tensor], strides: Sequence[int], num_classes: int) -> IgnoredCells:
    """Finds the cells in ignore regions.

    Args:
        ignore: (R, 6) as in `Targets`, sorted by image.
        raw: maps (B, D, h, w), one per level.
        strides: strides of the levels.
        num_classes: C.
    """
    shapes = grid_shapes(raw)
    device = raw[0].device
    centers, sizes = cell_centers(shapes, tuple(strides), device)
    regions = _pad_regions(ignore, num_classes)
    device_boxes = from_host(regions.boxes, device)
    device_classes = from_host(regions.ignores_class, device)
    canvas_h, canvas_w = (side * strides[0] for side in shapes[0])
    low, high = scale_boxes(cxcywh_to_xyxy(device_boxes), canvas_w, canvas_h)[:, None].split(2, -1)
    points = (centers * sizes)[:, None]
    inside = ((points >= low) & (points <= high)).all(-1)  # (I, N, K)
    return IgnoredCells(from_host(regions.images, device), inside.float() @ device_classes > 0)


class _PaddedRegions(NamedTuple):
    """Regions of the images that have some, padded to K per image."""

    images: np.ndarray  # int64 (I,) ascending
    boxes: np.ndarray  # float32 (I, K, 4), cxcywh as fractions of the canvas; padding has no cell inside
    ignores_class: np.ndarray  # float32 (I, K, C), 1 where the region ignores the class


def _pad_regions(ignore: np.ndarray, num_classes: int) -> _PaddedRegions:
    """Pads ignore regions. Arguments: see `ignored_cells`.

    A region of several classes, such as an image that does not label them, has consecutive rows, and becomes one slot.
    For example, four rows of the images 0, 2, 2 and 2, of which the second and the third have equal boxes, are three
    regions: ``region_of_row`` is 0 1 1 2, and their ``row`` and ``slot`` in the padded arrays are 0 1 1 and 0 0 1.
    """
    places = ignore[:, [0, 2, 3, 4, 5]]
    is_new_region = np.append(True, (places[1:] != places[:-1]).any(1))
    region_of_row = np.cumsum(is_new_region) - 1
    image_of_region = ignore[is_new_region, 0].astype(np.int64)
    images, first_region, row = np.unique(image_of_region, return_index=True, return_inverse=True)
    slot = np.arange(len(row)) - first_region[row]
    boxes = np.full((len(images), slot.max() + 1, 4), -1.0, np.float32)
    boxes[row, slot] = ignore[is_new_region, 2:]
    classes = ignore[:, 1].astype(np.int64)
    # The last column is class -1, for all classes.
    ignores_class = np.zeros((*boxes.shape[:2], num_classes + 1), np.float32)
    ignores_class[row[region_of_row], slot[region_of_row], classes] = 1
    # The sum is contiguous: a part of an array would be copied to a GPU through memory that is not pinned.
    return _PaddedRegions(images, boxes, ignores_class[..., :-1] + ignores_class[..., -1:])
