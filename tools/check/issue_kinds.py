"""The kinds of issues that a check finds, each with its meaning and remedy."""

from __future__ import annotations

from typing import NamedTuple

from data.findings import KINDS
from engine.report.label_errors import MISSING_LABEL, WRONG_CLASS

# Kinds of issues besides scan findings (`data.findings.KINDS`) and label errors.
MISSING_SPLIT = "missing split"
UNREADABLE_SPLIT = "unreadable split"
REFUSED = "refused split"
NO_OBJECTS = "split without objects"
DAMAGED = "damaged image"
COPIES_ACROSS_SPLITS = "copies of one image across splits"
DUPLICATES_ACROSS_SPLITS = "near-duplicates across splits"
DUPLICATES_WITHIN_SPLIT = "near-duplicates within a split"
DOUBLED = "doubled box"
TWO_CLASSES = "one box, two classes"
TINY = "tiny box"
SMALL_OBJECTS = "small objects"
UNUSED = "unused classes"
SIMILAR = "similar class names"
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
    **{kind: Advice(meaning, remedy) for kind, (meaning, remedy, *_) in KINDS.items()},
    SMALL_OBJECTS: Advice(
        "most models miss objects below two cells of their finest level", "raise --imgsz, or use tiles"
    ),
    UNUSED: Advice("the model cannot learn these", "label some, or remove the classes from the names"),
    SIMILAR: Advice("one may be a slip of the other", "rename the class in its labels, or merge the two: 'classes:'"),
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
    DOUBLED: Advice("two boxes of one class with IoU above 0.9: one object is counted twice", "delete one of the two"),
    TWO_CLASSES: Advice("two boxes of different classes with IoU above 0.9", "delete the wrong one"),
    TINY: Advice(
        "too small to be found at this --imgsz", "delete it if it was drawn by mistake, else raise --imgsz or use tiles"
    ),
    MISSING_LABEL: Advice(
        "the model is sure of an object that is not labeled",
        "add the label; its class may be another that the model has not learned",
    ),
    WRONG_CLASS: Advice("the model is sure of another class", "change the class"),
}


def advice_about(kind: str) -> Advice:
    """Returns the advice about a kind of issue; empty for an unknown kind, which shards may have from another
    version."""
    return ADVICE.get(kind, Advice("", ""))
