"""Words the findings about label files that no image uses. Each text follows the name of the file."""

from __future__ import annotations

from pathlib import Path

from data.source.diagnosis.split_context import SplitContext
from data.source.listing.listing import ListedImage
from utils.files.paths import relative_name


def uses_another_file(image: ListedImage) -> str:
    """``image``: that of the file."""
    return f"{image.name} uses {image.label.name} instead; remove one of the two"


def is_unsupported(image: str) -> str:
    """``image``: name of that of the file."""
    return f"{image} is of an unsupported kind"


def is_missing(image: str) -> str:
    """``image``: name of that of the file, in a list."""
    return f"{image}, which a list names, is missing"


def may_label(image: ListedImage) -> str:
    """``image``: an unlabeled one, which is left out."""
    return f"belongs to no image; if it labels {image.name}, which is left out, rename it to {image.label.name}"


def is_named_like(image: ListedImage) -> str:
    """``image``: a labeled one."""
    return f"is named like {image.name}, which has labels elsewhere; remove one of the two"


def may_be_of_missing(entry: Path) -> str:
    """``entry``: a folder or list of a split, which is empty or missing."""
    place = "listed in" if entry.suffix.lower() == ".txt" else "in"
    return f"its image may be {place} {entry}, which is empty or missing"


def belongs_to_no_image(background: ListedImage | None) -> str:
    """``background``: one of the file's name in another split, if there is one."""
    remedy = "rename it like its image, or remove it"
    if background is not None:
        rename = f"if it labels {background.name}, a background of another split, rename it to {background.label.name}"
        remedy = f"{rename}; else {remedy}"
    return f"belongs to no image; {remedy}"


def hint_at_unnamed_split(folder: str, context: SplitContext) -> str:
    """Returns a hint for the files of a folder of the annotations that belongs to no split: it may have the labels of a
    split that the YAML does not name, which must be neither renamed nor removed. Returns "" for other folders."""
    annotations = context.own.candidates.annotations
    is_of_a_split = any(folder in labels.own_folders for labels in context.splits)
    if annotations is None or folder == str(annotations) or is_of_a_split:
        return ""
    name = relative_name(folder, context.own.candidates.folders.root)
    return f"; if {name} has the labels of another split, name this split in the YAML"
