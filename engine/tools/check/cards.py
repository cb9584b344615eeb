"""The galleries of a check's page: near-duplicates as pairs, boxes that are wrong, label errors with their corrections,
and samples of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TypeVar

import numpy as np
from markupsafe import Markup

from data.check.issues import DUPLICATES, LABEL_ERRORS, MISSED, SPURIOUS, Box, Issue, by_kind
from data.check.photos import CROP_SIDE, Album, Photos, Source, View
from data.check.scanned import CheckedSplit
from utils.boxes import clip_xyxy, scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.drawing import page
from utils.structures import DetectionTable

MOST_PAIRS, MOST_OF_KIND, MOST_LABEL_ERRORS, MOST_SAMPLES = 30, 24, 60, 200
MOST_SAMPLES_OF_CLASS = 6
MOST_BYTES = {"pairs": 400_000, "boxes": 800_000, "labels": 600_000, "samples": 500_000}  # of JPEG files, by gallery
PAIR_SIDE, SAMPLE_SIDE = 240, 170  # pixels
DRAWN_SCORE = 0.25  # of detections
MOST_LABELS, MOST_DETECTIONS = 60, 40  # drawn in a picture
STYLES = {MISSED: "missed", SPURIOUS: "spurious"}  # of the box that an issue is about; of other kinds: location
T = TypeVar("T")


class IssueGalleries:
    """Makes the galleries of a page.

    Args:
        out: the page that keeps the photos.
        detections: by split, if a model has looked for label errors.
    """

    def __init__(
        self, out: page.Page, splits: Sequence[CheckedSplit], detections: Mapping[str, DetectionTable]
    ) -> None:
        self._page, self._photos, self._detections = out, Photos(), detections
        self._splits = {split.name: split for split in splits}
        self._names = splits[0].index.names
        self._numbers: dict[tuple[str, str], int] = {}  # of images, by split and name

    def duplicates(self, issues: Sequence[Issue]) -> Markup | None:
        """Pairs of near-duplicates, those across splits first; None if there are none."""
        groups = by_kind(issue for issue in issues if issue.kind in DUPLICATES)
        drawn = alternating(list(groups.values()))[:MOST_PAIRS]
        self._find(drawn)
        album = Album(self._page, self._photos, MOST_BYTES["pairs"])
        cards = [self._pair(issue, album) for issue in drawn]
        return self._gallery(cards, ("Found", "Split"), "Near-duplicates") if cards else None

    def boxes(self, issues: Sequence[Issue]) -> Markup | None:
        """Images and boxes that are wrong without asking a model; None if there are none."""
        groups = by_kind(i for i in issues if i.images and i.kind not in (*DUPLICATES, *LABEL_ERRORS))
        drawn = {kind: alternating(list(_by_split(group)))[:MOST_OF_KIND] for kind, group in groups.items()}
        self._find(list(chain(*drawn.values())))
        cards = []
        for group in drawn.values():
            album = Album(self._page, self._photos, MOST_BYTES["boxes"] // len(drawn))
            cards += [card for issue in group if (card := self._issue(issue, album))]
        return self._gallery(cards, ("Finding", "Split", "Class"), "Findings", card_px=230) if cards else None

    def label_errors(self, issues: Sequence[Issue]) -> Markup | None:
        """The most probable label errors: labels, detections, and corrected labels; None if there are none."""
        drawn = [issue for issue in issues if issue.kind in LABEL_ERRORS][:MOST_LABEL_ERRORS]
        self._find(drawn)
        album = Album(self._page, self._photos, MOST_BYTES["labels"])
        cards = [self._label_error(issue, album) for issue in drawn]
        return self._gallery(cards, ("Label error", "Split", "Class"), "Label errors") if cards else None

    def samples(self) -> tuple[Markup | None, int]:
        """Boxes of each class, from small to large, and the number of classes that are shown; None without boxes."""
        splits = list(self._splits.values())
        rows_of = [np.flatnonzero(~split.index.crowd) for split in splits]
        owner, row_of = np.repeat(np.arange(len(splits)), list(map(len, rows_of))), np.concatenate(rows_of)
        classes = np.concatenate([split.index.classes[rows] for split, rows in zip(splits, rows_of)])
        areas = np.concatenate([s.index.boxes_xywh_px[rows, 2:].prod(1) for s, rows in zip(splits, rows_of)])
        shown = _evenly(np.unique(classes), MOST_SAMPLES)
        album = Album(self._page, self._photos, MOST_BYTES["samples"])
        cards = []
        for c in shown.tolist():
            of_class = np.flatnonzero(classes == c)
            of_class = of_class[np.argsort(areas[of_class], kind="stable")]
            some = _evenly(of_class, min(max(MOST_SAMPLES // len(shown), 1), MOST_SAMPLES_OF_CLASS))
            cards += [self._sample(splits[owner[i]], int(row_of[i]), album) for i in some]
        if not cards:
            return None, 0
        return self._gallery(cards, ("Class", "Split"), "Samples of each class", card_px=150), len(shown)

    def _find(self, issues: Sequence[Issue]) -> None:
        """Looks up the numbers of the images of ``issues``; those that the scan left out have none."""
        wanted: dict[str, set[str]] = {}
        for issue in issues:
            for split, name in _images(issue):
                wanted.setdefault(split, set()).add(name)
        for split, names in wanted.items():
            paths = self._splits[split].index.paths if split in self._splits else ()
            self._numbers |= {(split, name): i for i, name in enumerate(paths) if name in names}

    def _gallery(self, cards: list[page.Card], menus: Sequence[str], label: str, *, card_px: int = 560) -> Markup:
        """Cards with a menu for each of their tags; the values of ``Class`` are numbers, all others are texts."""
        filters = []
        for position, menu in enumerate(menus):
            values = dict.fromkeys(tag[position] for card in cards for tag in card.tags if tag[position])
            if menu == "Class":
                choices = [(v, self._names[int(v)]) for v in sorted(values, key=int)]
            else:
                known = [split for split in self._splits if split in values] if menu == "Split" else values
                choices = [(v, v) for v in known]
            filters.append((menu, choices))
        return page.gallery(cards, filters, label, card_px=card_px)

    def _source(self, split: str, name: str) -> tuple[Source, np.ndarray] | None:
        """An image, and the rows of its boxes in the index; None if the scan left it out."""
        i = self._numbers.get((split, name))
        if i is None:
            return None
        index = self._splits[split].index
        rows = np.arange(index.offsets[i], index.offsets[i + 1])
        return Source(index.path(i), *index.image_hw[i].tolist()), rows

    def _outlines(self, view: View, split: str, rows: np.ndarray, but: Sequence[Box] = ()) -> Markup:
        """The labels of an image, in ``rows`` of the index, without ``but``."""
        boxes = xywh_to_xyxy(self._splits[split].index.boxes_xywh_px[rows])
        boxes = np.delete(boxes, [box.number for box in but if box.number is not None], axis=0)
        return view.outlines(boxes, "correct", MOST_LABELS)

    def _pair(self, issue: Issue, album: Album) -> page.Card:
        images = _images(issue)
        first = images[0]
        second = next((image for image in images[1:] if image[0] != first[0]), images[1])
        pictures = []
        for split, name in (first, second):
            source, rows = self._source(split, name)
            body = view = album.view(source, source.whole(), PAIR_SIDE)
            if isinstance(view, View):
                body = view.svg(f"{name} with its labels", [self._outlines(view, split, rows)])
            pictures.append((f"{split}: {name}", body))
        others = f"{len(images) - 2:,} more are like these." if len(images) > 2 else ""
        tags = tuple((issue.kind, split) for split in dict.fromkeys(split for split, _ in images))
        return page.Card(page.side_by_side(*pictures), page.with_note(issue.kind, others), tags)

    def _issue(self, issue: Issue, album: Album) -> page.Card | None:
        found = self._source(issue.split, issue.images[0])
        if found is None and not issue.boxes:
            return None  # the image cannot be read, or there is none
        caption = page.with_note(f"{issue.kind}: {issue.text}", f"{issue.split}: {issue.where or issue.images[0]}")
        if found is None:
            body = Markup('<p class="muted">The scan left this image out.</p>')
        else:
            source, rows = found
            corners = _corners(issue.boxes)
            window = source.around(corners) if len(corners) else source.whole()
            body = view = album.view(source, window, CROP_SIDE)
            if isinstance(view, View):
                shapes = [self._outlines(view, issue.split, rows, issue.boxes)]
                for box, style in zip(issue.boxes[::-1], ("spurious", "label")):
                    shapes.append(view.rect(np.array(box.xyxy_px), style, box.where or "", box.class_name))
                body = view.svg(f"{issue.kind} in {issue.images[0]}", shapes)
        classes = sorted({box.class_id for box in issue.boxes})
        tags = tuple((issue.kind, issue.split, str(c)) for c in classes) or ((issue.kind, issue.split, ""),)
        return page.Card(body, caption, tags)

    def _label_error(self, issue: Issue, album: Album) -> page.Card:
        name, style = issue.images[0], STYLES.get(issue.kind, "location")
        source, rows = self._source(issue.split, name)
        mine = (*issue.boxes, *((issue.suggestion,) if issue.suggestion else ()))
        body = view = album.view(source, source.around(_corners(mine)), CROP_SIDE)
        if isinstance(view, View):
            others = self._outlines(view, issue.split, rows, issue.boxes)
            labels = [view.rect(np.array(box.xyxy_px), "label", box.where or "", box.class_name) for box in issue.boxes]
            before = view.svg(f"Labels in {name}", [others, *labels])
            seen = view.svg(f"Detections in {name}", self._seen(view, issue))
            corrected = [others]
            if issue.suggestion:
                box = issue.suggestion
                corrected.append(view.rect(np.array(box.xyxy_px), style, "suggested", box.class_name))
            after = view.svg(f"Corrected labels in {name}", corrected)
            body = page.side_by_side(("labels", before), ("detections", seen), ("suggested labels", after))
        said = f"{issue.score:.2f} {issue.kind}: {issue.text}"
        note = Markup("{}: {}<br>{}").format(issue.split, issue.where or name, self._correction(issue, source))
        classes = sorted({box.class_id for box in mine})
        tags = tuple((issue.kind, issue.split, str(c)) for c in classes)
        return page.Card(body, page.with_note(said, note), tags)

    def _seen(self, view: View, issue: Issue) -> list[Markup]:
        """The detections in an issue's image that score at least `DRAWN_SCORE`, the most confident first."""
        table = self._detections[issue.split]
        i = self._numbers[issue.split, issue.images[0]]
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
        box = np.array(issue.suggestion.xyxy_px)
        if self._splits[issue.split].scan.source.normalized:
            box = clip_xyxy(box, source.width, source.height)
            cxcywh = scale_boxes(xyxy_to_cxcywh(box), 1 / source.width, 1 / source.height)
            row = " ".join([str(issue.suggestion.class_id), *(f"{v:.6f}" for v in cxcywh)])
        else:
            row = f"{issue.suggestion.class_name}, corners {', '.join(f'{v:.1f}' for v in box)} px"
        return Markup("{} {}").format("write" if issue.boxes else "add", page.code(row))

    def _sample(self, split: CheckedSplit, row: int, album: Album) -> page.Card:
        index, i = split.index, split.image_of(row)
        source = Source(index.path(i), *index.image_hw[i].tolist())
        box = split.box(row)
        body = view = album.view(source, source.around(_corners([box])), SAMPLE_SIDE)
        if isinstance(view, View):
            rows = np.arange(index.offsets[i], index.offsets[i + 1])
            others = self._outlines(view, split.name, rows[rows != row])
            drawn = view.rect(np.array(box.xyxy_px), "location", box.where or "", box.class_name)
            body = view.svg(f"{box.class_name} in {index.paths[i]}", [others, drawn])
        caption = page.with_note(box.class_name, f"{split.name}: {box.where}")
        return page.Card(body, caption, ((str(box.class_id), split.name),))


def alternating(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of each group, then the second of each, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]


def _by_split(issues: Sequence[Issue]) -> list[list[Issue]]:
    groups: dict[str, list[Issue]] = {}
    for issue in issues:
        groups.setdefault(issue.split, []).append(issue)
    return list(groups.values())


def _images(issue: Issue) -> list[tuple[str, str]]:
    """Split and name of each image of an issue."""
    return list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))


def _evenly(values: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of ``values``, evenly spread over their positions: the first, the last and some between; the one
    in the middle if ``most`` is 1."""
    if most == 1:
        return values[len(values) // 2 :][:1]
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).round().astype(int))]


def _corners(boxes: Sequence[Box]) -> np.ndarray:
    return np.array([box.xyxy_px for box in boxes], np.float64).reshape(-1, 4)
