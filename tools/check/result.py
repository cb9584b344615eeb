"""The result of a check, for the terminal, the JSON and the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex
from engine.evaluation.result import EvalResult
from engine.issues.issue import CheckedSplit, Issue, by_kind
from engine.report.gallery import DrawnDetections
from tools.check.issue_kinds import advice_about

MAX_LISTED = 3  # issues of each kind in the summary


@dataclass(frozen=True)
class LabelErrors:
    """The label errors that a model finds in all splits, and what it detects; empty without a model."""

    issues: list[Issue] = field(default_factory=list)  # the most probable first
    detections: dict[str, DrawnDetections] = field(default_factory=dict)  # by split
    results: dict[str, EvalResult] = field(default_factory=dict)  # by split: scores as computed by val.py
    trust_notes: list[str] = field(default_factory=list)  # lines about how far to trust the model


@dataclass(frozen=True)
class CheckResult:
    """All issues of a data set."""

    spec: DatasetSpec
    splits: list[CheckedSplit]
    issues: list[Issue]  # including label errors
    label_errors: LabelErrors
    imgsz: int  # longer image side in training, pixels
    weights: str  # "" without a model

    def summary(self) -> list[str]:
        """Returns the lines for the terminal: the number of issues of each kind, its meaning, and the first few."""
        lines = list(self.label_errors.trust_notes)
        for kind, group in by_kind(self.issues).items():
            meaning = advice_about(kind).meaning
            lines.append(f"{kind}: {len(group):,}{f' ({meaning})' if meaning else ''}")
            lines += [f"  {issue}" for issue in group[:MAX_LISTED]]
            if len(group) > MAX_LISTED:
                lines.append(f"  ... and {len(group) - MAX_LISTED:,} more")
        if not self.issues:
            lines.append("nothing to report")
        return lines

    def content(self, report: Path | None) -> dict[str, Any]:
        """Returns the content of the JSON. ``report``: path of the page; None if there is none."""
        return {
            "data": self.spec.source,
            "root": str(self.spec.root),
            "imgsz": self.imgsz,
            "report": None if report is None else str(report),
            "splits": {split.name: _numbers(split.index) for split in self.splits},
            "model": self.label_errors.trust_notes,
            "issues": [issue.content() for issue in self.issues],
        }


def _numbers(index: DatasetIndex) -> dict[str, int]:
    """Returns the numbers of images, backgrounds, boxes and crowd regions, and of the findings by kind."""
    return index.counts() | {total.kind: total.number for total in index.report.kinds}
