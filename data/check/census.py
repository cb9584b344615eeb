"""The data census of a report: how many boxes of each class, how large they are and where, and what the scan found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from data.index.index import DatasetIndex
from utils.boxes import scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.drawing import page
from utils.drawing.charts import heat_map, histogram, legend
from utils.logger import get_logger

SMALL_PX = 16.0  # two cells of stride 8, the finest of most models
LARGEST_ADVISED = 2048  # px; larger images leave few models and GPUs a batch
HEAT_CELLS = 24
MOST_BARS = 20
MOST_LINES = 100  # of the scan's report


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
        """None without boxes."""
        return median_side(self.sides_px)


def take_census(index: DatasetIndex, split: str, imgsz: int) -> Census:
    """Counts the boxes of a split; their sizes are those after the images' longer sides are scaled to ``imgsz``."""
    truth, classes = index.ground_truth(), len(index.names)
    image = truth.image_of_box[~truth.crowd]
    of_class = truth.classes[~truth.crowd]
    sizes = truth.image_hw[image].astype(np.float64)
    centers = xyxy_to_cxcywh(xywh_to_xyxy(truth.boxes_xywh_px[~truth.crowd]))
    centers = scale_boxes(centers, 1 / sizes[:, 1], 1 / sizes[:, 0])
    heat, _, _ = np.histogram2d(centers[:, 1], centers[:, 0], bins=HEAT_CELLS, range=((0, 1), (0, 1)))
    in_image = np.bincount(image, minlength=truth.num_images)
    return Census(
        split=split,
        images=truth.num_images,
        backgrounds=int((in_image == 0).sum()),
        class_boxes=np.bincount(of_class, minlength=classes),
        class_images=truth.images_of_classes(classes),
        sides_px=np.sqrt(index.sides_at(imgsz).prod(1)),
        centers=heat.astype(np.int64),
        most_in_image=int(in_image.max(initial=0)),
    )


def median_side(sides_px: np.ndarray) -> float | None:
    """None without boxes."""
    return float(np.median(sides_px)) if sides_px.size else None


def size_that_shows(median_side_px: float | None, imgsz: int, stride: int) -> int | None:
    """The smallest multiple of ``stride`` at which the median side reaches `SMALL_PX`; None if it does at ``imgsz``."""
    if median_side_px is None or median_side_px >= SMALL_PX:
        return None
    return int(-(-imgsz * SMALL_PX / median_side_px // stride)) * stride


def remedy_for_small_boxes(median_side_px: float | None, imgsz: int, stride: int) -> str | None:
    """What to do about a median side that is too small for most models; None if it is large enough."""
    better = size_that_shows(median_side_px, imgsz, stride)
    if better is None:
        return None
    if better > LARGEST_ADVISED:
        return "cut the images into tiles and train on those"
    return f"use --imgsz {better} or more, or cut large images into tiles"


def warn_of_small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> None:
    """Warns if the median training box is too small for most models, and says what to do."""
    median = median_side(np.sqrt(train.sides_at(imgsz).prod(1)))
    if remedy := remedy_for_small_boxes(median, imgsz, stride):
        get_logger().warning(
            "half of the training boxes have sides below %.3g px at --imgsz %d, too few for most models: %s",
            median, imgsz, remedy,
        )  # fmt: skip


def _pixels(side: float | None) -> str:
    return page.UNKNOWN if side is None else f"{side:.1f} px"


def census_parts(
    censuses: Sequence[Census], indexes: Sequence[DatasetIndex], *, imgsz: int, stride: int
) -> list[page.Content]:
    """The contents of the section. Charts of the first census, which is of the training split if there is one, come
    first."""
    names, first = indexes[0].names, censuses[0]
    parts: list[page.Content] = [
        page.table(
            ("split", "images", "backgrounds", "boxes", "most boxes in an image", f"median side at --imgsz {imgsz}"),
            [(c.split, c.images, c.backgrounds, c.boxes, c.most_in_image, _pixels(c.median_side_px)) for c in censuses],
            "The splits. A background is an image without boxes; a side is the square root of a box's area",
        )
    ]
    if first.median_side_px is None:
        parts.append(f"The {first.split} split has no boxes.")
    else:
        if remedy := remedy_for_small_boxes(first.median_side_px, imgsz, stride):
            text = (
                f"Half of the {first.split} boxes have sides below {first.median_side_px:.1f} px at --imgsz {imgsz}, "
                f"fewer than {SMALL_PX:g} px: too few for most models. {remedy[0].upper()}{remedy[1:]}."
            )
            parts.append(page.paragraph(text, "warning"))
        parts.append(_size_and_centers(first, imgsz))
    for other in censuses[1:]:
        if other.boxes:
            parts.append(page.fold(f"Sizes and centers of {other.split}", _size_and_centers(other, imgsz)))
    if any(census.boxes for census in censuses):
        parts += _class_counts(censuses, names)
    return [*parts, *_findings(censuses, indexes)]


def _size_and_centers(census: Census, imgsz: int) -> Markup:
    """The charts of one split, which has boxes."""
    small = float((census.sides_px < SMALL_PX).mean())
    low, high = np.floor(np.log2(np.percentile(census.sides_px, [0, 100]).clip(0.5)))
    edges = 2.0 ** np.arange(low, high + 1.01, 0.5)
    counts, _ = np.histogram(census.sides_px.clip(edges[0], edges[-1]), edges)
    return page.row_of(
        histogram(
            edges,
            counts,
            title=f"Box sizes at --imgsz {imgsz} ({census.split}); {small:.0%} below {SMALL_PX:g} px",
            x_label="side, square root of the area (px)",
            y_label="boxes",
            log2=True,
            marks=[(SMALL_PX, f"{SMALL_PX:g} px")] if edges[0] <= SMALL_PX <= edges[-1] else [],
        ),
        heat_map(
            census.centers,
            title=f"Centers of the boxes ({census.split})",
            x_label="x (fraction of the image's width)",
            y_label="y (fraction of its height)",
            unit="boxes",
        ),
    )


def _class_counts(censuses: Sequence[Census], names: Sequence[str]) -> list[page.Content]:
    """Boxes and images of each class."""
    first, parts = censuses[0], []
    order = np.argsort(-first.class_boxes, kind="stable")
    if first.boxes:
        top = [(names[c], float(first.class_boxes[c]), f"{first.class_boxes[c]:,}") for c in order[:MOST_BARS]]
        caption = f"Boxes of each class ({first.split})"
        if len(names) > MOST_BARS:
            caption = f"Boxes of the {MOST_BARS} most frequent of {len(names)} classes ({first.split})"
        parts.append(page.bars(top, caption))
    if len(censuses) > 1:
        parts += _balance(censuses, names)
    columns = ["class", *(f"{c.split}: {what}" for c in censuses for what in ("boxes", "images"))]
    rows = [
        [names[c], *(int(v[c]) for census in censuses for v in (census.class_boxes, census.class_images))]
        for c in order
    ]
    table = page.table(columns, rows, "Boxes and images of each class")
    return [*parts, page.fold(f"All classes ({len(names)})", table)]


def _balance(censuses: Sequence[Census], names: Sequence[str]) -> list[page.Content]:
    """How frequent each class is in each split; of many classes, those whose frequencies differ most."""
    frequency = np.array([c.class_images / max(c.images, 1) for c in censuses])  # (S, C)
    order, caption = np.argsort(-frequency[0], kind="stable"), "Images with each class, % of the split's images"
    if len(names) > MOST_BARS:
        order = np.argsort(-np.ptp(frequency, axis=0), kind="stable")[:MOST_BARS]
        caption += f"; the {MOST_BARS} of {len(names)} classes that differ most between the splits"
    rows = [
        (names[c], frequency[:, c].tolist(), ", ".join(f"{value:.1%}" for value in frequency[:, c].tolist()))
        for c in order
    ]
    return [page.grouped_bars(rows, caption), legend([(c.split, f"s{i}") for i, c in enumerate(censuses)])]


def _findings(censuses: Sequence[Census], indexes: Sequence[DatasetIndex]) -> list[page.Content]:
    """What the scan of each split found."""
    parts: list[page.Content] = []
    for census, index in zip(censuses, indexes):
        report = index.report
        lines = [report.lines[i] for i in range(min(len(report.lines), MOST_LINES))]
        parts.append(f"The scan of {census.split}: {report.summary()}.")
        if lines:
            listed = page.bullets(page.code(line) for line in lines)
            parts.append(page.fold(f"{len(lines)} of {len(report.lines):,} findings", listed))
    return parts
