"""Checks the geometry of labeled boxes: clips them to their images, and leaves out boxes that are not objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.labels.findings import CLIPPED, DUPLICATE, FRACTIONS, NO_AREA, OUTSIDE, REVERSED
from data.labels.rows import AREA, CLASS, CROWD, IMAGE, ROW_NUMBER, SHAPE, X1, Y2, RowProblem

MIN_SIDE_PX = 1e-3  # smaller sides are rounding errors in boxes without area
_BORDER_TOLERANCE = 0.01  # fraction of the image's size by which a box may exceed it and still fit
_MIN_FRACTION_CHECK_SIDE_PX = 16  # in images with a shorter side below this, a box within one pixel is taken as pixels


class CleanBoxes(NamedTuple):
    """Valid boxes, by image and in file order."""

    image: np.ndarray  # int64 (M,)
    classes: np.ndarray  # int32 (M,)
    boxes_xywh_px: np.ndarray  # float64 (M, 4), inside the image
    area_px: np.ndarray  # float64 (M,)
    crowd: np.ndarray  # bool (M,)
    row_number: np.ndarray  # int32 (M,), see `data.labels.rows`
    repeated: np.ndarray  # bool (M,) equal to an earlier box of the image; scored, but not trained on


class _Wording(NamedTuple):
    """The wording with which a kind of problem is reported."""

    text: str  # with {box} for the labeled corners in pixels, and {size} for the image size
    consequence: str
    cause: str = ""  # see `RowProblem`


_WORDINGS = {
    NO_AREA: _Wording("corners {box} px", "left out", "the boxes have no area"),
    OUTSIDE: _Wording("corners {box} px, image {size}", "left out", "the boxes are outside the image"),
    FRACTIONS: _Wording(
        "corners {box} px: fractions of the image, {size}, expected pixels",
        "left out",
        "the boxes are fractions of the image, expected pixels",
    ),
    DUPLICATE: _Wording("corners {box} px repeat an earlier row", "training uses it once"),
    CLIPPED: _Wording("corners {box} px exceed the image, {size}", "clipped to it"),
    REVERSED: _Wording("corners {box} px are in the wrong order", "taken in order"),
}


class _PixelBoxes(NamedTuple):
    """The R rows of a table in pixels, float64."""

    labeled: np.ndarray  # (R, 4) corners as labeled
    corners: np.ndarray  # (R, 4) corners in order, or as labeled if they seem to be misread
    inside: np.ndarray  # (R, 4) ``corners``, clipped to the image
    area: np.ndarray  # (R,) area according to the labels; not finite if they contain none
    size_wh: np.ndarray  # (R, 2) image size of each row


@np.errstate(over="ignore", invalid="ignore")  # rows may hold any numbers; infinities are checked below
def clean_rows(
    table: np.ndarray, image_hw: np.ndarray, normalized: bool, *, is_misread: bool = False
) -> tuple[CleanBoxes, list[tuple[int, RowProblem]]]:
    """Clips boxes to their images, removes boxes without area or outside the image, and marks exact repetitions.

    Args:
        table: float64 (R, 10): `row_table` of each image, ascending.
        image_hw: int (N, 2) upright sizes.
        normalized: whether corners and areas are fractions of the image size, not pixels.
        is_misread: whether the numbers seem to be misread (`data.labels.misread`). If so, boxes that do not fit are
            left out instead of being put in order and clipped.

    Returns:
        The remaining boxes; and the image number and problem of each row that is removed, changed or repeated.
    """
    boxes = _in_pixels(table, image_hw, normalized=normalized, is_misread=is_misread)
    lost = _lost_rows(boxes, normalized=normalized, is_misread=is_misread)
    kept = ~(lost[NO_AREA] | lost[OUTSIDE] | lost[FRACTIONS])
    repeated = _repeated_rows(table, boxes.corners, kept)
    clipped = kept & _is_clipped(boxes)
    changed = {DUPLICATE: repeated, CLIPPED: clipped & ~repeated, REVERSED: kept & _is_reversed(boxes.labeled)}
    problems = _problems(table, boxes, lost | changed, normalized=normalized)
    return _selected(table, boxes, kept, clipped=clipped, repeated=repeated), problems


def _in_pixels(table: np.ndarray, image_hw: np.ndarray, *, normalized: bool, is_misread: bool) -> _PixelBoxes:
    """Converts the boxes of a table to pixels. For the arguments, see `clean_rows`."""
    from utils.boxes import clip_xyxy  # imports torch, which `check_data` does without

    size_wh = image_hw[table[:, IMAGE].astype(np.int64), ::-1].astype(np.float64)
    labeled = table[:, X1 : Y2 + 1]
    area = table[:, AREA]
    if normalized:
        labeled = labeled * np.tile(size_wh, 2)
        area = area * size_wh[:, 0] * size_wh[:, 1]
    corners = labeled
    if not is_misread:
        corners = in_order(labeled)
        area = np.where(_is_reversed(labeled), np.abs(area), area)
    return _PixelBoxes(labeled, corners, clip_xyxy(corners, *size_wh.T), area, size_wh)


def _lost_rows(boxes: _PixelBoxes, *, normalized: bool, is_misread: bool) -> dict[str, np.ndarray]:
    """Returns masks of the rows to leave out, bool (R,), by kind of problem. The masks are disjoint."""
    sides = boxes.corners[:, 2:] - boxes.corners[:, :2]
    has_area = ((sides >= MIN_SIDE_PX) & np.isfinite(sides)).all(1)
    fractions = np.zeros(len(sides), bool)
    if not normalized:
        shorter_side = boxes.size_wh.min(1)
        fractions[has_area] = _are_fractions(boxes.corners[has_area], shorter_side[has_area])
    sides_inside = boxes.inside[:, 2:] - boxes.inside[:, :2]
    outside = has_area & ~(sides_inside >= MIN_SIDE_PX).all(1)
    if is_misread:
        outside |= has_area & ~fits(boxes.corners, np.tile(boxes.size_wh, 2))
    return {NO_AREA: ~has_area, OUTSIDE: outside & ~fractions, FRACTIONS: fractions}


def _are_fractions(corners: np.ndarray, shorter_side: np.ndarray) -> np.ndarray:
    """Returns a mask of the boxes, expected in pixels, that are fractions of the image, bool (R,): boxes within the
    first pixel of an image, provided that all boxes are, or that one of these has a non-integer coordinate."""
    in_pixel = (corners >= 0).all(1) & (corners <= 1).all(1) & (shorter_side >= _MIN_FRACTION_CHECK_SIDE_PX)
    is_whole = (corners == corners.round()).all(1)
    return in_pixel & (in_pixel.all() or (in_pixel & ~is_whole).any())


def _repeated_rows(table: np.ndarray, corners: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns a mask of the ``kept`` rows that equal an earlier row of the same image. Both masks are bool (R,)."""
    keys = np.column_stack([table[:, [IMAGE, CLASS, CROWD]], corners, table[:, SHAPE]])
    rows = np.flatnonzero(kept)
    order = rows[np.lexsort(keys[rows].T[::-1])]  # stable: equal rows stay in file order
    repeated = np.zeros(len(keys), bool)
    repeated[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(1)
    return repeated


def _is_clipped(boxes: _PixelBoxes) -> np.ndarray:
    """Returns a mask of the boxes that exceed their image by more than the rounding of labels, bool (R,): 0.01 px in
    COCO, 1e-6 of the image size in YOLO."""
    tolerance = 0.01 + 1e-5 * boxes.size_wh.max(1)
    return np.abs(boxes.inside - boxes.corners).max(1, initial=0) > tolerance


def _is_reversed(corners: np.ndarray) -> np.ndarray:
    return np.asarray((corners[:, 2:] < corners[:, :2]).any(1))


def in_order(corners: np.ndarray) -> np.ndarray:
    """Swaps coordinates where necessary, so that x1 <= x2 and y1 <= y2."""
    return np.concatenate([np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])], 1)


def fits(corners: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Returns a mask of the boxes within ``size``, float64 (R, 4), whose corners are in order: bool (R,)."""
    is_inside = (corners > -_BORDER_TOLERANCE * size) & (corners < (1 + _BORDER_TOLERANCE) * size)
    is_in_order = corners[:, 2:] > corners[:, :2]
    return np.asarray(is_inside.all(1) & is_in_order.all(1))


def _problems(
    table: np.ndarray, boxes: _PixelBoxes, rows_of_kind: dict[str, np.ndarray], *, normalized: bool
) -> list[tuple[int, RowProblem]]:
    """Returns the image number and problem of each row set in ``rows_of_kind``, masks bool (R,) by kind."""
    problems = []
    ordered = in_order(boxes.labeled)
    for kind, mask in rows_of_kind.items():
        wording = _WORDINGS[kind]
        cause = wording.cause
        if kind == OUTSIDE and normalized:
            cause += "; coordinates in pixels?"
        for row in np.flatnonzero(mask):
            width, height = boxes.size_wh[row]
            corners = ", ".join(f"{value:.6g}" for value in boxes.labeled[row])
            problem = RowProblem(
                row_number=int(table[row, ROW_NUMBER]),
                kind=kind,
                text=wording.text.format(box=corners, size=f"{width:.0f}x{height:.0f}"),
                cause=cause,
                consequence=wording.consequence,
                class_id=int(table[row, CLASS]),
                xyxy=tuple(ordered[row].tolist()),
            )
            problems.append((int(table[row, IMAGE]), problem))
    return problems


def _selected(
    table: np.ndarray, boxes: _PixelBoxes, kept: np.ndarray, *, clipped: np.ndarray, repeated: np.ndarray
) -> CleanBoxes:
    """Returns the boxes of the rows to keep. All masks are bool (R,)."""
    from utils.boxes import xyxy_to_xywh  # see `_in_pixels`

    table = table[kept]
    inside = boxes.inside[kept]
    sides_inside = inside[:, 2:] - inside[:, :2]
    sides = (boxes.corners[:, 2:] - boxes.corners[:, :2])[kept]
    # The area of a clipped object is reduced by the same factor as its box.
    area = boxes.area[kept] * np.where(clipped[kept], (sides_inside / sides).prod(1), 1)
    return CleanBoxes(
        image=table[:, IMAGE].astype(np.int64),
        classes=table[:, CLASS].astype(np.int32),
        boxes_xywh_px=xyxy_to_xywh(inside),
        area_px=np.where(np.isfinite(area), area, sides_inside.prod(1)),
        crowd=table[:, CROWD] != 0,
        row_number=table[:, ROW_NUMBER].astype(np.int32),
        repeated=repeated[kept],
    )
