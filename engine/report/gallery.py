"""Galleries of a page: photos of a data set's images with labels, detections and errors drawn over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from data.check.issues import LABEL_ERRORS, MISSED, SPURIOUS, Box, Issue
from data.check.photos import CROP_SIDE, PHOTO_SIDE, Album, Photos, Source, View
from data.check.scanned import CheckedSplit, learned_names
from engine.evaluation.analysis import CLASS
from engine.evaluation.analysis import MISSED as MISSED_OBJECT
from engine.report.image_errors import CORRECT, ImageErrors, worst_backgrounds, worst_images
from utils.boxes import clip_xyxy, scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.drawing.page import Card, Gallery, code
from utils.strings import counted
from utils.structures import DetectionTable

# By kind of error, in the order of `engine.evaluation.analysis.KINDS`: the words, and the class of the style sheet.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
LABEL_LEGEND = (
    ("label that the error is about", "label-key"),
    ("other labels", "correct"),
    ("detection, or suggested box", "location"),
    ("suggested box without a label", "missed"),
)
STYLES = {MISSED: "missed", SPURIOUS: "spurious"}  # of the box that an issue is about; of other kinds: location
MOST_IMAGES, MOST_BACKGROUNDS, MOST_LABEL_ERRORS = 40, 12, 60
MOST_BYTES = {"worst": 1_500_000, "labels": 600_000, "backgrounds": 400_000}  # of JPEG files, by gallery
SMALL_CARD_PX = 230  # least width
MOST_BOXES = 60  # errors of an image that are drawn one by one
DRAWN_SCORE = 0.25  # of detections next to label errors
MOST_LABELS, MOST_DETECTIONS = 60, 40  # drawn in a picture of a label error


class Galleries:
    """What all galleries share, and the gallery of label errors.

    Args:
        pictures: of the page.
        detections: by split, if a model has looked for label errors.
    """

    def __init__(
        self,
        pictures: dict[str, tuple],
        photos: Photos,
        splits: Sequence[CheckedSplit],
        detections: Mapping[str, DetectionTable],
    ) -> None:
        self._pictures, self._photos, self._detections = pictures, photos, detections
        self._splits = {split.name: split for split in splits}
        self._names = splits[0].index.names
        self._numbers: dict[str, dict[str, int]] = {}  # of images by name, by split

    def label_errors(self, issues: Sequence[Issue]) -> Gallery | None:
        """The most probable label errors: labels, detections, and corrected labels; None if there are none."""
        drawn = [issue for issue in issues if issue.kind in LABEL_ERRORS][:MOST_LABEL_ERRORS]
        album = self._album(MOST_BYTES["labels"])
        cards = [self._label_error(issue, album) for issue in drawn]
        return self._gallery(cards, ("Label error", "Split", "Class"), "Label errors")

    def _album(self, most_bytes: int) -> Album:
        return Album(self._pictures, self._photos, most_bytes)

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

    def _outlines(self, view: View, split: str, rows: np.ndarray, but: Sequence[Box] = ()) -> Markup:
        """The labels of an image, in ``rows`` of the index, without ``but``."""
        boxes = xywh_to_xyxy(self._splits[split].index.boxes_xywh_px[rows])
        boxes = np.delete(boxes, [box.number for box in but if box.number is not None], axis=0)
        return view.outlines(boxes, "correct", MOST_LABELS)

    def _label_error(self, issue: Issue, album: Album) -> Card:
        name, suggestion = issue.images[0], issue.suggestion
        source, rows = self._image(issue.split, name)
        mine = (*issue.boxes, *((suggestion,) if suggestion else ()))
        view = album.view(source, source.around(corners_of(mine)), CROP_SIDE)
        pictures = [("", view)]
        if isinstance(view, View):
            others = self._outlines(view, issue.split, rows, issue.boxes)
            labels = [view.rect(np.array(box.xyxy_px), "label", box.where or "", box.class_name) for box in issue.boxes]
            before = view.svg(f"Labels in {name}", [others, *labels])
            seen = view.svg(f"Detections in {name}", self._seen(view, issue))
            corrected = [others]
            if suggestion:
                style = STYLES.get(issue.kind, "location")
                corrected.append(view.rect(np.array(suggestion.xyxy_px), style, "suggested", suggestion.class_name))
            after = view.svg(f"Corrected labels in {name}", corrected)
            pictures = [("labels", before), ("detections", seen), ("suggested labels", after)]
        note = Markup("{}: {}<br>{}").format(issue.split, issue.where or name, self._correction(issue, source))
        tags = [(issue.kind, issue.split, str(c)) for c in sorted({box.class_id for box in mine})]
        return Card(pictures, f"{issue.score:.2f} {issue.kind}: {issue.text}", note, tags)

    def _seen(self, view: View, issue: Issue) -> list[Markup]:
        """The detections in an issue's image that score at least `DRAWN_SCORE`, the most confident first."""
        table = self._detections[issue.split]
        i = self._number(issue.split, issue.images[0])
        rows = np.flatnonzero((table.image_index == i) & (table.scores >= DRAWN_SCORE))
        rows = rows[view.shows(table.boxes_xyxy_px[rows])]
        shapes = []
        for row in rows[np.argsort(-table.scores[rows], kind="stable")][:MOST_DETECTIONS].tolist():
            text = f"{self._names[table.classes[row]]} {table.scores[row]:.2f}"
            shapes.append(view.rect(table.boxes_xyxy_px[row], "location", text, text))
        return shapes

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

    def __init__(
        self,
        pictures: dict[str, tuple],
        photos: Photos,
        split: CheckedSplit,
        detections: DetectionTable,
        errors: ImageErrors,
    ) -> None:
        super().__init__(pictures, photos, [split], {split.name: detections})
        self._split, self._errors = split, errors
        photos.begin_page()

    def worst(self) -> Gallery | None:
        """The images with the most errors, labels next to detections; None if there is no error."""
        album = self._album(MOST_BYTES["worst"])
        cards = [self._worst(image, album) for image in worst_images(self._errors, MOST_IMAGES)]
        return self._gallery(cards, ("Class", "Kind of error"), "Worst images")

    def backgrounds(self) -> Gallery | None:
        """Images without objects that have detections; None if there are none."""
        album = self._album(MOST_BYTES["backgrounds"])
        cards = [self._background(image, album) for image in worst_backgrounds(self._errors, MOST_BACKGROUNDS)]
        return self._gallery(cards, (), "Backgrounds with detections", SMALL_CARD_PX)

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
        view = album.view(source, source.whole(), PHOTO_SIDE)
        pictures = [("", view)]
        if isinstance(view, View):
            labels = view.svg(f"Labels of {name}", self._truth(view, objects))
            found = view.svg(f"Detections in {name}: {text}", self._found(view, of_image, wrong))
            pictures = [("labels", labels), ("detections", found)]
        return Card(pictures, text, name, [(str(c), KIND_WORDS[k]) for c, k in sorted(tags)])

    def _truth(self, view: View, objects: np.ndarray) -> list[Markup]:
        errors = self._errors
        plain = objects[~errors.crowd[objects]]
        shapes = [view.outlines(errors.object_boxes_xyxy_px[plain[errors.found[plain]]], "correct")]
        for m in plain[~errors.found[plain]][:MOST_BOXES].tolist():
            name, is_missed = self._names[errors.object_classes[m]], bool(errors.missed[m])
            title = f"{name}: missed" if is_missed else f"{name}: not found as labeled"
            shapes.append(view.rect(errors.object_boxes_xyxy_px[m], "missed" if is_missed else "label", title, name))
        return shapes

    def _found(self, view: View, of_image: np.ndarray, wrong: np.ndarray) -> list[Markup]:
        errors = self._errors
        shapes = [view.outlines(errors.boxes_xyxy_px[of_image[errors.outcome[of_image] == CORRECT]], "correct")]
        return shapes + [self._error(view, row) for row in wrong[:MOST_BOXES].tolist()][::-1]

    def _error(self, view: View, row: int) -> Markup:
        errors, kind = self._errors, int(self._errors.outcome[row])
        text = f"{self._names[errors.classes[row]]} {errors.scores[row]:.2f}"
        return view.rect(errors.boxes_xyxy_px[row], KIND_STYLES[kind], f"{text}: {KIND_WORDS[kind]}", text)

    def _background(self, image: int, album: Album) -> Card:
        errors = self._errors
        rows = np.flatnonzero(errors.image == image)
        rows = rows[np.argsort(-errors.scores[rows], kind="stable")]
        best = f"{self._names[errors.classes[rows[0]]]} ({errors.scores[rows[0]]:.2f})"
        text = f"{counted(rows.size, 'detection')}, the best {best}"
        name, source = self._split.index.paths[image], source_of(self._split, image)
        picture = view = album.view(source, source.whole(), CROP_SIDE)
        if isinstance(view, View):
            shapes = [self._error(view, row) for row in rows[:MOST_BOXES].tolist()][::-1]
            picture = view.svg(f"{name}: {text}", shapes)
        return Card([("", picture)], text, name)


def source_of(split: CheckedSplit, image: int) -> Source:
    return Source(split.index.path(image), *split.index.image_hw[image].tolist(), split.index.pixels)


def images_of(issue: Issue) -> list[tuple[str, str]]:
    """Split and name of each image of an issue."""
    return list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))


def corners_of(boxes: Sequence[Box]) -> np.ndarray:
    return np.array([box.xyxy_px for box in boxes], np.float64).reshape(-1, 4)
