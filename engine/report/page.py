"""report.html: one page that explains a training run, or the validation of a checkpoint. It needs no network and no
other file; its figures are also PNG files in the folder of the run."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from data.index.index import DatasetIndex
from engine.evaluation.analysis import KINDS, ErrorSplit, split_errors
from engine.evaluation.bootstrap import ap_of_draws
from engine.evaluation.issues import CheckedSplit, Issue
from engine.evaluation.label_errors import find_label_errors, trust_lines
from engine.evaluation.matching import match_detections
from engine.evaluation.metrics import CONFUSION_IOU, METRICS, Fitness
from engine.optim.schedule import few_steps_warning, step_plan
from engine.report.advice import (
    BALANCING,
    FEW_OBJECTS,
    Findings,
    confused_pairs,
    how_it_went,
    what_to_do,
    where_it_is_wrong,
)
from engine.report.census import CensusSection, census_content, take_census
from engine.report.figures import confusion_picture, errors_picture, metric_charts
from engine.report.gallery import LABEL_LEGEND, DrawnDetections, Galleries
from engine.report.image_errors import KIND_LEGEND, ImageErrors, worst_gallery
from engine.report.photos import Album
from utils.config.flags import flag_name
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig, default_of
from utils.distributed.context import DistributedContext
from utils.drawing import page
from utils.drawing.figures import Picture, chart_picture, history_charts, tile_images
from utils.errors import first_line
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted
from utils.structures import DetectionTable, EvalResult

FILE_NAME = "report.html"
TEMPLATE = "engine/report/page.html"
MIN_LABEL_ERROR_SCORE = 0.5  # more probable than not
MAX_PAIRS = 200  # confused pairs of classes
MAX_LABEL_BYTES = 700_000  # size of the JPEG files of label errors together
DRAWS = 400  # bootstrap draws of the images of a split with few objects
SHEET_COLUMNS = 4  # columns of charts in results.png


@dataclass(frozen=True)
class ScoredValidation:
    """The scores and detections of a validation."""

    result: EvalResult
    detections: DetectionTable  # whose AP was computed
    shown: DetectionTable  # as detect.py finds them
    epoch: int = 0  # epoch of the training after which it ran; 0: validation of a checkpoint
    errors: ErrorSplit | None = None  # None: not computed yet


@dataclass(frozen=True)
class CurvesSection:
    """Precision, recall and F1."""

    figures: dict[str, Picture]  # by the name of the file; empty without objects
    scores: page.Table  # of each class


@dataclass(frozen=True)
class ConfusionSection:
    """The confusion matrix."""

    figures: dict[str, Picture]
    pairs: page.Table  # of classes


@dataclass(frozen=True)
class ErrorsSection:
    """The kinds of errors, and what they cost."""

    split: ErrorSplit
    figures: dict[str, Picture]  # empty without objects
    counts: page.Table  # of each class


@dataclass(frozen=True)
class WorstImagesSection:
    """The images with the most errors."""

    errors: ImageErrors
    gallery: Sequence[page.Card]
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class LabelsSection:
    """Labels that the model contradicts."""

    trust: Sequence[str]
    issues: Sequence[Issue]
    gallery: Sequence[page.Card]
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ValidationSections:
    """What the page shows of a validation."""

    result: EvalResult
    curves: CurvesSection
    confusion: ConfusionSection
    errors: ErrorsSection
    worst: WorstImagesSection
    labels: LabelsSection


@dataclass(frozen=True)
class PageContent:
    """The variables of `TEMPLATE`."""

    subject: Subject
    summary: dict[str, list[str]]  # sentences by title
    changed: page.Table  # settings that differ from their defaults
    machine: Sequence[tuple[str, str]]
    data: CensusSection
    history: dict[str, Picture]  # by title; empty before the first epoch
    validation: ValidationSections | None


@dataclass(frozen=True)
class Subject:
    """The run or checkpoint that a report is about."""

    title: str
    config: TrainConfig | ValConfig
    hyp: Hyperparameters | None
    ctx: DistributedContext
    imgsz: int
    stride: int
    indexes: dict[str, DatasetIndex]  # by split: first that of the training, if it is known, last the validated one
    fitness: Fitness = Fitness("AP", "AP")
    batches: int = 0  # per epoch; 0 for the validation of a checkpoint

    @property
    def epochs(self) -> int:
        """Planned epochs of the run; 0 for the validation of a checkpoint."""
        return self.config.epochs if isinstance(self.config, TrainConfig) else 0

    @property
    def few_steps(self) -> str:
        """Warning that the run has too few steps; "" if it has enough, or if ``--time`` decides."""
        config = self.config
        if not isinstance(config, TrainConfig) or config.time or not self.batches:
            return ""
        return few_steps_warning(step_plan(config, self.batches), from_weights=bool(config.weights))

    @property
    def validated(self) -> DatasetIndex:
        return list(self.indexes.values())[-1]


class ReportPage:
    """Writes `FILE_NAME` and its figures into ``folder``, and rewrites them while a run goes on.

    A resumed run keeps the page of the previous process until its first validation.
    """

    def __init__(self, folder: Path, subject: Subject, *, is_resumed: bool = False) -> None:
        self._folder = folder
        self._subject = subject
        self._is_resumed = is_resumed
        self.path = folder / FILE_NAME
        self.validation: ScoredValidation | None = None  # the newest
        self._ap_of_draws: dict[int, np.ndarray] = {}  # `ap_of_draws` by epoch, of this process
        self._data: CensusSection | None = None
        self._warning = ""
        self.is_written = False  # whether the newest call of `write` has replaced the page

    def set_validation(self, validation: ScoredValidation) -> None:
        """Sets the newest validation. With few objects, the epochs that are set are compared on the same draws of the
        images, which takes seconds."""
        self.validation = validation
        index = self._subject.validated
        if validation.epoch and 0 < validation.result.class_targets.sum() < FEW_OBJECTS:
            self._ap_of_draws[validation.epoch] = ap_of_draws(
                index.ground_truth(), validation.detections, len(index.names), DRAWS
            )

    def set_epochs(self, epochs: int) -> None:
        """Sets the planned epochs of the run, which its hooks may change."""
        config = self._subject.config
        if isinstance(config, TrainConfig):
            self._subject = replace(self._subject, config=replace(config, epochs=epochs))

    def write(self, history: dict[str, np.ndarray]) -> None:
        """Replaces the page, results.png, labels.png, the curves, confusion_matrix.png and errors.png.

        A failure is logged as a warning. ``history``: the columns of results.csv, float64 (epochs,); empty before the
        first epoch.
        """
        self.is_written = False
        if self._is_resumed and self.validation is None:
            return
        path = self.path
        validation = self.validation
        try:
            content = self._content(history, validation)
            for name, picture in _figure_files(content).items():
                write_whole(self._folder / f"{name}.png", picture.png)
            subtitle = f"Written {page.now()}."
            if validation is None:
                subtitle = f"Written {page.now()}, before the first validation."
            elif validation.epoch:
                subtitle += f" Detections are those of the newest validation, after epoch {validation.epoch}."
            page.write_page(path, TEMPLATE, self._subject.title, subtitle, **vars(content))
            self.is_written = True
        except Exception as error:
            warning = f"{path}: the report cannot be written ({first_line(error)})"
            if warning != self._warning:  # not after each epoch
                get_logger().warning("%s", warning)
            self._warning = warning

    def log_path(self) -> None:
        """Logs the path of the page if the newest call of `write` has written it."""
        if self.is_written:
            get_logger().info("report: %s", self.path)

    def _content(self, history: dict[str, np.ndarray], validation: ScoredValidation | None) -> PageContent:
        subject = self._subject
        if self._data is None:
            censuses = [take_census(index, split, subject.imgsz) for split, index in subject.indexes.items()]
            indexes = list(subject.indexes.values())
            self._data = census_content(censuses, indexes, imgsz=subject.imgsz, stride=subject.stride)
        sections = None if validation is None else self._validation_sections(validation)
        findings = self._findings(history, self._data, sections)
        return PageContent(
            subject=subject,
            summary={
                "How it went": list(how_it_went(findings)),
                "Where the model is wrong": list(where_it_is_wrong(findings)),
                "What to do next": list(what_to_do(findings)),
            },
            changed=_changed_settings(subject),
            machine=_machine(subject.ctx),
            data=self._data,
            history={chart.title: chart_picture(chart) for chart in history_charts(history)},
            validation=sections,
        )

    def _findings(
        self, history: dict[str, np.ndarray], data: CensusSection, validation: ValidationSections | None
    ) -> Findings:
        """Collects what the advice is based on."""
        subject = self._subject
        train = subject.indexes.get("train")
        findings = Findings(
            history=history,
            epochs=subject.epochs,
            names=subject.validated.names,
            imgsz=subject.imgsz,
            stride=subject.stride,
            train=next((census for census in data.censuses if census.split == "train"), None),
            data=data.censuses[0],
            last=self._folder / "last.pt",
            fitness=subject.fitness,
            balances=any(getattr(subject.config, name, 0) for name in BALANCING),
            ap_of_draws=self._ap_of_draws,
            few_steps=subject.few_steps,
            tile=subject.validated.tile,
            ignored=() if train is None else tuple(train.names_ignored_everywhere()),
        )
        if validation is None:
            return findings
        return replace(
            findings,
            result=validation.result,
            errors=validation.errors.split,
            suspects=len(validation.labels.issues),
            backgrounds=validation.worst.errors.backgrounds(),
        )

    def _validation_sections(self, validation: ScoredValidation) -> ValidationSections:
        split, index = list(self._subject.indexes.items())[-1]
        names = index.names
        truth = index.ground_truth()
        result = validation.result
        error_split = validation.errors or split_errors(match_detections(truth, validation.detections, len(names)))
        errors = ImageErrors(truth, validation.shown, len(names), result.confusion_confidence)
        checked = CheckedSplit(split, index)
        issues = find_label_errors(checked, validation.detections, result.class_metrics, MIN_LABEL_ERROR_SCORE)
        model = f"The model after {counted(validation.epoch, 'epoch')}" if validation.epoch else "The model"
        drawn = DrawnDetections(validation.shown, result.confusion_confidence)
        confusion_title = f"detections above confidence {result.confusion_confidence:.3f}, IoU {CONFUSION_IOU}"
        return ValidationSections(
            result=result,
            curves=CurvesSection(
                figures={f"{kind}_curve": chart_picture(chart) for kind, chart in metric_charts(result, names).items()},
                scores=_score_table(result, names),
            ),
            confusion=ConfusionSection(
                figures={"confusion_matrix": confusion_picture(result.confusion, names, confusion_title)},
                pairs=_confused_pairs(result, names),
            ),
            errors=ErrorsSection(
                split=error_split,
                figures={} if np.isnan(error_split.ap) else {"errors": errors_picture(error_split)},
                counts=page.Table(
                    ("class", *KINDS),
                    [[name, *count] for name, count in zip(names, error_split.counts.tolist()) if any(count)],
                    "Errors of each class, at any confidence",
                ),
            ),
            worst=WorstImagesSection(errors, gallery=worst_gallery(checked, errors), legend=KIND_LEGEND),
            labels=LabelsSection(
                trust=trust_lines(model, {split: result}, names, issues),
                issues=issues,
                gallery=Galleries([checked], {split: drawn}).label_errors(issues, Album(MAX_LABEL_BYTES)),
                legend=LABEL_LEGEND,
            ),
        )


def _figure_files(content: PageContent) -> dict[str, Picture]:
    """Returns the pictures of the page that are also written as PNG files, by name."""
    sheets = {"results": content.history, "labels": content.data.figures.get("train", {})}
    files = {
        name: Picture(tile_images([picture.pixels for picture in shown.values()], SHEET_COLUMNS))
        for name, shown in sheets.items()
        if shown
    }
    validation = content.validation
    if validation is not None:
        for section in (validation.curves, validation.confusion, validation.errors):
            files |= section.figures
    return files


def _changed_settings(subject: Subject) -> page.Table:
    """Lists the flags and hyper-parameters that differ from their defaults."""
    groups: list[tuple[TrainConfig | ValConfig | Hyperparameters, Callable[[str], str]]]
    groups = [(subject.config, flag_name)]
    if subject.hyp is not None:
        groups.append((subject.hyp, str))
    rows = []
    for settings, display_name in groups:
        for field in fields(settings):
            value = getattr(settings, field.name)
            default = default_of(field)
            if value != default:
                name = page.code(display_name(field.name))
                rows.append((name, _display_value(value), _display_value(default), field.metadata["help"]))
    return page.Table(("setting", "value", "default", "meaning"), rows, "Settings that differ from their defaults")


def _display_value(value: object) -> str:
    if value in ("", []):
        return "empty"
    if value in (None, MISSING):
        return "none"
    return str(value)


def _machine(ctx: DistributedContext) -> Sequence[tuple[str, str]]:
    return (
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("device", f"{ctx.device} ({_device_name(ctx.device)})"),
        ("processes", str(ctx.world_size)),
        ("cores of this machine that may be used", str(available_cores())),
        ("threads per process", str(torch.get_num_threads())),
        ("system", f"{platform.system()} {platform.release()}"),
        ("machine", platform.node() or page.UNKNOWN),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        if models:
            return models[0]
    return platform.processor() or page.UNKNOWN


def _score_table(result: EvalResult, names: Sequence[str]) -> page.Table:
    """Lists the scores of all classes together, then of each class, the best first."""
    f1 = np.nan_to_num(result.curve_f1)
    best = np.where(f1.max(1) > 0, [f1.max(1), result.curve_confidence[f1.argmax(1)]], np.nan)
    values = np.stack([*(result.class_metrics[m.name] for m in METRICS), *best], 1).tolist()
    order = np.argsort(-np.nan_to_num(result.class_metrics["AP50"], nan=-1.0), kind="stable")
    total = int(result.class_targets.sum())
    rows: list[list[str | float | None]]
    rows = [["all", total, *result.metrics.values(), result.metrics["f1"], result.threshold]]
    rows += [[names[c], int(result.class_targets[c]), *values[c]] for c in order.tolist()]
    return page.Table(
        ("class", "objects", *(m.column for m in METRICS), "best F1", "at confidence"),
        rows,
        f"Scores of each class; P, R and F1 as detect.py finds them above {result.best_confidence:.3f}, IoU 0.5",
    )


def _confused_pairs(result: EvalResult, names: Sequence[str]) -> page.Table:
    totals = np.maximum(np.asarray(result.confusion).sum(0), 1)
    pairs = confused_pairs(result.confusion)
    listed: list[list[str | float]]
    listed = [[names[t], names[p], count, float(count / totals[t])] for count, p, t in pairs[:MAX_PAIRS]]
    columns = ("true class", "mistaken for", "objects", "fraction of the true class")
    return page.Table(columns, listed, f"Confused pairs of classes ({len(pairs):,})")
