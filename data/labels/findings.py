"""Defines the findings of a scan: one `Finding` for everything that is left out, changed or doubtful.

A finding also says what is lost with it, so that `data.labels.ledger` can add it up.
"""

from __future__ import annotations

from typing import NamedTuple

# Kinds of findings. The image is left out:
BAD_IMAGE = "unreadable image"
MISSING_IMAGE = "missing image"
BAD_LISTED = "bad row of a list"
BAD_LABEL = "unusable label file"
SIZE = "size mismatch"
UNREAD_LABELS = "labels that are not read"
# The row is left out, and the image with it if none of its rows can be used:
BAD_ROW = "bad row"
UNKNOWN_CLASS = "unknown class"
NO_AREA = "box without area"
NOT_FINITE = "number not finite"  # the image is left out, too: the rest of the file cannot be trusted
OUTSIDE = "box outside the image"
FRACTIONS = "box given as fractions"
# Labels of no image in the split:
STRAY = "annotation without an image"
ABSENT = "annotated image not in the split"
ORPHAN = "label file without an image"
# Corrected or only reported:
DUPLICATE = "duplicate box"
CLIPPED = "box clipped"
REVERSED = "corners in the wrong order"
SCALED = "labels for another size"
TURNED = "labels of the unturned photo"
REPEATED_IMAGE = "image listed twice"
UNLISTED = "image without annotations entry"
UNSUPPORTED = "file of an unsupported kind"
SECOND_LABEL = "second label file of an image"
SHARED_LABEL = "label file of several images"
NAMED_OTHERWISE = "label file that names another image"
NO_LABEL = "missing label file"
MISREAD = "probably misread"  # of the split as a whole

IMAGE_LOST = frozenset({BAD_IMAGE, MISSING_IMAGE, BAD_LABEL, SIZE})
ROW_LOST = frozenset({BAD_ROW, UNKNOWN_CLASS, NO_AREA, NOT_FINITE, OUTSIDE, FRACTIONS})


class Finding(NamedTuple):
    """One line of the report."""

    where: str  # file, or file:line, relative to the data set
    kind: str  # one of the kinds above
    text: str  # what is wrong
    image: int = -1  # number in `LabelSource.images`; -1: about none of these
    row_number: int = -1  # see `data.labels.rows`; -1: the image or the label file itself
    class_id: int = -1  # of a box whose geometry is the problem, and
    xyxy_px: tuple[float, ...] = ()  # its corners as labeled, original pixels; empty: there is no such box
    lost_images: int = 0  # images, or the label files of some, that are not used because of this
    lost_objects: int = 0  # labeled objects that are not used because of this
    consequence: str = ""  # what becomes of it, such as "left out"
    cause: str = ""  # ``text`` without what differs from file to file or row to row; empty: nothing does
    class_name: str = ""  # what the label file calls the class, if it is unknown

    @property
    def message(self) -> str:
        """What is wrong, and what becomes of it."""
        return f"{self.text}; {self.consequence}" if self.consequence else self.text

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"
