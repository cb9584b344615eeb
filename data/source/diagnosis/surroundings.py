"""Holds what is known of a split and its surroundings (`Surroundings`), to find out whose a label file is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from data.source.diagnosis.other_splits import OtherSplits
from data.source.diagnosis.similar_names import ImagesOnDisk, UnlabeledImages, loose_stem
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.label_files import FoundLabels, ListedImage


@dataclass(frozen=True)
class Surroundings:
    """Holds what decides whose a label file is that no image of a split has."""

    found: FoundLabels
    split_folders: Sequence[str]  # that the split names (absolute), without its lists
    others: OtherSplits
    unlabeled: UnlabeledImages
    images_on_disk: ImagesOnDisk  # also those that no split names

    @classmethod
    def of(cls, found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> Surroundings:
        return cls(
            found=found,
            split_folders=split_folders,
            others=others,
            unlabeled=UnlabeledImages(found.images),
            images_on_disk=ImagesOnDisk(found.candidates.folders),
        )

    @cached_property
    def image_of_name(self) -> dict[str, ListedImage]:
        """The images of the split by name."""
        return {image.name: image for image in self.found.images}

    @cached_property
    def labeled_stems(self) -> frozenset[str]:
        """The loose stems of the images with a label file."""
        return frozenset(loose_stem(image.file.base_name) for image in self.found.images if not image.is_unlabeled)

    @property
    def candidates(self) -> CandidateFiles:
        """The files that no image has."""
        return self.found.candidates
