"""Reads the labels of a split: a file for each image, or one file for all, whose entries are matched by name.

Rule D5: an entry of a file fits the image whose path ends with its file name, in whole folders:

    images: train/a/7.png, val/a/7.png, val/8.png
    "8.png", "val/8.png", "VAL/8.PNG"   val/8.png
    "train/a/7.png"                     train/a/7.png
    "7.png", "a/7.png"                  ambiguous
    "test/8.png", "9.png"               not found

The name is compared as written, then percent-decoded (``x%20y.png``), then both again without regard to case and
Unicode composition. The first of these four that fits any image counts, if it fits only one. `ANY_SUFFIX` fits any.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from data.findings import NO_LABEL, ORPHAN, UNDECLARED, Finding
from data.folders import Folders
from data.formats.label_format import ANY_SUFFIX, MAX_BYTES, Classes, Entry, Format, LabelFileError
from data.listing import UNREADABLE, Listing, images_beside
from utils.errors import UserError, one_line, os_reason
from utils.files.paths import casefold_nfc, path_of
from utils.files.safe_io import read_regular
from utils.machine.limits import explain_limit
from utils.strings import counted

NOT_FOUND = -1
AMBIGUOUS = -2
TAKEN = -3
_REASONS = {
    NOT_FOUND: "is the name of no image",
    AMBIGUOUS: "fits several images",
    TAKEN: "fits an image that has another entry",
}


class Labels:
    """The labels of a split's images. Images that a file for all images does not name are left out."""

    def __init__(self, listing: Listing, names: Sequence[str] | None) -> None:
        """``names``: see `Classes`. Raises UserError if a file for all images is unusable, or names none of them."""
        self.format = listing.label_format
        self.images = listing.images
        self.image_ids: list[int | str] | None = None  # None if the format has none
        self.findings: list[Finding] = []  # about labels that belong to none of ``images``
        self.classes = Classes(names)
        self._listing = listing
        self._stamps = listing.label_stamps.tolist()
        self._entries: list[Entry] | None = None  # one for each of ``images``
        if not self.format.is_per_image:
            self._read_shared_file(listing)

    def read(self, i: int) -> Entry | None:
        """Reads the labels of ``images[i]``, None without a label file. Raises LabelFileError if it is unusable."""
        if self._entries is not None:
            return self._entries[i]
        if self._stamps[i][0] < 0:
            return None
        if self._stamps[i] == [*UNREADABLE]:  # a staged copy may still have an older file there
            raise LabelFileError("not a file that can be read")
        path = path_of(self._listing.labels[i], self._listing.root)
        try:
            data = read_regular(path, max_bytes=MAX_BYTES)
        except OSError as error:
            if explain_limit(error):  # a failure of the machine; the file itself may be correct
                error.filename = path
                raise
            raise LabelFileError(f"cannot be read ({error.strerror})") from None
        (entry,) = self.format.read(data, self.classes)
        return entry

    def where(self, i: int, row_number: int = -1) -> str:
        """Returns, for the report, the label file of ``images[i]``, with the location of a row that `read` returned,
        unless it is -1."""
        if self._entries is None:
            name = self._listing.labels[i]
            return name if row_number < 0 else f"{name}:{row_number}"
        name = self._listing.labels[0]
        if row_number < 0:
            return f"{name}: {_shown(self._entries[i].image)}"
        return f"{name}: annotations[{row_number}]" if self.classes.id_of_category else f"{name}:{row_number}"

    def _read_shared_file(self, listing: Listing) -> None:
        file = listing.labels[0]
        entries = read_label_file(Path(path_of(file, listing.root)), self.format, self.classes)
        # Absolute paths in the data set's folder become relative to it.
        names = [entry.image.removeprefix(f"{listing.named_root}/") for entry in entries]
        images = listing.shared_images or listing.images  # of all splits that name it, so that each has the same answer
        image_of_entry = match_entries(names, images)
        entry_of: dict[str, Entry] = {}
        # Of several entries of an image, the first one with an object counts: without any it would be a background.
        for number in sorted(range(len(entries)), key=lambda number: not entries[number].rows):
            image = image_of_entry[number]
            if image >= 0 and entry_of.setdefault(images[image], entries[number]) is not entries[number]:
                image_of_entry[number] = TAKEN
        self.images = [name for name in listing.images if name in entry_of]
        if not self.images:
            first = f" (first: {_shown(entries[0].image)})" if entries else ""
            raise UserError(
                f"{file}: none of its {counted(len(entries), 'entry')}{first} fits one of the split's "
                f"{counted(len(listing.images), 'image')} (first: {listing.images[0]}); check 'annotations' and the "
                "file names"
            )
        self._entries = [entry_of[name] for name in self.images]
        if self.classes.id_of_category:
            self.image_ids = [image_id for entry in self._entries if (image_id := entry.image_id) is not None]
        self.findings = _findings_of_unused(entries, names, image_of_entry, listing)
        self.findings += [
            Finding(NO_LABEL, f"not in {file}, left out", name) for name in listing.images if name not in entry_of
        ]


def class_names_in(paths: Sequence[Path], label_format: Format) -> list[str]:
    """Returns the class names in files for all images, or in folders of label files: of COCO, those of the first file
    in the order of their ids, else those of all objects, sorted. Raises UserError for an unusable file for all images;
    the scan reports the others."""
    classes = Classes(None)
    for path in dict.fromkeys(paths):
        if label_format.class_names is not None:
            with _user_errors(path):
                return list(label_format.class_names(read_regular(path)))
        if not label_format.is_per_image:
            read_label_file(path, label_format, classes)
            continue
        folders = Folders(path)
        for folder in folders.walk(str(path)):
            for name, entry in folders.entries(folder).items():
                if name.lower().endswith(label_format.suffix):
                    with contextlib.suppress(LabelFileError, OSError):
                        list(label_format.read(read_regular(entry.path, MAX_BYTES), classes))
    return sorted(classes.seen)


def read_label_file(path: Path, label_format: Format, classes: Classes) -> list[Entry]:
    """Reads a file for all images. Raises UserError if it is unusable."""
    with _user_errors(path):
        return list(label_format.read(read_regular(path), classes))


@contextlib.contextmanager
def _user_errors(path: Path) -> Iterator[None]:
    """Raises UserError for a label file that cannot be used."""
    try:
        yield
    except LabelFileError as error:
        line = "" if error.line < 0 else f":{error.line}"
        raise UserError(f"{path}{line}: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None


def _findings_of_unused(
    entries: Sequence[Entry], names: Sequence[str], image_of_entry: Sequence[int], listing: Listing
) -> list[Finding]:
    """Returns findings about the entries with an object that are of no image in ``listing``. ``names``: as compared;
    ``image_of_entry``: as `match_entries` returns it, or `TAKEN`."""
    file = listing.labels[0]
    unused = [number for number, image in enumerate(image_of_entry) if image < 0 and entries[number].rows]
    others = [0] * len(unused)  # images of no split
    original = Path(listing.named_root)  # a copy lacks the images of no split
    if unused and not listing.lacks_split and original.is_dir():
        beside = images_beside(listing.shared_images or listing.images, Folders(original))
        others = match_entries([names[number] for number in unused], sorted(beside))
    undeclared: list[Entry] = []
    findings: list[Finding] = []
    for number, other in zip(unused, others):
        entry = entries[number]
        image = image_of_entry[number]
        if image == NOT_FOUND and other >= 0:
            undeclared.append(entry)
            continue
        reason = _REASONS[image]
        if image == NOT_FOUND and other == AMBIGUOUS:
            reason = "fits several images of no split"
        finding = Finding(ORPHAN, f"{_shown(entry.image)} {reason}", file, number=len(entry.rows))
        findings.append(finding._replace(lost_images=int(image != TAKEN), lost_objects=len(entry.rows)))
    if undeclared:
        num_objects = sum(len(entry.rows) for entry in undeclared)
        count = f"{counted(len(undeclared), 'entry')} with {counted(num_objects, 'object')}"
        text = f"{count} (first: {_shown(undeclared[0].image)})"
        findings.append(Finding(UNDECLARED, text, file, number=num_objects))
    return findings


def match_entries(file_names: Sequence[str], images: Sequence[str]) -> list[int]:
    """Returns the image of each file name: its position in ``images``, `NOT_FOUND` or `AMBIGUOUS`.

    ``images``: paths with ``/``. In file names, ``\\`` is also a separator, and ``.`` and ``..`` are left out.
    """

    @functools.cache
    def image_of_end(num_parts: int, is_folded: bool, has_suffix: bool) -> dict[str, int]:
        """Returns the image, or `AMBIGUOUS`, of the last ``num_parts`` of each path."""
        table: dict[str, int] = {}
        for number, image in enumerate(images):
            parts = (image if has_suffix else os.path.splitext(image)[0]).rsplit("/", num_parts)
            if len(parts) >= num_parts:
                end = "/".join(parts[-num_parts:])
                end = casefold_nfc(end) if is_folded else end
                table[end] = AMBIGUOUS if end in table else number
        return table

    def match(file_name: str) -> int:
        name = file_name.removesuffix(ANY_SUFFIX)
        for is_folded in (False, True):
            for written in dict.fromkeys((name, unquote(name))):
                parts = [part for part in written.replace("\\", "/").split("/") if part not in ("", ".", "..")]
                end = casefold_nfc("/".join(parts)) if is_folded else "/".join(parts)
                table = image_of_end(len(parts), is_folded, name == file_name) if parts else {}
                if end in table:
                    return table[end]
        return NOT_FOUND

    return [match(name) for name in file_names]


def _shown(name: str) -> str:
    return one_line(name)[:200]
