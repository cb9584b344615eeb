"""Lists the files of a split with their sizes and modification times, which show whether the split has changed."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from data.image_io.decode import ARRAY_SUFFIX, IMAGE_SUFFIXES, image_suffixes, unread_image, unread_summary
from data.image_io.shards import is_shard_path
from data.labels.findings import BAD_IMAGE, BAD_LABEL, BAD_LISTED, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding
from data.labels.image_names import loose
from data.labels.label_format import ImageFile, LabelFile, LabelFormat
from data.source.dataset_spec import WITHOUT_VAL, DatasetSpec, SplitSource, labels_without_images
from data.source.label_files import LabelSearch
from data.source.walk import Folders, Visit, query, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import path_of, relative_name
from utils.files.safe_io import read_text
from utils.logger import get_logger

_MAX_LIST_BYTES = 1 << 31
NO_FILE = "a pipe or device, not a file; left out"
_MOST_FOLDERS = 1000  # next to those of a split, in which images of the same labels are looked for
_MOST_TRIED = 10  # rows of a list that was written for another folder


@dataclass(slots=True)
class Listing:
    """The files of a split."""

    images: list[ImageFile]  # sorted by name
    labels: list[LabelFile]  # one per image, or one for all
    label_format: LabelFormat
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # image names in each .txt list, in order
    taken: dict[str, str] = field(default_factory=dict)  # see `FoundLabels`
    hidden: int = 0  # images that are left out, since symbolic links show them under another name
    # Images of other splits with the same annotation file; with empty keys, others in the data set.
    others: list[ImageFile] = field(default_factory=list)


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Lists the files of a split.

    Raises UserError if the split, its folder, its annotations or any image is missing, or it joins data sets.
    """
    source = spec.split(split)
    if source.parts:
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    folders = Folders(spec.root)
    found = _find_images(spec, split, folders)
    findings = found.findings
    images = [found.images[name] for name in sorted(found.images)]
    label_format = _label_format(source, spec)
    original = spec.originals.get(split)
    if original:
        findings += original.findings
    if label_format.per_image is None:
        annotations = LabelFile(relative_name(source.annotations, spec.root), stamp_of(source.annotations))
        images, _, hidden = _without_equal_views(images, None, found.views, spec.root)
        if original:
            others = list(original.others)
        else:
            others = _images_of_other_splits(spec, split, folders)
            others += _images_beside(spec, split, {*found.images, *(image.name for image in others)}, folders)
        others = [image for image in others if image.name not in found.images]
        return Listing(images, [annotations], label_format, findings, found.lists, hidden=hidden, others=others)
    found_labels = _label_search(images, label_format, spec, split, folders).run()
    findings += found_labels.findings
    images, labels, hidden = _without_equal_views(images, found_labels.files, found.views, spec.root)
    kept = [i for i, file in enumerate(labels) if file is not None]
    if not kept:
        first = next(finding for finding in findings if finding.kind == BAD_LABEL)
        raise UserError(f"{spec.source}: no label file of '{split}' can be read; first {first.where}: {first.text}")
    return Listing(
        images=[images[i] for i in kept],
        labels=[labels[i] for i in kept],
        label_format=label_format,
        findings=findings,
        lists=found.lists,
        taken=found_labels.taken,
        hidden=hidden,
    )


@dataclass(slots=True)
class _FoundImages:
    images: dict[str, ImageFile] = field(default_factory=dict)  # by name
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # see `Listing`
    views: dict[str, list[str]] = field(default_factory=dict)  # what names in a folder begin with, by its real path


def _find_images(spec: DatasetSpec, split: str, folders: Folders) -> _FoundImages:
    """Returns the images of a split, at least one. Raises UserError as `list_split`."""
    source = spec.split(split)
    suffixes = image_suffixes(spec.pixels)
    found = _FoundImages()
    for entry in source.images:
        if is_shard_path(entry):
            raise UserError(f"{entry}: is in shards, which are neither listed nor copied; name a folder of images")
        if entry == Path(entry.anchor):
            raise UserError(f"{spec.source}: '{split}' is {entry}, the whole disk; name the folder of its images")
        files: Iterable[tuple[str, ImageFile]]
        if entry.is_dir():
            files = _in_folder(entry, folders, found.findings, suffixes, found.views)
        elif entry.suffix.lower() == ".txt" and entry.is_file():
            files = list(_in_list(entry, spec.root, folders, found.findings, suffixes))
            found.lists[entry] = [image.name for _, image in files]
        elif entry.exists():
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
        else:
            raise spec.missing_error(entry)
        for where, image in files:
            if image.name in found.images:
                found.findings.append(Finding(where, REPEATED_IMAGE, f"{image.name} is there already; used once"))
            else:
                found.images[image.name] = image
    if not found.images:
        searched, unread = ", ".join(map(str, source.images)), unread_files(found.findings)
        text = f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(suffixes))})"
        text += f"; {unread_summary(unread)}" if unread else labels_without_images(spec.root)
        raise UserError(text + (f"; add some, or {WITHOUT_VAL}" if split == "val" else ""))
    return found


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """``spec`` without those of ``splits`` that are missing, folders without any image, or empty lists; a line in the
    log tells of them."""
    suffixes = image_suffixes(spec.pixels)

    def has_images(entry: Path) -> bool:
        if entry.is_dir():
            return any(_is_image(each.name, suffixes) for visit in walk(entry) for each in visit.entries)
        if entry.suffix.lower() == ".txt" and entry.is_file():
            return bool(read_text(entry, most=_MAX_LIST_BYTES).strip())
        return entry.exists()

    kept = dict(spec.splits)
    for name in splits:
        images = kept[name].images if name in kept else ()
        if images and not any(map(has_images, images)):
            del kept[name]
            get_logger().info("%s: '%s' (%s) has no images and is left out", spec.source, name, images[0])
    return replace(spec, splits=kept)


def shards_of(spec: DatasetSpec, split: str) -> Path | None:
    """Returns the index of the shards of a split; None for a split in files. Raises UserError for a mixture."""
    images = spec.split(split).images
    found = [path for path in images if is_shard_path(path)]
    if found and len(images) > 1:
        raise UserError(f"{spec.source}: '{split}': {found[0]} must be the only entry; join data sets by their YAMLs")
    return found[0] if found else None


def unread_files(findings: Iterable[Finding]) -> list[str]:
    """Returns what `unread_summary` takes."""
    return [f"{finding.where}: {finding.text}" for finding in findings if finding.kind == UNSUPPORTED]


def _in_folder(
    folder: Path, folders: Folders, findings: list[Finding], suffixes: frozenset[str], views: dict[str, list[str]]
) -> Iterator[tuple[str, ImageFile]]:
    for visit in walk(folder):
        prefix, key_base = folders.name_in(visit.path), relative_name(visit.path, folder)
        if prefix not in views.setdefault(visit.real, []):
            views[visit.real].append(prefix)
        if not visit.entries and _is_image(visit.path, suffixes):
            text = "an empty folder, not a file; left out"
            findings.append(Finding(prefix.rstrip("/") or ".", BAD_IMAGE, text, lost_images=1))
        stems = set()  # of images next to which arrays are copies, which other programs cache
        if ARRAY_SUFFIX in suffixes:
            stems = {os.path.splitext(e.name)[0] for e in visit.entries if _is_image(e.name, IMAGE_SUFFIXES)}
        besides = []
        for entry in visit.entries:
            if query(entry.is_dir):
                continue
            name = prefix + entry.name
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ARRAY_SUFFIX and stem in stems:
                continue
            if suffix.lower() not in suffixes:
                besides.append(entry)
                if what := unread_image(entry.path):
                    findings.append(Finding(name, UNSUPPORTED, what))
                continue
            stamp = stamp_of(entry)
            if stamp is None or not query(entry.is_file):
                kind, text = (MISSING_IMAGE, "a link to nothing") if stamp is None else (BAD_IMAGE, NO_FILE)
                findings.append(Finding(name, kind, text, lost_images=1))
                continue
            key = entry.name if key_base == "." else f"{key_base}/{entry.name}"
            yield name, ImageFile(name, key, stamp)
        folders.keep_besides(visit.path, besides)


def _in_list(
    file: Path, root: Path, folders: Folders, findings: list[Finding], suffixes: frozenset[str]
) -> Iterator[tuple[str, ImageFile]]:
    """Rows are absolute paths, or relative ones: to the list's folder if they begin with ``./``, else to the data
    set's folder first. If none is an image, see `_elsewhere`."""
    rows = [(line, row.strip()) for line, row in enumerate(read_text(file, most=_MAX_LIST_BYTES).splitlines(), 1)]
    rows = [(line, row) for line, row in rows if row]
    here = relative_name(file, root)

    def as_written(row: str) -> str | None:
        if not _is_image(row, suffixes):
            return None
        bases = (file.parent, root) if row.startswith("./") else (root, file.parent)
        paths = [folders.normal(os.path.join(base, row)) for base in bases]
        return next(filter(folders.exists, paths), None) or next(filter(None, map(folders.alike, paths)), None)

    find = as_written
    if rows and not any(as_written(row) for _, row in rows):
        folder, left_out = _elsewhere(rows, file, root, suffixes)

        def find(row: str) -> str | None:
            path = os.path.join(folder, *_parts(row)[left_out:])
            endings = ("",) if _is_image(row, suffixes) else (*suffixes, *map(str.upper, suffixes))
            found = [path + ending for ending in endings if folders.exists(path + ending)]
            return found[0] if len(found) == 1 else None

    for line, row in rows:
        where, path = f"{here}:{line}", find(row)
        if path is None:
            kind, text = MISSING_IMAGE, f"{row} not found"
            if find == as_written and not _is_image(row, suffixes):
                kind, text = BAD_LISTED, f"{row[:100]!r} is not the path of an image"
            findings.append(Finding(where, kind, text, lost_images=1))
            continue
        parent, name = os.path.split(path)
        if not query(folders.entries(parent)[name].is_file):
            findings.append(Finding(where, BAD_IMAGE, f"{row}: {NO_FILE}", lost_images=1))
        else:
            yield where, ImageFile(folders.name_in(parent) + name, name, folders.stamp(path))


def _elsewhere(rows: list[tuple[int, str]], file: Path, root: Path, suffixes: frozenset[str]) -> tuple[Path, int]:
    """Where the images of a list are whose rows name none as written: with Windows separators, for another folder
    (``data/obj_train_data/a.jpg`` of CVAT, absolute paths of another machine), or without suffixes (VOC's ``000012``).

    The first of ``rows`` (line, text) that ends like the path of one image in the data set decides for all: returns the
    folder of the images, and how many first parts of rows to leave out. Raises UserError if none fits, or several do.
    """
    names = {_parts(row)[-1] for _, row in rows[:_MOST_TRIED]}
    of_voc = file.parent.parent.parent / "JPEGImages"  # next to ImageSets/Main; masks elsewhere have the same names
    base = of_voc if of_voc.is_dir() else root
    images = [
        os.path.join(folder, entry.name)
        for folder, _, entries in (walk(base) if base.is_dir() else ())
        for entry in entries
        if _is_image(entry.name, suffixes) and {entry.name, os.path.splitext(entry.name)[0]} & names
    ]
    for line, row in rows[:_MOST_TRIED]:
        parts = _parts(row)
        for left_out in range(len(parts)):
            tail = os.sep + os.path.join(*parts[left_out:])
            fits = [p for p in images if (p if _is_image(row, suffixes) else os.path.splitext(p)[0]).endswith(tail)]
            if not fits:
                continue
            if len(fits) > 1:
                raise UserError(
                    f"{file}:{line}: {len(fits)} images fit {row[:200]!r}: {', '.join(sorted(fits)[:2])}"
                    f"{', ...' * (len(fits) > 2)}; name images by their paths relative to {root}"
                )
            folder = Path(fits[0]).parents[len(parts) - left_out - 1]
            text = "%s: no row names an image as it is written; rows are read as line %d: %s is %s"
            get_logger().info(text, file, line, row, relative_name(fits[0], root))
            return folder, left_out
    line, row = rows[0]
    advice = labels_without_images(root) or f"; give paths of images relative to {root}"
    raise UserError(f"{file}:{line}: {row[:200]!r} is not an image, and neither is any other row{advice}")


def _is_image(name: str, suffixes: frozenset[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes


def _parts(row: str) -> list[str]:
    return [part for part in row.replace("\\", "/").split("/") if part not in ("", ".", "..")] or [row]


def _label_format(source: SplitSource, spec: DatasetSpec) -> LabelFormat:
    """Returns the format of the labels of a split. Raises UserError if its annotations are missing or of no format."""
    annotations, label_format = source.annotations, source.label_format
    if label_format is None or (label_format.per_image is None and not annotations.is_file()):
        if not annotations.exists():
            raise spec.missing_error(annotations)
        raise UserError(f"{annotations}: neither a COCO .json nor a folder of VOC .xml (named by {spec.source})")
    return label_format


def _label_search(
    images: list[ImageFile], label_format: LabelFormat, spec: DatasetSpec, split: str, folders: Folders
) -> LabelSearch:
    source = spec.split(split)
    return LabelSearch(
        images,
        label_format.per_image,
        root=spec.root,
        annotations=source.annotations,
        folders=folders,
        entries=[str(entry) for entry in source.images if entry.is_dir()],
        others=_OtherSplits(spec, split, {image.name for image in images}),
        taken=spec.originals[split].taken if split in spec.originals else None,
    )


class _OtherSplits:
    """See `data.source.label_files.OtherSplits`."""

    def __init__(self, spec: DatasetSpec, split: str, own: Collection[str]) -> None:
        self._spec = spec
        self._split = split
        self._own = own
        self.is_first = split == next(iter(spec.splits))

    @cached_property
    def stems(self) -> frozenset[str]:
        mine = self._spec.split(self._split).annotations
        names = []
        for other, source in self._spec.splits.items():
            theirs = source.annotations
            if other == self._split or (mine is None) != (theirs is None):
                continue
            if mine is None or theirs.is_relative_to(mine) or mine.is_relative_to(theirs):
                names += [image.name for image in _images_of(self._spec, other, Folders(self._spec.root))]
        if mine is not None:
            beside = _images_beside(self._spec, self._split, self._own, Folders(self._spec.root))
            names += [image.name for image in beside]
        return frozenset(loose(os.path.splitext(name.rpartition("/")[2])[0]) for name in names)

    @cached_property
    def folders_before(self) -> frozenset[str]:
        names: set[str] = set()
        for other in itertools.takewhile(lambda name: name != self._split, self._spec.splits):
            images = _images_of(self._spec, other, Folders(self._spec.root))
            names |= {image.name.rpartition("/")[0] for image in images}
        return frozenset(path_of(name, self._spec.root) for name in names)


def _images_of(spec: DatasetSpec, split: str, folders: Folders) -> list[ImageFile]:
    """Returns the images of a split as far as they can be listed."""
    suffixes = image_suffixes(spec.pixels)
    found: list[ImageFile] = []
    for entry in spec.split(split).images:
        with contextlib.suppress(UserError):  # raised when that split is used
            if entry.is_dir():
                found += [image for _, image in _in_folder(entry, folders, [], suffixes, {})]
            elif entry.suffix.lower() == ".txt" and entry.is_file():
                found += [image for _, image in _in_list(entry, spec.root, folders, [], suffixes)]
    return found


def _images_of_other_splits(spec: DatasetSpec, split: str, folders: Folders) -> list[ImageFile]:
    """Returns the images of splits that have the same annotation file as ``split``, without stamps, sorted by name."""
    mine = spec.split(split).annotations
    own = spec.split(split).images  # a split of the same folders has no other images
    others = [name for name, source in spec.splits.items() if source.annotations == mine and source.images != own]
    found = {image.name: image._replace(stamp=None) for other in others for image in _images_of(spec, other, folders)}
    return [found[name] for name in sorted(found)]


def _images_beside(spec: DatasetSpec, split: str, known: Collection[str], folders: Folders) -> list[ImageFile]:
    """Returns the images in the data set that no split names, next to the folders of ``split`` or to the images of its
    lists, without stamps and keys, sorted by name: the file of its labels may have theirs, too. ``known``: the names of
    images of the split, and of others that are not returned."""
    suffixes = image_suffixes(spec.pixels)
    of_splits = {entry for source in spec.splits.values() for entry in source.images}
    entries = spec.split(split).images
    places = {entry.parent for entry in entries if entry.is_dir()}
    if not all(entry.is_dir() for entry in entries):
        places |= {Path(path_of(folder, spec.root)) for folder in {name.rpartition("/")[0] for name in known}}
    found: set[str] = set()
    for place in sorted(places):
        if not place.is_relative_to(spec.root):
            continue
        here = list(folders.entries(str(place)).values())
        inner = [Path(entry.path) for entry in here if query(entry.is_dir)]
        below = itertools.chain.from_iterable(walk(path) for path in inner if path not in of_splits)
        visits = itertools.chain([Visit(str(place), "", here)], below)
        for visit in itertools.islice(visits, _MOST_FOLDERS):
            prefix = folders.name_in(visit.path)
            found |= {prefix + entry.name for entry in visit.entries if _is_image(entry.name, suffixes)}
    return [ImageFile(name, "", None) for name in sorted(found.difference(known))]


def _without_equal_views(
    images: list[ImageFile], labels: list[LabelFile | None] | None, views: dict[str, list[str]], root: Path
) -> tuple[list[ImageFile], list[LabelFile | None], int]:
    """Leaves out images that symbolic links show under another name, too. Of the names of an image, those with label
    files of their own are kept, else the first.

    Args:
        labels: one per image; None: one file has those of all.
        views: what the names of the images in a folder begin with, by the folder's real path.

    Returns the remaining images, their labels, and the number of the others.
    """
    real_of = {prefix: real for real, prefixes in views.items() if len(prefixes) > 1 for prefix in prefixes}
    if not real_of:
        return images, labels or [], 0
    names_of: dict[tuple[str, str], list[int]] = {}
    for i, image in enumerate(images):
        folder, _, name = image.name.rpartition("/")
        if real := real_of.get(f"{folder}/" if folder else ""):
            names_of.setdefault((real, name), []).append(i)
    dropped: set[int] = set()
    for positions in names_of.values():
        labeled = [i for i in positions if labels and labels[i] is not None and labels[i].stamp is not None]
        own = {os.path.realpath(path_of(labels[i].name, root)): i for i in reversed(labeled)}
        dropped |= set(positions) - set(own.values() or positions[:1])
    kept = [i for i in range(len(images)) if i not in dropped]
    return [images[i] for i in kept], [labels[i] for i in kept] if labels else [], len(dropped)
