"""Context for deciding which image an unused label file belongs to (`SplitContext`): the images of its split, on the
disk, and in the other splits (`OtherSplits`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from data.source.dataset_spec import DatasetSpec
from data.source.diagnosis.similar_names import ImagesOnDisk, UnlabeledImages, loose_stem
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.images import SplitImages, find_images_leniently
from data.source.listing.label_files import FoundLabels
from data.source.listing.listing import ImageStatus, ListedImage
from data.source.listing.other_images import images_of_no_split
from data.source.listing.other_splits import (
    entries_without_images,
    share_labels,
    splits_before,
    splits_with_other_images,
)
from data.source.walk import Folders
from utils.files.paths import path_of


class OtherSplits:
    """Images of the other splits of a data set, as far as they differ from this split's. They are listed on first use.

    Args:
        split: name of this split.
        split_images: images of this split.
    """

    def __init__(self, spec: DatasetSpec, split: str, split_images: SplitImages) -> None:
        self._spec = spec
        self._split = split
        self._split_images = split_images
        self._folders = Folders(spec.root)

    @cached_property
    def _names(self) -> list[str]:
        """The other splits, in the order of the data set."""
        return splits_with_other_images(self._spec, self._split)

    @cached_property
    def _names_before(self) -> list[str]:
        """The other splits that the data set names before this one."""
        earlier = splits_before(self._spec, self._split)
        return [name for name in self._names if name in earlier]

    @property
    def is_first_split(self) -> bool:
        """Whether the data set names no other split before this one."""
        return not self._names_before

    @cached_property
    def stems(self) -> frozenset[str]:
        """Loose stems of images outside this split whose labels may be in the same folders as this split's."""
        splits = self._spec.listed_splits
        annotations = splits[self._split].annotations
        names: list[str] = []
        for other in self._names:
            if share_labels(annotations, splits[other].annotations):
                names += find_images_leniently(self._spec, other, self._folders).images
        if annotations is not None:
            names += images_of_no_split(self._spec, self._split, self._folders, known=self._split_images.names)
        return frozenset(loose_stem(name.rpartition("/")[2]) for name in names)

    @cached_property
    def may_lack_images(self) -> bool:
        """Whether images are missing whose labels may be in the annotations of this split."""
        return bool(entries_without_images(self._spec, self._split))

    @cached_property
    def folders_before(self) -> frozenset[str]:
        """The image folders (absolute) of the splits that the data set names before this one."""
        names: set[str] = set()
        for other in self._names_before:
            images = find_images_leniently(self._spec, other, self._folders).names
            names |= {name.rpartition("/")[0] for name in images}
        return frozenset(path_of(name, self._spec.root) for name in names)


@dataclass(frozen=True)
class SplitContext:
    """The images of a split, the images around it, and the label files found for it."""

    found: FoundLabels
    split_folders: Sequence[str]  # folders that the split names (absolute), without its lists
    others: OtherSplits
    unlabeled: UnlabeledImages
    images_on_disk: ImagesOnDisk  # including images of no split

    @classmethod
    def of(cls, found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> SplitContext:
        return cls(
            found=found,
            split_folders=split_folders,
            others=others,
            unlabeled=UnlabeledImages(found.images),
            images_on_disk=ImagesOnDisk(found.candidates.folders),
        )

    @cached_property
    def image_of_name(self) -> dict[str, ListedImage]:
        """The images of the split by each of their names."""
        return {file.name: image for image in self.found.images for file in image.names}

    @cached_property
    def labeled_stems(self) -> frozenset[str]:
        """The loose stems of the images with a label file, including images that are left out because of it."""
        images = [image for image in self.found.images if image.status is not ImageStatus.BACKGROUND]
        return frozenset(loose_stem(image.file.base_name) for image in images)

    @property
    def candidates(self) -> CandidateFiles:
        """The candidate label files that are not used by any image."""
        return self.found.candidates
