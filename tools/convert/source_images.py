"""Finds the images of an annotation tool's export by their names in the annotations."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from data.images.kinds import IMAGE_SUFFIXES, unread_reason
from tools.convert.image_names import ImageNames, readings_of
from utils.errors import UserError, one_line
from utils.files.paths import casefold_nfc as loose


class SourceImages:
    """The image files below the folder of an export."""

    def __init__(self, root: Path) -> None:
        self.paths = list(files_below(root, IMAGE_SUFFIXES))
        self.root = root
        self._names = ImageNames.of_single_names(path.relative_to(root).as_posix() for path in self.paths)
        self._stems = {loose(path.stem) for path in self.paths}

    def find(self, name: str, location: str, near: Path, split: str = "") -> Path:
        """Returns the image ``name``; if there are several, the one in a folder called ``split``, or nearest to
        ``near``.

        ``name`` is a path with or without suffix. Raises UserError, whose message begins with ``location``, unless
        exactly one image matches.
        """
        matches = [self.paths[i] for i in self._names.find(name)]
        if len(matches) > 1:
            in_split = [path for path in matches if split in path.parts]  # CVAT's names do not include its folder
            matches = _nearest(in_split or matches, near)
        if len(matches) != 1:
            reason = f"{len(matches)} files below {self.root} fit" if matches else self._not_found(name)
            image = f"image {one_line(name)[:200]!r}"
            prefix = location if location.endswith(image) else f"{location}: the {image}"
            raise UserError(f"{prefix}: {reason}")
        return matches[0]

    def find_of_file(self, file: Path) -> Path:
        """Returns the image after which an annotation file is named, as `find` does."""
        return self.find(file.stem, str(file), near=file)

    def _not_found(self, name: str) -> str:
        """Returns the reason why an image is not found: that of its file, if there is one, else with a similar name or
        an example."""
        unread = self._unread_file(name)
        if unread:
            return unread
        reason = f"not found below {self.root}"
        other = self._names.same_stem(name)
        if other:
            return f"{reason}, but {other} is there"
        if self.paths:
            return f"{reason}, where images have names such as {self.paths[0].relative_to(self.root)}"
        return reason

    def _unread_file(self, name: str) -> str:
        """Returns why a file called ``name`` is not among the images; "" if there is no such file."""
        for parts in readings_of(name):
            for path in sorted(self.root.rglob(glob.escape(parts[-1]))):
                reason = unread_reason(path)
                if not reason and _is_hidden(path, self.root):
                    reason = "hidden; rename it, or its folder, without the leading dot"
                if reason:
                    return f"{path}: {reason}"
        return ""

    def has_stem(self, stem: str) -> bool:
        """Returns whether there is an image with this stem."""
        return loose(stem) in self._stems


def _nearest(paths: Sequence[Path], near: Path) -> list[Path]:
    """Returns those of ``paths`` that share the most folders with ``near``."""
    num_shared_folders = [len(Path(os.path.commonpath([path, near])).parts) for path in paths]
    most = max(num_shared_folders)
    return [path for path, num_shared in zip(paths, num_shared_folders) if num_shared == most]


def files_below(folder: Path, suffixes: Iterable[str]) -> Iterator[Path]:
    """Yields the files with one of ``suffixes`` (lower case), sorted, except hidden ones and those in hidden
    folders."""
    wanted = set(suffixes)
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in wanted and not _is_hidden(path, folder) and path.is_file():
            yield path


def _is_hidden(path: Path, folder: Path) -> bool:
    """Returns whether a path below ``folder``, or a folder between them, is hidden."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
