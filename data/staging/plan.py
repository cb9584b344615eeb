"""The files of a copy of a data set. One process lists them; no file is opened.

The copy mirrors the data set's part of the file tree. Every file keeps its name relative to the data set's folder and
its modification time, so the index of the copy has the fingerprint of the original. Only the YAML and .txt lists of
images are rewritten, because they may name paths outside the copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from data.index.files import Listing, list_split
from data.labels.findings import relative_name
from data.labels.label_format import FileStamp
from data.spec.dataset_spec import DatasetSpec
from utils.logger import get_logger
from utils.strings import counted


@dataclass(frozen=True)
class StagePlan:
    """The files of some splits. Names are relative to the data set's folder, with ``/``; they may begin with ``..``."""

    spec: DatasetSpec
    splits: tuple[str, ...]
    names: list[str]  # sorted
    sizes: np.ndarray  # int64 (F,), bytes
    mtimes_ns: np.ndarray  # int64 (F,)
    lists: dict[str, str]  # text of the .txt lists in the copy, by name
    folders: tuple[str, ...]  # of images and annotations: created even if empty; other images in them are removed
    absent: frozenset[str]  # missing label files

    @property
    def above(self) -> int:
        """The number of levels between the root of the copied tree and the data set's folder."""
        names = [*self.names, *self.lists, *self.folders, *self.absent]
        return max((name.split("/").count("..") for name in names), default=0)

    @property
    def root_in_tree(self) -> Path:
        """The data set's folder in the copied tree."""
        parts = self.spec.root.parts
        return Path(*parts[len(parts) - self.above :]) if self.above else Path()

    @property
    def key(self) -> str:
        """A folder name that is unique to this data set."""
        source = Path(self.spec.source).absolute()
        digest = hashlib.blake2b(f"{source}\0{self.spec.root}".encode("utf-8", "surrogateescape"), digest_size=6)
        return f"{source.stem}-{digest.hexdigest()}"

    @property
    def yaml_name(self) -> str:
        return f"{'-'.join(self.splits)}.yaml"

    def yaml_text(self, tree: str) -> str:
        """The YAML of the copy, which is next to the folder ``tree``."""
        chosen = {split: self.spec.splits[split] for split in self.splits}
        root = self.spec.root
        content: dict[str, object] = {"path": (Path(tree) / self.root_in_tree).as_posix()}
        content |= {split: [relative_name(p, root) for p in source.images] for split, source in chosen.items()}
        annotations = {s: relative_name(source.annotations, root) for s, source in chosen.items() if source.annotations}
        content |= {"annotations": annotations} if annotations else {}
        return yaml.safe_dump(content | self.spec.content(), sort_keys=False, allow_unicode=True)


def plan_stage(spec: DatasetSpec, splits: Sequence[str]) -> StagePlan:
    """Lists the splits. Raises UserError as `list_split` does."""
    stamps: dict[str, FileStamp] = {}
    lists: dict[str, str] = {}
    absent: set[str] = set()
    folders: list[str] = []
    for split in splits:
        listing = list_split(spec, split)
        _warn_of_findings(listing, split)
        stamps |= {image.name: image.stamp for image in listing.images}
        stamps |= {label.name: label.stamp for label in listing.labels if label.stamp is not None}
        absent |= {label.name for label in listing.labels if label.stamp is None}
        source = spec.split(split)
        for entry in (*source.images, *filter(None, [source.annotations])):
            name = relative_name(entry, spec.root)
            if entry in listing.lists:
                lists[name] = "".join(f"{row}\n" for row in listing.lists[entry])
            elif name not in stamps:
                folders.append(name)
    names = sorted(stamps)
    return StagePlan(
        spec=spec,
        splits=tuple(splits),
        names=names,
        sizes=np.array([stamps[n].size for n in names], np.int64),
        mtimes_ns=np.array([stamps[n].mtime_ns for n in names], np.int64),
        lists=lists,
        folders=tuple(dict.fromkeys(folders)),
        absent=frozenset(absent),
    )


def _warn_of_findings(listing: Listing, split: str) -> None:
    if listing.findings:
        first = listing.findings[0]
        get_logger().warning(
            "--stage: not copied: %s of '%s', the first: %s: %s",
            counted(len(listing.findings), "file"), split, first.where, first.text,
        )  # fmt: skip


def is_under(name: str, folders: Sequence[str]) -> bool:
    """Whether ``name`` is in one of the folders or their subfolders."""
    return any((folder == "." and not name.startswith("../")) or name.startswith(folder + "/") for folder in folders)
