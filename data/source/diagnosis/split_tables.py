"""Tables of one split, with which `unused_file` explains label files: its images, and the folders where its label files
are looked for (`SplitTables`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from data.labels.image_names import loose
from data.source.diagnosis.similar_names import UnlabeledImages, loose_stem
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.found_labels import FoundLabels
from data.source.listing.label_folders import expected_folders, nearby_folders
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of


class SplitTables:
    """The images of a split, and the folders where its label files are looked for. Each folder has one name, see
    `Folders.first_name`."""

    def __init__(self, found: FoundLabels, folders: Sequence[str], missing: Sequence[str]) -> None:
        self.found = found
        self.folders = folders  # that the split names (absolute), without its lists
        self.unlabeled = UnlabeledImages(found.images)
        self._missing = missing  # see `SplitImages.missing`

    @property
    def candidates(self) -> CandidateFiles:
        """The label files that no image of the split uses."""
        return self.found.candidates

    @cached_property
    def expected(self) -> dict[str, list[str]]:
        """The `expected_folders`, each with the folders of the images whose label files may be there."""
        return {folder: [group.folder for group in groups] for folder, groups in expected_folders(self.found).items()}

    @cached_property
    def nearby(self) -> dict[str, list[str]]:
        """The other `nearby_folders`, each with the folders of the images whose label files may be there."""
        folders: dict[str, list[str]] = {}
        for nearby in nearby_folders(self.folders, self.candidates):
            folder = self.candidates.folders.first_name(nearby.label_folder)
            if folder not in self.expected:
                folders.setdefault(folder, []).extend(nearby.image_folders)
        return folders

    @cached_property
    def usual(self) -> frozenset[str]:
        """The usual label folders of the images."""
        first_name = self.candidates.folders.first_name
        return frozenset(first_name(group.usual_label_folder) for group in self.found.groups)

    @cached_property
    def own_folders(self) -> frozenset[str]:
        """The label folders of the images and of the folders that the split names, as far as they are searched."""
        first_name = self.candidates.folders.first_name
        named = [folder for entry in self.folders for folder in self.candidates.label_folders(entry)]
        return frozenset({*self.expected, *self.nearby.keys() & set(map(first_name, named))})

    @cached_property
    def image_of_name(self) -> dict[str, ListedImage]:
        """The images of the split by each of their names."""
        return {file.name: image for image in self.found.images for file in image.files}

    @cached_property
    def labeled_of_stem(self) -> dict[str, ListedImage]:
        """By loose stem, an image with a label file. It may be left out because of that file."""
        images = [image for image in self.found.images if image.status is not ImageStatus.BACKGROUND]
        return {loose_stem(image.file.base_name): image for image in images}

    @property
    def names(self) -> set[str]:
        """All names of the images, and those of missing images in lists."""
        return {*self.image_of_name, *self._missing}

    def image_folders(self, label_folder: str) -> list[str]:
        """Returns the folders of the images whose label files may be in a folder."""
        return self.expected.get(label_folder) or self.nearby.get(label_folder, [])

    @cached_property
    def missing_images(self) -> dict[str, dict[str, str]]:
        """The names in lists of missing images, by each folder that may contain their label files, and by their loose
        stems and loose names."""
        names_of_folder: dict[str, dict[str, str]] = {}  # by image folder
        for name in self._missing:
            folder, _, base_name = name.rpartition("/")
            names_of_folder.setdefault(folder, {}).update({loose(base_name): name, loose_stem(base_name): name})
        by_label_folder: dict[str, dict[str, str]] = {}
        for folder, names in names_of_folder.items():
            for label_folder in self.candidates.label_folders(path_of(folder, self.candidates.folders.root)):
                by_label_folder.setdefault(self.candidates.folders.first_name(label_folder), {}).update(names)
        return by_label_folder

    def missing_image(self, label_folder: str, stems: Iterable[str]) -> str:
        """Returns the name in a list of a missing image that has one of the loose ``stems`` and may have a label file
        in a folder, or ""."""
        names = self.missing_images.get(label_folder, {})
        return next((names[stem] for stem in stems if stem in names), "")

    def images_named(self, names: Sequence[str], status: ImageStatus) -> list[ListedImage]:
        """Returns the images of a status among ``names``. Links may give one image several of these names."""
        images = [self.image_of_name[name] for name in names if name in self.image_of_name]
        return [image for image in {image.name: image for image in images}.values() if image.status is status]
