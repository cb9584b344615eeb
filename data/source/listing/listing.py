"""Defines the listing of a split: all of its images, each with its status, and the findings about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from data.labels.findings import Finding
from data.labels.label_format import LabelFormat
from data.split_files import FilesOfImage, ImageFile, LabelFile, OtherImages


class ImageStatus(StrEnum):
    """Whether and how a split uses an image that it names."""

    LABELED = "labeled"
    BACKGROUND = "background"  # without a label file
    LEFT_OUT = "left out"  # its labels cannot be read, or may be in another file


class ListedImage(NamedTuple):
    """An image of a split, with its status."""

    file: ImageFile
    status: ImageStatus
    label: LabelFile  # for a background, the file where its labels would be
    reason: Finding | None = None  # why the image is left out
    aliases: FilesOfImage = ()  # the image under other names, given by links to folders

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def files(self) -> FilesOfImage:
        """The image under each of its names."""
        return (self.file, *self.aliases)

    def leave_out(self, reason: Finding) -> ListedImage:
        return self._replace(status=ImageStatus.LEFT_OUT, reason=reason)


@dataclass(frozen=True)
class Listing:
    """The files of a split."""

    all_images: list[ListedImage]  # sorted by name
    label_format: LabelFormat
    findings: list[Finding]
    unusual_labels: dict[str, str] = field(default_factory=dict)  # see `FoundLabels`
    others: OtherImages = OtherImages()  # images outside the split that its shared label file may name
    shares_folders: bool = False  # see `DatasetSpec.shares_folders`

    @cached_property
    def images(self) -> list[ImageFile]:
        """The images that are used, sorted by name."""
        return [image.file for image in self.all_images if image.status is not ImageStatus.LEFT_OUT]

    @cached_property
    def labels(self) -> list[LabelFile]:
        """One label file per image that is used, or one for all."""
        labels = [image.label for image in self.all_images if image.status is not ImageStatus.LEFT_OUT]
        return labels if self.label_format.per_image else labels[:1]

    @property
    def has_labels(self) -> bool:
        """Whether any image that is used has a label file."""
        return any(file.stamp is not None for file in self.labels)

    @cached_property
    def aliases(self) -> dict[str, FilesOfImage]:
        """The images under their other names, by name; without those that have one."""
        return {image.name: image.aliases for image in self.all_images if image.aliases}

    @property
    def num_aliases(self) -> int:
        """Number of additional names of the images, besides the name under which each is listed."""
        return sum(len(image.aliases) for image in self.all_images)


def leave_out(images: list[ListedImage], reasons: Mapping[str, Finding]) -> list[ListedImage]:
    """Returns ``images``, leaving out those with a reason. ``reasons``: reasons by image name."""
    if not reasons:
        return images
    return [image.leave_out(reasons[image.name]) if image.name in reasons else image for image in images]
