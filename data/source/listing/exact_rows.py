"""Resolves rows of a list that are exact: paths relative to the data set's folder or the list's, or absolute ones."""

from __future__ import annotations

import os

from data.image_io.file_kinds import is_image
from data.source.listing.list_rows import ImageList, Row


class ExactRows:
    """Resolves the rows of a list as written or, if there is no such image, with Windows separators. Rows without a
    suffix name images by their stems, first those in VOC's JPEGImages, of which previews and masks may have the stems.

    Rows that begin with ``./`` are relative to the list's folder or else to the data set's folder; other rows are
    relative to the data set's folder or else to the list's folder.
    """

    def __init__(self, image_list: ImageList) -> None:
        self._folders = image_list.folders
        self._suffixes = image_list.suffixes
        self._root = str(image_list.root)
        self._list_folder = str(image_list.file.parent)
        self._voc_image_folder = str(image_list.voc_image_folder)

    def images(self, row: Row) -> list[str]:
        """Returns the absolute path of the image that a row names, or those of several that have the stem."""
        images = self._images_at(row.text)
        if not images and "\\" in row.text:
            images = self._images_at(row.text.replace("\\", "/"))
        return images

    def _images_at(self, path: str) -> list[str]:
        bases = [self._root, self._list_folder]
        if path.startswith("./"):
            bases.reverse()
        has_suffix = is_image(path, self._suffixes)
        if not has_suffix:
            bases.insert(0, self._voc_image_folder)
        paths = [self._folders.normal(os.path.join(base, path)) for base in bases]
        if not has_suffix:
            of_stem = (self._folders.files_of_stem(path, self._suffixes) for path in paths)
            return next(filter(None, of_stem), [])
        for path in paths:
            if self._folders.exists(path):
                return [path]
        for path in paths:
            alike = self._folders.case_insensitive_match(path)
            if alike is not None:
                return [alike]
        return []
