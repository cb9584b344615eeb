"""The galleries of a check's page: near-duplicates, and images with other issues."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from markupsafe import Markup

from data.images.verify import check_image
from engine.issues.issue import LABEL_ERRORS, Issue, by_kind
from engine.report.gallery import Galleries, corners_of
from engine.report.photos import CROP_SIDE, Album, Outline, Overlay, PhotoFile
from tools.check.issue_kinds import DUPLICATES
from utils.drawing.page import Card, CardPicture
from utils.errors import UserError
from utils.files.paths import path_of
from utils.strings import listed

MAX_PAIR_CARDS = 30
MAX_CARDS_PER_KIND = 24
MAX_TEXTS_PER_CARD = 6  # maximum number of issues on the card of an image
PAIR_SIDE = 240  # pixels
BOX_STYLES = ("label", "spurious")  # styles of the first and second of two boxes
T = TypeVar("T")


class IssueGalleries(Galleries):
    """Draws the issues that are found without a model."""

    def duplicates(self, issues: Sequence[Issue], album: Album) -> list[Card]:
        """Draws pairs of near-duplicates."""
        groups = by_kind(issue for issue in issues if issue.kind in DUPLICATES)
        drawn = alternating(list(groups.values()))[:MAX_PAIR_CARDS]
        return [self._pair(issue, album) for issue in drawn]

    def boxes(self, issues: Sequence[Issue], album: Album) -> list[Card]:
        """Draws images and boxes with other issues, one card per image."""
        groups = by_kind(filter(is_about_image, issues))
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
            overlay = Overlay(f"{split}: {name}", f"{name} with its labels", self._labels(split, rows))
            pictures += album.pictures(source, source.whole(), PAIR_SIDE, overlay)
        others = f"{len(images) - 2:,} more like these." if len(images) > 2 else ""
        return Card(pictures, "", others, issue.kind)

    def _image_card(self, issues: Sequence[Issue], album: Album) -> Card | None:
        """Draws an image with its issues; None if it cannot be read and no issue has a box."""
        split = issues[0].split
        name = issues[0].images[0]
        image = self._image(split, name) or self._left_out(split, name)
        if image is not None:
            pictures = self._pictures(issues, *image, album)
        elif any(issue.boxes for issue in issues):
            pictures = [CardPicture("", Markup('<p class="muted">The scan left this image out.</p>'))]
        else:
            return None
        messages = list(dict.fromkeys(f"{issue.kind}: {issue.text}" for issue in issues))
        if len(messages) > MAX_TEXTS_PER_CARD:
            messages[MAX_TEXTS_PER_CARD:] = [f"... and {len(messages) - MAX_TEXTS_PER_CARD} more"]
        locations = list(dict.fromkeys(issue.where or name for issue in issues))[:MAX_TEXTS_PER_CARD]
        return Card(pictures, Markup("<br>").join(messages), f"{split}: {', '.join(locations)}", issues[0].kind)

    def _pictures(
        self, issues: Sequence[Issue], source: PhotoFile, rows: np.ndarray, album: Album
    ) -> list[CardPicture]:
        """Draws the boxes of ``issues``, and the other labels of their image, ``rows`` of the index."""
        boxes = [box for issue in issues for box in issue.boxes]
        drawn = []
        for issue in issues:
            styles = BOX_STYLES[-len(issue.boxes) :]  # a single box gets the last style
            drawn += [Outline(box.xyxy_px, style, box.class_name) for box, style in zip(issue.boxes, styles)]
        kinds = listed(list(dict.fromkeys(issue.kind for issue in issues)))
        overlay = Overlay("", f"{kinds} in {issues[0].images[0]}", drawn + self._labels(issues[0].split, rows, boxes))
        window = source.around(corners_of(boxes)) if boxes else source.whole()
        return album.pictures(source, window, CROP_SIDE, overlay)

    def _left_out(self, split: str, name: str) -> tuple[PhotoFile, np.ndarray] | None:
        """Opens an image that training leaves out, without index rows; returns None if it cannot be read."""
        index = self._splits[split].index
        path = path_of(name, index.root)
        try:
            height, width = check_image(path, pixels=index.pixels).size_hw
            return PhotoFile(path, height, width, index.pixels), np.zeros(0, np.int64)
        except (UserError, OSError):
            return None


def is_about_image(issue: Issue) -> bool:
    """Returns whether an issue is about an image or its boxes, and neither a duplicate nor a label error."""
    return bool(issue.images) and issue.kind not in (*DUPLICATES, *LABEL_ERRORS)


def alternating(groups: Sequence[Sequence[T]]) -> list[T]:
    """Returns the first of each group, then the second of each, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]
