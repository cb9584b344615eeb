"""Checks the geometry of labeled boxes: clips them to their images, and leaves out boxes that are not objects.

Boxes in pixels are fractions of the size that their file states (`fit_corners`). It may differ from the image's by one
factor, if the image was resized after it was labeled, and it may be that of the photo as stored, which EXIF data turns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.findings import BAD_BOX, DUPLICATE, FITTED, Finding
from data.formats.label_format import AREA, CLASS, CROWD, IMAGE, ROW_NUMBER, X1, Y2
from utils.boxes import clip_xyxy, xyxy_to_xywh

MIN_SIDE_PX = 1e-3  # smaller sides are rounding errors in boxes without area
_MIN_AREA_PX = 1.0


class CleanBoxes(NamedTuple):
    """Valid boxes, by image and in file order."""

    image: np.ndarray  # int64 (M,)
    classes: np.ndarray  # int32 (M,)
    boxes_xywh_px: np.ndarray  # float64 (M, 4), inside the image
    area_px: np.ndarray  # float64 (M,)
    crowd: np.ndarray  # bool (M,)
    row_number: np.ndarray  # int32 (M,), see `data.formats.label_format`
    repeated: np.ndarray  # bool (M,) equal to an earlier box of the image; scored, but not trained on


@np.errstate(over="ignore", invalid="ignore")  # rows may hold any numbers; infinities are checked below
def clean_rows(table: np.ndarray, image_hw: np.ndarray, is_normalized: np.ndarray) -> tuple[CleanBoxes, list[Finding]]:
    """Clips boxes to their images, removes boxes that are reversed, too small or outside the image, and marks exact
    repetitions.

    Args:
        table: float64 (R, 9): `row_table` of each image, ascending.
        image_hw: int (N, 2) upright sizes.
        is_normalized: bool (N,): whether corners and areas are fractions of the image size, not pixels.

    Returns:
        The remaining boxes; and a finding, without `where`, of each row that is removed, clipped or repeated.
    """
    image = table[:, IMAGE].astype(np.int64)
    size_wh = image_hw[image, ::-1].astype(np.float64)
    scale_wh = np.where(is_normalized[image, None], size_wh, 1.0)
    corners = table[:, X1 : Y2 + 1] * np.tile(scale_wh, 2)
    area = table[:, AREA] * scale_wh[:, 0] * scale_wh[:, 1]
    inside = clip_xyxy(corners, *size_wh.T)
    sides = corners[:, 2:] - corners[:, :2]
    sides_inside = inside[:, 2:] - inside[:, :2]

    is_reversed = (sides < 0).any(1)
    is_small = ~(is_reversed | ((sides >= MIN_SIDE_PX) & np.isfinite(sides)).all(1) & (sides.prod(1) >= _MIN_AREA_PX))
    is_outside = ~(is_reversed | is_small | (sides_inside >= MIN_SIDE_PX).all(1))
    kept = ~(is_reversed | is_small | is_outside)
    repeated = _repeated_rows(table, corners, kept)
    # Labels are rounded to 0.01 px in COCO, to 1e-6 of the image size in YOLO.
    exceeds = np.abs(inside - corners).max(1, initial=0) > 0.01 + 1e-5 * size_wh.max(1)
    clipped = kept & exceeds

    boxes = CleanBoxes(
        image=image[kept],
        classes=table[kept, CLASS].astype(np.int32),
        boxes_xywh_px=xyxy_to_xywh(inside[kept]),
        area_px=_area_inside(area[kept], sides[kept], sides_inside[kept], clipped[kept]),
        crowd=table[kept, CROWD] != 0,
        row_number=table[kept, ROW_NUMBER].astype(np.int32),
        repeated=repeated[kept],
    )
    problems = []
    for mask, kind, reason in (
        (is_reversed, BAD_BOX, "in the wrong order"),
        (is_small, BAD_BOX, "less than one pixel"),
        (is_outside, BAD_BOX, "outside the image"),
        (repeated, DUPLICATE, "as in an earlier row"),
        (clipped & ~repeated, FITTED, "clipped"),
    ):
        for row in np.flatnonzero(mask):
            width, height = size_wh[row]
            shown = ", ".join(f"{value:.6g}" for value in corners[row])
            problem = Finding(
                kind=kind,
                text=f"corners {shown} px of {width:.0f}x{height:.0f}: {reason}",
                image=int(table[row, IMAGE]),
                row_number=int(table[row, ROW_NUMBER]),
                class_id=int(table[row, CLASS]),
                xyxy_px=tuple(corners[row].tolist()),
            )
            problems.append(problem)
    return boxes, problems


def _repeated_rows(table: np.ndarray, corners: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns a mask of the ``kept`` rows that equal an earlier row of the same image. Both masks are bool (R,)."""
    keys = np.column_stack([table[:, [IMAGE, CLASS, CROWD, AREA]], corners])  # polygons in one box differ in area
    rows = np.flatnonzero(kept)
    order = rows[np.lexsort(keys[rows].T[::-1])]  # stable: equal rows stay in file order
    repeated = np.zeros(len(keys), bool)
    repeated[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(1)
    return repeated


def _area_inside(area: np.ndarray, sides: np.ndarray, sides_inside: np.ndarray, clipped: np.ndarray) -> np.ndarray:
    """Returns the areas of objects, float64 (M,), after clipping, which reduces them by the same factor as their boxes;
    the areas of the boxes where the labels have none."""
    area = area * np.where(clipped, (sides_inside / sides).prod(1), 1)
    return np.where(np.isfinite(area), area, sides_inside.prod(1))


def fit_corners(
    corners: np.ndarray, stated_hw: tuple[int, int], upright_hw: tuple[int, int], orientation: int
) -> tuple[np.ndarray, float] | None:
    """Converts corners, float64 (R, 4), from the stated size of an image to its actual size.

    ``orientation``: EXIF orientation of the photo as stored, 1 to 8. Returns the corners (``corners`` itself if the
    sizes are the same up to rounding) and the factor of areas; None if no factor, up to rounding, maps both sides.
    """
    is_swapped = (stated_hw[0] - stated_hw[1]) * (upright_hw[0] - upright_hw[1]) < 0  # one is tall, one is wide
    is_turned = is_swapped and orientation >= 5
    if not is_turned and max(abs(a - b) for a, b in zip(stated_hw, upright_hw)) <= 1:
        return corners, 1.0
    labeled_hw = stated_hw[::-1] if is_turned else stated_hw
    low = max((side - 1) / labeled for side, labeled in zip(upright_hw, labeled_hw))
    high = min((side + 1) / labeled for side, labeled in zip(upright_hw, labeled_hw))
    if low >= high:
        return None
    scale_y, scale_x = (side / labeled for side, labeled in zip(upright_hw, labeled_hw))
    turned = turned_boxes(corners, labeled_hw, orientation if is_turned else 1)
    return turned * [scale_x, scale_y, scale_x, scale_y], scale_y * scale_x


def turned_boxes(corners: np.ndarray, upright_hw: tuple[int, int], orientation: int) -> np.ndarray:
    """Maps corners, float64 (R, 4), from a photo as stored to the upright photo. ``orientation``: EXIF orientation, 1
    or 5 to 8."""
    height, width = (float(side) for side in upright_hw)
    x1, y1, x2, y2 = corners.T
    upright = {
        1: (x1, y1, x2, y2),
        5: (y1, x1, y2, x2),
        6: (width - y2, x1, width - y1, x2),
        7: (width - y2, height - x2, width - y1, height - x1),
        8: (y1, height - x2, y2, height - x1),
    }[orientation]
    return np.stack(upright, 1)
