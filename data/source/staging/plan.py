"""Plans a copy of a data set: which files it has, and how its YAML and lists of images are written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from data.source.dataset_spec import DatasetSpec, Original, SplitSource
from data.source.diagnosis.missing_labels import check_label_files
from data.source.files import Listing, list_split
from data.split_files import FileStamp
from utils.files.paths import normal_path, path_of, relative_name


@dataclass(frozen=True)
class StagePlan:
    """Lists the files of some splits. Names are relative to the data set's folder, with ``/``, and may begin with
    ``..``."""

    spec: DatasetSpec
    splits: tuple[str, ...]
    names: list[str]  # sorted
    sizes: np.ndarray  # int64 (F,), bytes
    mtimes_ns: list[int]  # Python integers: a time after the year 2262 has more than 64 bits
    lists: dict[str, str]  # text of the .txt lists in the copy, by name
    originals: dict[str, Original]  # by split
    folders: tuple[str, ...]  # folders of images and annotations, created even if empty; other images are removed
    absent: frozenset[str]  # label files in usual places that the original does not have

    @property
    def root_in_tree(self) -> Path:
        """The data set's folder in the copied tree, which begins as many levels above it as names lead out of it."""
        names = [*self.names, *self.lists, *self.folders, *self.absent]
        levels = max((name.split("/").count("..") for name in names), default=0)
        return Path(*self.spec.root.parts[-levels:]) if levels else Path()

    @property
    def key(self) -> str:
        """A folder name that is unique to this data set."""
        source = normal_path(self.spec.source)
        digest = hashlib.blake2b(f"{source}\0{self.spec.root}".encode("utf-8", "surrogateescape"), digest_size=6)
        return f"{source.stem}-{digest.hexdigest()}"

    def yaml_text(self, tree: str) -> str:
        """Returns the YAML of the copy, which lies next to the folder ``tree``."""
        chosen = {split: self.spec.splits[split] for split in self.splits}
        root = self.spec.root
        content: dict[str, object] = {"path": (Path(tree) / self.root_in_tree).as_posix()}
        content |= {split: [relative_name(p, root) for p in source.images] for split, source in chosen.items()}
        annotations = {s: relative_name(source.annotations, root) for s, source in chosen.items() if source.annotations}
        if annotations:
            content["annotations"] = annotations
        return yaml.safe_dump(content | self.spec.content(), sort_keys=False, allow_unicode=True)


def plan_stage(spec: DatasetSpec, splits: Sequence[str]) -> StagePlan:
    """Lists the splits. Raises UserError as `list_split` does, and if no image of a split has a label file."""
    stamps: dict[str, FileStamp] = {}
    lists: dict[str, str] = {}
    originals: dict[str, Original] = {}
    absent: set[str] = set()
    folders: list[str] = []
    for split in splits:
        listing = list_split(spec, split)
        check_label_files(listing, spec, split)  # here, where the files are that its message may name
        originals[split] = Original(
            findings=tuple(listing.findings),
            unusual_labels=listing.unusual_labels,
            other_images=listing.others,
            shares_folders=spec.shares_folders(split),
        )
        stamps |= {image.name: image.stamp for image in listing.images if image.stamp is not None}
        stamps |= {label.name: label.stamp for label in listing.labels if label.stamp is not None}
        absent |= {label.name for label in listing.labels if label.stamp is None}
        absent |= _superseded(listing, spec, split)
        for entry in _entries(spec.split(split)):
            name = relative_name(entry, spec.root)
            if entry in listing.lists:
                # Other rows would be missing images, of which the original's findings say more.
                rows = [row for row in listing.lists[entry] if row in stamps]
                lists[name] = "".join(f"{row}\n" for row in rows)
            elif name not in stamps:
                folders.append(name)
    names = sorted(stamps)
    return StagePlan(
        spec=spec,
        splits=tuple(splits),
        names=names,
        sizes=np.array([stamps[name].size for name in names], np.int64),
        mtimes_ns=[stamps[name].mtime_ns for name in names],
        lists=lists,
        originals=originals,
        folders=tuple(dict.fromkeys(folders)),
        absent=frozenset(absent.difference(names)),
    )


def _entries(source: SplitSource) -> Iterator[Path]:
    """Yields the folders, lists and annotations that a split names."""
    yield from source.images
    if source.annotations is not None:
        yield source.annotations


def _superseded(listing: Listing, spec: DatasetSpec, split: str) -> set[str]:
    """Returns the usual names of label files that have unusual ones. The copy may have them from an earlier run, and
    they would be read instead."""
    files = listing.label_format.per_image
    if files is None:
        return set()
    names = set()
    for image in listing.images:
        if image.name in listing.unusual_labels:
            folder, _, base = image.name.rpartition("/")
            folder_in_split = image.name_in_split.rpartition("/")[0]
            usual, *_ = files.label_folders(path_of(folder, spec.root), folder_in_split, spec.split(split).annotations)
            names.add(relative_name(Path(usual) / (os.path.splitext(base)[0] + files.suffix), spec.root))
    return names
