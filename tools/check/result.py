"""The result of a check, for the JSON and the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.source.dataset_spec import DatasetSpec
from engine.issues.issue import CheckedSplit, Issue
from engine.report.gallery import DrawnDetections
from tools.check.issue_kinds import summary_lines


@dataclass(frozen=True)
class ModelOpinion:
    """The label errors that a model finds; empty without a model."""

    issues: list[Issue] = field(default_factory=list)  # the most probable first
    detections: dict[str, DrawnDetections] = field(default_factory=dict)  # by split
    trust: list[str] = field(default_factory=list)  # lines about how far to trust the model


@dataclass(frozen=True)
class CheckResult:
    """All issues of a data set."""

    spec: DatasetSpec
    splits: list[CheckedSplit]
    issues: list[Issue]  # including label errors
    by_model: ModelOpinion
    imgsz: int  # longer image side in training, pixels
    weights: str  # "" without a model

    def summary(self) -> list[str]:
        """Returns the lines for the terminal."""
        return [*self.by_model.trust, *(summary_lines(self.issues) or ["nothing to report"])]

    def content(self, report: Path | None) -> dict[str, Any]:
        """Returns the content of the JSON. ``report``: path of the page; None if there is none."""
        return {
            "data": self.spec.source,
            "root": str(self.spec.root),
            "imgsz": self.imgsz,
            "report": None if report is None else str(report),
            "splits": {split.name: dict(split.index.report.totals) for split in self.splits},
            "model": self.by_model.trust,
            "issues": [issue.content() for issue in self.issues],
        }
