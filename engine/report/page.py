"""report.html: one page that explains a training run, or the validation of a checkpoint.

It is written into the folder of the run and needs nothing else: no network, no other file.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from data.check.census import Census, census_parts, take_census
from data.check.photos import Photos
from data.index.index import DatasetIndex
from engine.evaluation.analysis import Analysis, analyze
from engine.evaluation.fitness import Fitness
from engine.evaluation.image_errors import (
    SUSPICIOUS_CONFIDENCE,
    ImageErrors,
    find_image_errors,
    suspicious_labels,
    worst_backgrounds,
)
from engine.report import score_parts
from engine.report.advice import Findings, how_it_went, what_to_do, where_it_is_wrong
from engine.report.gallery import KIND_STYLES, KIND_WORDS, MOST_SUSPECTS, Galleries
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig, default_of
from utils.distributed.context import DistributedContext
from utils.drawing import page
from utils.drawing.charts import legend
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted
from utils.structures import DetectionTable, EvalResult

FILE_NAME = "report.html"


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
        self._censuses: list[Census] | None = None
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
            self._build(history, validation).write(self._path)
        except Exception as error:
            warning = (
                f"{self._path}: the report cannot be written ({(str(error).strip() or repr(error)).splitlines()[0]})"
            )
            if warning != self._warning:  # not after each epoch
                get_logger().warning("%s", warning)
            self._warning = warning

    def _build(self, history: dict[str, np.ndarray], validation: Validation | None) -> page.Page:
        subject = self._subject
        if self._censuses is None:
            self._censuses = [take_census(index, split, subject.imgsz) for split, index in subject.indexes.items()]
        names, analysis, errors = subject.validated.names, None, None
        if validation is not None:
            truth, result = subject.validated.ground_truth(), validation.result
            analysis = validation.analysis or analyze(
                truth, validation.detections, len(names), threshold=result.best_confidence
            )
            errors = find_image_errors(truth, validation.detections, len(names), result.confusion_confidence)
        out = page.Page(subject.title, self._subtitle(validation))
        out.section("Summary", *self._summary(history, validation, analysis, errors))
        out.section("Settings and machine", *_settings_parts(subject))
        out.section(
            "Data",
            *census_parts(self._censuses, list(subject.indexes.values()), imgsz=subject.imgsz, stride=subject.stride),
        )
        if subject.epochs:
            out.section("Training", *score_parts.history_parts(history))
        if validation is None or analysis is None or errors is None:
            out.section("Detections", "There is no validation yet: curves, errors and images appear after the first.")
            return out
        out.section("Precision, recall and F1", *score_parts.curve_parts(validation.result, names))
        out.section("Confusion matrix", *score_parts.confusion_parts(validation.result, names))
        out.section("Kinds of errors", *score_parts.error_parts(analysis.errors, names))
        out.section("Reliability of confidences", *score_parts.calibration_parts(analysis.calibration))
        self._galleries(out, errors)
        return out

    def _subtitle(self, validation: Validation | None) -> str:
        now = datetime.now().astimezone().isoformat(" ", "minutes")
        if validation is None:
            return f"Written {now}, before the first validation."
        if validation.epoch:
            return f"Written {now}. Detections are those of the newest validation, after epoch {validation.epoch}."
        return f"Written {now}."

    def _summary(
        self,
        history: dict[str, np.ndarray],
        validation: Validation | None,
        analysis: Analysis | None,
        errors: ImageErrors | None,
    ) -> Iterator[page.Content]:
        subject, censuses = self._subject, self._censuses or []
        most = subject.validated.ground_truth().num_images
        found = Findings(
            history=history,
            epochs=subject.epochs,
            names=subject.validated.names,
            imgsz=subject.imgsz,
            stride=subject.stride,
            train=next((c for c in censuses if c.split == "train"), None),
            result=validation.result if validation else None,
            errors=analysis.errors if analysis else None,
            calibration=analysis.calibration if analysis else None,
            suspects=suspicious_labels(errors, len(errors.scores)).size if errors else 0,
            backgrounds=len(worst_backgrounds(errors, most)) if errors else 0,
            fitness=subject.fitness,
        )
        for title, lines in (
            ("How it went", how_it_went(found)),
            ("Where the model is wrong", where_it_is_wrong(found)),
            ("What to do next", what_to_do(found)),
        ):
            if lines:
                yield page.heading(title)
                yield page.bullets(lines)

    def _galleries(self, out: page.Page, errors: ImageErrors) -> None:
        made = Galleries(out, self._photos, self._subject.validated, errors)
        shown = f"at confidence {errors.threshold:.3f} or above"
        colors = legend(
            [("correct", "correct"), *zip(KIND_WORDS, KIND_STYLES), ("label that an error is about", "label-key")]
        )
        worst = made.worst()
        out.section(
            "Worst images",
            f"Images with the most errors among detections {shown}, then examples of each class and kind of error.",
            *((colors, worst) if worst else ("No image has an error.",)),
        )
        labels, number = made.labels(), suspicious_labels(errors, len(errors.scores)).size
        out.section(
            "Suspicious labels",
            f"Labels that the model contradicts with confidence {max(errors.threshold, SUSPICIOUS_CONFIDENCE):.2f} or "
            "above: the label or the model is wrong. Labels are white and dashed.",
            *(
                (f"The {min(number, MOST_SUSPECTS)} most confident of {number:,}:", labels)
                if labels
                else ("There are none.",)
            ),
        )
        backgrounds = made.backgrounds()
        out.section(
            "Worst backgrounds",
            f"Images without labels that have detections {shown}, the most confident first.",
            backgrounds or self._no_backgrounds(),
        )

    def _no_backgrounds(self) -> str:
        validated = (self._censuses or [])[-1]
        if not validated.backgrounds:
            return "Every image has labels."
        return f"None of {counted(validated.backgrounds, 'image')} without labels has a detection."


def _settings_parts(subject: Subject) -> Iterator[page.Content]:
    groups: list[tuple[str, Any]] = [("flags", subject.config)]
    groups += [("hyper-parameters", subject.hyp)] if subject.hyp is not None else []
    rows = [(what, field, getattr(values, field.name)) for what, values in groups for field in fields(values)]
    changed = [
        (_flag(what, field), _shown(value), _shown(default_of(field)), field.metadata["help"])
        for what, field, value in rows
        if value != default_of(field)
    ]
    if changed:
        yield page.table(
            ("setting", "value", "default", "meaning"), changed, "Settings that differ from their defaults"
        )
    else:
        yield "All settings have their defaults."
    for what, values in groups:
        listed = [(_flag(what, f), _shown(getattr(values, f.name)), f.metadata["help"]) for f in fields(values)]
        yield page.fold(f"All {what}", page.table(("setting", "value", "meaning"), listed, f"All {what}"))
    yield page.facts(_machine(subject.ctx))


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
