"""Names of the files and folders of results, of which no two are the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from utils.files.url import url_path

WRITABLE = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
MAX_FOLDER_BYTES = 200  # limit for the name of a class's folder: file systems allow 255
_FRAME = re.compile(r"(.+)_\d{6,}", re.DOTALL)  # the names that detect.py gives to the frames of videos


def written_suffix(path: str) -> str:
    """Returns the suffix of an image's drawing: the image's own, or .jpg for formats that cannot be written."""
    suffix = Path(url_path(path) if "://" in path else path).suffix
    return suffix if suffix.lower() in WRITABLE else ".jpg"


class UniqueStems:
    """Assigns a file stem to each source.

    This is the source's own stem, made safe (`safe_name`), with a number appended if two sources share a stem, or if an
    image has the name of a video's frame (STEM_000123). A stem that is numbered or made safe never equals another
    file's stem.
    """

    def __init__(self, files: Iterable[str | Path] = ()) -> None:
        """``files``: those that will be named."""
        self._own = {str(file): Path(file).stem for file in files}  # stems of the files, by path
        self._stems: dict[str, str] = {}  # stems by source
        # Case-folded, because some file systems ignore case:
        self._reserved = {stem.casefold() for stem in self._own.values() if safe_name(stem) == stem}
        self._taken: set[str] = set()
        self._videos: set[str] = set()  # stems of videos
        self._frame_prefixes: set[str] = set()  # STEM of images that are called STEM_000123

    def __call__(self, source: str, *, is_video: bool = False) -> str:
        """Returns the stem of ``source``, always the same one."""
        if source not in self._stems:
            own_stem = _base_of(source, is_video=is_video)
            base = safe_name(own_stem)
            numbered = (f"{base}-{number}" for number in itertools.count(2))
            for stem in itertools.chain([base], numbered):
                is_reserved = stem != own_stem and stem.casefold() in self._reserved
                if not is_reserved and self._take(stem, is_video=is_video):
                    break
            self._stems[source] = stem
        return self._stems[source]

    def renamed(self) -> dict[str, str]:
        """Returns the stems of the files that did not get their own, by path."""
        return {path: stem for path, stem in self._stems.items() if stem != self._own.get(path, stem)}

    def _take(self, stem: str, *, is_video: bool) -> bool:
        """Reserves a stem, unless another source may have the same file names. Returns True on success."""
        key = stem.casefold()
        frame = _FRAME.fullmatch(key)
        if is_video:
            is_free = key not in self._frame_prefixes
        else:
            is_free = frame is None or frame[1] not in self._videos
        if key in self._taken or not is_free:
            return False
        self._taken.add(key)
        if is_video:
            self._videos.add(key)
        elif frame is not None:
            self._frame_prefixes.add(frame[1])
        return True


def _base_of(source: str, *, is_video: bool) -> str:
    if source.isdigit():
        return f"webcam{source}"
    if "://" not in source:
        path = Path(source)
        if path.is_dir():  # a sequence of images; MOT Challenge calls its folders SEQUENCE/img1
            return path.parent.name if path.name == "img1" else path.name
        return path.stem
    name = Path(url_path(source)).stem
    if not name or is_video:
        name = source.split("://", 1)[1]
    return name[:100]


def safe_name(name: str) -> str:
    """Converts ``name`` to a file name without separators, control characters, and characters that some systems
    forbid."""
    return re.sub(r'[\x00-\x1f/\\:*?"<>|@]+', "_", name).strip(". ") or "_"


def class_folders(names: Mapping[int, str]) -> dict[int, str]:
    """Returns a folder name for each class: its name (`safe_name`), cut to `MAX_FOLDER_BYTES`, with a number appended
    if an earlier class has the same folder."""
    folders: dict[int, str] = {}
    taken: set[str] = set()  # case-folded, because some file systems ignore case
    for c, name in names.items():
        base = safe_name(name)
        encoded = base.encode(errors="ignore")
        if len(encoded) > MAX_FOLDER_BYTES:
            base = encoded[:MAX_FOLDER_BYTES].decode(errors="ignore")
        numbered = (f"{base}-{number}" for number in itertools.count(2))
        folder = next(name for name in itertools.chain([base], numbered) if name.casefold() not in taken)
        taken.add(folder.casefold())
        folders[c] = folder
    return folders
