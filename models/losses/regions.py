"""Regions of images that are to be ignored: the outputs there have no loss, unless they are assigned to an object.

Legend: B images, N cells over all levels, C classes, R regions, S any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.box_coding import cell_centers, grid_shapes
from utils.boxes import cxcywh_to_xyxy, scale_boxes

NO_OBJECT = -1e4  # a logit whose softplus is 0 in any floating-point type


def ignored_cells(
    ignore: np.ndarray | None, raw: Sequence[Tensor], strides: Sequence[int], num_classes: int
) -> Tensor | None:
    """bool (B, N, C): the cells whose centers are in a region of their image in which the class is ignored.

    Args:
        ignore: (R, 6) as in `Targets`, by image; None: no region.
        raw: maps (B, D, h, w), one of each level.

    Returns None without a region.
    """
    if ignore is None:
        return None
    images, shapes, device = raw[0].shape[0], grid_shapes(raw), raw[0].device
    centers, sizes = cell_centers(shapes, tuple(strides), device)
    # A region of many classes, such as an image that does not label them, has consecutive rows and is computed once.
    begins = np.r_[True, (ignore[1:, [0, 2, 3, 4, 5]] != ignore[:-1, [0, 2, 3, 4, 5]]).any(1)]
    image = ignore[begins, 0].astype(np.int64)
    slot = np.arange(len(image)) - np.searchsorted(image, image)
    boxes = np.full((images, slot.max() + 1, 4), -1.0, np.float32)  # padding: no cell is inside
    boxes[image, slot] = ignore[begins, 2:]
    of_class = np.zeros((images, slot.max() + 1, num_classes + 1), np.float32)  # class -1, of all, is the last
    region = np.cumsum(begins) - 1
    of_class[image[region], slot[region], ignore[:, 1].astype(np.int64)] = 1
    of_class[..., :-1] += of_class[..., -1:]
    regions, members = (torch.from_numpy(a).to(device, non_blocking=True) for a in (boxes, of_class[..., :-1]))
    canvas_wh = shapes[0][1] * strides[0], shapes[0][0] * strides[0]
    low, high = scale_boxes(cxcywh_to_xyxy(regions), *canvas_wh)[:, None].split(2, -1)
    points = (centers * sizes)[:, None]
    inside = ((points >= low) & (points <= high)).all(-1)  # (B, N, regions of an image)
    return inside.float() @ members > 0


def of_best_class(ignored: Tensor, class_logits: Tensor) -> Tensor:
    """bool (*S): whether the class that an output predicts is ignored there, which decides about its objectness.

    Args: ignored, class_logits: (*S, C).
    """
    return ignored.gather(-1, class_logits.detach().argmax(-1, keepdim=True))[..., 0]


def without_loss(logits: Tensor, ignored: Tensor | None, positive: Tensor) -> Tensor:
    """``logits`` (*S), of the background where ``ignored`` bool (*S), unless ``positive`` bool (*S): their binary
    cross-entropy with a target of 0, and its gradient, are 0. With ``ignored`` None they stay as they are."""
    return logits if ignored is None else torch.where(ignored & ~positive, NO_OBJECT, logits)
