"""The text at the top of a report: how training went, where the model is wrong, and what to do next. Each sentence
follows from numbers by a rule; a rule whose numbers are unknown says nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.index.index import remedy_for_small_boxes
from engine.evaluation.analysis import KINDS, ErrorSplit
from engine.evaluation.metrics import Fitness, mean_known
from engine.evaluation.tables import silenced_text
from engine.report.census import Census
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.program import resume_flag
from utils.strings import counted, format_duration, listed
from utils.structures import EvalResult

RISING_AP = 0.005  # a rise that more epochs may continue
FALLING_AP = 0.02
MAX_DATA_WAIT = 0.2
MIN_COST = 0.01  # AP50 that a kind of error costs
NEARLY_WORST = 0.8  # of the cost of the worst kind: as important
FEW_OBJECTS = 100  # in a validation split: changes of AP within its interval are then no reason to do anything
FEW_BOXES = 50  # of a class, for training
IMBALANCED = 10  # boxes of the most frequent class for each of the rarest
BALANCING = ("repeat_factor", "cls_pw", "image_weights")  # settings
WEAK = 0.6  # of the mean AP
SMALL_SIDE_PX = 32  # at --imgsz, as the sides of COCO's small objects
SOME_SMALL = 0.1  # of the boxes: enough of them to speak of
SURE = 0.975  # of the draws: as an interval of 95 % that does not reach 0
MIN_IMAGES = 10  # whose draws tell how far chance goes
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
    """What the rules read; None or empty where it is not known."""

    history: dict[str, np.ndarray]  # columns of results.csv, float (epochs,)
    epochs: int  # of the whole run; 0 for the validation of a checkpoint
    names: Sequence[str]
    imgsz: int
    stride: int
    train: Census | None
    data: Census | None = None  # that of the training, or else of the validation
    result: EvalResult | None = None
    errors: ErrorSplit | None = None
    suspects: int = 0  # probable label errors
    backgrounds: int = 0  # images without objects that have detections
    balances: bool = False  # whether the run weights classes or repeats images
    last: Path = Path("last.pt")  # the checkpoint that continues the run
    fitness: Fitness = Fitness("AP", "AP")  # what decides which epoch is the best
    # AP of each class on draws of the images, float64 (S, C), by epoch; epochs of other processes are missing.
    ap_of_draws: Mapping[int, np.ndarray] = field(default_factory=dict)
    few_steps: str = ""  # what to say if the run has too few steps
    tile: int = 0  # side of the tiles that the model sees, pixels of the images; 0: whole images
    ignored: Sequence[str] = ()  # classes that the training images do not label, as the old ones of --keep-old


def how_it_went(findings: Findings) -> Iterator[str]:
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
        elif _differs(findings, epochs, values, best, len(values) - 1, least=FALLING_AP):
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
    if silenced := silenced_text(result, findings.names):
        yield f"{silenced}; detect.py --conf-thres sets another threshold."
    if chance := _chance(findings, result.ap):
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
    if not _objects(findings):
        return
    result = findings.result
    if findings.errors is not None:
        order = np.argsort(-findings.errors.cost)
        costly = [f"{KINDS[k]} {findings.errors.cost[k]:.3f}" for k in order if findings.errors.cost[k] >= MIN_COST]
        if costly:
            rise = ", ".join(costly[:3])
            yield f"AP50 is {findings.errors.ap:.3f}. Without one kind of error it would rise by: {rise}."
        else:
            yield f"No kind of error costs {MIN_COST} of AP50 ({findings.errors.ap:.3f}) or more."
    pairs = confused_pairs(result.confusion)
    if pairs:
        count, predicted, true = pairs[0]
        of = int(result.class_targets[true])
        objects, verb = counted(of, "object"), "is" if count == 1 else "are"
        true, predicted = findings.names[true], findings.names[predicted]
        yield f"The most frequent confusion: {count} of {objects} of class {true} {verb} mistaken for {predicted}."
    ap = np.where(result.class_targets > 0, result.class_ap, np.nan)
    weak = np.argsort(ap)
    weak = weak[ap[weak] < WEAK * result.ap]  # the weakest first
    if weak.size:
        shown = listed([f"{findings.names[c]} ({result.class_ap[c]:.3f})" for c in weak], 5)
        yield f"The weakest classes by AP: {shown}."
    unscored = [findings.names[c] for c in np.flatnonzero(result.class_targets == 0)]
    if unscored:
        classes = counted(len(unscored), "class")
        yield f"{classes} without validation objects, so without a score: {listed(unscored, 5)}."


def what_to_do(findings: Findings) -> Iterator[str]:
    if findings.result is not None and not _objects(findings):
        yield "Label the objects in the validation images: until then, no epoch is known to be better than another."
        return
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
    if findings.train is not None:
        yield from _do_about_data(findings, findings.train)
    if findings.errors is not None and _objects(findings):
        cost = findings.errors.cost
        for kind in np.argsort(-cost, kind="stable"):
            if cost[kind] >= max(MIN_COST, NEARLY_WORST * cost.max()):
                remedy = REMEDIES[KINDS[kind]] + (_larger_images(findings) if KINDS[kind] == "location" else "")
                yield f"{cost[kind]:.3f} of AP50 is lost because {remedy}."
    if findings.suspects:
        yield f"Check {counted(findings.suspects, 'label')} that the model contradicts: section Suspicious labels."
    if findings.backgrounds:
        images = counted(findings.backgrounds, "image")
        yield f"Check {images} without labels that have detections: labels may be missing."


def _larger_images(findings: Findings) -> str:
    """Why larger images would make boxes more accurate; "" if they would not."""
    small = 0.0
    if findings.data is not None and findings.data.boxes:
        small = float((findings.data.sides_px < SMALL_SIDE_PX).mean())
    if small < SOME_SMALL:
        return ""
    return f"; {small:.0%} of the boxes have sides below {SMALL_SIDE_PX} px and need a larger --imgsz"


def _do_about_data(findings: Findings, census: Census) -> Iterator[str]:
    if remedy := remedy_for_small_boxes(census.median_side_px, findings.imgsz, findings.stride, tile=findings.tile):
        yield (
            f"At --imgsz {findings.imgsz}, half of the boxes have sides below {census.median_side_px:.1f} px: {remedy}."
        )
    is_labeled = np.array([name not in findings.ignored for name in findings.names], bool)
    few = np.flatnonzero((census.class_boxes < FEW_BOXES) & is_labeled)
    if few.size:
        order = few[np.argsort(census.class_boxes[few], kind="stable")]
        shown = listed([f"{findings.names[c]} ({census.class_boxes[c]})" for c in order], 5)
        yield f"{counted(few.size, 'class')} with fewer than {FEW_BOXES} training boxes; label more: {shown}."
    boxes = census.class_boxes
    known = np.flatnonzero(boxes)  # classes without boxes are not rare, but unlabeled: named above
    if not findings.balances and known.size:
        most = known[boxes[known].argmax()]
        least = known[boxes[known].argmin()]
        if boxes[most] >= IMBALANCED * boxes[least]:
            yield (
                f"{findings.names[most]} has {boxes[most] / boxes[least]:.0f} times as many training boxes as "
                f"{findings.names[least]}: --repeat-factor repeats images of rare classes, --cls-pw weights them in "
                "the loss."
            )


def _column(findings: Findings, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The epochs at which a column of the history is known, and its values."""
    values = findings.history.get(name)
    if values is None:
        return np.zeros(0), np.zeros(0)
    known = np.isfinite(values)
    return findings.history["epoch"][known], values[known]


def _best_row(findings: Findings) -> dict[str, float] | None:
    """The row of the history of the epoch with the best fitness; None without one, or if its threshold is not known."""
    values = findings.history.get(findings.fitness.column)
    if values is None or CONFIDENCE_COLUMN not in findings.history or not np.isfinite(values).any():
        return None
    row = int(np.nanargmax(values))
    return {name: float(column[row]) for name, column in findings.history.items()}


def _objects(findings: Findings) -> int:
    """Labeled objects of the validation; 0 before it."""
    return 0 if findings.result is None else int(findings.result.class_targets.sum())


def _chance(findings: Findings, ap: float) -> float:
    """Half of the 95 % interval of an AP, as of the fraction of few objects that is found; 0 for many objects."""
    objects = _objects(findings)
    return 1.96 * float(np.sqrt(ap * (1 - ap) / objects)) if 0 < objects < FEW_OBJECTS else 0.0


def _is_rising(findings: Findings, epochs: np.ndarray, values: np.ndarray) -> bool:
    """Whether the best of the last third exceeds the best before by more than `RISING_AP` and chance."""
    third = values.size // 3
    if not third:
        return False
    newest = values.size - third + int(np.argmax(values[-third:]))
    before = int(np.argmax(values[:-third]))
    return _differs(findings, epochs, values, newest, before, least=RISING_AP)


def _differs(findings: Findings, epochs: np.ndarray, values: np.ndarray, high: int, low: int, *, least: float) -> bool:
    """Whether the fitness in row ``high`` exceeds that in row ``low`` by more than ``least`` and chance.

    Both are scored on the same images, so what makes these hard cancels: it is no chance if the AP is higher on
    `SURE` of the draws of these images. Where draws are not known, or the fitness is not an AP, the interval of one AP
    decides.
    """
    difference = float(values[high] - values[low])
    if difference <= least:
        return False
    draws = [findings.ap_of_draws.get(int(epochs[row])) for row in (high, low)]
    is_known = findings.fitness.metric == "AP" and all(ap is not None for ap in draws)
    if is_known and findings.result is not None and findings.result.num_images >= MIN_IMAGES:
        higher, lower = (_fitness_of_draws(findings, ap) for ap in draws)
        return bool(np.mean(higher > lower) >= SURE)
    return difference > _chance(findings, float(values[high]))


def _fitness_of_draws(findings: Findings, ap: np.ndarray) -> np.ndarray:
    """The AP that is the fitness on each draw: float64 (S,) from that of the classes (S, C)."""
    if findings.fitness.class_index is None:
        return mean_known(ap, axis=1)
    return ap[:, findings.fitness.class_index]


def _overfits(findings: Findings) -> bool:
    """Over the last third, the sums of the losses of both splits move apart by more than 2 % each."""
    shared = [n[6:] for n in findings.history if n.startswith("train/") and f"val/{n[6:]}" in findings.history]
    if not shared:
        return False
    train, val = (sum(findings.history[f"{split}/{name}"] for name in shared) for split in ("train", "val"))
    known = np.isfinite(train) & np.isfinite(val)
    train, val, third = train[known], val[known], int(known.sum()) // 3
    if third < 2:
        return False
    return bool(val[-1] > 1.02 * val[-third - 1] and train[-1] < 0.98 * train[-third - 1])


def confused_pairs(confusion: np.ndarray) -> list[tuple[int, int, int]]:
    """Pairs of classes by the number of objects that are taken for another class: count, predicted, true."""
    pairs = [(int(confusion[p, t]), int(p), int(t)) for p, t in np.argwhere(confusion[:-1, :-1]) if p != t]
    return sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))
