"""The galleries of a report: the worst images, suspicious labels, and backgrounds with detections.

They show detections, labels and errors over the photos of data/check/photos.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup

from data.check.photos import CROP_SIDE, PHOTO_SIDE, Album, Photos, Source, View
from data.index.index import DatasetIndex
from engine.evaluation.image_errors import (
    CORRECT,
    ImageErrors,
    overlap,
    suspicious_labels,
    worst_backgrounds,
    worst_images,
)
from engine.evaluation.tide import BACKGROUND, CLASS, MISSED
from utils.drawing import page
from utils.drawing.page import Card, Page
from utils.strings import counted

# By kind of error, in the order of `engine.evaluation.tide.KINDS`: the words, and the class of the style sheet.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
MOST_IMAGES, MOST_SUSPECTS, MOST_BACKGROUNDS = 40, 36, 12
MOST_BYTES = {"worst": 1_500_000, "labels": 600_000, "backgrounds": 400_000}  # of JPEG files, by gallery
SMALL_CARD_PX = 230  # least width
MOST_BOXES = 60  # errors of an image that are drawn one by one


class Galleries:
    """Makes the three galleries of a page from the errors of a validation.

    Args:
        out: the page that keeps the photos.
    """

    def __init__(self, out: Page, photos: Photos, index: DatasetIndex, errors: ImageErrors) -> None:
        self._page, self._photos, self._index, self._errors = out, photos, index, errors
        self._names = index.names
        photos.begin_page()

    def worst(self) -> Markup | None:
        """The images with the most errors, labels beside detections; None if there is no error."""
        return self._gallery("worst", worst_images(self._errors, MOST_IMAGES), self._worst, "Worst images")

    def labels(self) -> Markup | None:
        """Crops of the labels that confident detections contradict; None if there are none."""
        rows = suspicious_labels(self._errors, MOST_SUSPECTS).tolist()
        return self._gallery("labels", rows, self._suspect, "Suspicious labels", card_px=SMALL_CARD_PX)

    def backgrounds(self) -> Markup | None:
        """Images without objects that have detections; None if there are none."""
        images = worst_backgrounds(self._errors, MOST_BACKGROUNDS)
        return self._gallery(
            "backgrounds", images, self._background, "Backgrounds with detections", card_px=SMALL_CARD_PX
        )

    def _gallery(
        self,
        which: str,
        items: Sequence[int],
        make_card: Callable[[int, Album], Card],
        label: str,
        *,
        card_px: int = 560,
    ) -> Markup | None:
        album = Album(self._page, self._photos, MOST_BYTES[which])
        cards = [make_card(item, album) for item in items]
        if not cards:
            return None
        tags = {tag for card in cards for tag in card.tags}
        classes = sorted({int(c) for c, _ in tags})
        kinds = sorted({int(k) for _, k in tags})
        menus = [
            ("Class", [(str(c), self._names[c]) for c in classes]),
            ("Kind of error", [(str(k), KIND_WORDS[k]) for k in kinds]),
        ]
        return page.gallery(cards, menus if tags else [], label, card_px=card_px)

    def _worst(self, image: int, album: Album) -> Card:
        errors, tags = self._errors, set()
        of_image, objects = np.flatnonzero(errors.image == image), np.flatnonzero(errors.object_image == image)
        wrong = of_image[errors.outcome[of_image] >= 0]
        wrong = wrong[np.argsort(-errors.scores[wrong], kind="stable")]
        missed = objects[errors.missed[objects]]
        for row in wrong.tolist():
            kind = int(errors.outcome[row])
            tags.add((int(errors.classes[row]), kind))
            if kind == CLASS:
                tags.add((int(errors.object_classes[errors.target[row]]), kind))
        tags |= {(int(errors.object_classes[m]), MISSED) for m in missed}
        counts = Counter(KIND_WORDS[k] for k in errors.outcome[wrong].tolist()) + Counter(
            {KIND_WORDS[MISSED]: missed.size}
        )
        said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        name, source = self._index.paths[image], self._source(image)
        body = view = album.view(source, source.whole(), PHOTO_SIDE)
        if isinstance(view, View):
            labels = view.svg(f"Labels of {name}", self._truth(view, objects))
            found = view.svg(f"Detections in {name}: {said}", self._detections(view, of_image, wrong))
            body = page.side_by_side(("labels", labels), ("detections", found))
        return Card(body, page.with_note(said, name), _texts(tags))

    def _truth(self, view: View, objects: np.ndarray) -> list[Markup]:
        errors = self._errors
        plain = objects[~errors.crowd[objects]]
        shapes = [view.outlines(errors.object_boxes_xyxy_px[plain[errors.found[plain]]], "correct")]
        for m in plain[~errors.found[plain]][:MOST_BOXES].tolist():
            name, is_missed = self._names[errors.object_classes[m]], bool(errors.missed[m])
            title = f"{name}: missed" if is_missed else f"{name}: not found as labeled"
            shapes.append(view.rect(errors.object_boxes_xyxy_px[m], "missed" if is_missed else "label", title, name))
        return shapes

    def _detections(self, view: View, of_image: np.ndarray, wrong: np.ndarray) -> list[Markup]:
        errors = self._errors
        shapes = [view.outlines(errors.boxes_xyxy_px[of_image[errors.outcome[of_image] == CORRECT]], "correct")]
        return shapes + [self._error(view, row) for row in wrong[:MOST_BOXES].tolist()][::-1]

    def _error(self, view: View, row: int) -> Markup:
        errors, kind = self._errors, int(self._errors.outcome[row])
        text = f"{self._names[errors.classes[row]]} {errors.scores[row]:.2f}"
        return view.rect(errors.boxes_xyxy_px[row], KIND_STYLES[kind], f"{text}: {KIND_WORDS[kind]}", text)

    def _suspect(self, row: int, album: Album) -> Card:
        errors, names = self._errors, self._names
        image, kind, target = int(errors.image[row]), int(errors.outcome[row]), int(errors.target[row])
        seen, score = names[errors.classes[row]], f"{errors.scores[row]:.2f}"
        boxes = errors.boxes_xyxy_px[row][None]
        tags = {(int(errors.classes[row]), kind)}
        if kind == BACKGROUND:
            said = f"no label where the model sees {seen} ({score})"
        else:
            boxes = np.r_[boxes, errors.object_boxes_xyxy_px[target][None]]
            labeled = names[errors.object_classes[target]]
            tags.add((int(errors.object_classes[target]), kind))
            if kind == CLASS:
                said = f"labeled {labeled}, the model sees {seen} ({score})"
            else:
                iou = f"{overlap(errors, row):.2f}"
                said = f"the label {labeled} and the model's box ({score}) overlap little (IoU {iou})"
        name, source = self._index.paths[image], self._source(image)
        body = view = album.view(source, source.around(boxes), CROP_SIDE)
        if isinstance(view, View):
            shapes = [view.rect(boxes[1], "label", "label")] if len(boxes) > 1 else []
            body = view.svg(f"{said}, in {name}", [*shapes, self._error(view, row)])
        return Card(body, page.with_note(said, name), _texts(tags))

    def _background(self, image: int, album: Album) -> Card:
        errors = self._errors
        rows = np.flatnonzero(errors.image == image)
        rows = rows[np.argsort(-errors.scores[rows], kind="stable")]
        best = rows[0]
        said = f"{counted(rows.size, 'detection')}, the best {self._names[errors.classes[best]]} "
        said += f"({errors.scores[best]:.2f})"
        name, source = self._index.paths[image], self._source(image)
        body = view = album.view(source, source.whole(), CROP_SIDE)
        if isinstance(view, View):
            shapes = [self._error(view, row) for row in rows[:MOST_BOXES].tolist()][::-1]
            body = view.svg(f"{name}: {said}", shapes)
        return Card(body, page.with_note(said, name))

    def _source(self, image: int) -> Source:
        return Source(self._index.path(image), *self._index.image_hw[image].tolist())


def _texts(tags: set[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(c), str(k)) for c, k in sorted(tags))
