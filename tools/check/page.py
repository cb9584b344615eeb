"""Writes the page of a check: drawn issues and statistics of the data set. It needs no other file and no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from data.images.verify import check_image
from data.open import problem_of_output
from engine.report.images import (
    COLORS,
    CROP_SIDE,
    LABEL_LEGEND,
    MAX_LABEL_ERRORS,
    Outline,
    PhotoFile,
    label_error_cards,
    label_outlines,
    photo,
)
from engine.report.issues import CheckedSplit, Issue, by_kind
from engine.report.label_errors import LABEL_ERRORS
from engine.report.page import data_content
from tools.check.dataset_check import CheckResult
from tools.check.issue_kinds import DUPLICATES, advice_about
from utils.drawing import page
from utils.drawing.page import Card, CardPicture
from utils.errors import UserError, first_line
from utils.files.new_folder import increment_path
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.process.main import error_line
from utils.program_folders import cache_folder
from utils.strings import listed

FILE_NAME = "report.html"
TEMPLATE = "tools/check/page.html"
PROJECT = "runs/check"
MAX_LISTED_ISSUES = 400  # maximum number of issues in the table
MAX_PAIR_CARDS = 30
MAX_CARDS_PER_KIND = 12
MAX_TEXTS_PER_CARD = 6  # maximum number of issues on the card of an image
PAIR_SIDE = 240  # pixels
BOX_STYLES = ("misplaced", "spurious")  # styles of the first and second of two boxes
T = TypeVar("T")


def write_page(result: CheckResult, out: Path | None) -> Path | None:
    """Writes `FILE_NAME` and returns its path; None, after a warning, if that fails.

    ``out``: folder of the page; None for a new one in runs/check or, if that is among the images, in the cache folder.
    """
    try:
        content = _content(result)
        is_among_images = problem_of_output(Path(PROJECT), result.spec) != ""
        folder = out or increment_path(cache_folder() / "check" if is_among_images else PROJECT, "exp")
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
    label_errors = [issue for issue in issues if issue.kind in LABEL_ERRORS]
    galleries = IssueGalleries(result.splits)
    return {
        "colors": COLORS,
        "issues": issues,
        "kinds": _kinds_table(kinds),
        "facts": _facts(result),
        "trust_notes": result.trust_notes,
        "model": Path(result.weights).name,
        "num_errors": len(label_errors),
        "max_errors": MAX_LABEL_ERRORS,
        "label_legend": LABEL_LEGEND,
        "label_errors": label_error_cards(result.splits, label_errors),
        "group_counts": [(kind, len(group)) for kind, group in kinds.items() if kind in DUPLICATES],
        "duplicates": galleries.duplicates(issues),
        "boxes": galleries.boxes(issues),
        "has_image_issues": any(map(is_about_image, issues)),
        "data": data_content({split.name: split.index for split in result.splits}, result.imgsz),
        "issues_table": _issues_table(kinds),
    }


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
    return page.HtmlTable(("issue", "split", "where", "what", "score"), rows, caption)


def _splits_of(issue: Issue) -> str:
    """Names the splits of an issue; "" for one about the whole data set."""
    return issue.split or ", ".join(dict.fromkeys(issue.splits))


class IssueGalleries:
    """Draws the issues that are found without a model."""

    def __init__(self, splits: Sequence[CheckedSplit]) -> None:
        self._splits = {split.name: split for split in splits}
        # Numbers of images by split and name, without images that the scan left out.
        self._number = {(split.name, path): i for split in splits for i, path in enumerate(split.index.paths)}

    def duplicates(self, issues: Sequence[Issue]) -> list[Card]:
        """Draws pairs of near-duplicates."""
        groups = by_kind(issue for issue in issues if issue.kind in DUPLICATES)
        return [self._pair(issue) for issue in alternating(list(groups.values()))[:MAX_PAIR_CARDS]]

    def boxes(self, issues: Sequence[Issue]) -> list[Card]:
        """Draws images and boxes with other issues, one card per image."""
        groups = by_kind(filter(is_about_image, issues))
        by_image: dict[tuple[str, str], list[Issue]] = {}
        for group in groups.values():
            by_split = [[issue for issue in group if issue.split == split] for split in self._splits]
            for issue in alternating(by_split)[:MAX_CARDS_PER_KIND]:
                by_image.setdefault((issue.split, issue.images[0]), []).append(issue)
        cards = [self._image_card(group) for group in by_image.values()]
        return [card for card in cards if card is not None]

    def _pair(self, issue: Issue) -> Card:
        images = list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))
        first = images[0]
        second = next((image for image in images[1:] if image[0] != first[0]), images[1])
        pictures = []
        for split, name in (first, second):
            number = self._number[split, name]
            source = PhotoFile.of(self._splits[split], number)
            outlines = label_outlines(self._splits[split], number)
            title = f"{split}: {name}"
            pictures.append(
                photo(source, source.whole(), PAIR_SIDE, outlines, label=f"{name} with its labels", title=title)
            )
        others = f"{len(images) - 2:,} more like these." if len(images) > 2 else ""
        return Card(pictures, "", others, issue.kind)

    def _image_card(self, issues: Sequence[Issue]) -> Card | None:
        """Draws an image with its issues; None if it cannot be read and no issue has a box."""
        split = self._splits[issues[0].split]
        name = issues[0].images[0]
        boxes = [box for issue in issues for box in issue.boxes]
        number = self._number.get((split.name, name))
        source = _left_out(split, name) if number is None else PhotoFile.of(split, number)
        if source is None and not boxes:
            return None
        outlines = []
        for issue in issues:
            styles = BOX_STYLES[-len(issue.boxes) :]  # a single box gets the last style
            outlines += [Outline(box.xyxy_px, style, box.class_name) for box, style in zip(issue.boxes, styles)]
        if number is not None:
            outlines += label_outlines(split, number, boxes)
        if source is None:
            picture = CardPicture("", Markup('<p class="muted">The scan left this image out.</p>'))
        else:
            window = source.around(boxes) if boxes else source.whole()
            kinds = listed(list(dict.fromkeys(issue.kind for issue in issues)))
            picture = photo(source, window, CROP_SIDE, outlines, label=f"{kinds} in {name}")
        messages = list(dict.fromkeys(f"{issue.kind}: {issue.text}" for issue in issues))
        if len(messages) > MAX_TEXTS_PER_CARD:
            messages[MAX_TEXTS_PER_CARD:] = [f"... and {len(messages) - MAX_TEXTS_PER_CARD} more"]
        locations = list(dict.fromkeys(issue.where or name for issue in issues))[:MAX_TEXTS_PER_CARD]
        return Card([picture], Markup("<br>").join(messages), f"{split.name}: {', '.join(locations)}", issues[0].kind)


def _left_out(split: CheckedSplit, name: str) -> PhotoFile | None:
    """Opens an image that training leaves out; None if it cannot be read."""
    index = split.index
    path = path_of(name, index.root)
    try:
        height, width = check_image(path, pixels=index.pixels).size_hw
    except (UserError, OSError):
        return None
    return PhotoFile(path, height, width, index.pixels)


def is_about_image(issue: Issue) -> bool:
    """Returns whether an issue is about an image or its boxes, and neither a duplicate nor a label error."""
    return bool(issue.images) and issue.kind not in (*DUPLICATES, *LABEL_ERRORS)


def alternating(groups: Sequence[Sequence[T]]) -> list[T]:
    """Returns the first of each group, then the second of each, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]
