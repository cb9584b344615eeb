"""Writes the images that annotation files contain to a folder."""

from __future__ import annotations

import re
from pathlib import Path

from data.images.kinds import IMAGE_SUFFIXES
from tools.convert.split_names import split_of_file
from utils.errors import UserError
from utils.files.safe_io import write_whole

# The first bytes of image files, by suffix.
_SIGNATURES = {
    ".jpg": rb"\xff\xd8\xff",
    ".png": rb"\x89PNG\r\n\x1a\n",
    ".webp": rb"RIFF.{4}WEBP",
    ".bmp": rb"BM.{4}\0{4}",
    ".tif": rb"II\*\0|MM\0\*",
    ".jp2": rb"\0{3}\x0cjP  ",
}


class ExtractedImages:
    """The images from annotation files, in a folder of their own."""

    def __init__(self, folder: Path, source: Path) -> None:
        """``source``: folder of the export."""
        self._folder = folder
        self._source = source
        self.num_unused = 0  # images without usable labels, which are not in the folder

    def write(self, content: bytes, name: str, file: Path, row: int) -> Path:
        """Writes an image that is stored in ``file``, and returns its path: in the folder of the split and, below it,
        the other folders of ``file``, because several folders may contain a file of one name. ``name``: name of the
        image in ``file``, or "". Raises UserError if the path exists, or the kind of the image is unknown."""
        kinds = (kind for kind, start in _SIGNATURES.items() if re.match(start, content, re.DOTALL))
        suffix = next(kinds, Path(name).suffix.lower())
        if suffix not in IMAGE_SUFFIXES:
            raise UserError(f"{file}: row {row}: not an image of a known kind")
        split = split_of_file(file, self._source) or "train"
        folders = [folder for folder in file.parent.relative_to(self._source).parts if folder != split]
        folder = self._folder.joinpath(split, *folders)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file.stem}-{row:06}{suffix}"
        if path.exists():  # x.parquet and x.PARQUET, or x.parquet and X.parquet on some disks, yield the same name
            raise UserError(f"{file}: row {row}: the images of another file would have the same names; rename one")
        write_whole(path, content)
        return path

    def remove(self, image: Path) -> None:
        """Removes an image without usable labels if it is in the folder."""
        if image.is_relative_to(self._folder):
            image.unlink()
            self.num_unused += 1
