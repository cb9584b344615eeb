"""Galleries of a page: photos of a data set's images with labels, detections and errors drawn over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from data.check.issues import LABEL_ERRORS, MISSED, SPURIOUS, Box, Issue
from data.check.photos import COLORS, CROP_SIDE, PHOTO_SIDE, Album, Outline, Source, Version, in_window, outlines
from data.check.scanned import CheckedSplit, learned_names
from engine.evaluation.analysis import CLASS
from engine.evaluation.analysis import MISSED as MISSED_OBJECT
from engine.report.image_errors import CORRECT, ImageErrors, worst_images
from utils.boxes import clip_xyxy, scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.drawing.page import Card, Gallery, code
from utils.structures import DetectionTable

# By kind of error, in the order of `engine.evaluation.analysis.KINDS`: the words, and the style of the box.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
KIND_LEGEND = (
    ("correct", COLORS["correct"]),
    *((words, COLORS[style]) for words, style in zip(KIND_WORDS, KIND_STYLES)),
    ("label, not found", COLORS["label"]),
)
LABEL_LEGEND = (
    ("label that the error is about", COLORS["label"]),
    ("other labels", COLORS["correct"]),
    ("detection, or suggested box", COLORS["location"]),
    ("suggested box without a label", COLORS["missed"]),
)
STYLES = {MISSED: "missed", SPURIOUS: "spurious"}  # of the box that an issue is about; of other kinds: location
MOST_IMAGES, MOST_LABEL_ERRORS = 40, 60
MOST_BYTES = {"worst": 1_800_000, "labels": 700_000}  # of JPEG files, by gallery
SMALL_CARD_PX = 230  # least width
MOST_BOXES = 60  # errors of an image that are drawn
DRAWN_SCORE = 0.25  # of detections next to label errors
MOST_LABELS, MOST_DETECTIONS = 60, 40  # drawn in a picture of a label error


class Galleries:
    """What all galleries share, and the gallery of label errors.

    ``detections``: by split, if a model has looked for label errors.
    """

    def __init__(self, splits: Sequence[CheckedSplit], detections: Mapping[str, DetectionTable]) -> None:
        self._detections = detections
        self._splits = {split.name: split for split in splits}
        self._names = splits[0].index.names
        self._numbers: dict[str, dict[str, int]] = {}  # of images by name, by split

    def label_errors(self, issues: Sequence[Issue]) -> Gallery | None:
        """The most probable label errors: labels, detections, and corrected labels; None if there are none."""
        drawn = [issue for issue in issues if issue.kind in LABEL_ERRORS][:MOST_LABEL_ERRORS]
        album = Album(MOST_BYTES["labels"])
        cards = [self._label_error(issue, album) for issue in drawn]
        return self._gallery(cards, ("Label error", "Split", "Class"), "Label errors")

    def _number(self, split: str, name: str) -> int | None:
        """Of an image; None if the scan left it out."""
        if split not in self._numbers:
            paths = self._splits[split].index.paths if split in self._splits else ()
            self._numbers[split] = {path: i for i, path in enumerate(paths)}
        return self._numbers[split].get(name)

    def _gallery(self, cards: list[Card], menus: Sequence[str], label: str, card_px: int = 560) -> Gallery | None:
        """Cards with a menu for each of their tags; the values of ``Class`` are numbers, all others are texts. None
        without cards."""
        if not cards:
            return None
        filters = []
        for position, menu in enumerate(menus):
            values = dict.fromkeys(tag[position] for card in cards for tag in card.tags if tag[position])
            if menu == "Class":
                choices = [(v, self._names[int(v)]) for v in sorted(values, key=int)]
            else:
                known = [split for split in self._splits if split in values] if menu == "Split" else values
                choices = [(v, v) for v in known]
            filters.append((menu, choices))
        return Gallery(cards, filters, label, card_px)

    def _image(self, split: str, name: str) -> tuple[Source, np.ndarray] | None:
        """An image, and the rows of its boxes in the index; None if the scan left it out."""
        if (i := self._number(split, name)) is None:
            return None
        index = self._splits[split].index
        return source_of(self._splits[split], i), np.arange(index.offsets[i], index.offsets[i + 1])

    def _labels(self, split: str, rows: np.ndarray, but: Sequence[Box] = ()) -> list[Outline]:
        """The labels of an image, in ``rows`` of the index, without ``but``."""
        boxes = xywh_to_xyxy(self._splits[split].index.boxes_xywh_px[rows])
        boxes = np.delete(boxes, [box.number for box in but if box.number is not None], axis=0)
        return outlines(boxes[:MOST_LABELS], "correct")

    def _label_error(self, issue: Issue, album: Album) -> Card:
        name, suggestion = issue.images[0], issue.suggestion
        source, rows = self._image(issue.split, name)
        mine = (*issue.boxes, *((suggestion,) if suggestion else ()))
        window = source.around(corners_of(mine))
        others = self._labels(issue.split, rows, issue.boxes)
        labels = [Outline(box.xyxy_px, "label", box.class_name) for box in issue.boxes]
        style = STYLES.get(issue.kind, "location")
        suggested = [Outline(suggestion.xyxy_px, style, suggestion.class_name)] if suggestion else []
        pictures = album.pictures(
            source,
            window,
            CROP_SIDE,
            Version("labels", f"Labels in {name}", labels + others),
            Version("detections", f"Detections in {name}", self._seen(window, issue)),
            Version("suggested labels", f"Corrected labels in {name}", suggested + others),
        )
        note = Markup("{}: {}<br>{}").format(issue.split, issue.where or name, self._correction(issue, source))
        tags = [(issue.kind, issue.split, str(c)) for c in sorted({box.class_id for box in mine})]
        return Card(pictures, f"{issue.score:.2f} {issue.kind}: {issue.text}", note, tags)

    def _seen(self, window: np.ndarray, issue: Issue) -> list[Outline]:
        """The detections in an issue's image that score at least `DRAWN_SCORE`, the most confident first."""
        table = self._detections[issue.split]
        i = self._number(issue.split, issue.images[0])
        rows = np.flatnonzero((table.image_index == i) & (table.scores >= DRAWN_SCORE))
        rows = rows[in_window(table.boxes_xyxy_px[rows], window)]
        rows = rows[np.argsort(-table.scores[rows], kind="stable")][:MOST_DETECTIONS]
        texts = [f"{self._names[table.classes[row]]} {table.scores[row]:.2f}" for row in rows]
        return [Outline(table.boxes_xyxy_px[row], "location", text) for row, text in zip(rows, texts)]

    def _correction(self, issue: Issue, source: Source) -> Markup:
        """What to write into the labels."""
        if issue.suggestion is None:
            return Markup("delete this label")
        box, name = np.array(issue.suggestion.xyxy_px), issue.suggestion.class_name
        part, _ = self._splits[issue.split].part_of(self._number(issue.split, issue.images[0])) or (None, 0)
        names = learned_names(part) if part and part.scan.source.normalized else []
        if name in names:
            box = clip_xyxy(box, source.width, source.height)
            cxcywh = scale_boxes(xyxy_to_cxcywh(box), 1 / source.width, 1 / source.height)
            row = " ".join([str(names.index(name)), *(f"{v:.6f}" for v in cxcywh)])
        else:
            row = f"{name}, corners {', '.join(f'{v:.1f}' for v in box)} px"
        return Markup("{} {}").format("write" if issue.boxes else "add", code(row))


class ErrorGalleries(Galleries):
    """The galleries of a validation, besides that of label errors: ``split`` has been validated, with ``errors``."""

    def __init__(self, split: CheckedSplit, detections: DetectionTable, errors: ImageErrors) -> None:
        super().__init__([split], {split.name: detections})
        self._split, self._errors = split, errors

    def worst(self) -> Gallery | None:
        """The images with the most errors, labels next to detections; None if there is no error."""
        album = Album(MOST_BYTES["worst"])
        cards = [self._worst(image, album) for image in worst_images(self._errors, MOST_IMAGES)]
        return self._gallery(cards, ("Class", "Kind of error"), "Worst images")

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
        tags |= {(int(errors.object_classes[m]), MISSED_OBJECT) for m in missed}
        counts = Counter(KIND_WORDS[k] for k in errors.outcome[wrong].tolist())
        counts += Counter({KIND_WORDS[MISSED_OBJECT]: missed.size})
        text = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        name, source = self._split.index.paths[image], source_of(self._split, image)
        pictures = album.pictures(
            source,
            source.whole(),
            PHOTO_SIDE,
            Version("labels", f"Labels of {name}", self._truth(objects)),
            Version("detections", f"Detections in {name}: {text}", self._found(of_image, wrong)),
        )
        return Card(pictures, text, name, [(str(c), KIND_WORDS[k]) for c, k in sorted(tags)])

    def _truth(self, objects: np.ndarray) -> list[Outline]:
        errors = self._errors
        plain = objects[~errors.crowd[objects]]
        not_found = [
            Outline(
                errors.object_boxes_xyxy_px[m],
                "missed" if errors.missed[m] else "label",
                self._names[errors.object_classes[m]],
            )
            for m in plain[~errors.found[plain]][:MOST_BOXES].tolist()
        ]
        return not_found + outlines(errors.object_boxes_xyxy_px[plain[errors.found[plain]]], "correct")

    def _found(self, of_image: np.ndarray, wrong: np.ndarray) -> list[Outline]:
        correct = self._errors.boxes_xyxy_px[of_image[self._errors.outcome[of_image] == CORRECT]]
        return self._wrong(wrong) + outlines(correct, "correct")

    def _wrong(self, rows: np.ndarray) -> list[Outline]:
        errors = self._errors
        return [
            Outline(
                errors.boxes_xyxy_px[row],
                KIND_STYLES[errors.outcome[row]],
                f"{self._names[errors.classes[row]]} {errors.scores[row]:.2f}",
            )
            for row in rows[:MOST_BOXES].tolist()
        ]


def source_of(split: CheckedSplit, image: int) -> Source:
    return Source(split.index.path(image), *split.index.image_hw[image].tolist(), split.index.pixels)


def images_of(issue: Issue) -> list[tuple[str, str]]:
    """Split and name of each image of an issue."""
    return list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))


def corners_of(boxes: Sequence[Box]) -> np.ndarray:
    return np.array([box.xyxy_px for box in boxes], np.float64).reshape(-1, 4)
