"""The content of report.html, a page about best.pt of a training run, or about the checkpoint of a validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    ap_error,
    confused_pairs,
    images_with_objects,
    split_errors,
)
from engine.evaluation.metrics import METRICS, MIN_F1
from engine.evaluation.result import EvalResult, Evaluation
from engine.report.advice import MIN_COST, Known, Subject, advise
from engine.report.figures import error_charts, history_charts, metric_charts
from engine.report.images import COLORS, ISSUE_COLORS, KIND_NAMES, issue_card, worst_images
from engine.report.label_errors import CheckedSplit, find_label_errors, unjudged_classes
from utils.config.settings import TrainConfig
from utils.drawing.page import Block, Bullets, Content, Facts, Gallery, Picture, Row, Section, Table, now
from utils.strings import counted, format_duration, listed

FILE_NAME = "report.html"
FIRST_IMAGES = 3  # worst images on the first screen
MIN_LABEL_ERROR_SCORE = 0.5
MAX_LABEL_ERRORS = 30  # drawn
MAX_PAIRS = 200  # confused pairs of classes
NEXT = "What to do next"
ABOUT_SCORES = (
    "Recall is the fraction of the objects that is found, precision that of the detections that are right. AP50 is the "
    "mean precision over all recalls, where a box is right if its IoU with the labeled one is at least 0.5; AP is the "
    "mean for IoUs from 0.5 to 0.95."
)
ABOUT_ERRORS = (
    "A bar is the rise of AP50 if all errors of one kind were mended and no others (after TIDE), with their number. In "
    "the matrix, what is left after the true positives is matched whatever its class; the rest is background."
)
# By kind of error: what these detections do, or what happens to these objects.
ERROR_SENTENCES = {
    CLASS: "name another class",
    LOCATION: "overlap their object by an IoU of only 0.1 to 0.5",
    BOTH: "overlap only an object of another class",
    DUPLICATE: "are of an object that is found already",
    BACKGROUND: "are where no object is labeled",
    MISSED: "are missed",
}


def report_content(subject: Subject, evaluation: Evaluation | None, history: Mapping[str, np.ndarray]) -> Content:
    """Returns the page about a run or a checkpoint.

    Args:
        evaluation: None before the first validation of a run.
        history: columns of results.csv, float64 (epochs,); empty before the first epoch, and for a checkpoint without
            its run.
    """
    charts = history_charts(history)
    files = {"results": [*charts.values()]}
    first_chart: list[Block] = [Picture("AP", charts.pop("AP"))] if "AP" in charts else []
    if evaluation is None:
        text = "This page has no validation: scores, errors and images appear with one."
        sections = [Section("Result", [text, Row([first_chart, [Bullets(NEXT, advise(subject))]])])]
    else:
        sections, figures = _sections_of(subject, evaluation, first_chart)
        files |= {name: [pixels] for name, pixels in figures.items()}
    splits = {} if subject.train is None else {"train": subject.train}
    sections.append(data_section(splits | {subject.split: subject.validated}, subject.config.imgsz))
    if charts:
        sections.append(Section("Training", [row_of(charts)]))
    return Content(subject.title, _subtitle(subject, history), sections, files)


def _subtitle(subject: Subject, history: Mapping[str, np.ndarray]) -> str:
    """Says which epoch the page is about, and how far the run is."""
    parts = []
    best = subject.best_epoch
    if subject.epoch:
        file = "best.pt, of" if subject.epoch == best else "The newest validated weights, of"
        parts.append(f"{file} epoch {subject.epoch}.")
        if 0 < best != subject.epoch:
            parts.append(f"best.pt is of epoch {best}: val.py --weights best.pt writes its report.")
    if isinstance(subject.config, TrainConfig):
        epochs = subject.config.epochs
        if history:
            done = f"Epoch {history['epoch'][-1]:.0f} of {epochs} is complete"
            parts.append(f"{done} after {format_duration(history['time'][-1])}.")
        else:
            parts.append(f"No epoch of {epochs} is complete yet.")
    return " ".join([*parts, f"Written {now()}."])


def _sections_of(
    subject: Subject, evaluation: Evaluation, first_chart: list[Block]
) -> tuple[list[Section], dict[str, np.ndarray]]:
    """Returns the sections about a validation, and their figures by the names of files. The first chart is that of
    precision and recall if there is none of the run."""
    index = subject.validated
    names = index.names
    result = evaluation.result
    errors = split_errors(evaluation.shown)
    split = CheckedSplit(subject.split, index)
    label_errors = find_label_errors(split, evaluation.for_ap, result.class_metrics["AP50"], MIN_LABEL_ERROR_SCORE)
    known = Known(errors, len(label_errors), unlabeled_with_detections(evaluation, index))
    curves = metric_charts(result, names)
    figures = error_charts(result, errors, names)
    legend = {name: COLORS[name] for name in ("correct", "label")}
    legend |= {name: COLORS[name] for name, count in zip(KIND_NAMES, errors.counts.sum(0)) if count}
    cards = worst_images(index, evaluation.shown, int(np.nan_to_num(errors.cost).argmax()))
    if not first_chart and curves:
        first_chart = [Picture("precision and recall", curves["PR_curve"])]
    lost = [(sentence, "") for sentence in error_sentences(result, errors, names)]
    lists = [Bullets("Where AP is lost above the threshold", lost), Bullets(NEXT, advise(subject, known))]
    totals = np.maximum(result.confusion.sum(0), 1)
    pairs = confused_pairs(result.confusion)
    label_cards = [issue_card({split.name: split}, issue) for issue in label_errors[:MAX_LABEL_ERRORS]]
    shown_labels = f"{len(label_cards)} of {len(label_errors):,}" if label_errors else "There are none"
    sections = [
        Section(
            "Result",
            [
                *verdict(evaluation, index),
                Facts(_facts(evaluation)),
                ABOUT_SCORES,
                Row([first_chart, lists]),
                Gallery("Images with many errors", legend, cards[:FIRST_IMAGES]),
            ],
        ),
        Section(
            "Errors",
            [
                f"Errors are those of detections above confidence {result.shown_confidence:.3f}. {ABOUT_ERRORS}",
                row_of(figures),
                Table(
                    f"Confused pairs of classes ({len(pairs):,})",
                    ("true class", "mistaken for", "objects", "fraction of the true class"),
                    [[names[t], names[p], n, float(n / totals[t])] for n, p, t in pairs[:MAX_PAIRS]],
                ),
                Gallery("More images with many errors", legend, cards[FIRST_IMAGES:]),
            ],
        ),
        Section("Classes", [row_of(curves), _score_table(result, names)]),
        Section(
            "Label errors",
            [
                f"Labels that the model contradicts with confidence; the label or the model is wrong. {shown_labels}.",
                *unjudged_classes(result.class_metrics["AP50"], names),
                Gallery("Contradicted labels", ISSUE_COLORS, label_cards),
            ],
        ),
    ]
    return sections, figures | curves


def row_of(figures: Mapping[str, np.ndarray]) -> Row:
    """Returns figures side by side."""
    return Row([[Picture(label, pixels)] for label, pixels in figures.items()])


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


def _facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Returns the numbers at the top of the page, as pairs of name and value."""
    result = evaluation.result
    error = ap_error(evaluation.matches)
    objects = int(result.class_targets.sum())
    images = ("validated on", f"{counted(result.num_images, 'image')}, {counted(objects, 'object')}")
    if not objects:
        return [("AP", "nothing to score"), images]
    facts = [("AP", f"{result.ap:.3f}")]
    if np.isfinite(error):
        facts = [("AP, ± 95 % on other images", f"{result.ap:.3f} ± {1.96 * error:.3f}")]
    facts += [("AP50", f"{result.metrics['AP50']:.3f}"), images]
    if result.threshold is None:
        return [*facts, ("threshold", f"{result.shown_confidence} as no confidence gives a mean F1 of {MIN_F1}")]
    return [*facts, ("threshold (--conf-thres of detect.py)", f"{result.shown_confidence:.3f}")]


def _score_table(result: EvalResult, names: Sequence[str]) -> Table:
    """Lists the scores of all classes together, then of each class, the worst first."""
    values = np.stack([result.class_metrics[m.name] for m in METRICS], 1).tolist()
    order = np.argsort(np.nan_to_num(result.class_metrics["AP"], nan=2.0), kind="stable")
    rows: list[list[str | float | None]] = [["all", int(result.class_targets.sum()), *result.metrics.values()]]
    rows += [[names[c], int(result.class_targets[c]), *values[c]] for c in order.tolist()]
    return Table(
        f"Scores of each class; P, R and F1 as detect.py finds them above {result.shown_confidence:.3f}, IoU 0.5",
        ("class", "objects", *(m.column for m in METRICS)),
        rows,
    )


def data_section(splits: Mapping[str, DatasetIndex], imgsz: int) -> Section:
    """Returns what a page shows of the data: counts of ``splits``, indexes by name, and the boxes of each class."""
    names = next(iter(splits.values())).names
    boxes = {name: index.boxes_per_class(len(names)) for name, index in splits.items()}
    blocks: list[Block] = []
    for name, index in splits.items():
        sides = np.sqrt(index.sides_at(imgsz).prod(1))
        median = (
            f" Half of the boxes have sides below {np.median(sides):.1f} px at --imgsz {imgsz}." if sides.size else ""
        )
        blocks.append(f"{name}: {index.summary(name)}.{median}")
    first = next(iter(boxes))
    counts = [count for name in splits for count in (boxes[name], splits[name].images_per_class(len(names)))]
    order = np.argsort(-boxes[first], kind="stable").tolist()
    columns = ("class", *(f"{what} of {name}" for name in splits for what in ("boxes", "images")))
    rows = [[names[c], *(int(count[c]) for count in counts)] for c in order]
    return Section("Data", [*blocks, Table(f"Boxes of each class ({len(names)})", columns, rows)])
