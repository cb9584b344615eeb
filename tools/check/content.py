"""What a check shows of a data set: lines for the terminal, the JSON, and a page, which needs no other file and no
network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.open import problem_of_output
from engine.report.content import FILE_NAME, MAX_LABEL_ERRORS, data_section
from engine.report.images import ISSUE_COLORS, issue_card
from engine.report.label_errors import LABEL_ERRORS, Issue, IssueKind
from tools.check.dataset_check import CheckResult
from utils.drawing.page import Block, Content, Facts, Gallery, Section, Table, now, write_page
from utils.errors import first_line
from utils.files.new_folder import increment_path
from utils.logger import get_logger
from utils.program_folders import cache_folder
from utils.strings import counted

PROJECT = "runs/check"
MAX_IN_SUMMARY = 3  # issues of each kind
MAX_LISTED_ISSUES = 400  # in the table
MAX_CARDS = 12  # of each kind but label errors


def by_kind(issues: Sequence[Issue]) -> dict[IssueKind, list[Issue]]:
    """Groups issues by kind; kinds and issues keep their order."""
    groups: dict[IssueKind, list[Issue]] = {}
    for issue in issues:
        groups.setdefault(issue.kind, []).append(issue)
    return groups


def summary(result: CheckResult) -> list[str]:
    """Returns the lines for the terminal: the number of issues of each kind, its meaning, and the first few."""
    lines = list(result.trust_notes)
    for kind, group in by_kind(result.issues).items():
        lines.append(f"{kind.name}: {len(group):,}{f' ({kind.meaning})' if kind.meaning else ''}")
        lines += [f"  {issue}" for issue in group[:MAX_IN_SUMMARY]]
        if len(group) > MAX_IN_SUMMARY:
            lines.append(f"  ... and {len(group) - MAX_IN_SUMMARY:,} more")
    return lines if result.issues else [*lines, "nothing to report"]


def json_content(result: CheckResult, report: Path | None) -> dict[str, Any]:
    """Returns the content of the JSON. ``report``: path of the page; None if there is none."""
    return {
        "data": result.spec.source,
        "root": str(result.spec.root),
        "imgsz": result.imgsz,
        "report": None if report is None else str(report),
        "splits": {
            split.name: split.index.counts() | {total.kind: total.number for total in split.index.report.kinds}
            for split in result.splits
        },
        "model": result.trust_notes,
        "issues": [issue.content() for issue in result.issues],
    }


def write_report(result: CheckResult, out: str) -> Path | None:
    """Writes the page and returns its path; None, after a warning, if that fails: the issues are still printed.

    ``out``: folder of the page; "" for a new one in runs/check or, if that is among the images, in the cache folder.
    """
    try:
        is_among_images = problem_of_output(Path(PROJECT), result.spec) != ""
        project = cache_folder() / "check" if is_among_images else Path(PROJECT)
        folder = Path(out) if out else increment_path(project, "exp")
        folder.mkdir(parents=True, exist_ok=True)
        write_page(folder / FILE_NAME, check_content(result))
    except Exception as error:
        get_logger().warning("the report cannot be written (%s)", first_line(error))
        return None
    get_logger().info("report: %s", folder / FILE_NAME)
    return folder / FILE_NAME


def check_content(result: CheckResult) -> Content:
    """Returns the page about the issues of a data set."""
    issues = result.issues
    kinds = by_kind(issues)
    facts = [
        ("data set", result.spec.source),
        ("its folder", str(result.spec.root)),
        ("--imgsz", f"{result.imgsz} px"),
        ("model that examined the labels", result.weights or "none (--weights)"),
    ]
    blocks: list[Block] = ["Nothing to report."]
    if issues:
        rows = [(kind.name, len(group), kind.remedy, kind.meaning) for kind, group in kinds.items()]
        blocks = [
            f"{counted(len(issues), 'issue')} of {counted(len(kinds), 'kind')}.",
            Table("Issues by kind", ("issue", "number", "what to do", "what it means"), rows),
        ]
    blocks += [Facts(facts), *result.trust_notes]
    if result.weights:
        blocks.append(
            "A model agrees with wrong labels that it has learned, so images that it was not trained on show more."
        )
    splits = {split.name: split for split in result.splits}
    galleries: list[Block] = []
    for kind, group in sorted(kinds.items(), key=lambda item: item[0] not in LABEL_ERRORS):  # these first
        limit = MAX_LABEL_ERRORS if kind in LABEL_ERRORS else MAX_CARDS
        drawn = [issue for issue in group if issue.images][:limit]
        title = f"{kind.name} ({len(drawn)} of {len(group):,})"
        galleries.append(Gallery(title, ISSUE_COLORS, [issue_card(splits, issue) for issue in drawn]))
    listed = [issue for group in kinds.values() for issue in group[: MAX_LISTED_ISSUES // len(kinds)]]
    sections = [
        Section("Summary", blocks),
        Section("Images", galleries),
        data_section({split.name: split.index for split in result.splits}, result.imgsz),
        Section(
            "All issues",
            [
                Table(
                    f"{len(listed):,} of {counted(len(issues), 'issue')}",
                    ("issue", "split", "where", "what", "score"),
                    [
                        (
                            issue.kind.name,
                            issue.split or ", ".join(dict.fromkeys(issue.splits)),
                            issue.where or next(iter(issue.images), ""),
                            issue.text,
                            issue.score,
                        )
                        for issue in listed
                    ],
                ),
                "--json prints all issues, with the names of all files.",
            ],
        ),
    ]
    subtitle = f"Written {now()}. The data set was not changed."
    return Content(f"Check of {Path(result.spec.source).stem}", subtitle, sections, {})
