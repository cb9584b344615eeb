"""The sentences of a report about a model: what it finds, and its errors, the most costly first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.index import DatasetIndex
from engine.evaluation.analysis import (
    BACKGROUND,
    BOTH,
    CLASS,
    DUPLICATE,
    FEW_IMAGES,
    LOCATION,
    MISSED,
    ErrorSplit,
    confused_pairs,
    images_with_objects,
)
from engine.evaluation.result import EvalResult, Evaluation
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.strings import counted, listed

SMALL_PX = 16.0  # two cells of stride 8, the finest of most models
LARGEST_ADVISED = 2048  # px; with larger images, few GPUs have memory for a batch
MIN_COST = 0.01  # AP50; kinds of errors that cost less are not mentioned
# By kind of error: what these detections do, or what happens to these objects.
ERROR_SENTENCES = {
    CLASS: "name another class",
    LOCATION: "overlap their object by an IoU of only 0.1 to 0.5",
    BOTH: "overlap only an object of another class",
    DUPLICATE: "are of an object that is found already",
    BACKGROUND: "are where no object is labeled",
    MISSED: "are missed",
}


@dataclass(frozen=True)
class Subject:
    """The run or checkpoint that a report is about."""

    title: str
    config: TrainConfig | ValConfig
    hyp: Hyperparameters | None
    machine: Sequence[tuple[str, str]]  # versions and the machine
    imgsz: int
    stride: int
    train: DatasetIndex | None  # None: not known, for the validation of a checkpoint
    validated: DatasetIndex
    split: str  # name of the validated split
    batches: int = 0  # per epoch; 0 for the validation of a checkpoint
    best_epoch: int = -1  # of best.pt, see `Progress`; -1: none
    is_held_out: bool = False  # the validated images are a part of the data set's training split
    command: TrainConfig | None = None  # the settings that have begun the run, some of them open; None: ``config``

    @property
    def epochs(self) -> int:
        """Planned epochs of the run; 0 for the validation of a checkpoint."""
        return self.config.epochs if isinstance(self.config, TrainConfig) else 0


@dataclass(frozen=True)
class Validated:
    """What is known from a validation."""

    errors: ErrorSplit  # of the detections above the threshold
    label_errors: int  # labels that the model contradicts
    unlabeled: int  # images without a label file in which it finds objects above the threshold


def unlabeled_with_detections(evaluation: Evaluation, index: DatasetIndex) -> int:
    """Counts the images without a label file in which the model finds objects above the threshold."""
    detected = evaluation.detected
    with_detections = np.unique(detected.image_index[detected.scores > evaluation.result.shown_confidence])
    return int(index.without_label_file()[with_detections].sum())


def verdict(evaluation: Evaluation, index: DatasetIndex) -> Iterator[str]:
    """Yields how many images have no label file, how many objects are found above the threshold, how many detections
    are right, and how much the validation images prove."""
    result = evaluation.result
    unlabeled = int(index.without_label_file().sum())
    if unlabeled:
        yield (
            f"Of {counted(len(index), 'image')}, the scores take {unlabeled:,} without a label file as showing no "
            f"object; the model finds objects in {unlabeled_with_detections(evaluation, index):,} of them."
        )
    objects = int(result.class_targets.sum())
    if not objects:
        return
    detections = int(result.confusion[:-1].sum())
    right = int(np.diag(result.confusion)[:-1].sum())
    clauses = [f"It finds {right:,} of {counted(objects, 'object')} ({right / objects:.0%})"]
    if detections:
        are = "is" if detections == 1 else "are"
        clauses.append(f"{right:,} of {counted(detections, 'detection')} {are} right ({right / detections:.0%})")
    yield f"{'; '.join(clauses)}."
    images = images_with_objects(evaluation.matches)
    if images < FEW_IMAGES:
        few = "One image with objects proves" if images == 1 else f"{images} images with objects prove"
        yield f"{few} nothing about other images: validate on at least {FEW_IMAGES}, better 100."


def error_sentences(result: EvalResult, errors: ErrorSplit, names: Sequence[str]) -> Iterator[str]:
    """Yields the kinds of errors of detections above the threshold, the most costly first, then the weakest class.

    ``errors``: of these detections.
    """
    objects = int(result.class_targets.sum())
    if not objects:
        return
    detections = int(result.confusion[:-1].sum())
    for kind in np.argsort(-errors.cost, kind="stable").tolist():
        count = int(errors.counts[:, kind].sum())
        if not count or not errors.cost[kind] >= MIN_COST:
            continue
        total = counted(objects, "object") if kind == MISSED else counted(detections, "detection")
        sentence = f"{count:,} of {total} {ERROR_SENTENCES[kind]}{_main_class(result, errors, kind, names)}"
        yield f"{sentence}: {errors.cost[kind]:.3f} of AP50."
    ap = np.where(result.class_targets > 0, result.class_ap, np.nan)
    if np.count_nonzero(result.class_targets) > 1:
        weakest = int(np.nanargmin(ap))
        yield f"The weakest class is {names[weakest]}, with AP {ap[weakest]:.3f}; the mean is {result.ap:.3f}."
    unscored = [names[c] for c in np.flatnonzero(result.class_targets == 0).tolist()]
    if unscored:
        yield f"{counted(len(unscored), 'class')} without validation objects, so not scored: {listed(unscored, 5)}."


def _main_class(result: EvalResult, errors: ErrorSplit, kind: int, names: Sequence[str]) -> str:
    """Returns a clause about the class that loses most by a kind of error, or the most frequent confusion; "" for a
    single class."""
    if len(names) == 1:
        return ""
    pairs = confused_pairs(result.confusion)
    if kind == CLASS and pairs:
        count, predicted, true = pairs[0]
        return f", most often {names[true]} as {names[predicted]} ({count} of {result.class_targets[true]})"
    main = int(np.nan_to_num(errors.class_cost[:, kind]).argmax())
    total = result.class_targets[main] if kind == MISSED else result.confusion[main].sum()
    return f", which costs most in {names[main]} ({errors.counts[main, kind]:,} of {total:,})"


def imgsz_for_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> int:
    """Returns ``imgsz`` if the median side of the boxes reaches `SMALL_PX` there, else the smallest multiple of
    ``stride`` at which it does."""
    sides = np.sqrt(train.sides_at(imgsz).prod(1))
    median = float(np.median(sides)) if sides.size else math.inf
    return imgsz if median >= SMALL_PX else math.ceil(imgsz * SMALL_PX / median / stride) * stride


def small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> str:
    """Describes that half of the boxes are too small for most models at ``imgsz``, with the remedy; "" if they are not.

    The remedy is larger images (`imgsz_for_boxes`), or (smaller) tiles.
    """
    larger = imgsz_for_boxes(train, imgsz=imgsz, stride=stride)
    if larger == imgsz:
        return ""
    median = float(np.median(np.sqrt(train.sides_at(imgsz).prod(1))))
    remedies = []
    if larger <= LARGEST_ADVISED:
        remedies.append(f"use --imgsz {larger} or more")
    if train.tile:
        tile = max(int(train.tile * median / SMALL_PX // stride), 1) * stride
        remedies.append(f"use smaller tiles ('tile: {tile}' in the data set's YAML)")
    else:
        tile = imgsz if remedies else 640
        remedies.append(f"cut large images into tiles ('tile: {tile}' in the data set's YAML)")
    return (
        f"half of the boxes have sides below {median:.3g} px at --imgsz {imgsz}, too small for most models; "
        f"{', or '.join(remedies)}"
    )
