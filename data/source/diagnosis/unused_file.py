"""Describes a label file that no image uses (`UnusedFile`): the images that it may label, and the splits to which it
may belong."""

from __future__ import annotations

from functools import cached_property

from data.labels.image_names import ImageNames, loose, readings_of
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import FolderOwner, SplitContext, SplitLabels
from data.source.listing.candidate_files import Candidate
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of

ImagesOfSplits = dict[SplitLabels, list[ListedImage]]


class UnusedFile:
    """A label file that no image uses. Its properties are computed on first use."""

    def __init__(self, file: Candidate, context: SplitContext) -> None:
        self.folder = file.folder
        self.context = context
        self.own = context.own  # the split that is read
        self._file = file

    @property
    def name(self) -> str:
        """The name of the file relative to the data set's folder, for messages."""
        return self.own.candidates.full_name(self._file)

    @property
    def num_objects(self) -> int:
        return self.own.candidates.num_objects(self._file)

    @cached_property
    def stem(self) -> str:
        """The loose stem of the file."""
        return loose_stem(self._file.name)

    @cached_property
    def stems_of_image(self) -> list[str]:
        """The loose stems and names that the image of the file may have, beginning with the stem of the file itself."""
        stems = [self.stem]
        for parts in readings_of(self._named_image):
            stems += [loose(parts[-1]), loose_stem(parts[-1])]
        return stems

    @cached_property
    def _named_image(self) -> str:
        """The image that the file names in its content, or ""."""
        named_image = self.own.candidates.label_format.named_image
        return "" if named_image is None else named_image(self._file.first_bytes())

    @cached_property
    def existing_images(self) -> list[str]:
        """The names of its images on the disk, whether or not a split has them, in folders whose label files may be in
        the file's. If the file names a folder, only images in that folder count."""
        folders = [folder for labels in self.context.splits for folder in labels.image_folders(self.folder)]
        names = self.context.images_on_disk.find(self.stems_of_image, list(dict.fromkeys(folders)))
        if len(names) <= 1 or not self._named_image:
            return names
        return [names[i] for i in ImageNames.of_single_names(names).find(self._named_image)] or names

    def existing_in(self, labels: SplitLabels, status: ImageStatus) -> list[ListedImage]:
        """Returns its `existing_images` that a split has with a status."""
        return labels.images_named(self.existing_images, status)

    @cached_property
    def owner(self) -> FolderOwner:
        """The owner of the file's folder."""
        return self.context.owner_of(self.folder)

    @cached_property
    def labeled_namesakes(self) -> list[ListedImage]:
        """The labeled images that the file is named like, if it is in a folder where no split expects label files: it
        may be another version of their labels."""
        if not self.owner.splits or self.context.is_expected(self.folder):
            return []
        return [
            labels.labeled_of_stem[self.stem] for labels in self.context.splits if self.stem in labels.labeled_of_stem
        ]

    @cached_property
    def is_of_image_outside(self) -> bool:
        """See `SplitContext.is_of_image_outside`."""
        return self.context.is_of_image_outside(self.folder, self.stems_of_image)

    @cached_property
    def similar_unlabeled(self) -> ImagesOfSplits:
        """By split, the unlabeled images of a similar name that the file may label. These are only images of the same
        name in splits to which the file's folder does not belong, and if a labeled image or one of no split has this
        name. Splits to which the folder does not belong are considered only if the name determines the split."""
        splits = self.context.splits if self.context.tells_split(self.stem) else self.owner.splits
        is_named_like_another = bool(self.labeled_namesakes) or self.is_of_image_outside
        similar: ImagesOfSplits = {}
        for labels in filter(self._is_searched_by, splits):
            only_same_name = is_named_like_another or labels not in self.owner.splits
            find = labels.unlabeled.named if only_same_name else labels.unlabeled.resembling
            similar[labels] = find(self.stem)
        return {labels: images for labels, images in similar.items() if images}

    @property
    def background_of_other_split(self) -> ListedImage | None:
        """An unlabeled image of the same name in a split to which the file's folder does not belong. If the name does
        not determine the split (`SplitContext.tells_split`), the image stays a background."""
        others = [labels for labels in self.context.splits if labels not in self.owner.splits]
        return next((image for labels in others for image in labels.unlabeled.named(self.stem)), None)

    def _is_searched_by(self, labels: SplitLabels) -> bool:
        """Returns whether a split searches the file's folder for labels of its images. Where it expects no label files,
        it does not search for those of a name that one of its labeled images has."""
        if self.folder in labels.expected:
            return True
        is_near = self.folder in labels.nearby or self.folder in self.context.named_label_folders
        return is_near and self.stem not in labels.labeled_of_stem

    def has_labels_of(self, image: ListedImage) -> bool:
        """Returns whether the file is a copy of an image's label file."""
        candidates = self.own.candidates
        return candidates.have_equal_labels(self._file.path, path_of(image.label.name, candidates.folders.root))
