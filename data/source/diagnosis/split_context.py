"""The splits among which `unused_file` looks for the image of a label file, and the owner of each folder
(`SplitContext`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from data.labels.label_format import FilesPerImage
from data.source.dataset_spec import DatasetSpec, ListedSplit, folders_of
from data.source.diagnosis.similar_names import ImagesOnDisk, loose_stem
from data.source.diagnosis.split_tables import SplitTables
from data.source.listing.candidate_files import CandidateFile
from data.source.listing.found_labels import FoundLabels
from data.source.listing.images import find_images_leniently
from data.source.listing.label_files import find_labels
from data.source.listing.label_folders import label_folders_near
from data.source.listing.other_images import images_of_no_split
from data.source.listing.other_splits import entries_without_images, share_labels, splits_with_other_images
from utils.files.paths import path_of

_MAX_REPEATED_STEM_SHARE = 0.05  # of a split's stems; if more are repeated, splits are numbered alike


class FolderOwner(NamedTuple):
    """The splits, or missing folders and lists, to which the unused label files in a folder belong."""

    splits: list[SplitTables]  # in the order of the data set
    missing: Path | None  # folder or list of a further split, which is missing or empty


class SplitContext:
    """The splits that may have label files in the folders of one split. The others are listed on first use.

    Args:
        split: name of the split whose unused label files are explained.
        found: its images and the label files that they use.
        missing: see `SplitImages.missing`.
    """

    def __init__(self, spec: DatasetSpec, split: str, found: FoundLabels, missing: Sequence[str]) -> None:
        self._spec = spec
        self._split = split
        self.own = SplitTables(found, folders_of(spec.listed_splits[split]), missing)
        self.images_on_disk = ImagesOnDisk(found.candidates.folders)  # including images of no split

    @cached_property
    def others(self) -> list[SplitTables]:
        """The other splits that name other images, and have their own label files in the same folders."""
        return [split for split in self.splits if split is not self.own]

    @cached_property
    def splits(self) -> list[SplitTables]:
        """This split and the `others`, in the order of the data set, which is the same for each of them. A part that is
        held out from the training split stands in its place."""
        listed = self._spec.listed_splits
        others = splits_with_other_images(self._spec, self._split)
        first_of_own_images = next(name for name in listed if name not in others)
        splits: list[SplitTables] = []
        for name in listed:
            if name == first_of_own_images:
                splits.append(self.own)
            elif name in self._names_of_others:
                splits += self._tables_of(name)
        return splits

    @cached_property
    def _names_of_others(self) -> list[str]:
        """The names of the `others`, and of those that are empty or missing."""
        listed = self._spec.listed_splits
        others = splits_with_other_images(self._spec, self._split)
        return [name for name in others if self._shares_labels(name) and _format_per_image(listed[name]) is not None]

    def is_distinctive(self, stem: str) -> bool:
        """Returns whether the loose stem of a label file tells the split of its image, whichever folder the file is in:
        the images of all splits are known, at most one split has images with this stem, and splits do not repeat stems,
        as if each were numbered from 0.

        Otherwise, a file in the folder of one split says nothing about a background of this name in another: its
        objects are lost, and the finding names the background.
        """
        is_any_split_unknown = len(self.others) < len(self._names_of_others) or bool(self._missing_entries)
        return not (is_any_split_unknown or self._do_splits_repeat_stems or stem in self._repeated_stems)

    @cached_property
    def _do_splits_repeat_stems(self) -> bool:
        """Whether any split has more than a few of the `_repeated_stems`."""
        return any(
            len(stems & self._repeated_stems) > _MAX_REPEATED_STEM_SHARE * len(stems) for stems in self._stems_of_splits
        )

    @cached_property
    def _repeated_stems(self) -> set[str]:
        """The loose stems that different images of several splits have, such as "cover"."""
        num_splits = Counter(stem for stems in self._stems_of_splits for stem in stems)
        num_images = Counter(map(_loose_stem_of, set().union(*(split.names for split in self.splits))))
        return {stem for stem, count in num_splits.items() if count > 1 and num_images[stem] > 1}

    @cached_property
    def _stems_of_splits(self) -> list[set[str]]:
        """The loose stems of each split's images."""
        return [set(map(_loose_stem_of, split.names)) for split in self.splits]

    @cached_property
    def named_label_folders(self) -> dict[str, None]:
        """The label folders of all folders that a split of YOLO txt names, and the folders nearby, as keys."""
        listed = self._spec.listed_splits
        if listed[self._split].annotations is not None:
            return {}  # all of them are `nearby`
        candidates = self.own.candidates
        split_folders = [folder for name in listed if self._shares_labels(name) for folder in folders_of(listed[name])]
        label_folders = [folder for named in split_folders for folder in label_folders_near(named, candidates)]
        return dict.fromkeys(map(candidates.folders.first_name, label_folders))

    def labels_image_outside(self, folder: str, stems: Iterable[str]) -> bool:
        """Returns whether an image in no split, or in one with another kind of label file, has one of the loose
        ``stems`` and may have its label file in a folder of the annotations.

        For example, images/old/9.png is in no split, and the annotations are voc. A file 9.xml in voc/old or voc may be
        its label file, but not one in voc/train, where the split train expects label files. In a folder where no split
        expects any, such as voc/copies, it may be that of any image.
        """
        label_folder = folder if self.is_expected(folder) else str(self.own.candidates.annotations)
        return not self._stems_outside.get(label_folder, frozenset()).isdisjoint(stems)

    def is_expected(self, folder: str) -> bool:
        """Returns whether any split expects label files in a folder."""
        return any(folder in split.expected for split in self.splits)

    @cached_property
    def _stems_outside(self) -> dict[str, set[str]]:
        """The loose stems for `labels_image_outside`, by label folder: "9" by voc/images/old, voc/old and voc for
        images/old/9.png. The folder of the annotations itself has the stems of all such images."""
        annotations = self.own.candidates.annotations
        if annotations is None:
            return {}
        stems_of: dict[str, set[str]] = {}  # by image folder
        for name in self._images_outside():
            stems_of.setdefault(name.rpartition("/")[0], set()).add(_loose_stem_of(name))
        folders = self.own.candidates.folders
        by_label_folder: dict[str, set[str]] = {}
        for folder, stems in stems_of.items():
            for label_folder in self.own.candidates.label_folders(path_of(folder, folders.root)):
                by_label_folder.setdefault(folders.first_name(label_folder), set()).update(stems)
        by_label_folder[str(annotations)] = set().union(*stems_of.values())
        return by_label_folder

    def _images_outside(self) -> set[str]:
        """Returns the names of the images that are in no split, or in one with another kind of label file."""
        folders = self.own.candidates.folders
        known = {image_name for split in self.splits for image_name in split.image_of_name}
        names: set[str] = set()
        for split_name in (self._split, *splits_with_other_images(self._spec, self._split)):
            if not self._shares_labels(split_name):
                continue
            names.update(images_of_no_split(self._spec, split_name, folders, known=known))
            if _format_per_image(self._spec.listed_splits[split_name]) is None:
                names |= find_images_leniently(self._spec, split_name, folders).names
        return names

    def is_used_by_another(self, file: CandidateFile) -> bool:
        """Returns whether an image of another split uses a label file."""
        return any(split.candidates.is_used(file) for split in self.others)

    def owner_of(self, folder: str) -> FolderOwner:
        """Returns the owner of the unused label files in a folder: the splits whose label folders include it or,
        failing that, the closest folder above it; otherwise, the splits that look for label files nearby.

        For example, the annotations are voc, and the splits are images/train, images/val, and images/test, which is
        missing: voc/train/old belongs to train, voc/test to images/test, and voc/old, like voc itself, to train and val
        or images/test.
        """
        candidates = self.own.candidates
        top = candidates.folders.root if candidates.annotations is None else candidates.annotations
        for ancestor in (Path(folder), *Path(folder).parents):
            name = candidates.folders.first_name(str(ancestor))
            splits = [split for split in self.splits if name in split.own_folders]
            missing = self._missing_entries.get(name)
            if splits or missing is not None:
                return FolderOwner(splits, missing)
            if ancestor == top:
                break
        return FolderOwner([split for split in self.splits if folder in split.nearby], None)

    @cached_property
    def _missing_entries(self) -> dict[str, Path]:
        """The folders and lists of other splits that are missing or empty, by label folder."""
        entries: dict[str, Path] = {}
        for entry in entries_without_images(self._spec, self._split):
            for folder in self.own.candidates.label_folders(str(entry)):
                entries.setdefault(self.own.candidates.folders.first_name(folder), entry)
        return entries

    def _tables_of(self, name: str) -> list[SplitTables]:
        """Returns the tables of one of the `_names_of_others`, or nothing if it names no image."""
        other = self._spec.listed_splits[name]
        label_format = _format_per_image(other)
        assert label_format is not None
        images = find_images_leniently(self._spec, name, self.own.candidates.folders)
        if not images.images and not images.missing:
            return []
        found = find_labels(images, label_format, other.annotations)
        return [SplitTables(found, folders_of(other), images.missing)]

    def _shares_labels(self, other: str) -> bool:
        splits = self._spec.listed_splits
        return share_labels(splits[self._split].annotations, splits[other].annotations)


def _format_per_image(split: ListedSplit) -> FilesPerImage | None:
    """Returns the format of a split with a label file for each image, or None for other splits."""
    return None if split.label_format is None else split.label_format.per_image


def _loose_stem_of(name: str) -> str:
    """Returns the loose stem of an image from its name with folders."""
    return loose_stem(name.rpartition("/")[2])
