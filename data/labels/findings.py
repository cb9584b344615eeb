"""Defines the findings of a split: whatever is labeled or named and is not used as written is one `Finding`.

`KINDS` is the only table of their kinds: messages, `tools.check` and docs/checks.md take their texts from it. The lost
images and objects of all findings are added up by `data.labels.ledger`.
"""

from __future__ import annotations

from typing import NamedTuple

MISSING_IMAGE = "missing image"
BAD_IMAGE = "unreadable image"
BAD_LABEL = "unusable labels"
BAD_ROW = "bad row"
UNKNOWN_CLASS = "unknown class"
BAD_BOX = "bad box"
ORPHAN = "labels without an image"
NO_LABEL = "image without labels"
UNDECLARED = "labels of undeclared images"
FITTED = "box fitted to its image"
DUPLICATE = "repeated row"
UNSUPPORTED = "unsupported file"


class Kind(NamedTuple):
    """A kind of finding."""

    meaning: str
    remedy: str
    costs: str  # what is lost: "image" (with its objects), "object", or "" for nothing
    unit: str  # what is counted, "image" or "object": their share of the split's decides whether it is a warning


KINDS: dict[str, Kind] = {
    MISSING_IMAGE: Kind("a row of a list names no file", "correct the row, or restore the file", "image", "image"),
    BAD_IMAGE: Kind("the image cannot be read", "get a better copy, or delete image and label", "image", "image"),
    BAD_LABEL: Kind(
        "the label file cannot be read, has no usable row, or is for an image of another shape",
        "correct the label file, or label the image again",
        "image",
        "image",
    ),
    BAD_ROW: Kind("the row does not have the fields of its format", "correct the row", "object", "object"),
    UNKNOWN_CLASS: Kind("the class is not in 'names'", "correct the class, or add it to 'names'", "object", "object"),
    BAD_BOX: Kind(
        "corners in the wrong order, an area below one pixel, or a place outside the image",
        "delete the row, or draw the box again",
        "object",
        "object",
    ),
    ORPHAN: Kind(
        "a label file, COCO entry or annotation that fits no image, or several",
        "name it like its image, or delete it",
        "object",
        "object",
    ),
    NO_LABEL: Kind(
        "a background, as with an empty label file; if a COCO JSON does not name the image, it is left out",
        "label it; for a background, add an empty label file or an entry",
        "",
        "image",
    ),
    UNDECLARED: Kind(
        "COCO entries of images that exist in no declared split, or of a declared split that is missing",
        "nothing, or declare the split",
        "",
        "object",
    ),
    FITTED: Kind(
        "a box that exceeds its image is clipped; labels for another size of the image are scaled or turned",
        "nothing if objects are cut off, else draw the box again",
        "",
        "object",
    ),
    DUPLICATE: Kind(
        "trained on once, scored each time as in pycocotools; different polygons are different objects",
        "delete the second row",
        "",
        "object",
    ),
    UNSUPPORTED: Kind("an image format that is not read", "convert it, or delete it", "", "image"),
}
ROW_LOST = frozenset({BAD_ROW, UNKNOWN_CLASS, BAD_BOX})  # a row that is no box


class Finding(NamedTuple):
    """One line of the report."""

    where: str  # file, or file:line, relative to the data set's folder
    kind: str  # one of `KINDS`
    text: str  # what is wrong there
    image: int = -1  # position in `LabelSource.images`; -1 if it is about none of these
    row_number: int = -1  # see `data.labels.label_format`; -1 for the image or the label file itself
    class_id: int = -1  # class index of the box, if it is known
    xyxy_px: tuple[float, ...] = ()  # labeled corners of the box, in original pixels; empty without a box
    number: int = 1  # images or objects, see `Kind.unit`, that it is about
    lost_images: int = 0  # images, or entries of missing images, that are not used because of this
    lost_objects: int = 0  # labeled objects that are not used because of this

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.text}"
