"""Writes the page of a check: drawn issues and statistics of the data set. It needs no other file and no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.issues.issue import LABEL_ERRORS, Issue, by_kind
from engine.report.census import census_content, take_census
from engine.report.gallery import LABEL_LEGEND, MAX_LABEL_ERRORS, DrawnDetections
from engine.report.photos import COLORS, Album
from tools.check.checks.box_sizes import SIZE_STEP
from tools.check.issue_kinds import DUPLICATES, advice_about
from tools.check.out_folder import new_folder
from tools.check.page.galleries import IssueGalleries, is_about_image
from tools.check.result import CheckResult
from utils.drawing import page
from utils.errors import UserError, first_line
from utils.logger import get_logger
from utils.process.entrypoint import error_line

FILE_NAME = "report.html"
TEMPLATE = "tools/check/page/page.html"
MAX_LISTED_ISSUES = 400  # maximum number of issues in the table
# Bytes of JPEG files by gallery, in drawing order; each gallery may also use the bytes that earlier ones have left.
MAX_GALLERY_BYTES = {"errors": 1_400_000, "pairs": 600_000, "boxes": 1_400_000}


def write_page(result: CheckResult, out: Path | None) -> Path | None:
    """Writes `FILE_NAME` and returns its path; None, after a warning, if that fails.

    ``out``: folder of the page; None for a new folder in runs/check.
    """
    try:
        content = _content(result)
        folder = out or new_folder(result.spec)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        title = f"Check of {Path(result.spec.source).stem}"
        subtitle = f"Written {page.now()}. The data set was not changed."
        page.write_page(path, TEMPLATE, title, subtitle, **content)
    except (OSError, UserError) as error:  # the issues are still printed
        get_logger().warning("the report cannot be written (%s)", error_line(error) or first_line(error))
        return None
    return path


def _content(result: CheckResult) -> dict[str, Any]:
    """Returns the values that the template shows."""
    issues = result.issues
    kinds = by_kind(issues)
    censuses = [take_census(split.index, split.name, result.imgsz) for split in result.splits]
    indexes = [split.index for split in result.splits]
    return {
        "colors": COLORS,
        "issues": issues,
        "kinds": _kinds_table(kinds),
        "facts": _facts(result),
        "trust_notes": result.label_errors.trust_notes,
        "model": Path(result.weights).name,
        "num_errors": sum(issue.kind in LABEL_ERRORS for issue in issues),
        "max_errors": MAX_LABEL_ERRORS,
        "thresholds": _thresholds(result.label_errors.detections),
        "label_legend": LABEL_LEGEND,
        "group_counts": [(kind, len(group)) for kind, group in kinds.items() if kind in DUPLICATES],
        **_galleries(result),
        "has_image_issues": any(map(is_about_image, issues)),
        "data": census_content(censuses, indexes, imgsz=result.imgsz, stride=SIZE_STEP),
        "issues_table": _issues_table(kinds),
    }


def _galleries(result: CheckResult) -> dict[str, list[page.Card]]:
    """Draws the galleries, one after another."""
    galleries = IssueGalleries(result.splits, result.label_errors.detections)
    album = Album()
    album.add_bytes(MAX_GALLERY_BYTES["errors"])
    label_errors = galleries.label_errors(result.issues, album)
    album.add_bytes(MAX_GALLERY_BYTES["pairs"])
    duplicates = galleries.duplicates(result.issues, album)
    album.add_bytes(MAX_GALLERY_BYTES["boxes"])
    boxes = galleries.boxes(result.issues, album)
    return {"label_errors": label_errors, "duplicates": duplicates, "boxes": boxes}


def _thresholds(detections: Mapping[str, DrawnDetections]) -> str:
    """Returns the confidence above which detections are drawn, or those of the splits if they differ."""
    thresholds = {split: f"{drawn.threshold:.3f}" for split, drawn in detections.items()}
    if len(set(thresholds.values())) == 1:
        return next(iter(thresholds.values()))
    return ", ".join(f"{threshold} ({split})" for split, threshold in thresholds.items())


def _facts(result: CheckResult) -> list[tuple[str, str]]:
    """Returns a summary of what was checked, and how, as pairs of name and value."""
    return [
        ("data set", result.spec.source),
        ("its folder", str(result.spec.root)),
        ("--imgsz", f"{result.imgsz} px"),
        *((f"images of {split.name}", f"{len(split.index):,}") for split in result.splits),
        ("model that examined the labels", result.weights or "none (--weights)"),
    ]


def _kinds_table(kinds: Mapping[str, Sequence[Issue]]) -> page.HtmlTable:
    """Returns a table with one row per kind of issue."""
    rows: list[tuple[str | int, ...]] = []
    for kind, group in kinds.items():
        by_split = Counter(_splits_of(issue) or "whole data set" for issue in group)
        counts = "; ".join(f"{split}: {count:,}" for split, count in by_split.most_common())
        meaning, remedy = advice_about(kind)
        rows.append((kind, len(group), remedy, meaning, counts))
    return page.HtmlTable(("issue", "number", "what to do", "what it means", "splits"), rows, "Issues by kind")


def _issues_table(kinds: Mapping[str, Sequence[Issue]]) -> page.HtmlTable:
    """Returns a table with the first issues of each kind."""
    max_per_kind = MAX_LISTED_ISSUES // max(len(kinds), 1)
    rows: list[tuple[str | float | None, ...]] = []
    for kind, group in kinds.items():
        for issue in group[:max_per_kind]:
            location = page.code(issue.where or next(iter(issue.images), ""))
            rows.append((kind, _splits_of(issue), location, issue.text, issue.score))
    is_complete = len(rows) == sum(map(len, kinds.values()))
    caption = "Issues, with their locations" if is_complete else f"Of each kind at most {max_per_kind}"
    return page.HtmlTable(("issue", "split", "where", "what", "probability"), rows, caption)


def _splits_of(issue: Issue) -> str:
    """Names the splits of an issue; "" for one about the whole data set."""
    return issue.split or ", ".join(dict.fromkeys(issue.splits))
