"""report.html: one page that explains a training run, or the validation of a checkpoint. It needs no network and no
other file; its figures are also PNG files in the folder of the run.

The subject (subject.py) is presented in sections: the data (census.py), the history, a validation (validation.py), and
a summary, whose sentences (advice.py) follow from the numbers in the other sections (run_facts.py). `ReportPage` writes
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.evaluation.bootstrap import ap_of_draws
from engine.report.advice import how_it_went, what_to_do, where_it_is_wrong
from engine.report.census import CensusSection, census_content, take_census
from engine.report.environment import settings_table
from engine.report.figures import MANY_CLASSES
from engine.report.history import history_charts
from engine.report.run_facts import FEW_OBJECTS, collect_facts
from engine.report.subject import ScoredValidation, Subject
from engine.report.validation import ValidationSections, validation_sections
from utils.config.settings import TrainConfig
from utils.drawing import page
from utils.drawing.draw import tile_images
from utils.drawing.figures import Picture, chart_picture
from utils.errors import first_line
from utils.files.safe_io import write_whole
from utils.logger import get_logger

FILE_NAME = "report.html"
TEMPLATE = "engine/report/page.html"
DRAWS = 400  # bootstrap draws of the images of a split with few objects
SHEET_COLUMNS = 4  # columns of charts in results.png


@dataclass(frozen=True)
class Sections:
    """The values of `TEMPLATE` besides the subject."""

    summary: dict[str, list[str]]  # sentences by title
    changed: page.HtmlTable  # settings that differ from their defaults
    data: CensusSection
    history: dict[str, Picture]  # by title; empty before the first epoch
    validation: ValidationSections | None  # None before the first validation of the process


def is_outdated(path: Path, epochs: int) -> bool:
    """Returns whether the page at ``path`` is missing, or was written before a run had ``epochs``."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # missing, or reported when it is written
        return True
    shown = re.search(r'data-epochs="(\d+)"', text)
    return shown is not None and int(shown[1]) < epochs


class ReportPage:
    """Writes `FILE_NAME` and its figures into ``folder``, and rewrites them during a run.

    ``keeps_earlier``: whether the page of an earlier process stays until the first validation of this one.
    """

    def __init__(self, folder: Path, subject: Subject, *, keeps_earlier: bool = False) -> None:
        self._folder = folder
        self._subject = subject
        self._keeps_earlier = keeps_earlier
        self.path = folder / FILE_NAME
        self._validation: ScoredValidation | None = None  # the newest
        self._ap_of_draws: dict[int, np.ndarray] = {}  # `ap_of_draws` by epoch, of this process
        self._data: CensusSection | None = None
        self._warning = ""
        self.is_written = False  # whether the newest call of `write` has replaced the page

    def set_validation(self, validation: ScoredValidation) -> None:
        """Sets the newest validation. With few objects, epochs are compared on the same bootstrap draws of the images,
        which takes seconds."""
        self._validation = validation
        index = self._subject.validated.index
        if validation.epoch and 0 < validation.result.class_targets.sum() < FEW_OBJECTS:
            self._ap_of_draws[validation.epoch] = ap_of_draws(
                index.ground_truth(), validation.scored, len(index.names), DRAWS
            )

    def set_progress(self, *, epochs: int, best_epoch: int) -> None:
        """Sets the planned epochs of a run, which its hooks may change, and its best epoch."""
        config = self._subject.config
        if isinstance(config, TrainConfig):
            self._subject = replace(self._subject, config=replace(config, epochs=epochs), best_epoch=best_epoch)

    def write(self, history: dict[str, np.ndarray]) -> None:
        """Replaces the page, results.png, labels.png, the curves, confusion_matrix.png and errors.png.

        A failure is logged as a warning. ``history``: the columns of results.csv, float64 (epochs,); empty before the
        first epoch.
        """
        self.is_written = False
        if self._keeps_earlier and self._validation is None:
            return
        path = self.path
        validation = self._validation
        try:
            sections = self._sections(history)
            for name, picture in _figure_files(sections).items():
                write_whole(self._folder / f"{name}.png", picture.png)
            subtitle = f"Written {page.now()}."
            if validation is None:
                subtitle = f"Written {page.now()}, without a validation."
            elif validation.epoch:
                subtitle += f" Detections are those of the newest validation, after epoch {validation.epoch}."
            epochs = len(history.get("epoch", ()))
            page.write_page(
                path,
                TEMPLATE,
                self._subject.title,
                subtitle,
                subject=self._subject,
                epochs=epochs,
                many_classes=MANY_CLASSES,
                **vars(sections),
            )
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

    def _sections(self, history: dict[str, np.ndarray]) -> Sections:
        """Builds the sections; the summary last, because its sentences are about the others."""
        subject = self._subject
        data = self._data_section()
        validation = None
        if self._validation is not None:
            validation = validation_sections(self._validation, subject.validated)
        facts = collect_facts(
            subject, history, data, validation, ap_of_draws=self._ap_of_draws, last=self._folder / "last.pt"
        )
        return Sections(
            summary={
                "How it went": list(how_it_went(facts)),
                "Where the model is wrong": list(where_it_is_wrong(facts)),
                "What to do next": list(what_to_do(facts)),
            },
            changed=settings_table(subject.config, subject.hyp),
            data=data,
            history={chart.title: chart_picture(chart) for chart in history_charts(history)},
            validation=validation,
        )

    def _data_section(self) -> CensusSection:
        """Returns the census of the data, which is taken once."""
        subject = self._subject
        if self._data is None:
            censuses = [take_census(split.index, split.name, subject.imgsz) for split in subject.splits]
            indexes = [split.index for split in subject.splits]
            self._data = census_content(censuses, indexes, imgsz=subject.imgsz, stride=subject.stride)
        return self._data


def _figure_files(sections: Sections) -> dict[str, Picture]:
    """Returns the pictures of the page that are also written as PNG files, by name."""
    sheets = {"results": sections.history, "labels": sections.data.figures.get("train", {})}
    files = {
        name: Picture(tile_images([picture.pixels for picture in shown.values()], SHEET_COLUMNS))
        for name, shown in sheets.items()
        if shown
    }
    validation = sections.validation
    if validation is not None:
        for section in (validation.curves, validation.confusion, validation.errors):
            files |= section.figures
    return files
