"""The sentences of a report's summary: how training went, where the model is wrong, and what to do next.

A rule derives each sentence from the numbers in `RunFacts`; a rule whose numbers are unknown yields nothing. The three
functions at the top list the rules, in the order of their sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from engine.evaluation.analysis import KINDS, confused_pairs
from engine.evaluation.tables import missed_classes_text
from engine.issues.small_boxes import remedy_for_small_boxes
from engine.report.run_facts import RunFacts
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.program import resume_flag
from utils.strings import counted, format_duration, listed

AdviceRule: TypeAlias = Callable[[RunFacts], Iterator[str]]
MAX_DATA_WAIT = 0.2  # fraction of the time; more waiting for images is mentioned
MIN_COST = 0.01  # AP50; kinds of errors that cost less are not mentioned
NEARLY_WORST = 0.8  # kinds of errors with this fraction of the highest cost are as important
FEW_BOXES = 50  # training boxes of a class
IMBALANCED = 10  # ratio of boxes of the most frequent class to the rarest
WEAK = 0.6  # fraction of the mean AP below which a class is weak
SMALL_SIDE_PX = 32  # at --imgsz, like the sides of COCO's small objects
SOME_SMALL = 0.1  # minimum fraction of small boxes to mention them
REMEDIES = {
    "class": "classes are confused: see the confusion matrix; compare the labels of these classes, add images of them",
    "location": "boxes are inaccurate: check that labels are tight and consistent",
    "both": "objects are mistaken for others nearby: check whether their labels are complete",
    "duplicate": "objects are detected twice: lower the IoU threshold of NMS, or check for objects labeled twice",
    "background": "the model sees objects where no label is: check for missing labels, or add images without objects",
    "missed": "objects are not found: add images of such objects, train longer, or with a larger --imgsz or model",
}


def how_it_went(facts: RunFacts) -> Iterator[str]:
    """Yields sentences about the course of the training and the newest scores."""
    rules: tuple[AdviceRule, ...] = (
        _progress,
        _course_of_fitness,
        _overfitting,
        _scores,
        _recommended_threshold,
        _threshold_of_best,
        _missed_classes,
        _chance,
    )
    return _sentences(rules, facts)


def where_it_is_wrong(facts: RunFacts) -> Iterator[str]:
    """Yields sentences about errors, confusions, and weak or unscored classes."""
    rules: tuple[AdviceRule, ...] = (_costly_errors, _frequent_confusion, _weak_classes, _unscored_classes)
    return _sentences(rules, facts)


def what_to_do(facts: RunFacts) -> Iterator[str]:
    """Yields advice about the training, the data and the labels."""
    rules: tuple[AdviceRule, ...] = (
        _label_objects,
        _train_longer,
        _avoid_overfitting,
        _feed_faster,
        _enlarge_small_boxes,
        _label_rare_classes,
        _balance_classes,
        _stop_flips,
        _avoid_errors,
        _check_suspicious_labels,
        _check_backgrounds,
    )
    if facts.result is not None and not facts.objects:
        rules = (_label_objects,)  # without scores, nothing else is known to help
    return _sentences(rules, facts)


def _sentences(rules: Sequence[AdviceRule], facts: RunFacts) -> Iterator[str]:
    for rule in rules:
        yield from rule(facts)


def _progress(facts: RunFacts) -> Iterator[str]:
    if not facts.subject.epochs:
        return
    epochs, seconds = facts.column("time")
    if epochs.size:
        yield f"Epoch {epochs[-1]:.0f} of {facts.subject.epochs} is complete, after {format_duration(seconds[-1])}."
    else:
        yield f"No epoch of {facts.subject.epochs} is complete yet."


def _course_of_fitness(facts: RunFacts) -> Iterator[str]:
    epochs, values = facts.fitness_values()
    if values.size < 2:
        return
    name = facts.subject.fitness.name
    best = int(np.argmax(values))
    newest = f"the newest, in epoch {epochs[-1]:.0f}, is {values[-1]:.3f}"
    yield f"The best {name} was {values[best]:.3f} in epoch {epochs[best]:.0f}; {newest}."
    if facts.is_rising():
        yield f"{name} was still rising in the last third of the validations."
    elif facts.has_fallen():
        yield f"{name} has fallen by {values[best] - values[-1]:.3f} since the best epoch."


def _overfitting(facts: RunFacts) -> Iterator[str]:
    if facts.overfits():
        yield "The validation loss rises while the training loss falls: the model overfits."


def _scores(facts: RunFacts) -> Iterator[str]:
    result = facts.result
    if result is None:
        yield "This page has no validation, so it says nothing about the detections."
    elif not facts.objects:
        yield f"There are no objects in {counted(result.num_images, 'validation image')}: nothing can be scored."
    else:
        yield (
            f"On {counted(result.num_images, 'image')} with {counted(facts.objects, 'object')}: AP {result.ap:.3f}, "
            f"AP50 {result.metrics['AP50']:.3f}."
        )


def _recommended_threshold(facts: RunFacts) -> Iterator[str]:
    result = facts.scored_result
    if result is None:
        return
    if result.threshold is None:
        yield "No detection is correct at any confidence."
    else:
        yield (
            f"Recommended confidence threshold: {result.threshold:.3f} (the best mean F1, {result.metrics['f1']:.3f}); "
            f"there precision is {result.metrics['precision']:.3f} and recall {result.metrics['recall']:.3f}. "
            f"{'detect.py uses it.' if facts.subject.epochs else 'Pass it to detect.py with --conf-thres.'}"
        )


def _threshold_of_best(facts: RunFacts) -> Iterator[str]:
    best = facts.best_row()
    if facts.scored_result is None or best is None:
        return
    if best["epoch"] < facts.history["epoch"][-1] and np.isfinite(best[CONFIDENCE_COLUMN]):
        yield (
            f"best.pt, of epoch {best['epoch']:.0f}, has a threshold of its own: {best[CONFIDENCE_COLUMN]:.3f} (F1 "
            f"{best['metrics/f1']:.3f}, precision {best['metrics/precision']:.3f}, recall "
            f"{best['metrics/recall']:.3f})."
        )


def _missed_classes(facts: RunFacts) -> Iterator[str]:
    if facts.scored_result is None:
        return
    missed_classes = missed_classes_text(facts.scored_result, facts.subject.names)
    if missed_classes:
        yield f"{missed_classes}; detect.py --conf-thres sets another threshold."


def _chance(facts: RunFacts) -> Iterator[str]:
    if facts.scored_result is None:
        return
    halfwidth = facts.interval_halfwidth(facts.scored_result.ap)
    if halfwidth:
        yield (
            f"With {counted(facts.objects, 'object')}, AP is known to about ±{halfwidth:.2f}: on other images it may "
            "differ by as much. Epochs are compared on the same images."
        )


def _costly_errors(facts: RunFacts) -> Iterator[str]:
    errors = facts.errors
    if facts.scored_result is None or errors is None:
        return
    order = np.argsort(-errors.cost)
    costly = [f"{KINDS[k]} {errors.cost[k]:.3f}" for k in order if errors.cost[k] >= MIN_COST]
    if costly:
        yield f"AP50 is {errors.ap:.3f}. Without one kind of error it would rise by: {', '.join(costly[:3])}."
    else:
        yield f"No kind of error costs {MIN_COST} of AP50 ({errors.ap:.3f}) or more."


def _frequent_confusion(facts: RunFacts) -> Iterator[str]:
    result = facts.scored_result
    pairs = [] if result is None else confused_pairs(result.confusion)
    if result is not None and pairs:
        count, predicted, true = pairs[0]
        objects = counted(int(result.class_targets[true]), "object")
        verb = "is" if count == 1 else "are"
        names = facts.subject.names
        yield (
            f"The most frequent confusion: {count} of {objects} of class {names[true]} {verb} mistaken for "
            f"{names[predicted]}."
        )


def _weak_classes(facts: RunFacts) -> Iterator[str]:
    result = facts.scored_result
    if result is None:
        return
    ap = np.where(result.class_targets > 0, result.class_ap, np.nan)
    weak = np.argsort(ap)
    weak = weak[ap[weak] < WEAK * result.ap]  # the weakest first
    if weak.size:
        classes = listed([f"{facts.subject.names[c]} ({result.class_ap[c]:.3f})" for c in weak.tolist()], 5)
        yield f"The weakest classes by AP: {classes}."


def _unscored_classes(facts: RunFacts) -> Iterator[str]:
    if facts.scored_result is None:
        return
    unscored = [facts.subject.names[c] for c in np.flatnonzero(facts.scored_result.class_targets == 0).tolist()]
    if unscored:
        classes = counted(len(unscored), "class")
        yield f"{classes} without validation objects, so without a score: {listed(unscored, 5)}."


def _label_objects(facts: RunFacts) -> Iterator[str]:
    if facts.result is not None and not facts.objects:
        yield "Label the objects in the validation images: until then, no epoch is known to be better than another."


def _train_longer(facts: RunFacts) -> Iterator[str]:
    if facts.subject.few_steps_warning:
        yield f"Train longer: {facts.subject.few_steps_warning}."
    epochs, _ = facts.fitness_values()
    is_complete = facts.subject.epochs and epochs.size and epochs[-1] >= facts.subject.epochs
    if is_complete and facts.is_rising():
        yield f"Train longer: {resume_flag(facts.last)} --epochs {2 * facts.subject.epochs} continues this run."


def _avoid_overfitting(facts: RunFacts) -> Iterator[str]:
    if facts.overfits():
        yield "Against overfitting: more images, stronger augmentation, a smaller model, or fewer epochs."


def _feed_faster(facts: RunFacts) -> Iterator[str]:
    _, waits = facts.column("speed/data_wait")
    if waits.size and np.median(waits) > MAX_DATA_WAIT:
        yield f"{np.median(waits):.0%} of the time, training waits for images: more --workers, or --cache ram."


def _enlarge_small_boxes(facts: RunFacts) -> Iterator[str]:
    if facts.train is None:
        return
    side = facts.train.median_side_px
    subject = facts.subject
    remedy = remedy_for_small_boxes(side, subject.imgsz, subject.stride, tile=subject.validated.index.tile)
    if remedy:
        yield f"At --imgsz {subject.imgsz}, half of the boxes have sides below {side:.1f} px: {remedy}."


def _label_rare_classes(facts: RunFacts) -> Iterator[str]:
    if facts.train is None:
        return
    boxes = facts.train.class_boxes
    is_labeled = np.array([name not in facts.ignored for name in facts.subject.names], bool)
    rare = np.flatnonzero((boxes < FEW_BOXES) & is_labeled)
    if rare.size:
        order = rare[np.argsort(boxes[rare], kind="stable")]
        classes = listed([f"{facts.subject.names[c]} ({boxes[c]})" for c in order.tolist()], 5)
        yield f"{counted(rare.size, 'class')} with fewer than {FEW_BOXES} training boxes; label more: {classes}."


def _balance_classes(facts: RunFacts) -> Iterator[str]:
    if facts.train is None or facts.subject.balances:
        return
    boxes = facts.train.class_boxes
    labeled = np.flatnonzero(boxes)  # classes without boxes are not rare, but unlabeled: `_label_rare_classes`
    if not labeled.size:
        return
    most = labeled[boxes[labeled].argmax()]
    least = labeled[boxes[labeled].argmin()]
    if boxes[most] >= IMBALANCED * boxes[least]:
        yield (
            f"{facts.subject.names[most]} has {boxes[most] / boxes[least]:.0f} times as many training boxes as "
            f"{facts.subject.names[least]}: --repeat-factor repeats images of rare classes, --image-weights draws more "
            "images of classes with a low AP, --cls-pw weights rare classes in the loss."
        )


def _stop_flips(facts: RunFacts) -> Iterator[str]:
    condition = "" if facts.subject.hyp else ", if the training flipped images"
    for one, other, count, flip in facts.flipped_confusions():
        objects = counted(count, "object")
        yield (
            f"{objects} of {one} and {other} mistaken for the other: a flipped image exchanges these classes. Train "
            f"with --set {flip}=0{condition}."
        )


def _avoid_errors(facts: RunFacts) -> Iterator[str]:
    if facts.scored_result is None or facts.errors is None:
        return
    cost = facts.errors.cost
    for kind in np.argsort(-cost, kind="stable"):
        if cost[kind] >= max(MIN_COST, NEARLY_WORST * cost.max()):
            remedy = REMEDIES[KINDS[kind]]
            if KINDS[kind] == "class" and facts.subject.hyp and facts.flipped_confusions():
                continue  # because of the flips, not of the labels
            if KINDS[kind] == "location":
                remedy += _larger_images(facts)
            yield f"{cost[kind]:.3f} of AP50 is lost because {remedy}."


def _larger_images(facts: RunFacts) -> str:
    """Returns a clause that advises larger images for more accurate boxes; "" if they would not help."""
    small = 0.0
    if facts.data is not None and facts.data.boxes:
        small = float((facts.data.sides_px < SMALL_SIDE_PX).mean())
    if small < SOME_SMALL:
        return ""
    return f"; {small:.0%} of the boxes have sides below {SMALL_SIDE_PX} px and need a larger --imgsz"


def _check_suspicious_labels(facts: RunFacts) -> Iterator[str]:
    if facts.suspects:
        yield f"Check {counted(facts.suspects, 'label')} that the model contradicts: section Suspicious labels."


def _check_backgrounds(facts: RunFacts) -> Iterator[str]:
    if facts.backgrounds:
        images = counted(facts.backgrounds, "image")
        yield f"Check {images} without labels that have detections: labels may be missing."
