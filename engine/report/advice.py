"""The text at the top of a report: how training went, where the model is wrong, and what to do next.

Each sentence follows from numbers by a rule; a rule whose numbers are unknown yields nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.evaluation.analysis import KINDS, ErrorSplit
from engine.evaluation.metrics import Fitness, nanmean
from engine.evaluation.result import EvalResult
from engine.evaluation.small_boxes import remedy_for_small_boxes
from engine.evaluation.tables import missed_classes_text
from engine.report.census import Census
from engine.run.results_csv import CONFIDENCE_COLUMN
from utils.program import resume_flag
from utils.strings import counted, format_duration, listed

RISING_AP = 0.005  # smallest rise that more epochs may continue
FALLING_AP = 0.02  # smallest fall since the best epoch that is mentioned
MAX_DATA_WAIT = 0.2  # fraction of the time; more waiting for images is mentioned
MIN_COST = 0.01  # AP50; kinds of errors that cost less are not mentioned
NEARLY_WORST = 0.8  # kinds of errors with this fraction of the highest cost are as important
FEW_OBJECTS = 100  # in a validation split with fewer, changes of AP may be chance
FEW_BOXES = 50  # training boxes of a class
IMBALANCED = 10  # ratio of boxes of the most frequent class to the rarest
BALANCING = ("repeat_factor", "cls_pw", "image_weights")  # settings that balance classes
WEAK = 0.6  # fraction of the mean AP below which a class is weak
SMALL_SIDE_PX = 32  # at --imgsz, as the sides of COCO's small objects
SOME_SMALL = 0.1  # fraction of small boxes from which on they are mentioned
SURE = 0.975  # fraction of the draws, as in a two-sided interval of 95 %
MIN_IMAGES = 10  # with fewer, draws do not show how far chance goes
REMEDIES = {
    "class": "classes are confused: see the confusion matrix; compare the labels of these classes, add images of them",
    "location": "boxes are inaccurate: check that labels are tight and consistent",
    "both": "objects are taken for others nearby: check whether their labels are complete",
    "duplicate": "objects are detected twice: lower the IoU threshold of NMS, or check for objects labeled twice",
    "background": "the model sees objects where no label is: check for missing labels, or add images without objects",
    "missed": "objects are not found: add images of such objects, train longer, or with a larger --imgsz or model",
}


@dataclass(frozen=True)
class Findings:
    """Input of the rules; None or empty where it is unknown."""

    history: dict[str, np.ndarray]  # columns of results.csv, float (epochs,)
    epochs: int  # planned epochs of the run; 0 for the validation of a checkpoint
    names: Sequence[str]
    imgsz: int
    stride: int
    train: Census | None
    data: Census | None = None  # the training census if there is one, else the validation census
    result: EvalResult | None = None
    errors: ErrorSplit | None = None
    suspects: int = 0  # probable label errors
    backgrounds: int = 0  # images without objects that have detections
    balances: bool = False  # whether the run weights classes or repeats images
    last: Path = Path("last.pt")  # the checkpoint that continues the run
    fitness: Fitness = Fitness("AP", "AP")  # decides which epoch is the best
    # AP of each class on draws of the images, float64 (S, C), by epoch; epochs of other processes are missing.
    ap_of_draws: Mapping[int, np.ndarray] = field(default_factory=dict)
    few_steps: str = ""  # warning that the run has too few steps, or ""
    tile: int = 0  # side of the tiles that the model sees, pixels of the images; 0: whole images
    ignored: Sequence[str] = ()  # classes that the training images do not label, as the old ones of --keep-old


def how_it_went(findings: Findings) -> Iterator[str]:
    """Yields sentences about the course of the training and the newest scores."""
    if findings.epochs:
        epochs, seconds = _column(findings, "time")
        if epochs.size:
            yield f"Epoch {epochs[-1]:.0f} of {findings.epochs} is complete, after {format_duration(seconds[-1])}."
        else:
            yield f"No epoch of {findings.epochs} is complete yet."
    name = findings.fitness.name
    epochs, values = _column(findings, findings.fitness.column)
    if values.size > 1:
        best = int(np.argmax(values))
        newest = f"the newest, in epoch {epochs[-1]:.0f}, is {values[-1]:.3f}"
        yield f"The best {name} was {values[best]:.3f} in epoch {epochs[best]:.0f}; {newest}."
        if _is_rising(findings, epochs, values):
            yield f"{name} was still rising in the last third of the validations."
        elif _differs(findings, epochs, values, best, len(values) - 1, margin=FALLING_AP):
            yield f"{name} has fallen by {values[best] - values[-1]:.3f} since the best epoch."
    if _overfits(findings):
        yield "The validation loss rises while the training loss falls: the model overfits."
    yield from _score(findings)


def _score(findings: Findings) -> Iterator[str]:
    result = findings.result
    if result is None:
        yield "There is no validation yet, so nothing is known about the detections."
        return
    objects = _objects(findings)
    if not objects:
        yield f"There are no objects in {counted(result.num_images, 'validation image')}: nothing can be scored."
        return
    yield (
        f"On {counted(result.num_images, 'image')} with {counted(objects, 'object')}: AP {result.ap:.3f}, AP50 "
        f"{result.metrics['AP50']:.3f}."
    )
    yield from _recommended_threshold(findings, result)
    missed_classes = missed_classes_text(result, findings.names)
    if missed_classes:
        yield f"{missed_classes}; detect.py --conf-thres sets another threshold."
    chance = _chance(findings, result.ap)
    if chance:
        yield (
            f"With {counted(objects, 'object')}, AP is known to about ±{chance:.2f}: on other images it may differ by "
            "as much. Epochs are compared on the same images."
        )


def _recommended_threshold(findings: Findings, result: EvalResult) -> Iterator[str]:
    if result.threshold is None:
        yield "No detection is correct at any confidence."
    else:
        yield (
            f"Recommended confidence threshold: {result.threshold:.3f} (the best mean F1, {result.metrics['f1']:.3f}); "
            f"there precision is {result.metrics['precision']:.3f} and recall {result.metrics['recall']:.3f}. "
            "detect.py uses it."
        )
    best = _best_row(findings)
    if best is not None and best["epoch"] < findings.history["epoch"][-1] and np.isfinite(best[CONFIDENCE_COLUMN]):
        yield (
            f"best.pt, of epoch {best['epoch']:.0f}, has a threshold of its own: {best[CONFIDENCE_COLUMN]:.3f} (F1 "
            f"{best['metrics/f1']:.3f}, precision {best['metrics/precision']:.3f}, recall "
            f"{best['metrics/recall']:.3f})."
        )


def where_it_is_wrong(findings: Findings) -> Iterator[str]:
    """Yields sentences about errors, confusions, and weak or unscored classes."""
    result = findings.result
    if result is None or not _objects(findings):
        return
    if findings.errors is not None:
        yield _most_costly_errors(findings.errors)
    yield from _most_frequent_confusion(result, findings.names)
    yield from _weak_and_unscored_classes(result, findings.names)


def _most_costly_errors(errors: ErrorSplit) -> str:
    order = np.argsort(-errors.cost)
    costly = [f"{KINDS[k]} {errors.cost[k]:.3f}" for k in order if errors.cost[k] >= MIN_COST]
    if not costly:
        return f"No kind of error costs {MIN_COST} of AP50 ({errors.ap:.3f}) or more."
    return f"AP50 is {errors.ap:.3f}. Without one kind of error it would rise by: {', '.join(costly[:3])}."


def _most_frequent_confusion(result: EvalResult, names: Sequence[str]) -> Iterator[str]:
    pairs = confused_pairs(result.confusion)
    if pairs:
        count, predicted, true = pairs[0]
        objects = counted(int(result.class_targets[true]), "object")
        verb = "is" if count == 1 else "are"
        yield (
            f"The most frequent confusion: {count} of {objects} of class {names[true]} {verb} mistaken for "
            f"{names[predicted]}."
        )


def _weak_and_unscored_classes(result: EvalResult, names: Sequence[str]) -> Iterator[str]:
    ap = np.where(result.class_targets > 0, result.class_ap, np.nan)
    weak = np.argsort(ap)
    weak = weak[ap[weak] < WEAK * result.ap]  # the weakest first
    if weak.size:
        classes = listed([f"{names[c]} ({result.class_ap[c]:.3f})" for c in weak.tolist()], 5)
        yield f"The weakest classes by AP: {classes}."
    unscored = [names[c] for c in np.flatnonzero(result.class_targets == 0).tolist()]
    if unscored:
        classes = counted(len(unscored), "class")
        yield f"{classes} without validation objects, so without a score: {listed(unscored, 5)}."


def what_to_do(findings: Findings) -> Iterator[str]:
    """Yields advice about the training, the data and the labels."""
    if findings.result is not None and not _objects(findings):
        yield "Label the objects in the validation images: until then, no epoch is known to be better than another."
        return
    yield from _change_training(findings)
    if findings.train is not None:
        yield from _change_data(findings, findings.train)
    if findings.errors is not None and _objects(findings):
        yield from _avoid_errors(findings, findings.errors.cost)
    yield from _check_labels(findings)


def _change_training(findings: Findings) -> Iterator[str]:
    if findings.few_steps:
        yield f"Train longer: {findings.few_steps}."
    epochs, values = _column(findings, findings.fitness.column)
    if findings.epochs and epochs.size and epochs[-1] >= findings.epochs and _is_rising(findings, epochs, values):
        yield f"Train longer: {resume_flag(findings.last)} --epochs {2 * findings.epochs} continues this run."
    if _overfits(findings):
        yield "Against overfitting: more images, stronger augmentation, a smaller model, or fewer epochs."
    _, waits = _column(findings, "speed/data_wait")
    if waits.size and np.median(waits) > MAX_DATA_WAIT:
        yield (
            f"{np.median(waits):.0%} of the time, training waits for images: more --workers, --cache ram, or "
            "--render-on device on a GPU."
        )


def _avoid_errors(findings: Findings, cost: np.ndarray) -> Iterator[str]:
    """``cost``: see `ErrorSplit`."""
    for kind in np.argsort(-cost, kind="stable"):
        if cost[kind] >= max(MIN_COST, NEARLY_WORST * cost.max()):
            remedy = REMEDIES[KINDS[kind]]
            if KINDS[kind] == "location":
                remedy += _larger_images(findings)
            yield f"{cost[kind]:.3f} of AP50 is lost because {remedy}."


def _check_labels(findings: Findings) -> Iterator[str]:
    if findings.suspects:
        yield f"Check {counted(findings.suspects, 'label')} that the model contradicts: section Suspicious labels."
    if findings.backgrounds:
        images = counted(findings.backgrounds, "image")
        yield f"Check {images} without labels that have detections: labels may be missing."


def _larger_images(findings: Findings) -> str:
    """Returns a clause that advises larger images for more accurate boxes; "" if they would not help."""
    small = 0.0
    if findings.data is not None and findings.data.boxes:
        small = float((findings.data.sides_px < SMALL_SIDE_PX).mean())
    if small < SOME_SMALL:
        return ""
    return f"; {small:.0%} of the boxes have sides below {SMALL_SIDE_PX} px and need a larger --imgsz"


def _change_data(findings: Findings, census: Census) -> Iterator[str]:
    remedy = remedy_for_small_boxes(census.median_side_px, findings.imgsz, findings.stride, tile=findings.tile)
    if remedy:
        yield (
            f"At --imgsz {findings.imgsz}, half of the boxes have sides below {census.median_side_px:.1f} px: {remedy}."
        )
    is_labeled = np.array([name not in findings.ignored for name in findings.names], bool)
    rare = np.flatnonzero((census.class_boxes < FEW_BOXES) & is_labeled)
    if rare.size:
        order = rare[np.argsort(census.class_boxes[rare], kind="stable")]
        classes = listed([f"{findings.names[c]} ({census.class_boxes[c]})" for c in order.tolist()], 5)
        yield f"{counted(rare.size, 'class')} with fewer than {FEW_BOXES} training boxes; label more: {classes}."
    if not findings.balances:
        yield from _balance_classes(findings, census)


def _balance_classes(findings: Findings, census: Census) -> Iterator[str]:
    boxes = census.class_boxes
    known = np.flatnonzero(boxes)  # classes without boxes are not rare, but unlabeled: `_change_data` names them
    if known.size:
        most = known[boxes[known].argmax()]
        least = known[boxes[known].argmin()]
        if boxes[most] >= IMBALANCED * boxes[least]:
            yield (
                f"{findings.names[most]} has {boxes[most] / boxes[least]:.0f} times as many training boxes as "
                f"{findings.names[least]}: --repeat-factor repeats images of rare classes, --cls-pw weights them in "
                "the loss."
            )


def _column(findings: Findings, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epochs at which a column of the history is known, and its values there."""
    values = findings.history.get(name)
    if values is None:
        return np.zeros(0), np.zeros(0)
    known = np.isfinite(values)
    return findings.history["epoch"][known], values[known]


def _best_row(findings: Findings) -> dict[str, float] | None:
    """Returns the row of the history with the best fitness; None if there is none, or thresholds are unknown."""
    values = findings.history.get(findings.fitness.column)
    if values is None or CONFIDENCE_COLUMN not in findings.history or not np.isfinite(values).any():
        return None
    row = int(np.nanargmax(values))
    return {name: float(column[row]) for name, column in findings.history.items()}


def _objects(findings: Findings) -> int:
    """Counts the labeled objects of the validation; 0 before it."""
    return 0 if findings.result is None else int(findings.result.class_targets.sum())


def _chance(findings: Findings, ap: float) -> float:
    """Returns half of the 95 % interval of an AP, as if it were the fraction of the objects that is detected; 0 for
    many objects."""
    objects = _objects(findings)
    return 1.96 * float(np.sqrt(ap * (1 - ap) / objects)) if 0 < objects < FEW_OBJECTS else 0.0


def _is_rising(findings: Findings, epochs: np.ndarray, values: np.ndarray) -> bool:
    """Returns whether the best of the last third exceeds the best before by more than `RISING_AP` and chance."""
    third = values.size // 3
    if not third:
        return False
    newest = values.size - third + int(np.argmax(values[-third:]))
    before = int(np.argmax(values[:-third]))
    return _differs(findings, epochs, values, newest, before, margin=RISING_AP)


def _differs(findings: Findings, epochs: np.ndarray, values: np.ndarray, high: int, low: int, *, margin: float) -> bool:
    """Returns whether the fitness in row ``high`` exceeds that in row ``low`` by more than ``margin`` and chance.

    Both are scored on the same images, so what makes these hard cancels: the difference is no chance if the AP is
    higher on `SURE` of the draws of these images. Where draws are unknown, or the fitness is not an AP, the interval of
    one AP decides.
    """
    difference = float(values[high] - values[low])
    if difference <= margin:
        return False
    high_draws = findings.ap_of_draws.get(int(epochs[high]))
    low_draws = findings.ap_of_draws.get(int(epochs[low]))
    has_enough_images = findings.result is not None and findings.result.num_images >= MIN_IMAGES
    if findings.fitness.metric == "AP" and has_enough_images and high_draws is not None and low_draws is not None:
        is_higher = _fitness_of_draws(findings, high_draws) > _fitness_of_draws(findings, low_draws)
        return bool(np.mean(is_higher) >= SURE)
    return difference > _chance(findings, float(values[high]))


def _fitness_of_draws(findings: Findings, ap: np.ndarray) -> np.ndarray:
    """Computes the fitness, an AP, on each draw: float64 (S,) from the AP of the classes (S, C)."""
    if findings.fitness.class_index is None:
        return nanmean(ap, axis=1)
    return ap[:, findings.fitness.class_index]


def _overfits(findings: Findings) -> bool:
    """Returns whether, over the last third, the training loss falls and the validation loss rises by more than 2 %
    each."""
    columns = [name.removeprefix("train/") for name in findings.history if name.startswith("train/")]
    shared = [name for name in columns if f"val/{name}" in findings.history]
    if not shared:
        return False
    train = np.sum([findings.history[f"train/{name}"] for name in shared], axis=0)
    val = np.sum([findings.history[f"val/{name}"] for name in shared], axis=0)
    is_known = np.isfinite(train) & np.isfinite(val)
    train = train[is_known]
    val = val[is_known]
    third = len(train) // 3
    if third < 2:
        return False
    return bool(val[-1] > 1.02 * val[-third - 1] and train[-1] < 0.98 * train[-third - 1])


def confused_pairs(confusion: np.ndarray) -> list[tuple[int, int, int]]:
    """Lists pairs of classes that are confused, the most frequent first: count of objects, predicted, true class."""
    pairs = [(int(confusion[p, t]), int(p), int(t)) for p, t in np.argwhere(confusion[:-1, :-1]) if p != t]
    return sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))
