"""Regions of images that are to be ignored: the outputs there have no loss, unless they are assigned to an object.

Few images have regions, and what is computed for them is computed for those images only.

Legend: B images, I images with regions, N cells over all levels, C classes, R regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.box_coding import cell_centers, grid_shapes
from utils.boxes import cxcywh_to_xyxy, scale_boxes


class IgnoredCells(NamedTuple):
    """The cells whose centers are in a region of their image in which a class is ignored."""

    images: Tensor  # int64 (I,)
    cells: Tensor  # bool (I, N, C)

    def except_positive(self, positive: Tensor) -> IgnoredCells:
        """Without the cells that are ``positive``, bool (B, N)."""
        return self._replace(cells=self.cells & ~positive[self.images][..., None])

    def of_best_class(self, class_logits: Tensor) -> Tensor:
        """bool (B, *S): whether the class that an output predicts is ignored there, which decides about its objectness.

        Args: class_logits: (B, *S, C), with ``cells`` (I, *S, C).
        """
        predicted = class_logits.detach()[self.images].argmax(-1, keepdim=True)
        found = torch.zeros(class_logits.shape[:-1], dtype=torch.bool, device=class_logits.device)
        return found.index_copy_(0, self.images, self.cells.gather(-1, predicted)[..., 0])


def ignored_cells(
    ignore: np.ndarray | None, raw: Sequence[Tensor], strides: Sequence[int], num_classes: int
) -> IgnoredCells | None:
    """The cells to ignore; None without a region.

    Args:
        ignore: (R, 6) as in `Targets`, by image; None: no region.
        raw: maps (B, D, h, w), one of each level.
    """
    if ignore is None:
        return None
    shapes, device = grid_shapes(raw), raw[0].device
    centers, sizes = cell_centers(shapes, tuple(strides), device)
    # A region of many classes, such as an image that does not label them, has consecutive rows and is computed once.
    begins = np.r_[True, (ignore[1:, [0, 2, 3, 4, 5]] != ignore[:-1, [0, 2, 3, 4, 5]]).any(1)]
    images, first, image = np.unique(ignore[begins, 0].astype(np.int64), return_index=True, return_inverse=True)
    slot = np.arange(len(image)) - first[image]
    boxes = np.full((len(images), slot.max() + 1, 4), -1.0, np.float32)  # padding: no cell is inside
    boxes[image, slot] = ignore[begins, 2:]
    of_class = np.zeros((*boxes.shape[:2], num_classes + 1), np.float32)  # class -1, of all, is the last
    region = np.cumsum(begins) - 1
    of_class[image[region], slot[region], ignore[:, 1].astype(np.int64)] = 1
    of_class[..., :-1] += of_class[..., -1:]
    on_host = [torch.from_numpy(a) for a in (images, boxes, of_class[..., :-1])]
    if device.type == "cuda":  # a copy from other memory waits for the device
        on_host = [tensor.pin_memory() for tensor in on_host]
    numbers, regions, members = (tensor.to(device, non_blocking=True) for tensor in on_host)
    canvas_wh = shapes[0][1] * strides[0], shapes[0][0] * strides[0]
    low, high = scale_boxes(cxcywh_to_xyxy(regions), *canvas_wh)[:, None].split(2, -1)
    points = (centers * sizes)[:, None]
    inside = ((points >= low) & (points <= high)).all(-1)  # (I, N, regions of an image)
    return IgnoredCells(numbers, inside.float() @ members > 0)
