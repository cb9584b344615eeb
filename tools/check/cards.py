"""The galleries of a check's page besides that of label errors: near-duplicates as pairs, and boxes that are wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypeVar

import numpy as np
from markupsafe import Markup

from data.check.gallery import Galleries, corners_of
from data.check.issues import DUPLICATES, LABEL_ERRORS, Issue, by_kind
from data.check.photos import CROP_SIDE, Album, Outline, Source, Version
from data.image_io.verify import check_image
from utils.drawing.page import Card
from utils.errors import UserError
from utils.strings import listed

MOST_PAIRS, MOST_OF_KIND = 30, 24
MOST_TEXTS = 6  # on the card of an image
MOST_BYTES = {"pairs": 500_000, "boxes": 1_000_000}  # of JPEG files, by gallery
PAIR_SIDE = 240  # pixels
T = TypeVar("T")


class IssueGalleries(Galleries):
    def duplicates(self, issues: Sequence[Issue]) -> list[Card]:
        """Pairs of near-duplicates."""
        groups = by_kind(issue for issue in issues if issue.kind in DUPLICATES)
        drawn = alternating(list(groups.values()))[:MOST_PAIRS]
        album = Album(MOST_BYTES["pairs"])
        return [self._pair(issue, album) for issue in drawn]

    def boxes(self, issues: Sequence[Issue]) -> list[Card]:
        """Images and boxes that are wrong, whatever a model says of them."""
        groups = by_kind(i for i in issues if i.images and i.kind not in (*DUPLICATES, *LABEL_ERRORS))
        drawn = list(chain(*(alternating(_by_split(group))[:MOST_OF_KIND] for group in groups.values())))
        of_image: dict[tuple[str, str], list[Issue]] = {}
        for issue in drawn:
            of_image.setdefault((issue.split, issue.images[0]), []).append(issue)
        album = Album(MOST_BYTES["boxes"])
        return [card for group in of_image.values() if (card := self._image_card(group, album))]

    def _pair(self, issue: Issue, album: Album) -> Card:
        images = list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))
        first = images[0]
        second = next((image for image in images[1:] if image[0] != first[0]), images[1])
        pictures = []
        for split, name in (first, second):
            source, rows = self._image(split, name)
            version = Version(f"{split}: {name}", f"{name} with its labels", self._labels(split, rows))
            pictures += album.pictures(source, source.whole(), PAIR_SIDE, version)
        others = f"{len(images) - 2:,} more like these." if len(images) > 2 else ""
        return Card(pictures, "", others, issue.kind)

    def _image_card(self, issues: Sequence[Issue], album: Album) -> Card | None:
        """All that has been found in one image."""
        split, name = issues[0].split, issues[0].images[0]
        boxes = [box for issue in issues for box in issue.boxes]
        found = self._image(split, name) or self._left_out(split, name)
        if found is None and not boxes:
            return None  # the image cannot be read, or there is none
        if found is None:
            pictures = [("", Markup('<p class="muted">The scan left this image out.</p>'))]
        else:
            source, rows = found
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
        texts = list(dict.fromkeys(f"{issue.kind}: {issue.text}" for issue in issues))
        texts[MOST_TEXTS:] = [f"... and {len(texts) - MOST_TEXTS} more"] * (len(texts) > MOST_TEXTS)
        places = list(dict.fromkeys(issue.where or name for issue in issues))[:MOST_TEXTS]
        text = Markup("<br>").join(texts)
        return Card(pictures, text, f"{split}: {', '.join(places)}", issues[0].kind)

    def _left_out(self, split: str, name: str) -> tuple[Source, np.ndarray] | None:
        """An image that has no usable label, and no rows; None if it cannot be read."""
        index = self._splits[split].index
        path = os.path.normpath(os.path.join(index.root, name))
        try:
            return Source(path, *check_image(path, pixels=index.pixels), index.pixels), np.zeros(0, np.int64)
        except (UserError, OSError):
            return None


def alternating(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of each group, then the second of each, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]


def _by_split(issues: Sequence[Issue]) -> list[list[Issue]]:
    groups: dict[str, list[Issue]] = {}
    for issue in issues:
        groups.setdefault(issue.split, []).append(issue)
    return list(groups.values())
