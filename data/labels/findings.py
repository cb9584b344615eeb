"""Defines the findings of a scan: one `Finding` for everything that is left out, changed or doubtful.

A finding also counts the lost images and objects, which `data.labels.ledger` adds up.
"""

from __future__ import annotations

from typing import NamedTuple

# Kinds of findings. Kinds that leave out an image, found when the files of a split are listed:
MISSING_IMAGE = "missing image"
BAD_LISTED = "bad row of a list"
UNREAD_LABELS = "labels that are not read"
# Kinds that leave out an image, found by the scan (`IMAGE_LOST`) or, the first two, also when files are listed:
BAD_IMAGE = "unreadable image"
BAD_LABEL = "unusable label file"
SIZE = "size mismatch"
# Kinds that leave out the row, and the image if none of its rows is usable:
BAD_ROW = "bad row"
UNKNOWN_CLASS = "unknown class"
NO_AREA = "box without area"
NOT_FINITE = "number not finite"  # always leaves out the image, because the rest of the file cannot be trusted
OUTSIDE = "box outside the image"
FRACTIONS = "box given as fractions"
# Labels that are used for no image of the split:
STRAY = "annotation without an image"
ABSENT = "annotated image not in the split"
CONFLICT = "image with conflicting entries"
ORPHAN = "label file without an image"
IMAGE_ELSEWHERE = "labels of an image that is not here"  # it may be in a missing folder or in no split; not a loss
# Corrected or only reported:
DUPLICATE = "duplicate box"
CLIPPED = "box clipped"
REVERSED = "corners in the wrong order"
SCALED = "labels for another size"
TURNED = "labels of the unturned photo"
REPEATED_IMAGE = "image listed twice"
REPEATED_ENTRY = "repeated image entry"
OTHER_FOLDER = "image entry of another folder"
UNLISTED = "image without annotations entry"
UNSUPPORTED = "file of an unsupported kind"
SECOND_LABEL = "second label file of an image"
LABELED_PER_NAME = "image with a label file for each of its names"
SHARED_LABEL = "label file of several images"
NAMED_OTHERWISE = "label file that names another image"
NO_LABEL = "missing label file"
MISREAD = "probably misread"  # concerns the split as a whole

COUNTED_EARLIER = "counted as lost in an earlier split"  # consequence of a finding that may concern several splits

IMAGE_LOST = frozenset({BAD_IMAGE, BAD_LABEL, SIZE})
ROW_LOST = frozenset({BAD_ROW, UNKNOWN_CLASS, NO_AREA, NOT_FINITE, OUTSIDE, FRACTIONS})


class Finding(NamedTuple):
    """One line of the report."""

    where: str  # file, or file:line, relative to the data set; for `MISREAD`, the split or a joined data set's YAML
    kind: str  # one of the kinds above
    text: str  # description of the problem
    image: int = -1  # number in `LabelSource.images`; -1 if it is about none of these
    row_number: int = -1  # see `data.labels.rows`; -1 for the image or the label file itself
    class_id: int = -1  # class index of a box with a geometry problem or an unknown class
    xyxy_px: tuple[float, ...] = ()  # labeled corners of the box, in original pixels; empty without a box
    lost_images: int = 0  # images, or label files of missing images, that are not used because of this
    lost_objects: int = 0  # labeled objects that are not used because of this
    consequence: str = ""  # such as "left out"
    cause: str = ""  # ``text`` without the parts that differ between files or rows; empty if it has none
    class_name: str = ""  # name of the class in the label file, if it is unknown

    @property
    def message(self) -> str:
        """The problem and its consequence."""
        return f"{self.text}; {self.consequence}" if self.consequence else self.text

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"
