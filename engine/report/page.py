"""report.html: one page about best.pt of a training run, or about the checkpoint of a validation. It needs no network
and no other file; its figures are also PNG files in the folder of the run."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.index import DatasetIndex
from engine.evaluation.analysis import FOREGROUND_IOU, ap_error, confused_pairs, split_errors
from engine.evaluation.metrics import METRICS, MIN_F1
from engine.evaluation.result import EvalResult, Evaluation
from engine.report.advice import Facts, advise
from engine.report.figures import (
    MANY_CLASSES,
    class_bars,
    confusion_picture,
    errors_picture,
    history_charts,
    metric_charts,
)
from engine.report.images import KIND_NAMES, LABEL_LEGEND, label_error_cards, worst_images, worst_legend, write_preview
from engine.report.issues import CheckedSplit
from engine.report.label_errors import find_label_errors, unjudged_classes
from engine.report.summary import Subject, Validated, error_sentences, unlabeled_with_detections, verdict
from utils.config.flags import flag_name
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig, default_of
from utils.distributed.context import DistributedContext
from utils.drawing import page
from utils.drawing.draw import tile_images
from utils.drawing.figures import Picture, chart_picture
from utils.errors import first_line
from utils.files.results_csv import CONFIDENCE_COLUMN, read_columns
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted, format_duration

FILE_NAME = "report.html"
TEMPLATE = "engine/report/page.html"
FIRST_IMAGES = 3  # worst images on the first screen
MIN_LABEL_ERROR_SCORE = 0.5
MAX_PAIRS = 200  # confused pairs of classes
SHEET_COLUMNS = 4  # columns of charts in results.png


class ReportPage:
    """Writes `FILE_NAME` and its figures into ``folder``, and rewrites them during a run.

    ``keeps_earlier``: whether the page of an earlier process stays until the first validation of this one.
    """

    def __init__(self, folder: Path, subject: Subject, *, keeps_earlier: bool = False) -> None:
        self._folder = folder
        self._subject = subject
        self._keeps_earlier = keeps_earlier
        self.path = folder / FILE_NAME
        self._epoch = 0  # of the validation that is shown; 0: none, or that of a checkpoint
        self._validated: Validated | None = None  # what is known from it
        self._validation: dict[str, Any] | None = None  # what the page shows of it
        self._evaluation: Evaluation | None = None  # a validation that is not yet in `_validation`
        self._data: dict[str, Any] | None = None

    def set_progress(self, *, epochs: int, best_epoch: int) -> None:
        """Sets the planned epochs of a run, which its hooks may change, and its best epoch."""
        config = self._subject.config
        if isinstance(config, TrainConfig):
            self._subject = replace(self._subject, config=replace(config, epochs=epochs), best_epoch=best_epoch)

    def set_validation(self, evaluation: Evaluation, epoch: int = 0) -> bool:
        """Sets the newest validation, of ``epoch`` (0: of a checkpoint), and returns whether the page will show it: it
        keeps showing that of the best epoch."""
        if self._epoch and self._epoch == self._subject.best_epoch != epoch:
            return False
        self._epoch = epoch
        self._evaluation = evaluation
        return True

    def write(self, history: dict[str, np.ndarray]) -> None:
        """Replaces the page, results.png, labels.png, the curves, confusion_matrix.png and errors.png.

        ``history``: the columns of results.csv, float64 (epochs,); empty before the first epoch. Raises whatever fails.
        """
        if self._keeps_earlier and not self._epoch:
            return
        subject = self._subject
        if self._data is None:
            splits = {subject.split: subject.validated}
            if subject.train is not None:
                splits = {"train": subject.train, **splits}
            self._data = data_content(splits, subject.imgsz)
            self._save("labels", self._data["bars"].values())
        if self._evaluation is not None:
            self._validated, self._validation = self._validation_content(self._evaluation)
            self._evaluation = None
            for name, picture in (self._validation["curves"] | self._validation["error_figures"]).items():
                self._save(name, [picture])
        ap, training, others = (
            {chart.title: chart_picture(chart) for chart in charts} for charts in history_charts(history)
        )
        self._save("results", [*ap.values(), *training.values(), *others.values()])
        curves = self._validation["curves"] if self._validation else {}
        page.write_page(
            self.path,
            TEMPLATE,
            subject.title,
            self._subtitle(history),
            first_chart=ap or dict([*curves.items()][:1]),
            charts=training,
            timings=others,
            validation=self._validation,
            advice=advise(Facts(subject, self._folder, self._validated)),
            data=self._data,
            files=_files_table(history, subject.best_epoch),
            settings=_settings_table(subject.config, subject.hyp),
            machine=subject.machine,
            first_images=FIRST_IMAGES,
            many_classes=MANY_CLASSES,
            num_classes=len(subject.validated.names),
        )

    def _subtitle(self, history: Mapping[str, np.ndarray]) -> str:
        """Says which epoch the page is about, and how far the run is."""
        subject = self._subject
        parts = []
        if self._epoch:
            file = "best.pt, of" if self._epoch == subject.best_epoch else "The newest validated weights, of"
            parts.append(f"{file} epoch {self._epoch}.")
        if self._epoch and 0 < subject.best_epoch != self._epoch:
            parts.append(f"best.pt is of epoch {subject.best_epoch}: val.py --weights best.pt writes its report.")
        done = history.get("epoch", np.zeros(0))
        if subject.epochs and len(done):
            seconds = history.get("time", np.array([np.nan]))[-1]
            after = f" after {format_duration(seconds)}" if np.isfinite(seconds) else ""
            parts.append(f"Epoch {done[-1]:.0f} of {subject.epochs} is complete{after}.")
        elif subject.epochs:
            parts.append(f"No epoch of {subject.epochs} is complete yet.")
        return " ".join([*parts, f"Written {page.now()}."])

    def _save(self, name: str, pictures: Iterable[Picture]) -> None:
        """Writes pictures as one PNG file; none without pictures."""
        pixels = [picture.pixels for picture in pictures]
        if pixels:
            write_whole(self._folder / f"{name}.png", Picture(tile_images(pixels, SHEET_COLUMNS)).png)

    def _validation_content(self, evaluation: Evaluation) -> tuple[Validated, dict[str, Any]]:
        """Returns what is known from a validation, and what the page shows of it."""
        subject = self._subject
        index = subject.validated
        names = index.names
        result = evaluation.result
        threshold = result.shown_confidence
        errors = split_errors(evaluation.shown)
        error = ap_error(evaluation.matches)
        split = CheckedSplit(subject.split, index)
        class_ap50 = result.class_metrics["AP50"]
        label_errors = find_label_errors(split, evaluation.for_ap, class_ap50, MIN_LABEL_ERROR_SCORE)
        error_figures = {}
        if result.confusion.any():
            title = f"detections above confidence {threshold:.3f}, IoU {FOREGROUND_IOU}"
            error_figures["confusion_matrix"] = confusion_picture(result.confusion, names, title)
        if errors.counts.any() and result.class_targets.any():
            error_figures["errors"] = errors_picture(errors)
        rows = [[name, *counts] for name, counts in zip(names, errors.counts.tolist()) if any(counts)]
        totals = np.maximum(result.confusion.sum(0), 1)
        pairs = confused_pairs(result.confusion)
        pair_rows: list[list[str | float]]
        pair_rows = [[names[t], names[p], n, float(n / totals[t])] for n, p, t in pairs[:MAX_PAIRS]]
        unlabeled = unlabeled_with_detections(evaluation, index)
        return Validated(errors, len(label_errors), unlabeled), {
            "facts": _facts(result, error, subject.config),
            "verdict": list(verdict(evaluation, index)),
            "sentences": list(error_sentences(result, errors, names)),
            "worst": worst_images(split, evaluation.shown, int(np.nan_to_num(errors.cost).argmax())),
            "worst_legend": worst_legend(errors.counts.sum(0)),
            "threshold": threshold,
            "error_figures": error_figures,
            "error_counts": page.HtmlTable(("class", *KIND_NAMES), rows, "Errors of each class above the threshold"),
            "pairs": page.HtmlTable(
                ("true class", "mistaken for", "objects", "fraction of the true class"),
                pair_rows,
                f"Confused pairs of classes ({len(pairs):,})",
            ),
            "curves": {f"{kind}_curve": chart_picture(chart) for kind, chart in metric_charts(result, names).items()},
            "scores": _score_table(result, names),
            "label_errors": label_error_cards([split], label_errors),
            "label_legend": LABEL_LEGEND,
            "num_label_errors": len(label_errors),
            "unjudged": unjudged_classes(class_ap50, names),
        }


def write_validation_report(folder: Path, subject: Subject, evaluation: Evaluation, results: Path) -> None:
    """Writes the report and predictions.jpg of a validation. A failure, as on a full disk, is a warning: the scores are
    written. ``results``: results.csv of the run that the weights are from, if it exists."""
    report = ReportPage(folder, subject)
    report.set_validation(evaluation)
    confidence = evaluation.result.shown_confidence
    try:
        report.write(read_columns(results) if results.is_file() else {})
        get_logger().info("report: %s", report.path)
        write_preview(evaluation.preview, subject.validated.names, confidence, folder / "predictions.jpg")
    except Exception as error:
        get_logger().warning("%s: the report cannot be written (%s)", report.path, first_line(error))


def _facts(result: EvalResult, error: float, config: TrainConfig | ValConfig) -> list[tuple[str, str]]:
    """Returns the numbers at the top of the page, as pairs of name and value."""
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
    name = "threshold, which detect.py uses"
    if isinstance(config, ValConfig):
        is_chosen = config.chosen_confidence is not None
        name = "--conf-thres, below which AP counts nothing" if is_chosen else "best --conf-thres of detect.py"
    return [*facts, (name, f"{result.shown_confidence:.3f}")]


def _score_table(result: EvalResult, names: Sequence[str]) -> page.HtmlTable:
    """Lists the scores of all classes together, then of each class, the worst first."""
    best, confidence = result.best_f1  # first of all classes together
    values = np.stack([*(result.class_metrics[m.name] for m in METRICS), best[1:], confidence[1:]], 1).tolist()
    order = np.argsort(np.nan_to_num(result.class_metrics["AP"], nan=2.0), kind="stable")
    rows: list[list[str | float | None]]
    overall = (*result.metrics.values(), float(best[0]), float(confidence[0]))
    rows = [["all", int(result.class_targets.sum()), *overall]]
    rows += [[names[c], int(result.class_targets[c]), *values[c]] for c in order.tolist()]
    return page.HtmlTable(
        ("class", "objects", *(m.column for m in METRICS), "best F1 at any confidence", "this confidence"),
        rows,
        f"Scores of each class; P, R and F1 as detect.py finds them above {result.shown_confidence:.3f}, IoU 0.5",
    )


def data_content(splits: Mapping[str, DatasetIndex], imgsz: int) -> dict[str, Any]:
    """Returns what a page shows of the data: counts of ``splits``, indexes by name, and the boxes of each class."""
    names = next(iter(splits.values())).names
    boxes = {name: index.boxes_per_class(len(names)) for name, index in splits.items()}
    rows = []
    for name, index in splits.items():
        sides = np.sqrt(index.sides_at(imgsz).prod(1))
        median = f"{np.median(sides):.1f} px" if sides.size else page.UNKNOWN
        rows.append((name, len(index), index.counts()["backgrounds"], int(boxes[name].sum()), median))
    columns = ("split", "images", "backgrounds", "boxes", f"median side at --imgsz {imgsz}")
    first = next(iter(boxes))
    order = np.argsort(-boxes[first], kind="stable").tolist()
    class_columns = [f"{what} of {name}" for name in splits for what in ("boxes", "images")]
    counts = [count for name in splits for count in (boxes[name], splits[name].images_per_class(len(names)))]
    class_rows = [[names[c], *(int(count[c]) for count in counts)] for c in order]
    return {
        "splits": page.HtmlTable(columns, rows, "Splits; a background has no boxes; a side is the root of an area"),
        "classes": page.HtmlTable(("class", *class_columns), class_rows, f"Boxes of each class ({len(names)})"),
        "bars": {f"boxes of {first}": class_bars(boxes[first], names, first)} if boxes[first].any() else {},
        "scans": [f"The scan of {name}: {index.summary(name)}." for name, index in splits.items()],
    }


def _files_table(history: Mapping[str, np.ndarray], best_epoch: int) -> page.HtmlTable:
    """Lists best.pt and last.pt with the scores and the threshold of their epochs, as results.csv has them."""
    columns = {"AP": "metrics/AP", "F1": "metrics/f1", "threshold of detect.py": CONFIDENCE_COLUMN}
    epochs = history.get("epoch", np.zeros(0)).astype(int).tolist()
    rows: list[list[str | int | float]] = []
    for name, epoch in (("best.pt", best_epoch), ("last.pt", epochs[-1] if epochs else -1)):
        if epoch in epochs:
            row = epochs.index(epoch)
            values = [float(history[column][row]) if column in history else float("nan") for column in columns.values()]
            rows.append([name, epoch, *values])
    return page.HtmlTable(("file", "epoch", *columns), rows, "Checkpoints")


def _settings_table(config: TrainConfig | ValConfig, hyp: Hyperparameters | None) -> page.HtmlTable:
    """Lists the flags and hyper-parameters that differ from their defaults."""
    groups: list[tuple[TrainConfig | ValConfig | Hyperparameters, Callable[[str], str]]]
    groups = [(config, flag_name)]
    if hyp is not None:
        groups.append((hyp, str))
    rows = []
    for settings, display_name in groups:
        for field in fields(settings):
            value = getattr(settings, field.name)
            default = default_of(field)
            if value != default:
                name = page.code(display_name(field.name))
                rows.append((name, _display_value(value), _display_value(default), field.metadata["help"]))
    return page.HtmlTable(("setting", "value", "default", "meaning"), rows, "Settings that differ from their defaults")


def _display_value(value: object) -> str:
    if value in ("", []):
        return "empty"
    if value in (None, MISSING):
        return "none"
    return str(value)


def machine_facts(ctx: DistributedContext) -> Sequence[tuple[str, str]]:
    """Describes the versions and the machine, as names and values."""
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
