"""The data census of a report: number, size and position of the boxes of each class, and the scan's findings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.index.index import DatasetIndex
from engine.issues.small_boxes import SMALL_PX, median_side, remedy_for_small_boxes
from utils.boxes import scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.drawing import page
from utils.drawing.figures import AxisLabels, Mark, Picture, bar_chart_picture, heatmap_picture, histogram_picture
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
    """Counts the boxes of a split. Sizes are measured after the images' longer sides are scaled to ``imgsz``."""
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
    """The scan's summary of a split, and its findings that the page shows."""

    split: str
    summary: str
    num_findings: int
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
    return CensusSection(
        splits=_split_table(censuses, imgsz),
        censuses=censuses,
        figures={census.split: _figures(census, names, imgsz) for census in censuses if census.boxes},
        imgsz=imgsz,
        min_side_px=SMALL_PX,
        remedy=remedy_for_small_boxes(first.median_side_px, imgsz, stride, tile=indexes[0].tile),
        classes=_class_table(censuses, names),
        scans=[_scan_lines(census.split, index) for census, index in zip(censuses, indexes)],
    )


def _scan_lines(split: str, index: DatasetIndex) -> ScanLines:
    findings = index.report.findings
    first_lines = [str(finding) for finding in itertools.islice(findings, MAX_SCAN_LINES)]
    return ScanLines(split, index.summary(), len(findings), first_lines)


def _split_table(censuses: Sequence[Census], imgsz: int) -> page.HtmlTable:
    columns = ("split", "images", "backgrounds", "boxes", "most boxes in an image", f"median side at --imgsz {imgsz}")
    rows = []
    for census in censuses:
        side = page.UNKNOWN if census.median_side_px is None else f"{census.median_side_px:.1f} px"
        rows.append((census.split, census.images, census.backgrounds, census.boxes, census.most_in_image, side))
    caption = "The splits. A background is an image without boxes; a side is the square root of a box's area"
    return page.HtmlTable(columns, rows, caption)


def _class_table(censuses: Sequence[Census], names: Sequence[str]) -> page.HtmlTable:
    """Lists the classes, those with the most boxes in the first census first."""
    columns = ["class"]
    counts: list[np.ndarray] = []
    for census in censuses:
        columns += [f"{census.split}: boxes", f"{census.split}: images"]
        counts += [census.class_boxes, census.class_images]
    order = np.argsort(-censuses[0].class_boxes, kind="stable")
    rows: list[list[str | int]] = [[names[c], *(int(values[c]) for values in counts)] for c in order]
    return page.HtmlTable(columns, rows, "Boxes and images of each class")


def _figures(census: Census, names: Sequence[str], imgsz: int) -> dict[str, Picture]:
    """Draws the number, sizes and centers of the boxes of a split that has boxes. Returns pictures by title."""
    return {
        "boxes of classes": _class_bars(census, names),
        "sizes of boxes": _size_histogram(census, imgsz),
        "centers of boxes": _center_map(census),
    }


def _class_bars(census: Census, names: Sequence[str]) -> Picture:
    """Draws the number of boxes of each class, or of the `MAX_BARS` most frequent ones."""
    order = np.argsort(-census.class_boxes, kind="stable")[:MAX_BARS]
    counts = census.class_boxes[order]
    subset = f"{MAX_BARS} of {len(names)} classes" if len(names) > MAX_BARS else "each class"
    labels = AxisLabels("", "boxes", f"Boxes of {subset} ({census.split})")
    return bar_chart_picture([names[c] for c in order], counts, [f"{count:,}" for count in counts], labels)


def _size_histogram(census: Census, imgsz: int) -> Picture:
    """Draws a histogram of the boxes' sides, in bins that widen by a factor of the square root of 2."""
    low, high = np.floor(np.log2(np.percentile(census.sides_px, [0, 100]).clip(0.5)))
    edges = 2.0 ** np.arange(low, high + 1.01, 0.5)
    counts, _ = np.histogram(census.sides_px.clip(edges[0], edges[-1]), edges)
    labels = AxisLabels("side, square root of the area (px)", "boxes", f"Box sizes at --imgsz {imgsz} ({census.split})")
    mark = Mark(SMALL_PX, f"{SMALL_PX:g} px") if edges[0] <= SMALL_PX <= edges[-1] else None
    small = float((census.sides_px < SMALL_PX).mean())
    return histogram_picture(edges, counts, labels, mark, f"{small:.0%} below {SMALL_PX:g} px")


def _center_map(census: Census) -> Picture:
    """Draws the numbers of boxes by the position of their centers."""
    labels = AxisLabels(
        "x (fraction of the image's width)", "y (fraction of its height)", f"Centers of the boxes ({census.split})"
    )
    return heatmap_picture(census.centers, labels, f"the strongest color: {counted(int(census.centers.max()), 'box')}")
