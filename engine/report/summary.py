"""The sentences of a report: the errors of a model, the most costly first, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.dataset.spec import DEMO
from data.index.index import DatasetIndex
from engine.evaluation.analysis import BACKGROUND, BOTH, CLASS, DUPLICATE, LOCATION, MISSED, ErrorSplit, confused_pairs
from engine.evaluation.fitness import Fitness
from engine.evaluation.result import EvalResult
from engine.optim.schedule import few_steps_warning, random_weights_warning, step_plan
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.logger import get_logger
from utils.mirrored_classes import mirrored_classes
from utils.program import resume_flag
from utils.strings import counted, listed

SMALL_PX = 16.0  # two cells of stride 8, the finest of most models
LARGEST_ADVISED = 2048  # px; with larger images, few GPUs have memory for a batch
MIN_COST = 0.01  # AP50; kinds of errors that cost less are not mentioned
MAX_DATA_WAIT = 0.2  # fraction of the time; more waiting for images is mentioned
MIN_RISE = 0.005  # of AP in the last third of a run, that more epochs may continue
FEW_BOXES = 50  # training boxes of a class
MIN_F1_RISE = 0.1  # of a class at a threshold of its own, which is mentioned
MIN_OBJECTS = 10  # validation objects of a class, for its threshold to be more than chance
IMBALANCED = 10  # ratio of boxes of the most frequent class to the rarest
BALANCING = ("repeat_factor", "cls_pw", "image_weights")  # settings that balance classes
# By kind of error: what these detections do, or what happens to these objects, and what to do about it.
ERROR_SENTENCES = {
    CLASS: "name another class",
    LOCATION: "overlap their object by an IoU of only 0.1 to 0.5",
    BOTH: "overlap only an object of another class",
    DUPLICATE: "are of an object that is found already",
    BACKGROUND: "are where no object is labeled",
    MISSED: "are not found",
}
ERROR_ADVICE = {
    CLASS: "compare the labels of the confused classes, and add images of them",
    LOCATION: "check that labels are tight and consistent",
    BOTH: "check that the labels of these objects are complete",
    DUPLICATE: "check for objects that are labeled twice",
    BACKGROUND: "check for missing labels, or add images without objects",
    MISSED: "add images of such objects, or train with a larger --imgsz or a larger model",
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
    fitness: Fitness = Fitness("AP", "AP")
    batches: int = 0  # per epoch; 0 for the validation of a checkpoint
    best_epoch: int = -1  # of best.pt, see `Progress`; -1: none

    @property
    def epochs(self) -> int:
        """Planned epochs of the run; 0 for the validation of a checkpoint."""
        return self.config.epochs if isinstance(self.config, TrainConfig) else 0


@dataclass(frozen=True)
class Validated:
    """What is known from a validation."""

    result: EvalResult
    errors: ErrorSplit  # of the detections above the threshold
    ap_error: float  # standard error of AP; nan: unknown
    label_errors: int  # labels that the model contradicts


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
    """Returns a clause about the class with the most errors of a kind; "" for a single class."""
    if len(names) == 1:
        return ""
    pairs = confused_pairs(result.confusion)
    if kind == CLASS and pairs:
        count, predicted, true = pairs[0]
        return f", most often {names[true]} as {names[predicted]} ({count} of {result.class_targets[true]})"
    most = int(errors.counts[:, kind].argmax())
    total = result.class_targets[most] if kind == MISSED else result.confusion[most].sum()
    return f", most often {names[most]} ({errors.counts[most, kind]} of {total})"


def advice(
    subject: Subject, history: Mapping[str, np.ndarray], validated: Validated | None, *, last: Path
) -> Iterator[str]:
    """Yields what to do next: a longer run or weights for one that has learned little, then about the largest error.

    Args:
        history: the columns of results.csv, float64 (epochs,).
        validated: None before a validation.
        last: the checkpoint with which the run continues.
    """
    if validated is not None and not validated.result.class_targets.any():
        yield "Label the objects in the validation images: until then, no epoch is known to be better than another."
        return
    config = subject.config
    few = ""
    if isinstance(config, TrainConfig):
        if subject.batches and not config.time:
            few = few_steps_warning(step_plan(config, subject.batches), config)
            if few:
                yield f"Train longer: {few}."
        if subject.train is not None and config.data != DEMO:
            scratch = random_weights_warning(len(subject.train), weights=config.weights, model=config.model)
            if scratch:
                yield f"Start from weights: {scratch}."
    if validated is not None:
        flips = list(_flips(subject, validated.result))
        cost = validated.errors.cost
        largest = int(np.nan_to_num(cost).argmax())
        if cost[largest] >= MIN_COST and not (largest == CLASS and flips):
            yield f"Against the largest error: {ERROR_ADVICE[largest]}."
        yield from flips
        yield from _own_thresholds(validated.result, subject.validated.names)
        if validated.label_errors:
            yield f"Check {counted(validated.label_errors, 'label')} that the model contradicts, below."
    fitness = history.get(subject.fitness.column, np.zeros(0))
    fitness = fitness[np.isfinite(fitness)]
    third = len(fitness) // 3
    is_complete = subject.epochs > 0 and len(history.get("epoch", ())) >= subject.epochs
    if is_complete and third and not few:
        rise = float(fitness[-third:].max() - fitness[:-third].max())
        error = 0.0 if validated is None else float(np.nan_to_num(validated.ap_error))
        if rise > max(MIN_RISE, 2 * error):
            more = f"{resume_flag(last)} --epochs {2 * subject.epochs}"
            yield f"{subject.fitness.name} was still rising: train longer, with {more}."
    if _overfits(history):
        yield (
            "The validation loss rises while the training loss falls: more images, stronger augmentation, a smaller "
            "model, or fewer epochs."
        )
    waits = history.get("speed/data_wait", np.zeros(0))
    if np.isfinite(waits).any() and np.nanmedian(waits) > MAX_DATA_WAIT:
        yield f"{np.nanmedian(waits):.0%} of the time, training waits for images: more --workers, or --cache ram."
    if subject.train is not None:
        yield from _data_advice(subject, subject.train)


def _flips(subject: Subject, result: EvalResult) -> Iterator[str]:
    """Yields the flips of the training that exchange confused classes. If the settings of the training are unknown,
    images were perhaps flipped horizontally, but not vertically."""
    names = subject.validated.names
    hyp = subject.hyp or Hyperparameters()
    condition = "" if subject.hyp else ", if the training flipped images"
    for flip in ("fliplr", "flipud"):
        for one, other in mirrored_classes(names, flip) if getattr(hyp, flip) else ():
            i, j = names.index(one), names.index(other)
            count = int(result.confusion[[i, j], [j, i]].sum())
            if count:
                yield (
                    f"A flipped image exchanges {one} and {other}, of which {counted(count, 'object')} "
                    f"{'is' if count == 1 else 'are'} mistaken for the other: train with --set {flip}=0{condition}."
                )


def _own_thresholds(result: EvalResult, names: Sequence[str]) -> Iterator[str]:
    """Yields which classes have their best threshold far from that of all classes, and how to use it."""
    shared = result.class_metrics["f1"]
    best, confidence = result.class_best
    far = np.flatnonzero((best - shared >= MIN_F1_RISE) & (result.class_targets >= MIN_OBJECTS))
    far = far[np.argsort(shared[far] - best[far], kind="stable")]
    if far.size:
        found = [f"{names[c]} (F1 {best[c]:.2f} at {confidence[c]:.3f}, not {shared[c]:.2f})" for c in far.tolist()]
        flags = f"--classes {shlex.quote(names[far[0]])} --conf-thres {confidence[far[0]]:.3f}"
        yield (
            f"The threshold of all classes, {result.shown_confidence:.3f}, is far from the best one of "
            f"{listed(found, 3)}: detect.py {flags} shows a class alone, at its own."
        )


def _overfits(history: Mapping[str, np.ndarray]) -> bool:
    """Returns whether, over the last third, the training loss falls and the validation loss rises by more than 2 %
    each."""
    names = [name.removeprefix("train/") for name in history if name.startswith("train/")]
    shared = [name for name in names if f"val/{name}" in history]
    if not shared:
        return False
    losses = np.array([np.sum([history[f"{head}/{name}"] for name in shared], axis=0) for head in ("train", "val")])
    train, val = losses[:, np.isfinite(losses).all(0)]
    third = len(train) // 3
    return third >= 2 and bool(val[-1] > 1.02 * val[-third - 1] and train[-1] < 0.98 * train[-third - 1])


def _data_advice(subject: Subject, train: DatasetIndex) -> Iterator[str]:
    small = small_boxes(train, imgsz=subject.imgsz, stride=subject.stride)
    if small:
        yield f"{small[0].upper()}{small[1:]}."
    names = train.names
    boxes = train.boxes_per_class(len(names))
    unlabeled = train.names_ignored_everywhere()  # such as the old classes of --keep-old
    labeled = [c for c in range(len(names)) if names[c] not in unlabeled]
    rare = sorted((c for c in labeled if boxes[c] < FEW_BOXES), key=lambda c: int(boxes[c]))
    if rare:
        classes = listed([f"{names[c]} ({boxes[c]})" for c in rare], 5)
        yield f"{counted(len(rare), 'class')} with fewer than {FEW_BOXES} training boxes; label more: {classes}."
    present = np.flatnonzero(boxes)
    if not present.size or any(getattr(subject.config, name, 0) for name in BALANCING):
        return
    most = present[boxes[present].argmax()]
    least = present[boxes[present].argmin()]
    if boxes[most] >= IMBALANCED * boxes[least]:
        yield (
            f"{names[most]} has {boxes[most] / boxes[least]:.0f} times as many training boxes as {names[least]}: "
            "--image-weights draws more images of classes with a low AP, --repeat-factor repeats those of rare classes."
        )


def small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> str:
    """Describes that half of the boxes are too small for most models at ``imgsz``, with the remedy; "" if they are not.

    The remedy is the smallest multiple of ``stride`` at which the median side reaches `SMALL_PX`, or (smaller) tiles.
    """
    sides = np.sqrt(train.sides_at(imgsz).prod(1))
    median = float(np.median(sides)) if sides.size else math.inf
    if median >= SMALL_PX:
        return ""
    remedies = []
    larger = math.ceil(imgsz * SMALL_PX / median / stride) * stride
    if larger <= LARGEST_ADVISED:
        remedies.append(f"use --imgsz {larger} or more")
    if train.tile:
        tile = max(int(train.tile * median / SMALL_PX // stride), 1) * stride
        remedies.append(f"use smaller tiles ('tile: {tile}' in the data set's YAML)")
    else:
        tile = imgsz if remedies else 640
        remedies.append(f"cut large images into tiles ('tile: {tile}' in the data set's YAML)")
    return (
        f"half of the boxes have sides below {median:.3g} px at --imgsz {imgsz}, too small for most models: "
        f"{', or '.join(remedies)}"
    )


def warn_of_small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> None:
    """Logs `small_boxes` of the training split as a warning."""
    text = small_boxes(train, imgsz=imgsz, stride=stride)
    if text:
        get_logger().warning("%s", text)
