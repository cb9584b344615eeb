"""A data set: how a command names it, its classes, and where the images and labels of its splits are."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from data.image_io.decode import IMAGE_SUFFIXES
from data.labels.findings import Finding
from data.labels.label_format import ImageFile, LabelFormat
from data.labels.voc import is_voc
from data.labels.yolo import has_row
from utils.config.parser import class_numbers
from utils.config.settings import TrainConfig
from utils.errors import UserError, look_alike, one_line
from utils.files.safe_io import open_regular
from utils.pixels import RGB8, PixelFormat
from utils.strings import counted

IGNORE = "ignore"  # in ``classes``: the boxes are regions to ignore
IGNORED = -1  # the number of such a class
WITHOUT_VAL = "train with --val-fraction 0.2 or python -m tools.kfold"
SINGLE_CLASS_NAME = "object"
MOST_COMPARED = 1000  # names of files with a missing one
MOST_SEARCHED = 10_000  # files below a folder in which images are looked for
_HEAD = 4096  # bytes by which a file with labels is recognized
_COCO_LIST = re.compile(rb'"(annotations|images)"\s*:\s*\[\s*\{')
_LABEL_SIGNS: dict[str, Callable[[bytes], bool]] = {
    ".txt": has_row,
    ".xml": is_voc,
    ".json": lambda head: _COCO_LIST.search(head) is not None,
}
DEMO = "demo"  # the data set that is rendered into the cache folder


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set as a command names it."""

    data: str  # a YAML, the name of one in configs/data ("coco" or "coco.yaml"), a folder, or `DEMO`
    splits: tuple[str, ...] = ()  # those that will be read; the others are not staged
    optional: tuple[str, ...] = ()  # more splits to stage, if the data set has them; empty folders do not count
    classes: tuple[str, ...] = ()  # the only ones that are used, by name or number; empty: all
    stage: str = ""  # folder on a local disk of each node to which the splits are copied first; empty: no copy
    cache_dir: str = ""  # see `cache_folder`
    known_root: str = ""  # folder of the data set in an earlier run, if a relative ``path`` of the YAML is not found
    stored_in: str = ""  # the checkpoint or exported file that names ``data``, for messages; empty: the command line

    @classmethod
    def of_training(cls, config: TrainConfig, *, known_root: str, stored_in: str) -> DataSource:
        """The training and validation splits; with ``--val-fraction`` the latter may be missing."""
        splits, optional = (("train",), ("val",)) if config.val_fraction else (("train", "val"), ())
        classes, stage, cache_dir = tuple(config.classes), config.stage, config.cache_dir
        return cls(config.data, splits, optional, classes, stage, cache_dir, known_root, stored_in)


class Original(NamedTuple):
    """What the listing of a split has found that a copy of its files does not show."""

    findings: tuple[Finding, ...]
    taken: dict[str, str]  # by the names of images: label files that only another reading has found
    others: tuple[ImageFile, ...]  # images of other splits, of which one file has the labels, too


@dataclass(frozen=True, slots=True)
class SplitSource:
    """Absolute paths of the images and labels of a split, which may not exist."""

    images: tuple[Path, ...]  # folders and .txt lists
    annotations: Path | None  # None: YOLO txt next to the images
    label_format: LabelFormat | None  # None: unknown, or the annotations are missing
    parts: tuple[DatasetSpec, ...] = ()  # data sets whose splits of this name are joined, instead of the above


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The content of a data set YAML."""

    names: tuple[str, ...]  # of the classes that a model learns
    root: Path  # absolute
    splits: dict[str, SplitSource]
    source: str  # path of the YAML, for messages
    if_missing: str = "correct its paths"  # what to do if the data is missing
    held_out: frozenset[str] = frozenset()  # names of the training images that are the split "val"
    label_names: tuple[str, ...] = ()  # of the classes in the labels, by number; empty: `names`
    class_of: tuple[int, ...] = ()  # by number in the labels: the number in `names`, or `IGNORED`
    notes: tuple[str, ...] = ()  # lines for the log: what has been found in a folder, which keys are not used
    classes: tuple[int, ...] = ()  # numbers in ``names`` of those that are used, ascending; empty: all
    pixels: PixelFormat = RGB8  # of the images
    tile: int = 0  # side of the tiles that images are cut into, pixels; 0: they are not
    originals: dict[str, Original] = field(default_factory=dict)  # by split; empty: this is not a copy

    def split(self, name: str) -> SplitSource:
        """The split ``name``. Raises UserError if the YAML does not have it."""
        if name not in self.splits:
            hint = f", or {WITHOUT_VAL}" if name == "val" else ""
            raise UserError(
                f"{self.source}: has no '{name}' split, only {', '.join(self.splits)}; add '{name}: <folder>'{hint}"
            )
        return self.splits[name]

    def check_split(self, name: str) -> None:
        """Raises UserError unless the YAML has the split ``name``, and its folders, lists and annotations exist."""
        source = self.split(name)
        for part in source.parts:
            part.check_split(name)
        for path in (*source.images, *([source.annotations] if source.annotations else ())):
            if not path.exists():
                raise self.missing_error(path)

    def hold_out(self, names: Iterable[str]) -> DatasetSpec:
        """The data set with the training images ``names`` (relative to its folder) as the split "val"."""
        return replace(self, splits=self.splits | {"val": self.split("train")}, held_out=frozenset(names))

    def use_classes(self, classes: Sequence[int | str]) -> DatasetSpec:
        """The data set with only the boxes of ``classes``, numbers or names; empty: all. Raises UserError."""
        numbers = sorted(set(class_numbers(classes, dict(enumerate(self.names)), self.source)))
        return replace(self, classes=tuple(numbers) if len(numbers) < len(self.names) else ())

    def extended(self, names: Sequence[str], owner: str) -> DatasetSpec:
        """The data set for a model with the classes ``names`` of ``owner``, followed by the data set's other classes;
        names are compared without case and outer spaces. Where the data set does not label a class, the class is
        ignored, as where data sets are joined. Raises UserError if two classes of the data set have the same name."""
        given = {name.strip().lower(): name for name in reversed(names)}
        renamed = [given.get(name.strip().lower(), name) for name in self.names]
        used = [renamed[number] for number in self.classes or range(len(renamed))]
        if twice := next((name for name, count in Counter(used).items() if count > 1), None):
            raise UserError(f"{self.source}: two of its classes are '{twice}' of {owner}; merge them with 'classes:'")
        number = tuple(range(len(renamed)))
        part = replace(
            self, names=tuple(renamed), label_names=self.label_names or self.names, class_of=self.class_of or number
        )
        splits = {name: SplitSource((), None, None, (part,)) for name in self.splits}
        whole = {"held_out": frozenset(), "label_names": (), "class_of": (), "classes": ()}
        return replace(self, names=tuple(dict.fromkeys((*names, *used))), splits=splits, **whole)

    def as_labeled(self) -> DatasetSpec:
        """The data set with the classes as labeled, none merged or left out."""
        return replace(self, names=self.label_names or self.names, label_names=(), class_of=(), classes=())

    def content(self) -> dict[str, Any]:
        """What a YAML says about the classes (all of them), the pixels, and tiles."""
        others = self.pixels.content() | ({"tile": self.tile} if self.tile else {})
        if not self.label_names:
            return {"names": list(self.names)} | others
        to = {IGNORED: IGNORE} | dict(enumerate(self.names))
        classes = {n: to[c] for n, c in zip(self.label_names, self.class_of)}
        return {"names": list(self.label_names), "classes": classes} | others

    def missing_error(self, path: Path) -> UserError:
        advice = (
            labels_without_images(self.root) or self._beside_yaml(path) or f"{what_exists(path)}; {self.if_missing}"
        )
        return UserError(f"{path}: not found (named by {self.source}){advice}")

    def _beside_yaml(self, path: Path) -> str:
        """For a message: that ``path`` exists if the data set's folder is that of its YAML, as after it has moved."""
        home = Path(self.source).absolute().parent
        if (
            self.root.exists()
            or not path.is_relative_to(self.root)
            or not (home / path.relative_to(self.root)).exists()
        ):
            return ""
        return f"; {home / path.relative_to(self.root)} exists: remove 'path: {self.root}' from the YAML"


def class_names(spec: DatasetSpec, single_cls: bool) -> tuple[str, ...]:
    """Class names of a model trained on this data set. With ``single_cls``, a single used class keeps its name."""
    names = tuple(spec.names[number] for number in spec.classes) or spec.names
    return (SINGLE_CLASS_NAME,) if single_cls and len(names) > 1 else names


def labels_without_images(root: Path) -> str:
    """For messages: that a folder has label files and no image, as exports of labels alone have; "" if it has none, any
    image, or too many files to look at."""
    first = ""
    count = seen = 0
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in sorted(names):
            seen += 1
            suffix = os.path.splitext(name)[1].lower()
            if suffix in IMAGE_SUFFIXES or seen > MOST_SEARCHED:
                return ""
            if suffix in _LABEL_SIGNS and _begins_like_labels(os.path.join(folder, name), _LABEL_SIGNS[suffix]):
                count += 1
                first = first or os.path.join(folder, name)
    if not count:
        return ""
    return (
        f"; {root} has {counted(count, 'label file')} (first: {os.path.relpath(first, root)}) and no image: an export "
        "without its images; export it with them, or put them there"
    )


def _begins_like_labels(path: str, is_labels: Callable[[bytes], bool]) -> bool:
    try:
        with open_regular(path) as file:
            return is_labels(file.read(_HEAD))
    except OSError:
        return False


def what_exists(path: Path) -> str:
    """For messages: a name similar to the first missing part of ``path``, or the content of the folder, or ""."""
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    is_last = parent == path.parent
    suffix = path.suffix if is_last else ""
    if "*" in missing:
        return f"; patterns are not expanded: name the folder, {parent}"
    if "\\" in missing:
        return "; folders are separated by / here, not by \\"
    if one_line(missing) != missing:
        return f"; {missing!r} has a control character: in double quotes, YAML takes \\t for a tab; write / for \\"
    try:
        with os.scandir(parent) as entries:
            found = [e for e in entries if not e.name.startswith(".")]
        names = sorted(e.name for e in found if (e.name.endswith(suffix) if suffix else e.is_dir()))
    except OSError:
        return ""
    if alike := next((name for name in names if look_alike(name, missing)), None):
        return f"; {parent} has {alike!a}, which looks the same as {missing!a}"
    known = {name.removesuffix(suffix).lower(): name for name in reversed(names[:MOST_COMPARED])}
    close = difflib.get_close_matches(missing.removesuffix(suffix).lower(), known, n=1, cutoff=0.54)
    if close:  # as "validate" is to "val"
        return f"; '{parent / known[close[0]]}' exists"
    return f"; {parent} has {', '.join(names[:5])}{', ...' * (len(names) > 5)}" if is_last and names else ""
