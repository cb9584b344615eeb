"""The sections of a report about a validation: curves, confusions, kinds of errors, worst images, suspicious labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.evaluation.analysis import FOREGROUND_IOU, KINDS, ErrorSplit, confused_pairs, split_errors
from engine.evaluation.matching import match_detections
from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult
from engine.issues.issue import CheckedSplit, Issue
from engine.issues.label_errors import find_label_errors, trust_lines
from engine.report.figures import confusion_picture, errors_picture, metric_charts
from engine.report.gallery import LABEL_LEGEND, DrawnDetections, Galleries
from engine.report.image_errors import KIND_LEGEND, ImageErrors, worst_gallery
from engine.report.photos import Album
from engine.report.subject import ScoredValidation
from utils.drawing import page
from utils.drawing.figures import Picture, chart_picture
from utils.strings import counted

MIN_LABEL_ERROR_SCORE = 0.5  # more probable than not
MAX_PAIRS = 200  # confused pairs of classes
MAX_LABEL_BYTES = 700_000  # total size of the JPEG files of label errors


@dataclass(frozen=True)
class CurvesSection:
    """Precision, recall and F1."""

    figures: dict[str, Picture]  # by the name of the file; empty without objects
    scores: page.HtmlTable  # by class


@dataclass(frozen=True)
class ConfusionSection:
    """The confusion matrix."""

    figures: dict[str, Picture]
    pairs: page.HtmlTable  # of confused classes


@dataclass(frozen=True)
class ErrorsSection:
    """The kinds of errors, and their costs."""

    split: ErrorSplit
    figures: dict[str, Picture]  # empty without objects
    counts: page.HtmlTable  # of errors by kind, for each class


@dataclass(frozen=True)
class WorstImagesSection:
    """The images with the most errors."""

    errors: ImageErrors
    gallery: Sequence[page.Card]
    legend: Sequence[page.LegendEntry]


@dataclass(frozen=True)
class LabelsSection:
    """Labels that the model contradicts."""

    trust: Sequence[str]
    issues: Sequence[Issue]
    gallery: Sequence[page.Card]
    legend: Sequence[page.LegendEntry]


@dataclass(frozen=True)
class ValidationSections:
    """The sections of the page that show a validation."""

    result: EvalResult
    curves: CurvesSection
    confusion: ConfusionSection
    errors: ErrorsSection
    worst: WorstImagesSection
    labels: LabelsSection


def validation_sections(validation: ScoredValidation, split: CheckedSplit) -> ValidationSections:
    """Builds the sections of a validation on ``split``."""
    names = split.index.names
    result = validation.result
    errors = validation.errors
    if errors is None:
        errors = split_errors(match_detections(split.index.ground_truth(), validation.scored, len(names)))
    return ValidationSections(
        result=result,
        curves=CurvesSection(
            figures={f"{kind}_curve": chart_picture(chart) for kind, chart in metric_charts(result, names).items()},
            scores=_score_table(result, names),
        ),
        confusion=_confusion_section(result, names),
        errors=_errors_section(errors, names),
        worst=_worst_images_section(validation, split),
        labels=_labels_section(validation, split),
    )


def _confusion_section(result: EvalResult, names: Sequence[str]) -> ConfusionSection:
    title = f"detections above confidence {result.shown_confidence:.3f}, IoU {FOREGROUND_IOU}"
    return ConfusionSection(
        figures={"confusion_matrix": confusion_picture(result.confusion, names, title)},
        pairs=_confused_pairs(result, names),
    )


def _errors_section(errors: ErrorSplit, names: Sequence[str]) -> ErrorsSection:
    rows = [[name, *counts] for name, counts in zip(names, errors.counts.tolist()) if any(counts)]
    return ErrorsSection(
        split=errors,
        figures={} if np.isnan(errors.ap) else {"errors": errors_picture(errors)},
        counts=page.HtmlTable(("class", *KINDS), rows, "Errors of each class, at any confidence"),
    )


def _worst_images_section(validation: ScoredValidation, split: CheckedSplit) -> WorstImagesSection:
    threshold = validation.result.shown_confidence
    errors = ImageErrors.of(split.index.ground_truth(), validation.shown, len(split.index.names), threshold)
    return WorstImagesSection(errors, gallery=worst_gallery(split, errors), legend=KIND_LEGEND)


def _labels_section(validation: ScoredValidation, split: CheckedSplit) -> LabelsSection:
    result = validation.result
    issues = find_label_errors(split, validation.scored, result.class_metrics, MIN_LABEL_ERROR_SCORE)
    model = f"The model after {counted(validation.epoch, 'epoch')}" if validation.epoch else "The model"
    drawn = DrawnDetections(validation.shown, result.shown_confidence)
    return LabelsSection(
        trust=trust_lines(model, {split.name: result}, split.index.names, issues),
        issues=issues,
        gallery=Galleries([split], {split.name: drawn}).label_errors(issues, Album(MAX_LABEL_BYTES)),
        legend=LABEL_LEGEND,
    )


def _score_table(result: EvalResult, names: Sequence[str]) -> page.HtmlTable:
    """Lists the scores of all classes together, then of each class, the best first."""
    values = np.stack([*(result.class_metrics[m.name] for m in METRICS), *result.class_best], 1).tolist()
    order = np.argsort(-np.nan_to_num(result.class_metrics["AP50"], nan=-1.0), kind="stable")
    total = int(result.class_targets.sum())
    rows: list[list[str | float | None]]
    rows = [["all", total, *result.metrics.values(), result.metrics["f1"], result.threshold]]
    rows += [[names[c], int(result.class_targets[c]), *values[c]] for c in order.tolist()]
    return page.HtmlTable(
        ("class", "objects", *(m.column for m in METRICS), "best F1", "at confidence"),
        rows,
        f"Scores of each class; P, R and F1 as detect.py finds them above {result.shown_confidence:.3f}, IoU 0.5",
    )


def _confused_pairs(result: EvalResult, names: Sequence[str]) -> page.HtmlTable:
    totals = np.maximum(np.asarray(result.confusion).sum(0), 1)
    pairs = confused_pairs(result.confusion)
    listed: list[list[str | float]]
    listed = [[names[t], names[p], count, float(count / totals[t])] for count, p, t in pairs[:MAX_PAIRS]]
    columns = ("true class", "mistaken for", "objects", "fraction of the true class")
    return page.HtmlTable(columns, listed, f"Confused pairs of classes ({len(pairs):,})")
