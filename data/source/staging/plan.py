"""Plans a copy of a data set: its files and its YAML."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from data.source.dataset_spec import DatasetSpec
from data.source.diagnosis.missing_labels import check_label_files
from data.source.files import list_split
from data.source.listing.listing import Listing
from data.split_files import FileStamp
from utils.files.paths import normal_path, relative_name


@dataclass(frozen=True)
class StagePlan:
    """The files to copy for some splits. Names are relative to the data set's folder, with ``/``, and may begin with
    ``..``."""

    spec: DatasetSpec
    splits: tuple[str, ...]
    names: list[str]  # sorted
    sizes: np.ndarray  # int64 (F,), bytes
    mtimes_ns: list[int]  # Python integers, because times after the year 2262 do not fit in int64
    listings: dict[str, Listing]  # by split; the files of left-out images are not copied
    folders: tuple[str, ...]  # folders of images and annotations, from which other images are removed

    @property
    def image_folders(self) -> set[str]:
        """Names of the folders that contain images, also of images that a .txt list names."""
        return {os.path.dirname(image.name) for listing in self.listings.values() for image in listing.images}

    @property
    def root_in_tree(self) -> Path:
        """The data set's folder in the copied tree, which begins as many levels above it as any name leads."""
        levels = max((name.split("/").count("..") for name in (*self.names, *self.folders)), default=0)
        return Path(*self.spec.root.parts[-levels:]) if levels else Path()

    @property
    def key(self) -> str:
        """A folder name that is unique to this data set."""
        source = normal_path(self.spec.source)
        digest = hashlib.blake2b(f"{source}\0{self.spec.root}".encode("utf-8", "surrogateescape"), digest_size=6)
        return f"{source.stem}-{digest.hexdigest()}"

    def yaml_text(self, tree: str) -> str:
        """Returns the YAML of the copy, which is written next to the folder ``tree``."""
        listed_splits = self.spec.listed_splits
        chosen = {name: listed_splits[name] for name in self.splits}
        root = self.spec.root
        content: dict[str, object] = {"path": (Path(tree) / self.root_in_tree).as_posix()}
        content |= {name: [relative_name(path, root) for path in split.images] for name, split in chosen.items()}
        annotations = {n: relative_name(split.annotations, root) for n, split in chosen.items() if split.annotations}
        if annotations:
            content["annotations"] = annotations
        return yaml.safe_dump(content | self.spec.content(), sort_keys=False, allow_unicode=True)


def plan_stage(spec: DatasetSpec, splits: Sequence[str]) -> StagePlan:
    """Lists the splits. Raises UserError as `list_split` does, and if no image of a split has a label file."""
    stamps: dict[str, FileStamp] = {}
    listings: dict[str, Listing] = {}
    folders: list[str] = []
    for split in splits:
        listing = list_split(spec, split)
        check_label_files(listing, spec, split)  # on the original, whose files the message may name
        listings[split] = listing
        stamps |= {image.name: image.stamp for image in listing.images if image.stamp is not None}
        stamps |= {label.name: label.stamp for label in listing.labels if label.stamp is not None}
        folders += [relative_name(entry, spec.root) for entry in spec.split(split).paths if entry.is_dir()]
    names = sorted(stamps)
    return StagePlan(
        spec=spec,
        splits=tuple(splits),
        names=names,
        sizes=np.array([stamps[name].size for name in names], np.int64),
        mtimes_ns=[stamps[name].mtime_ns for name in names],
        listings=listings,
        folders=tuple(dict.fromkeys(folders)),
    )
