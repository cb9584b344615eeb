"""Lists the kinds of issues that a check finds, what each means, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from data.labels import findings as scan_kinds
from engine.evaluation.issues import MISSED, MOVED, SPURIOUS, SWAPPED, Issue, by_kind

# Kinds of issues besides those of the scan (`data.labels.findings`) and label errors (`engine.evaluation.issues`).
DAMAGED = "damaged image"
COPIED = "copies of one image across splits"
ACROSS = "near-duplicates across splits"
WITHIN = "near-duplicates within a split"
AUGMENTED = "augmented copies within a split"
DOUBLED = "doubled box"
TWO_CLASSES = "one box, two classes"
TINY = "tiny box"
SMALL_OBJECTS = "small objects"
UNUSED = "class never used"
NOT_TRAINED = "class without training boxes"
IMBALANCE = "class balance differs between splits"

DUPLICATES = (COPIED, ACROSS, WITHIN)
# What each kind means, and what to do.
ADVICE = {
    DAMAGED: ("decoders repair such files in their own way", "get a better copy, or delete image and label"),
    scan_kinds.BAD_IMAGE: ("training leaves these files out", "get a better copy, or delete it"),
    scan_kinds.MISSING_IMAGE: ("training leaves these out", "correct the list, or restore the file"),
    scan_kinds.BAD_LABEL: ("training leaves these images out", "correct the label file"),
    scan_kinds.BAD_ROW: ("training leaves these rows out", "correct the row"),
    scan_kinds.UNKNOWN_CLASS: ("training leaves these boxes out", "correct the class, or add it to the names"),
    scan_kinds.NO_AREA: ("training leaves these boxes out", "delete the row, or draw the box again"),
    scan_kinds.NOT_FINITE: ("training leaves these images out", "correct the row"),
    scan_kinds.OUTSIDE: ("training leaves these boxes out", "delete the row, or draw the box again"),
    scan_kinds.DUPLICATE: ("trained on once, scored as often as pycocotools does", "delete the second row"),
    scan_kinds.FRACTIONS: ("training leaves these boxes out", "multiply them by the image's width and height"),
    scan_kinds.SIZE: ("their labels are for another image: training leaves them out", "label the image as it is"),
    scan_kinds.SCALED: ("training scales the boxes to the image", "nothing, or label the image as it is"),
    scan_kinds.TURNED: ("training turns the boxes with the image", "nothing, or label the upright image"),
    scan_kinds.REVERSED: ("training takes them in order", "nothing, or exchange the corners"),
    scan_kinds.BAD_LISTED: ("training leaves these rows out", "one path a row, without quotes, columns and comments"),
    scan_kinds.STRAY: ("these labels are not used", "correct the image_id, or delete the annotation"),
    scan_kinds.REPEATED_IMAGE: ("training uses it once", "list it once"),
    scan_kinds.UNLISTED: ("training leaves these images out", "label the image, or delete it"),
    scan_kinds.ABSENT: ("these labels are not used", "add the images to the split, or delete these labels"),
    scan_kinds.ORPHAN: ("these labels are not used", "rename it like its image, or delete it"),
    scan_kinds.UNREAD_LABELS: ("training leaves these images out", "convert the labels, or add an empty label file"),
    scan_kinds.SECOND_LABEL: ("these labels are not used", "keep the right one of the two label files"),
    scan_kinds.SHARED_LABEL: ("one of the images may be another one", "delete all but one of the images"),
    scan_kinds.NAMED_OTHERWISE: ("training goes by the names of files", "correct its <filename>, or rename the file"),
    scan_kinds.UNSUPPORTED: ("training does not read these files", "convert it, or delete it"),
    scan_kinds.MISREAD: ("training reads them as the format says", "as its line says"),
    SMALL_OBJECTS: ("most models miss objects below two cells of their finest level", "raise --imgsz, or use tiles"),
    UNUSED: ("the model cannot learn these", "label some, or remove the class from the names"),
    NOT_TRAINED: ("the model cannot learn these, and they are scored", "move images of it into the training split"),
    IMBALANCE: ("scores say less about how the model was trained", "split the images again, at random"),
    COPIED: ("Roboflow made them of one image, so scores are too high", "keep all copies in one split"),
    ACROSS: ("the same image is trained on and scored on: scores are too high", "keep all copies in one split"),
    WITHIN: ("copies weigh more than other images", "keep one copy, unless several are intended"),
    AUGMENTED: ("Roboflow made them; training augments images by itself", "nothing, or export without augmentation"),
    DOUBLED: ("two boxes of one class with IoU above 0.9: one object is counted twice", "delete one of the two"),
    TWO_CLASSES: ("two boxes of different classes with IoU above 0.9", "delete the wrong one"),
    TINY: ("too small to be found at this --imgsz", "delete it if it is a slip, else raise --imgsz or use tiles"),
    scan_kinds.CLIPPED: ("training clips them to their image", "nothing if objects are cut off, else redraw the box"),
    scan_kinds.NO_LABEL: ("training takes these images as backgrounds", "label it, or add an empty label file"),
    MISSED: ("the model is sure of an object that is not labeled", "add the label"),
    SPURIOUS: ("the model sees no object where there is a label", "delete the label, unless the model is wrong"),
    SWAPPED: ("the model is sure of another class", "change the class"),
    MOVED: ("the model is sure of another position or size", "draw the box again"),
}
SHOWN = 3  # issues of each kind that the summary shows


def summary_lines(issues: Sequence[Issue]) -> list[str]:
    """Returns lines with the number of issues of each kind, what the kind means, and the first few issues."""
    lines = []
    for kind, group in by_kind(issues).items():
        meaning = f" ({ADVICE[kind][0]})" if kind in ADVICE else ""
        lines.append(f"{kind}: {len(group):,}{meaning}")
        lines += [f"  {issue}" for issue in group[:SHOWN]]
        if len(group) > SHOWN:
            lines.append(f"  ... and {len(group) - SHOWN:,} more")
    return lines
