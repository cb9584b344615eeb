"""report.html: one page that explains a training run, or the validation of a checkpoint. It needs no network and no
other file; its figures are also PNG files in the folder of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.evaluation.bootstrap import ap_of_draws
from engine.report.advice import BALANCING, FEW_OBJECTS, Findings, how_it_went, what_to_do, where_it_is_wrong
from engine.report.census import CensusSection, census_content, take_census
from engine.report.environment import changed_settings, machine_facts
from engine.report.history import history_charts
from engine.report.subject import ScoredValidation, Subject
from engine.report.validation import ValidationSections, validation_sections
from utils.config.settings import TrainConfig
from utils.drawing import page
from utils.drawing.figures import Picture, chart_picture, tile_images
from utils.errors import first_line
from utils.files.safe_io import write_whole
from utils.logger import get_logger

FILE_NAME = "report.html"
TEMPLATE = "engine/report/page.html"
DRAWS = 400  # bootstrap draws of the images of a split with few objects
SHEET_COLUMNS = 4  # columns of charts in results.png


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
        sections = None
        if validation is not None:
            sections = validation_sections(validation, subject.validated_split)
        findings = self._findings(history, self._data, sections)
        return PageContent(
            subject=subject,
            summary={
                "How it went": list(how_it_went(findings)),
                "Where the model is wrong": list(where_it_is_wrong(findings)),
                "What to do next": list(what_to_do(findings)),
            },
            changed=changed_settings(subject.config, subject.hyp),
            machine=machine_facts(subject.ctx),
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
