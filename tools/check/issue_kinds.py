"""The kinds of issues that a check finds, each with its meaning and remedy."""

from __future__ import annotations

from typing import NamedTuple

from data.labels import findings as scan_kinds
from engine.issues.issue import BADLY_PLACED, MISSING_LABEL, SPURIOUS, WRONG_CLASS

# Kinds of issues besides scan findings (`data.labels.findings`) and label errors (`engine.issues.issue`).
MISSING_SPLIT = "missing split"
UNREADABLE_SPLIT = "unreadable split"
REFUSED = "refused split"
NO_OBJECTS = "split without objects"
DAMAGED = "damaged image"
COPIES_ACROSS_SPLITS = "copies of one image across splits"
DUPLICATES_ACROSS_SPLITS = "near-duplicates across splits"
DUPLICATES_WITHIN_SPLIT = "near-duplicates within a split"
AUGMENTED_COPIES = "augmented copies within a split"
DOUBLED = "doubled box"
TWO_CLASSES = "one box, two classes"
TINY = "tiny box"
SMALL_OBJECTS = "small objects"
UNUSED = "unused classes"
NOT_TRAINED = "class without training boxes"
IMBALANCE = "class balance differs between splits"

DUPLICATES = (COPIES_ACROSS_SPLITS, DUPLICATES_ACROSS_SPLITS, DUPLICATES_WITHIN_SPLIT)


class Advice(NamedTuple):
    """The meaning of a kind of issue, and the remedy for one issue."""

    meaning: str
    remedy: str


ADVICE = {
    MISSING_SPLIT: Advice(
        "training refuses the data set as it is", "add the split; for 'val', --val-fraction 0.2 is enough"
    ),
    REFUSED: Advice("training, or scoring on it, ends with this message", "see the message"),
    UNREADABLE_SPLIT: Advice(
        "the other splits are checked", "restore its files, or name the other splits with --split"
    ),
    NO_OBJECTS: Advice("nothing can be scored; if it is 'val', training writes no best.pt", "label its objects"),
    DAMAGED: Advice("decoders differ in how they repair such files", "get a better copy, or delete image and label"),
    scan_kinds.BAD_IMAGE: Advice("training leaves these files out", "get a better copy, or delete it"),
    scan_kinds.MISSING_IMAGE: Advice("training leaves these out", "correct the list, or restore the file"),
    scan_kinds.BAD_LABEL: Advice("training leaves these images out", "correct the label file"),
    scan_kinds.BAD_ROW: Advice("training leaves these rows out", "correct the row"),
    scan_kinds.UNKNOWN_CLASS: Advice("training leaves these boxes out", "correct the class, or add it to the names"),
    scan_kinds.NO_AREA: Advice("training leaves these boxes out", "delete the row, or draw the box again"),
    scan_kinds.NOT_FINITE: Advice("training leaves these images out", "correct the row"),
    scan_kinds.OUTSIDE: Advice("training leaves these boxes out", "delete the row, or draw the box again"),
    scan_kinds.DUPLICATE: Advice("trained on once, but scored each time, as in pycocotools", "delete the second row"),
    scan_kinds.FRACTIONS: Advice("training leaves these boxes out", "multiply them by the image's width and height"),
    scan_kinds.SIZE: Advice("their labels are for another image: training leaves them out", "label the image as it is"),
    scan_kinds.SCALED: Advice("training scales the boxes to the image", "nothing, or label the image as it is"),
    scan_kinds.TURNED: Advice("training turns the boxes with the image", "nothing, or label the upright image"),
    scan_kinds.REVERSED: Advice("training takes them in order", "nothing, or exchange the corners"),
    scan_kinds.BAD_LISTED: Advice(
        "training leaves these rows out", "write one path per row, without quotes, columns or comments"
    ),
    scan_kinds.STRAY: Advice("these labels are not used", "correct the image_id, or delete the annotation"),
    scan_kinds.REPEATED_IMAGE: Advice("training uses it once", "list it once"),
    scan_kinds.REPEATED_ENTRY: Advice("its labels are used once", "nothing, or delete the second entry"),
    scan_kinds.OTHER_FOLDER: Advice(
        "training uses the labels for the image of this name", "nothing, if the image was moved; else delete the entry"
    ),
    scan_kinds.UNLISTED: Advice("training leaves these images out", "label the image, or delete it"),
    scan_kinds.ABSENT: Advice("these labels are not used", "add the images to the split, or delete these labels"),
    scan_kinds.CONFLICT: Advice("training leaves these images out", "delete the wrong entries"),
    scan_kinds.IMAGE_ELSEWHERE: Advice(
        "these labels are not used", "copy a missing folder here, or correct the file names"
    ),
    scan_kinds.ORPHAN: Advice("these labels are not used", "rename it like its image, or delete it"),
    scan_kinds.UNREAD_LABELS: Advice(
        "training leaves these images out", "convert the labels, or add an empty label file"
    ),
    scan_kinds.SECOND_LABEL: Advice("these labels are not used", "keep the right one of the two label files"),
    scan_kinds.LABELED_PER_NAME: Advice(
        "training uses the image with each", "keep the right one of the two label files"
    ),
    scan_kinds.SHARED_LABEL: Advice(
        "the label file may belong to only one of these images", "delete all but one of the images"
    ),
    scan_kinds.NAMED_OTHERWISE: Advice(
        "training matches labels to images by file name", "correct its <filename>, or rename the file"
    ),
    scan_kinds.UNSUPPORTED: Advice("training does not read these files", "convert it, or delete it"),
    scan_kinds.MISREAD: Advice("training reads them as the format says", "see the message"),
    SMALL_OBJECTS: Advice(
        "most models miss objects below two cells of their finest level", "raise --imgsz, or use tiles"
    ),
    UNUSED: Advice("the model cannot learn these", "label some, or remove the classes from the names"),
    NOT_TRAINED: Advice(
        "the model cannot learn these, and they are scored", "move images of it into the training split"
    ),
    IMBALANCE: Advice("scores say less about how the model was trained", "split the images again, at random"),
    COPIES_ACROSS_SPLITS: Advice(
        "Roboflow made them from one image, so scores are too high", "keep all copies in one split"
    ),
    DUPLICATES_ACROSS_SPLITS: Advice(
        "the same image is trained on and scored on: scores are too high", "keep all copies in one split"
    ),
    DUPLICATES_WITHIN_SPLIT: Advice(
        "training samples duplicated images more often", "keep one copy, unless several are intended"
    ),
    AUGMENTED_COPIES: Advice(
        "Roboflow made them; training augments images by itself", "nothing, or export without augmentation"
    ),
    DOUBLED: Advice("two boxes of one class with IoU above 0.9: one object is counted twice", "delete one of the two"),
    TWO_CLASSES: Advice("two boxes of different classes with IoU above 0.9", "delete the wrong one"),
    TINY: Advice(
        "too small to be found at this --imgsz", "delete it if it was drawn by mistake, else raise --imgsz or use tiles"
    ),
    scan_kinds.CLIPPED: Advice(
        "training clips them to their image", "nothing if objects are cut off, else redraw the box"
    ),
    scan_kinds.NO_LABEL: Advice("training treats these images as background", "label it, or add an empty label file"),
    MISSING_LABEL: Advice("the model is sure of an object that is not labeled", "add the label"),
    SPURIOUS: Advice("the model sees no object where there is a label", "delete the label, unless the model is wrong"),
    WRONG_CLASS: Advice("the model is sure of another class", "change the class"),
    BADLY_PLACED: Advice("the model is sure of another position or size", "draw the box again"),
}


def advice_about(kind: str) -> Advice:
    """Returns the advice about a kind of issue; empty for an unknown kind, which shards may have from another
    version."""
    return ADVICE.get(kind, Advice("", ""))
