"""report.html: one page that explains a training run, or the validation of a checkpoint.

It is written into the folder of the run and needs nothing else: no network, no other file.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from data.check.census import census_content, take_census
from data.check.photos import Photos
from data.check.scanned import CheckedSplit
from data.index.index import DatasetIndex
from data.loading.class_balance import class_repeats, repeat_factors
from engine.evaluation.analysis import KINDS, Analysis, ErrorSplit, analyze
from engine.evaluation.fitness import Fitness
from engine.evaluation.label_errors import find_label_errors, trust_lines
from engine.evaluation.metrics import CONFUSION_IOU, METRICS
from engine.report.advice import (
    BALANCING,
    Findings,
    confused_pairs,
    how_it_went,
    is_imbalanced,
    what_to_do,
    where_it_is_wrong,
)
from engine.report.gallery import KIND_STYLES, KIND_WORDS, LABEL_LEGEND, ErrorGalleries
from engine.report.image_errors import find_image_errors, worst_backgrounds
from engine.report.validation import reliability_figure
from models.losses.base import class_weights
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig, default_of
from utils.distributed.context import DistributedContext
from utils.drawing import page
from utils.drawing.figures import chart_svg, svg
from utils.drawing.plots import history_charts, metric_charts
from utils.errors import first_line
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted
from utils.structures import DetectionTable, EvalResult

FILE_NAME, TEMPLATE = "report.html", "engine/report/page.html"
LEAST_SCORE = 0.5  # of label errors: more probable than not
MOST_SHOWN, MOST_PAIRS = 20, 200  # classes of a confusion matrix, and pairs of classes
MOST_RARE = 10  # classes


@dataclass(frozen=True)
class Validation:
    """A result, and what it was computed from."""

    result: EvalResult
    detections: DetectionTable
    epoch: int = 0  # after which the validation was; 0: of a checkpoint
    analysis: Analysis | None = None  # None: not computed yet


@dataclass(frozen=True)
class Subject:
    """What a report is about, as far as it does not change during the run.

    ``indexes``: by split, the training split first if it is known; the last is the one that is validated.
    """

    title: str
    config: TrainConfig | ValConfig
    hyp: Hyperparameters | None
    ctx: DistributedContext
    imgsz: int
    stride: int
    indexes: dict[str, DatasetIndex]
    fitness: Fitness = Fitness("AP", "AP")

    @classmethod
    def of_checkpoint(cls, config: ValConfig, ctx: DistributedContext, index: DatasetIndex, stride: int) -> Subject:
        """The validation of ``config.weights`` on ``index``, at ``config.imgsz`` pixels."""
        title = f"Validation of {Path(config.weights[0]).name}"
        return cls(title, config, None, ctx, config.imgsz, stride, {config.task: index})

    @property
    def epochs(self) -> int:
        """Of the run; 0 for the validation of a checkpoint."""
        return self.config.epochs if isinstance(self.config, TrainConfig) else 0

    @property
    def validated(self) -> DatasetIndex:
        return list(self.indexes.values())[-1]


class ReportPage:
    """Writes `FILE_NAME` into ``folder``, again and again while a run goes on."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self._path, self._subject = folder / FILE_NAME, subject
        self._photos = Photos()
        self._data: dict[str, Any] | None = None  # what census.html shows
        self._warning = ""

    def set_epochs(self, epochs: int) -> None:
        """Of the run."""
        self._subject = replace(self._subject, config=replace(self._subject.config, epochs=epochs))

    def write(self, history: dict[str, np.ndarray], validation: Validation | None) -> None:
        """Replaces the page. A failure is no reason to end a run: it costs a warning.

        Args:
            history: the columns of results.csv, float64 (epochs,); empty before the first epoch.
            validation: the newest; None before the first.
        """
        try:
            content = self._content(history, validation)
            page.write_page(self._path, TEMPLATE, self._subject.title, self._subtitle(validation), **content)
        except Exception as error:
            warning = f"{self._path}: the report cannot be written ({first_line(error)})"
            if warning != self._warning:  # not after each epoch
                get_logger().warning("%s", warning)
            self._warning = warning

    def _content(self, history: dict[str, np.ndarray], validation: Validation | None) -> dict[str, Any]:
        """What page.html shows."""
        subject = self._subject
        if self._data is None:
            censuses = [take_census(index, split, subject.imgsz) for split, index in subject.indexes.items()]
            indexes = list(subject.indexes.values())
            self._data = census_content(censuses, indexes, imgsz=subject.imgsz, stride=subject.stride)
        found = Findings(
            history=history,
            epochs=subject.epochs,
            names=subject.validated.names,
            imgsz=subject.imgsz,
            stride=subject.stride,
            train=next((c for c in self._data["censuses"] if c.split == "train"), None),
            fitness=subject.fitness,
            balances=any(getattr(subject.config, name, 0) for name in BALANCING),
        )
        content = {"validation": validation}
        if validation is not None:
            content |= self._validation_content(validation)
            found = replace(
                found,
                result=validation.result,
                errors=content["analysis"].errors,
                calibration=content["analysis"].calibration,
                suspects=len(content["issues"]),
                backgrounds=len(worst_backgrounds(content["errors"], subject.validated.ground_truth().num_images)),
            )
        return content | {
            "subject": subject,
            "summary": {
                "How it went": how_it_went(found),
                "Where the model is wrong": where_it_is_wrong(found),
                "What to do next": what_to_do(found),
            },
            **_settings_content(subject),
            "data": self._data,
            "rare": _rare_classes(subject, found),
            "history": [chart_svg(chart) for chart in history_charts(history)],
        }

    def _validation_content(self, validation: Validation) -> dict[str, Any]:
        split, index = list(self._subject.indexes.items())[-1]
        names, truth, result = index.names, index.ground_truth(), validation.result
        analysis = validation.analysis or analyze(
            truth, validation.detections, len(names), threshold=result.best_confidence
        )
        errors = find_image_errors(truth, validation.detections, len(names), result.confusion_confidence)
        checked, pictures = CheckedSplit(split, index), {}
        issues = find_label_errors(checked, validation.detections, result.class_metrics["AP50"], LEAST_SCORE)
        model = f"The model after {counted(validation.epoch, 'epoch')}" if validation.epoch else "The model"
        galleries = ErrorGalleries(pictures, self._photos, checked, validation.detections, errors)
        curves, reliability = metric_charts(result, names), reliability_figure(analysis.calibration)
        return {
            "names": names,
            "analysis": analysis,
            "errors": errors,
            "issues": issues,
            "trust": trust_lines(model, {split: result}, names, issues),
            "pictures": pictures,
            "curves": [chart_svg(curves[kind]) for kind in ("PR", "F1") if curves],
            "scores": _score_table(result, names),
            "confusion": _confusion_content(result, names),
            "costs": _cost_bars(analysis.errors),
            "counts": _count_table(analysis.errors, names),
            "reliability": svg(reliability, "Precision of detections by their confidence") if reliability else "",
            "worst": galleries.worst(),
            "label_errors": galleries.label_errors(issues),
            "backgrounds": galleries.backgrounds(),
            "kinds": [("correct", "correct"), *zip(KIND_WORDS, KIND_STYLES), ("label, not found", "label-key")],
            "label_legend": LABEL_LEGEND,
        }

    def _subtitle(self, validation: Validation | None) -> str:
        if validation is None:
            return f"Written {page.now()}, before the first validation."
        if validation.epoch:
            newest = f"the newest validation, after epoch {validation.epoch}"
            return f"Written {page.now()}. Detections are those of {newest}."
        return f"Written {page.now()}."


def _rare_classes(subject: Subject, found: Findings) -> page.Table | None:
    """The rarest classes of a training run, and what it does about them; None if they are not rare."""
    config, names = subject.config, found.names
    if found.train is None or not isinstance(config, TrainConfig) or not (found.balances or is_imbalanced(found.train)):
        return None
    boxes, images = found.train.class_boxes, found.train.class_images
    index, count = subject.indexes["train"], len(names)
    times = class_repeats(repeat_factors(config.repeat_factor, index, count), index, count)
    columns = {
        "times per epoch": np.full(count, np.nan) if config.image_weights else times,
        "weight in the loss": class_weights(boxes, config.cls_pw).double().numpy(),
        "AP": np.full(count, np.nan) if found.result is None else found.result.class_ap,
    }
    rarest = [c for c in np.argsort(boxes, kind="stable").tolist() if boxes[c]][:MOST_RARE]
    return page.Table(
        ("class", "images", "boxes", *columns),
        [(names[c], int(images[c]), int(boxes[c]), *(float(v[c]) for v in columns.values())) for c in rarest],
        "The rarest classes: how often an epoch shows their images, and what their loss is multiplied by",
    )


def _settings_content(subject: Subject) -> dict[str, Any]:
    groups = {"flags": subject.config} | ({"hyper-parameters": subject.hyp} if subject.hyp is not None else {})
    rows = [
        (what, _flag(what, field), getattr(values, field.name), default_of(field), field.metadata["help"])
        for what, values in groups.items()
        for field in fields(values)
    ]
    return {
        "changed": page.Table(
            ("setting", "value", "default", "meaning"),
            [(flag, _shown(value), _shown(usual), text) for _, flag, value, usual, text in rows if value != usual],
            "Settings that differ from their defaults",
        ),
        "settings": [
            page.Table(
                ("setting", "value", "meaning"),
                [(flag, _shown(value), text) for group, flag, value, _, text in rows if group == what],
                f"All {what}",
            )
            for what in groups
        ],
        "machine": _machine(subject.ctx),
    }


def _flag(what: str, field: Field) -> Markup:
    return page.code(f"--{field.name.replace('_', '-')}" if what == "flags" else field.name)


def _shown(value: object) -> str:
    return "empty" if value in ("", []) else "none" if value in (None, MISSING) else str(value)


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
    """The scores of all classes together, then of each, the best first."""
    precision, recall = (np.nan_to_num(v) for v in (result.curve_precision, result.curve_recall))
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = np.where(f1.max(1) > 0, [f1.max(1), result.curve_confidence[f1.argmax(1)]], np.nan)
    values = np.stack([*(result.class_metrics[m.name] for m in METRICS), *best], 1).tolist()
    order = np.argsort(-np.nan_to_num(result.class_metrics["AP50"], nan=-1.0), kind="stable")
    every = ["all", int(result.class_targets.sum()), *result.metrics.values(), result.metrics["f1"], result.threshold]
    return page.Table(
        ("class", "objects", *(m.column for m in METRICS), "best F1", "at confidence"),
        [every, *([names[c], int(result.class_targets[c]), *values[c]] for c in order)],
        f"Scores of each class; P, R and F1 at confidence {result.best_confidence:.3f}, IoU 0.5",
    )


def _confusion_content(result: EvalResult, names: Sequence[str]) -> dict[str, Any]:
    """The matrix of the classes that are confused most, and the pairs."""
    confusion = np.asarray(result.confusion)
    wrong = confusion.sum(0)[:-1] + confusion.sum(1)[:-1] - 2 * np.diag(confusion)[:-1]
    shown, caption = np.arange(len(names)), f"Objects and detections at confidence {result.confusion_confidence:.3f}"
    caption += " (the recommended threshold)" if result.threshold is not None else ""
    caption += f" or above, matched at IoU {CONFUSION_IOU}"
    if len(names) > MOST_SHOWN:
        shown = np.sort(np.argsort(-wrong, kind="stable")[:MOST_SHOWN])
        caption += f"; the {MOST_SHOWN} of {len(names)} classes with the most errors"
    cells = np.ix_(*[np.r_[shown, len(names)]] * 2)
    totals = np.maximum(confusion.sum(0), 1)
    pairs = confused_pairs(confusion)
    listed = [[names[t], names[p], count, float(count / totals[t])] for count, p, t in pairs[:MOST_PAIRS]]
    return {
        "is_empty": not confusion.any(),
        "counts": confusion[cells].tolist(),
        "shades": (confusion / totals)[cells].tolist(),
        "names": [*(names[c] for c in shown), "background"],
        "caption": f"{caption}. A stronger color: a larger fraction of the true class",
        "number": len(pairs),
        "pairs": page.Table(
            ("true class", "mistaken for", "objects", "fraction of the true class"), listed, "Confused pairs of classes"
        ),
    }


def _cost_bars(errors: ErrorSplit) -> page.Bars:
    """What each kind of error costs (TIDE)."""
    rows = [(kind, [c], f"{c:.3f} ({n:,})") for kind, c, n in zip(KINDS, errors.cost.tolist(), errors.counts.sum(0))]
    all_costs = (("all false positives", errors.false_positive_cost), ("all not found", errors.false_negative_cost))
    rows += [(name, [float(cost)], f"{cost:.3f}") for name, cost in all_costs]
    return page.Bars(rows, f"AP50 to be gained by fixing one kind of error; AP50 is {errors.ap:.3f}")


def _count_table(errors: ErrorSplit, names: Sequence[str]) -> page.Table:
    rows = [[name, *count] for name, count in zip(names, errors.counts.tolist()) if any(count)]
    return page.Table(("class", *KINDS), rows, "Errors of each class, at any confidence")
