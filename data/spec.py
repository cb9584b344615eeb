"""Describes a data set: its classes, and the paths of each split's images and labels.

A command names it with a `DataSource`. `data.open.open_data` reads the named YAML (`read_spec`) or folder (`layouts`)
into a `DatasetSpec`. There are three kinds of splits: `FilesSplit`, whose files
`data.pairing.list_split` lists, `ShardSplit` and `JoinedSplit`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.formats.label_format import Format
from utils.class_names import class_key
from utils.config.settings import TrainConfig
from utils.errors import UserError, os_reason
from utils.files.paths import relative_name
from utils.pixels import RGB8, PixelFormat
from utils.schema import suggestion

SPLITS = ("train", "val", "test")
IGNORE = "ignore"  # value in the YAML's ``classes`` that turns boxes into ignore regions
IGNORED = -1  # class index of such boxes
CLASS_KEYS = frozenset({"names", "classes", "ignore"})  # keys in the YAML whose values are class names
WITHOUT_VAL = "train with --val-fraction 0.2 or python -m tools.kfold"
SINGLE_CLASS_NAME = "object"
DEMO = "demo"  # name of the data set that is rendered into the cache folder


@dataclass(frozen=True, slots=True)
class DataSource:
    """Names a data set and its splits, as given to a command."""

    data: str  # a YAML, the name of one in configs/data ("coco" or "coco.yaml"), a folder, or `DEMO`
    splits: tuple[str, ...] = ()  # splits that will be read; others are not staged
    is_val_optional: bool = False  # whether "val" is left out if it is missing or empty, and staged otherwise
    classes: tuple[str, ...] = ()  # classes to use, by name or number; empty for all
    stage: str = ""  # folder on each node's local disk to which the splits are copied first; empty for no copy
    cache_dir: str = ""  # see `cache_folder`
    known_root: str = ""  # the data set's folder in an earlier run, for a relative ``path`` that is not found
    stored_in: str = ""  # checkpoint or exported file that names ``data``, for messages; empty for the command line
    val_images: tuple[str, ...] = ()  # training images that serve as the split "val" if the data set has none
    output: str = ""  # folder for the command's plots, which must not be in an image folder; empty: no plots
    continues_output: bool = False  # whether a run continues there: then an image folder around it is only a warning

    @classmethod
    def of_training(cls, config: TrainConfig) -> DataSource:
        """Names the training and validation splits. With ``--val-fraction``, the validation split is optional."""
        return cls(
            data=config.data,
            splits=("train",) if config.val_fraction else ("train", "val"),
            is_val_optional=bool(config.val_fraction),
            classes=tuple(config.classes),
            stage=config.stage,
            cache_dir=config.cache_dir,
        )


@dataclass(frozen=True, slots=True)
class FilesSplit:
    """A split of image files and label files. All paths are absolute, but need not exist."""

    images: tuple[Path, ...]  # folders and .txt lists
    # File of all images, or folder of a label file each; None for YOLO txt, whose place follows from the image's path
    annotations: Path | None
    label_format: Format
    # Of a copy (--stage): names and stamps of its files, in place of the paths, which are those of the original
    listing_file: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All paths that the data set names for the split."""
        return self.images if self.annotations is None else (*self.images, self.annotations)


@dataclass(frozen=True, slots=True)
class ShardSplit:
    """A split in shards, which contain their labels."""

    index: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        """See `FilesSplit`."""
        return (self.index,)


@dataclass(frozen=True, slots=True)
class JoinedSplit:
    """A split that joins the splits of the same name in other data sets."""

    parts: tuple[DatasetSpec, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Empty, because each part names its own paths. See `FilesSplit`."""
        return ()


Split = FilesSplit | ShardSplit | JoinedSplit


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """A data set as its YAML or folder describes it, and what the command chose: `classes`, held-out images, splits to
    leave out, a copy."""

    names: tuple[str, ...]  # classes that a model learns
    root: Path  # absolute
    splits: dict[str, Split]
    source: str  # path of the YAML, or of a folder without one: for messages, and identifies the data set
    if_missing: str = "correct its paths"  # advice for missing data
    left_out: dict[str, Split] = field(default_factory=dict)  # an optional "val" that is missing or empty
    held_out: frozenset[str] = frozenset()  # names of the training images that form the split "val"
    label_names: tuple[str, ...] = ()  # classes in the labels, by number; empty if they are `names`
    class_of: tuple[int, ...] = ()  # number in `names`, or `IGNORED`, of each class in the labels
    notes: tuple[str, ...] = ()  # lines for the log, such as a folder's content and unused keys
    classes: tuple[int, ...] = ()  # used classes, as ascending positions in `names`; empty for all
    pixels: PixelFormat = RGB8  # format of the images
    tile: int = 0  # side of the tiles that images are cut into, in pixels; 0 for whole images

    def split(self, name: str) -> Split:
        """Returns the split ``name``. Raises UserError if the data set does not have it."""
        if name not in self.splits:
            message = f"{self.source}: has no '{name}' split"
            if self.splits:
                message += f", only {', '.join(self.splits)}"
            if name not in SPLITS:
                raise UserError(message + suggestion(name, self.splits))
            hint = f", or {WITHOUT_VAL}" if name == "val" else ""
            raise UserError(f"{message}; add '{name}: <folder>'{hint}")
        return self.splits[name]

    def check_split(self, name: str) -> None:
        """Raises UserError unless the data set has the split ``name`` and all its paths exist, including those in the
        data sets that it joins."""
        split = self.split(name)
        if isinstance(split, JoinedSplit):
            for part in split.parts:
                part.check_split(name)
        for path in split.paths:
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                raise self.missing_error(path) from None
            except OSError as error:
                raise UserError(f"{path}: {os_reason(error)} (named by '{name}' of {self.source})") from None

    def missing_error(self, path: Path) -> UserError:
        """Returns the error about a missing path. If its end exists beside the YAML, which then is of another machine,
        the error says what to write."""
        folder = Path(self.source).absolute().parent
        ends = ["/".join(path.parts[i:]) for i in range(1, len(path.parts))]
        end = next((end for end in ends if (folder / end).exists()), None)
        if end is None:
            return UserError(f"{path}: not found (named by {self.source}); {self.if_missing}")
        inside = relative_name(path, self.root)
        line = f"'{end}' in its place"
        if end.endswith(inside):  # the root is another one here
            line = f"'path: {end[: -len(inside)].rstrip('/') or '.'}'"
        return UserError(f"{path}: not found (named by {self.source}), but {folder / end} exists; write {line}")

    def parts_of(self, name: str) -> tuple[DatasetSpec, ...]:
        """Returns the data sets that the split ``name`` joins, or just this data set if it joins none."""
        split = self.split(name)
        return split.parts if isinstance(split, JoinedSplit) else (self,)

    def hold_out(self, names: Iterable[str]) -> DatasetSpec:
        """Returns the data set with the training images ``names`` (relative to its folder) as the split "val"."""
        return replace(self, splits=self.splits | {"val": self.split("train")}, held_out=frozenset(names))

    def is_held_out(self, split: str) -> bool:
        """Returns whether a split is the part of the training split that was chosen by `hold_out`."""
        return split == "val" and bool(self.held_out)

    def extended(self, names: Sequence[str], owner: str) -> DatasetSpec:
        """Returns the data set for a model whose first classes are ``names`` of ``owner``, followed by its own.

        Names are compared without case and outer spaces. A class that the data set does not label is ignored in its
        images, as when data sets are joined. Raises UserError if two used classes match the same name.
        """
        known_names = {class_key(name): name for name in reversed(names)}
        part = replace(
            self,
            names=tuple(known_names.get(class_key(name), name) for name in self.names),
            label_names=self.label_names or self.names,
            class_of=self.class_of or tuple(range(len(self.names))),
        )
        used = [part.names[number] for number in self.classes or range(len(part.names))]
        for name, count in Counter(used).items():
            if count > 1:
                raise UserError(
                    f"{self.source}: two of its classes map to '{name}' of {owner}; merge them with 'classes:'"
                )
        # The part determines which of its labels and images are used; the joining data set only adds names.
        return DatasetSpec(
            names=tuple(dict.fromkeys((*names, *used))),
            root=self.root,
            splits={name: JoinedSplit((part,)) for name in self.splits},
            source=self.source,
            if_missing=self.if_missing,
            notes=self.notes,
            pixels=self.pixels,
            tile=self.tile,
        )

    def with_label_classes(self) -> DatasetSpec:
        """Returns the data set with the classes of its labels, none merged or left out."""
        return replace(self, names=self.label_names or self.names, label_names=(), class_of=(), classes=())

    def content(self) -> dict[str, Any]:
        """Returns the YAML keys and values that describe the classes (all of them), the pixel format and the tiles."""
        image_keys = self.pixels.content()
        if self.tile:
            image_keys = image_keys | {"tile": self.tile}
        if not self.label_names:
            return {"names": list(self.names)} | image_keys
        classes = {}
        for name, number in zip(self.label_names, self.class_of):
            if number == IGNORED:
                classes[name] = IGNORE
            elif name != self.names[number]:  # a class without a line keeps its name, which may be `IGNORE`
                classes[name] = self.names[number]
        return {"names": list(self.label_names), "classes": classes} | image_keys


def class_names(spec: DatasetSpec, single_cls: bool) -> tuple[str, ...]:
    """Returns the class names of a model trained on this data set. With ``single_cls``, several used classes become
    `SINGLE_CLASS_NAME`; a single used class keeps its name."""
    names = tuple(spec.names[number] for number in spec.classes) or spec.names
    return (SINGLE_CLASS_NAME,) if single_cls and len(names) > 1 else names
