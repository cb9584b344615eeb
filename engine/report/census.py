"""The data census of a report: number, size and position of the boxes of each class, and the scan's findings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.index.index import DatasetIndex
from data.labels.report import ScanReport
from engine.issues.small_boxes import SMALL_PX, median_side, remedy_for_small_boxes
from utils.boxes import scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.drawing import page
from utils.drawing.figures import AxisLabels, Mark, Picture, bars_picture, heat_picture, histogram_picture
from utils.strings import counted

HEAT_CELLS = 24
MAX_BARS = 20  # classes in the bar chart
MAX_SCAN_LINES = 100  # lines of the scan's report that are shown


class Census(NamedTuple):
    """Counts of a split; crowd regions are left out."""

    split: str
    images: int
    backgrounds: int  # images without boxes
    class_boxes: np.ndarray  # int64 (C,)
    class_images: np.ndarray  # int64 (C,) images with at least one box of the class
    sides_px: np.ndarray  # float64 (M,) square roots of the boxes' areas, in pixels at the training size
    centers: np.ndarray  # int64 (rows, columns) boxes by the position of their center in the image
    most_in_image: int

    @property
    def boxes(self) -> int:
        return int(self.class_boxes.sum())

    @property
    def median_side_px(self) -> float | None:
        """Median of `sides_px`; None without boxes."""
        return median_side(self.sides_px)


def take_census(index: DatasetIndex, split: str, imgsz: int) -> Census:
    """Counts the boxes of a split. Sizes are those after the images' longer sides are scaled to ``imgsz``."""
    truth = index.ground_truth()
    classes = len(index.names)
    image = truth.image_of_box[~truth.crowd]
    sizes = truth.image_hw[image].astype(np.float64)
    centers = xyxy_to_cxcywh(xywh_to_xyxy(truth.boxes_xywh_px[~truth.crowd]))
    centers = scale_boxes(centers, 1 / sizes[:, 1], 1 / sizes[:, 0])
    heat, _, _ = np.histogram2d(centers[:, 1], centers[:, 0], bins=HEAT_CELLS, range=((0, 1), (0, 1)))
    in_image = np.bincount(image, minlength=truth.num_images)
    return Census(
        split=split,
        images=truth.num_images,
        backgrounds=int((in_image == 0).sum()),
        class_boxes=truth.boxes_per_class(classes),
        class_images=truth.images_per_class(classes),
        sides_px=np.sqrt(index.sides_at(imgsz).prod(1)),
        centers=heat.astype(np.int64),
        most_in_image=int(in_image.max(initial=0)),
    )


class ScanLines(NamedTuple):
    """The scan's report of a split, and the lines of it that the page shows."""

    split: str
    report: ScanReport
    first_lines: list[str]


@dataclass(frozen=True, kw_only=True)
class CensusSection:
    """Content of census.html."""

    splits: page.HtmlTable
    censuses: Sequence[Census]  # the first is of the training split if there is one
    figures: dict[str, dict[str, Picture]]  # by split and title; splits without boxes have none
    imgsz: int
    min_side_px: float  # boxes with shorter sides are too small for most models
    remedy: str | None  # what to do about them; None if there are not many
    classes: page.HtmlTable
    scans: Sequence[ScanLines]


def census_content(
    censuses: Sequence[Census], indexes: Sequence[DatasetIndex], *, imgsz: int, stride: int
) -> CensusSection:
    """Returns the content of the census. The first census is of the training split if there is one."""
    names = indexes[0].names
    first = censuses[0]
    sides = [page.UNKNOWN if c.median_side_px is None else f"{c.median_side_px:.1f} px" for c in censuses]
    columns = ("split", "images", "backgrounds", "boxes", "most boxes in an image", f"median side at --imgsz {imgsz}")
    order = np.argsort(-first.class_boxes, kind="stable")
    return CensusSection(
        splits=page.HtmlTable(
            columns,
            [(c.split, c.images, c.backgrounds, c.boxes, c.most_in_image, side) for c, side in zip(censuses, sides)],
            "The splits. A background is an image without boxes; a side is the square root of a box's area",
        ),
        censuses=censuses,
        figures={c.split: _figures(c, names, imgsz) for c in censuses if c.boxes},
        imgsz=imgsz,
        min_side_px=SMALL_PX,
        remedy=remedy_for_small_boxes(first.median_side_px, imgsz, stride, tile=indexes[0].tile),
        classes=page.HtmlTable(
            ("class", *(f"{c.split}: {unit}" for c in censuses for unit in ("boxes", "images"))),
            [
                [names[c], *(int(v[c]) for census in censuses for v in (census.class_boxes, census.class_images))]
                for c in order
            ],
            "Boxes and images of each class",
        ),
        scans=[
            ScanLines(c.split, i.report, list(map(str, itertools.islice(i.report.findings, MAX_SCAN_LINES))))
            for c, i in zip(censuses, indexes)
        ],
    )


def _figures(census: Census, names: Sequence[str], imgsz: int) -> dict[str, Picture]:
    """Draws the number, sizes and centers of the boxes of a split that has boxes. Returns pictures by title."""
    order = np.argsort(-census.class_boxes, kind="stable")[:MAX_BARS]
    subset = f"{MAX_BARS} of {len(names)} classes" if len(names) > MAX_BARS else "each class"
    counts = census.class_boxes[order]
    classes = bars_picture(
        [names[c] for c in order],
        counts,
        [f"{n:,}" for n in counts],
        AxisLabels("", "boxes", f"Boxes of {subset} ({census.split})"),
    )
    small = float((census.sides_px < SMALL_PX).mean())
    low, high = np.floor(np.log2(np.percentile(census.sides_px, [0, 100]).clip(0.5)))
    edges = 2.0 ** np.arange(low, high + 1.01, 0.5)
    counts, _ = np.histogram(census.sides_px.clip(edges[0], edges[-1]), edges)
    mark = Mark(SMALL_PX, f"{SMALL_PX:g} px") if edges[0] <= SMALL_PX <= edges[-1] else None
    labels = AxisLabels("side, square root of the area (px)", "boxes", f"Box sizes at --imgsz {imgsz} ({census.split})")
    sizes = histogram_picture(edges, counts, labels, mark, f"{small:.0%} below {SMALL_PX:g} px")
    labels = AxisLabels(
        "x (fraction of the image's width)", "y (fraction of its height)", f"Centers of the boxes ({census.split})"
    )
    centers = heat_picture(census.centers, labels, f"the strongest color: {counted(int(census.centers.max()), 'box')}")
    return {"boxes of classes": classes, "sizes of boxes": sizes, "centers of boxes": centers}
