"""Suggests, for messages, what exists in place of missing data: files with a similar name, or labels alone."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from data.images.kinds import IMAGE_SUFFIXES
from data.labels.formats import LABEL_FORMATS
from data.labels.label_format import first_bytes
from utils.errors import UserError, one_line
from utils.strings import counted, look_alike

_MAX_COMPARED_NAMES = 1000  # file names compared with a missing one
_MAX_SEARCHED_FILES = 10_000  # files below a folder searched for images
_MIN_SIMILARITY = 0.54  # smallest `difflib` ratio of similar names, such as "validate" and "val"


def missing_error(path: Path, root: Path, source: str, advice: str) -> UserError:
    """Returns the error about a missing file or folder, with a hint at what exists instead.

    Args:
        root: the data set's folder.
        source: YAML or folder that names ``path``.
        advice: what to do if nothing similar exists.
    """
    hint = labels_without_images(root) or moved_data_hint(path, root, Path(source))
    if not hint:
        hint = f"{nearby_paths_hint(path)}; {advice}"
    return UserError(f"{path}: not found (named by {source}){hint}")


def labels_without_images(root: Path) -> str:
    """Returns a hint that a folder has label files but no images, like an export of labels alone, or "" if it has no
    label file, any image, or too many files to search."""
    first = ""
    num_label_files = 0
    num_searched = 0
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in sorted(names):
            num_searched += 1
            path = os.path.join(folder, name)
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES or num_searched > _MAX_SEARCHED_FILES:
                return ""
            if _is_label_file(path):
                num_label_files += 1
                first = first or path
    if not num_label_files:
        return ""
    return (
        f"; {root} has {counted(num_label_files, 'label file')} (first: {os.path.relpath(first, root)}) but no "
        "images; export the images as well, or copy them there"
    )


def _is_label_file(path: str) -> bool:
    """Returns whether a file has the suffix of a label format and begins like that format."""
    suffix = os.path.splitext(path)[1].lower()
    formats = [label_format.files for label_format in LABEL_FORMATS if label_format.files.suffix == suffix]
    head = first_bytes(path) if formats else b""
    return any(files.is_labels(head) for files in formats)


def nearby_paths_hint(path: Path) -> str:
    """Returns a hint with a name similar to the first missing part of ``path``, else the folder's content, else ""."""
    parent = next((folder for folder in path.parents if folder.is_dir()), None)
    if parent is None:  # the working folder has been deleted, or a drive has been removed
        return ""
    missing = path.relative_to(parent).parts[0]
    if "*" in missing:
        return f"; patterns are not expanded: name the folder, {parent}"
    if "\\" in missing:
        return "; folders are separated by / here, not by \\"
    if one_line(missing) != missing:
        return f"; {missing!r} has a control character: in double quotes, YAML takes \\t for a tab; write / for \\"
    is_last = parent == path.parent
    suffix = path.suffix if is_last else ""
    names = _names_in(parent, suffix)
    for name in names:
        if look_alike(name, missing):
            return f"; {parent} has {name!a}, which looks the same as {missing!a}"
    name_of = {name.removesuffix(suffix).lower(): name for name in reversed(names[:_MAX_COMPARED_NAMES])}
    similar = difflib.get_close_matches(missing.removesuffix(suffix).lower(), name_of, n=1, cutoff=_MIN_SIMILARITY)
    if similar:
        return f"; '{parent / name_of[similar[0]]}' exists"
    if not is_last or not names:
        return ""
    shown = names if len(names) <= 5 else [*names[:5], "..."]
    location = "the working folder" if parent == Path() else str(parent)
    return f"; {location} has {', '.join(shown)}"


def _names_in(folder: Path, suffix: str) -> list[str]:
    """Returns the sorted names of a folder's entries with the suffix or, if ``suffix`` is empty, of its subfolders.
    Hidden entries are skipped. Returns an empty list if the folder cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        if suffix:
            return sorted(entry.name for entry in visible if entry.name.endswith(suffix))
        return sorted(entry.name for entry in visible if entry.is_dir())
    except OSError:
        return []


def moved_data_hint(path: Path, root: Path, yaml: Path) -> str:
    """Returns a hint that ``path``, missing because the folder ``root`` does not exist, is next to the YAML, as after
    moving the data set; else ""."""
    if root.exists() or not path.is_relative_to(root):
        return ""
    moved = yaml.absolute().parent / path.relative_to(root)
    return f"; {moved} exists: remove the key 'path' from the YAML" if moved.exists() else ""
