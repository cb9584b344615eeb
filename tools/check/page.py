"""Writes the page of a check: drawn findings, and a census of the data set. It needs no other file and no network."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from markupsafe import Markup

from data.image_io.verify import check_image
from data.labels.yolo import label_folders
from data.source.dataset_spec import DatasetSpec
from engine.evaluation.issues import LABEL_ERRORS, CheckedSplit, Issue, by_kind
from engine.report.census import census_content, take_census
from engine.report.gallery import LABEL_LEGEND, MAX_LABEL_ERRORS, DrawnDetections, Galleries, corners_of
from engine.report.photos import COLORS, CROP_SIDE, Album, Outline, Source, Version
from tools.check.issue_kinds import ADVICE, DUPLICATES
from tools.check.label_checks import SIZE_STEP
from utils.drawing import page
from utils.drawing.page import Card
from utils.errors import UserError, first_line
from utils.files.folders import cache_folder, increment_path
from utils.files.paths import is_inside, path_of
from utils.logger import get_logger
from utils.strings import listed

FILE_NAME = "report.html"
TEMPLATE = "tools/check/page.html"
PROJECT = "runs/check"
MAX_LISTED_FINDINGS = 400  # findings in the table
MAX_PAIR_CARDS = 30
MAX_CARDS_PER_KIND = 24
MAX_TEXTS_PER_CARD = 6  # findings on the card of an image
# Bytes of JPEG files by gallery, in drawing order; each may also use what those before it have left.
MAX_GALLERY_BYTES = {"errors": 1_400_000, "pairs": 600_000, "boxes": 1_400_000}
PAIR_SIDE = 240  # pixels
T = TypeVar("T")


def make_out(spec: DatasetSpec, out: Path) -> None:
    """Makes the folder ``--out``. Raises UserError if it cannot be made, or is in the data set."""
    folder = _inside(out, spec)
    if folder:
        raise UserError(f"--out {out}: is in the data set ({folder}), which is never written to; name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None


def new_folder(spec: DatasetSpec) -> Path:
    """Makes runs/check/exp, exp2, ... in the working folder; in the cache folder if that one is in the data set."""
    return increment_path(cache_folder() / "check" if _inside(Path(PROJECT), spec) else PROJECT, "exp")


def _inside(path: Path, spec: DatasetSpec) -> str:
    """Returns the folder of the data set that contains ``path``; "" if there is none."""
    return next((folder for folder in _data_folders(spec) if is_inside(path, folder)), "")


def _data_folders(spec: DatasetSpec) -> list[str]:
    """Returns the smallest folder with all that the YAML names below its root, and each folder that it names
    elsewhere."""
    named = []
    sources = [part.split(s) for s, source in spec.splits.items() for part in source.parts or (spec,)]
    for source in sources:
        named += [str(p if p.is_dir() else p.parent) for p in (*source.images, *filter(None, [source.annotations]))]
        if source.annotations is None:
            folders = [str(path) for path in source.images if path.is_dir()]
            named += [place for folder in folders for place in label_folders(folder) if os.path.isdir(place)]
    named = list(dict.fromkeys(named))
    below = [folder for folder in named if os.path.commonpath([folder, spec.root]) == str(spec.root)]
    elsewhere = [folder for folder in named if folder not in below]
    return [os.path.commonpath(below), *elsewhere] if below else elsewhere


def write_page(
    out: Path | None,
    spec: DatasetSpec,
    splits: Sequence[CheckedSplit],
    issues: Sequence[Issue],
    detections: Mapping[str, DrawnDetections],
    trust: Sequence[str] = (),
    *,
    imgsz: int,
    weights: str,
) -> Path | None:
    """Writes `FILE_NAME` and returns its path; None, after a warning, if that fails.

    Args:
        out: its folder; None: a new folder in runs/check.
        detections: by split; empty without ``weights``.
        trust: how far the model can be trusted about labels.
        imgsz: longer image side in training, pixels.
    """
    try:
        content = _content(spec, splits, issues, detections, imgsz, weights) | {"trust": trust}
        path = (out or new_folder(spec)) / FILE_NAME
        title = f"Check of {Path(spec.source).stem}"
        subtitle = f"Written {page.now()}. The data set was not changed."
        page.write_page(path, TEMPLATE, title, subtitle, **content)
    except Exception as error:  # the findings are printed in any case
        get_logger().warning("the report cannot be written (%s)", first_line(error))
        return None
    return path


def _content(
    spec: DatasetSpec,
    splits: Sequence[CheckedSplit],
    issues: Sequence[Issue],
    detections: Mapping[str, DrawnDetections],
    imgsz: int,
    weights: str,
) -> dict[str, Any]:
    """Returns the values of the template."""
    galleries = IssueGalleries(splits, detections)
    kinds = by_kind(issues)
    album = Album()
    album.add_bytes(MAX_GALLERY_BYTES["errors"])
    label_errors = galleries.label_errors(issues, album)
    album.add_bytes(MAX_GALLERY_BYTES["pairs"])
    duplicates = galleries.duplicates(issues, album)
    album.add_bytes(MAX_GALLERY_BYTES["boxes"])
    boxes = galleries.boxes(issues, album)
    facts = [("data set", spec.source), ("its folder", str(spec.root)), ("--imgsz", f"{imgsz} px")]
    facts += [(f"images of {split.name}", f"{len(split.index):,}") for split in splits]
    censuses = [take_census(split.index, split.name, imgsz) for split in splits]
    rows: list[tuple[str | int, ...]] = []
    for kind, group in kinds.items():
        by_split = Counter(", ".join(dict.fromkeys(i.splits)) or i.split or "whole data set" for i in group)
        counts = "; ".join(f"{split}: {count:,}" for split, count in by_split.most_common())
        meaning, advice = ADVICE.get(kind, ("", ""))
        rows.append((kind, len(group), advice, meaning, counts))
    max_per_kind = MAX_LISTED_FINDINGS // max(len(kinds), 1)
    shown = [issue for group in kinds.values() for issue in group[:max_per_kind]]
    return {
        "colors": COLORS,
        "issues": issues,
        "kinds": page.Table(("finding", "number", "what to do", "what it means", "splits"), rows, "Findings by kind"),
        "facts": [*facts, ("model that examined the labels", weights or "none (--weights)")],
        "model": Path(weights).name,
        "label_errors": label_errors,
        "errors": sum(issue.kind in LABEL_ERRORS for issue in issues),
        "most_errors": MAX_LABEL_ERRORS,
        "threshold": max((drawn.threshold for drawn in detections.values()), default=0.0),
        "label_legend": LABEL_LEGEND,
        "groups": [(kind, len(group)) for kind, group in kinds.items() if kind in DUPLICATES],
        "duplicates": duplicates,
        "boxes": boxes,
        "data": census_content(censuses, [split.index for split in splits], imgsz=imgsz, stride=SIZE_STEP),
        "findings": page.Table(
            ("finding", "split", "where", "what", "probability"),
            [
                (
                    i.kind,
                    i.split or ", ".join(dict.fromkeys(i.splits)),
                    page.code(i.where or next(iter(i.images), "")),
                    i.text,
                    i.score,
                )
                for i in shown
            ],
            "Findings, with their places" if len(shown) == len(issues) else f"Of each kind at most {max_per_kind}",
        ),
    }


class IssueGalleries(Galleries):
    """Draws the findings that need no model."""

    def duplicates(self, issues: Sequence[Issue], album: Album) -> list[Card]:
        """Draws pairs of near-duplicates."""
        groups = by_kind(issue for issue in issues if issue.kind in DUPLICATES)
        drawn = alternating(list(groups.values()))[:MAX_PAIR_CARDS]
        return [self._pair(issue, album) for issue in drawn]

    def boxes(self, issues: Sequence[Issue], album: Album) -> list[Card]:
        """Draws images and boxes with other findings, one card per image."""
        groups = by_kind(i for i in issues if i.images and i.kind not in (*DUPLICATES, *LABEL_ERRORS))
        by_image: dict[tuple[str, str], list[Issue]] = {}
        for group in groups.values():
            by_split = [[issue for issue in group if issue.split == split] for split in self._splits]
            for issue in alternating(by_split)[:MAX_CARDS_PER_KIND]:
                by_image.setdefault((issue.split, issue.images[0]), []).append(issue)
        cards = [self._image_card(group, album) for group in by_image.values()]
        return [card for card in cards if card is not None]

    def _pair(self, issue: Issue, album: Album) -> Card:
        images = list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))
        first = images[0]
        second = next((image for image in images[1:] if image[0] != first[0]), images[1])
        pictures = []
        for split, name in (first, second):
            image = self._image(split, name)
            assert image is not None, "duplicates are found among the images of the index"
            source, rows = image
            version = Version(f"{split}: {name}", f"{name} with its labels", self._labels(split, rows))
            pictures += album.pictures(source, source.whole(), PAIR_SIDE, version)
        others = f"{len(images) - 2:,} more like these." if len(images) > 2 else ""
        return Card(pictures, "", others, issue.kind)

    def _image_card(self, issues: Sequence[Issue], album: Album) -> Card | None:
        """Draws an image with its findings; None if it cannot be read and no finding has a box."""
        split = issues[0].split
        name = issues[0].images[0]
        boxes = [box for issue in issues for box in issue.boxes]
        image = self._image(split, name) or self._left_out(split, name)
        if image is None and not boxes:
            return None
        if image is None:
            pictures = [("", Markup('<p class="muted">The scan left this image out.</p>'))]
        else:
            source, rows = image
            corners = corners_of(boxes)
            window = source.around(corners) if len(corners) else source.whole()
            drawn = [
                Outline(box.xyxy_px, style, box.class_name)
                for issue in issues
                for box, style in zip(issue.boxes, ("label", "spurious")[-len(issue.boxes) :])
            ]
            label = f"{listed(list(dict.fromkeys(issue.kind for issue in issues)))} in {name}"
            version = Version("", label, drawn + self._labels(split, rows, boxes))
            pictures = album.pictures(source, window, CROP_SIDE, version)
        messages = list(dict.fromkeys(f"{issue.kind}: {issue.text}" for issue in issues))
        if len(messages) > MAX_TEXTS_PER_CARD:
            messages[MAX_TEXTS_PER_CARD:] = [f"... and {len(messages) - MAX_TEXTS_PER_CARD} more"]
        places = list(dict.fromkeys(issue.where or name for issue in issues))[:MAX_TEXTS_PER_CARD]
        return Card(pictures, Markup("<br>").join(messages), f"{split}: {', '.join(places)}", issues[0].kind)

    def _left_out(self, split: str, name: str) -> tuple[Source, np.ndarray] | None:
        """Opens an image that training leaves out, without rows of the index; None if it cannot be read."""
        index = self._splits[split].index
        path = path_of(name, index.root)
        try:
            return Source(path, *check_image(path, pixels=index.pixels), index.pixels), np.zeros(0, np.int64)
        except (UserError, OSError):
            return None


def alternating(groups: Sequence[Sequence[T]]) -> list[T]:
    """Returns the first of each group, then the second of each, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]
