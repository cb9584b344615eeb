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
from data.labels.label_format import FilesPerImage, ImageFile, LabelFile, LabelFormat
from data.source.dataset_spec import WITHOUT_VAL, DatasetSpec, SplitSource, labels_without_images
from data.source.label_files import LabelSearch
from data.source.walk import Folders, Visit, query, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import path_of, relative_name
from utils.files.safe_io import read_text
from utils.logger import get_logger

_MAX_LIST_BYTES = 1 << 31
NO_FILE = "a pipe or device, not a file; left out"
_MAX_FOLDERS = 1000  # folders next to those of a split that are searched for images with the same labels
_MAX_TRIED_ROWS = 10  # rows that are tried of a list that was written for another folder


@dataclass(slots=True)
class Listing:
    """Holds the files of a split."""

    images: list[ImageFile]  # sorted by name
    labels: list[LabelFile]  # one per image, or one for all
    label_format: LabelFormat
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # image names in each .txt list, in order
    taken: dict[str, str] = field(default_factory=dict)  # see `FoundLabels`
    hidden: int = 0  # number of images left out because symbolic links show them under another name
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
    split_images = _find_images(spec, split, folders)
    label_format = _label_format(source, spec)
    if split in spec.originals:
        split_images.findings += spec.originals[split].findings
    if label_format.per_image is None:
        return _list_one_label_file(split_images, label_format, spec, split, folders)
    return _list_files_per_image(split_images, label_format, label_format.per_image, spec, split, folders)


@dataclass(slots=True)
class _SplitImages:
    """Collects the images of a split."""

    images: dict[str, ImageFile] = field(default_factory=dict)  # by name
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # see `Listing`
    views: dict[str, list[str]] = field(default_factory=dict)  # prefixes of the names in a folder, by its real path

    def sorted(self) -> list[ImageFile]:
        """Returns the images by name."""
        return [self.images[name] for name in sorted(self.images)]


def _list_one_label_file(
    split_images: _SplitImages, label_format: LabelFormat, spec: DatasetSpec, split: str, folders: Folders
) -> Listing:
    """Lists a split in a format with one label file for all images."""
    annotations = spec.split(split).annotations
    assert annotations is not None, "such a format is known by its annotations"
    images, _, hidden = _without_equal_views(split_images.sorted(), None, split_images.views, spec.root)
    if split in spec.originals:
        others = list(spec.originals[split].others)
    else:
        others = _images_of_other_splits(spec, split, folders)
        others += _images_beside(spec, split, {*split_images.images, *(image.name for image in others)}, folders)
    return Listing(
        images=images,
        labels=[LabelFile(relative_name(annotations, spec.root), stamp_of(annotations))],
        label_format=label_format,
        findings=split_images.findings,
        lists=split_images.lists,
        hidden=hidden,
        others=[image for image in others if image.name not in split_images.images],
    )


def _list_files_per_image(
    split_images: _SplitImages,
    label_format: LabelFormat,
    files: FilesPerImage,
    spec: DatasetSpec,
    split: str,
    folders: Folders,
) -> Listing:
    """Lists a split in a format with one label file per image. Raises UserError if none of these can be read."""
    all_images = split_images.sorted()
    found_labels = _label_search(all_images, files, spec, split, folders).run()
    findings = split_images.findings + found_labels.findings
    images, labels, hidden = _without_equal_views(all_images, found_labels.files, split_images.views, spec.root)
    pairs = [(image, file) for image, file in zip(images, labels) if file is not None]
    if not pairs:
        first = next(finding for finding in findings if finding.kind == BAD_LABEL)
        raise UserError(f"{spec.source}: no label file of '{split}' can be read; first {first.where}: {first.text}")
    return Listing(
        images=[image for image, _ in pairs],
        labels=[file for _, file in pairs],
        label_format=label_format,
        findings=findings,
        lists=split_images.lists,
        taken=found_labels.taken,
        hidden=hidden,
    )


def _find_images(spec: DatasetSpec, split: str, folders: Folders) -> _SplitImages:
    """Returns the images of a split, at least one. Raises UserError as `list_split`."""
    source = spec.split(split)
    suffixes = image_suffixes(spec.pixels)
    found = _SplitImages()
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
        for location, image in files:
            if image.name in found.images:
                message = f"{image.name} is there already; used once"
                found.findings.append(Finding(location, REPEATED_IMAGE, message))
            else:
                found.images[image.name] = image
    if not found.images:
        searched = ", ".join(map(str, source.images))
        unread = unread_files(found.findings)
        message = f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(suffixes))})"
        message += f"; {unread_summary(unread)}" if unread else labels_without_images(spec.root)
        if split == "val":
            message += f"; add some, or {WITHOUT_VAL}"
        raise UserError(message)
    return found


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """Returns ``spec`` without those of ``splits`` whose folders have no image or whose lists are empty, and logs
    them."""
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
    shards = [path for path in images if is_shard_path(path)]
    if shards and len(images) > 1:
        raise UserError(f"{spec.source}: '{split}': {shards[0]} must be the only entry; join data sets by their YAMLs")
    return shards[0] if shards else None


def unread_files(findings: Iterable[Finding]) -> list[str]:
    """Returns the files of unsupported kinds, as `unread_summary` takes them."""
    return [f"{finding.where}: {finding.text}" for finding in findings if finding.kind == UNSUPPORTED]


def _in_folder(
    folder: Path, folders: Folders, findings: list[Finding], suffixes: frozenset[str], views: dict[str, list[str]]
) -> Iterator[tuple[str, ImageFile]]:
    """Yields the images below a folder, with their names; adds to ``findings`` and ``views`` (see `_SplitImages`)."""
    for visit in walk(folder):
        prefix = folders.name_in(visit.path)
        key_base = relative_name(visit.path, folder)
        if prefix not in views.setdefault(visit.real, []):
            views[visit.real].append(prefix)
        if not visit.entries and _is_image(visit.path, suffixes):
            message = "an empty folder, not a file; left out"
            findings.append(Finding(prefix.rstrip("/") or ".", BAD_IMAGE, message, lost_images=1))
        stems = set()  # an array with the stem of an image is a copy that another program has cached
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
                reason = unread_image(entry.path)
                if reason:
                    findings.append(Finding(name, UNSUPPORTED, reason))
                continue
            stamp = stamp_of(entry)
            if stamp is None:
                findings.append(Finding(name, MISSING_IMAGE, "a link to nothing", lost_images=1))
                continue
            if not query(entry.is_file):
                findings.append(Finding(name, BAD_IMAGE, NO_FILE, lost_images=1))
                continue
            key = entry.name if key_base == "." else f"{key_base}/{entry.name}"
            yield name, ImageFile(name, key, stamp)
        folders.keep_besides(visit.path, besides)


def _in_list(
    file: Path, root: Path, folders: Folders, findings: list[Finding], suffixes: frozenset[str]
) -> Iterator[tuple[str, ImageFile]]:
    """Yields the images of a list, with their rows; adds to ``findings``.

    Rows are absolute paths, or relative ones: to the list's folder if they begin with ``./``, else to the data set's
    folder first, then to the list's. If no row is an image, `_elsewhere` finds out how to read them.
    """
    rows = [(line, row.strip()) for line, row in enumerate(read_text(file, most=_MAX_LIST_BYTES).splitlines(), 1)]
    rows = [(line, row) for line, row in rows if row]
    list_name = relative_name(file, root)

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
            existing = [path + ending for ending in endings if folders.exists(path + ending)]
            return existing[0] if len(existing) == 1 else None

    for line, row in rows:
        location = f"{list_name}:{line}"
        path = find(row)
        if path is None:
            if find == as_written and not _is_image(row, suffixes):
                finding = Finding(location, BAD_LISTED, f"{row[:100]!r} is not the path of an image", lost_images=1)
            else:
                finding = Finding(location, MISSING_IMAGE, f"{row} not found", lost_images=1)
            findings.append(finding)
            continue
        parent, name = os.path.split(path)
        if not query(folders.entries(parent)[name].is_file):
            findings.append(Finding(location, BAD_IMAGE, f"{row}: {NO_FILE}", lost_images=1))
        else:
            yield location, ImageFile(folders.name_in(parent) + name, name, folders.stamp(path))


def _elsewhere(rows: list[tuple[int, str]], file: Path, root: Path, suffixes: frozenset[str]) -> tuple[Path, int]:
    """Finds the images of a list whose rows name no image as written: they have Windows separators, are for another
    folder (CVAT's ``data/obj_train_data/a.jpg``, absolute paths of another machine), or lack suffixes (VOC's
    ``000012``).

    The first of ``rows`` (line number, row) that ends like the path of one image in the data set decides for all.
    Returns the folder of the images, and how many leading parts of rows to leave out. Raises UserError if no image
    fits, or several do.
    """
    names = {_parts(row)[-1] for _, row in rows[:_MAX_TRIED_ROWS]}
    voc_images = file.parent.parent.parent / "JPEGImages"  # next to ImageSets/Main; masks elsewhere have the same names
    base = voc_images if voc_images.is_dir() else root
    images = [
        os.path.join(folder, entry.name)
        for folder, _, entries in (walk(base) if base.is_dir() else ())
        for entry in entries
        if _is_image(entry.name, suffixes) and {entry.name, os.path.splitext(entry.name)[0]} & names
    ]
    for line, row in rows[:_MAX_TRIED_ROWS]:
        parts = _parts(row)
        for left_out in range(len(parts)):
            tail = os.sep + os.path.join(*parts[left_out:])
            fits = [p for p in images if (p if _is_image(row, suffixes) else os.path.splitext(p)[0]).endswith(tail)]
            if not fits:
                continue
            if len(fits) > 1:
                shown = sorted(fits) if len(fits) <= 2 else [*sorted(fits)[:2], "..."]
                raise UserError(
                    f"{file}:{line}: {len(fits)} images fit {row[:200]!r}: {', '.join(shown)}; name images by their "
                    f"paths relative to {root}"
                )
            folder = Path(fits[0]).parents[len(parts) - left_out - 1]
            message = "%s: no row names an image as it is written; rows are read as line %d: %s is %s"
            get_logger().info(message, file, line, row, relative_name(fits[0], root))
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
    annotations = source.annotations
    label_format = source.label_format
    if label_format is not None and (label_format.per_image or annotations is None or annotations.is_file()):
        return label_format
    assert annotations is not None, "without annotations, the format is YOLO txt"
    if not annotations.exists():
        raise spec.missing_error(annotations)
    raise UserError(f"{annotations}: neither a COCO .json nor a folder of VOC .xml (named by {spec.source})")


def _label_search(
    images: list[ImageFile], files: FilesPerImage, spec: DatasetSpec, split: str, folders: Folders
) -> LabelSearch:
    source = spec.split(split)
    return LabelSearch(
        images,
        files,
        root=spec.root,
        annotations=source.annotations,
        folders=folders,
        entries=[str(entry) for entry in source.images if entry.is_dir()],
        others=_OtherSplits(spec, split, {image.name for image in images}),
        taken=spec.originals[split].taken if split in spec.originals else None,
    )


class _OtherSplits:
    """Lists the other splits when asked; implements `data.source.label_files.OtherSplits`."""

    def __init__(self, spec: DatasetSpec, split: str, split_images: Collection[str]) -> None:
        self._spec = spec
        self._split = split
        self._split_images = split_images
        self.is_first = split == next(iter(spec.splits))

    @cached_property
    def stems(self) -> frozenset[str]:
        annotations = self._spec.split(self._split).annotations
        names = []
        for other, source in self._spec.splits.items():
            if other != self._split and _share_labels(annotations, source.annotations):
                names += [image.name for image in _images_of(self._spec, other, Folders(self._spec.root))]
        if annotations is not None:
            beside = _images_beside(self._spec, self._split, self._split_images, Folders(self._spec.root))
            names += [image.name for image in beside]
        return frozenset(loose(os.path.splitext(name.rpartition("/")[2])[0]) for name in names)

    @cached_property
    def folders_before(self) -> frozenset[str]:
        names: set[str] = set()
        for other in itertools.takewhile(lambda name: name != self._split, self._spec.splits):
            images = _images_of(self._spec, other, Folders(self._spec.root))
            names |= {image.name.rpartition("/")[0] for image in images}
        return frozenset(path_of(name, self._spec.root) for name in names)


def _share_labels(first: Path | None, second: Path | None) -> bool:
    """Returns whether the label files of two splits may be in the same folder. None: they are next to the images."""
    if first is None or second is None:
        return first is None and second is None
    return first.is_relative_to(second) or second.is_relative_to(first)


def _images_of(spec: DatasetSpec, split: str, folders: Folders) -> list[ImageFile]:
    """Returns the images of a split as far as they can be listed."""
    suffixes = image_suffixes(spec.pixels)
    images: list[ImageFile] = []
    for entry in spec.split(split).images:
        with contextlib.suppress(UserError):  # raised when that split is used
            if entry.is_dir():
                images += [image for _, image in _in_folder(entry, folders, [], suffixes, {})]
            elif entry.suffix.lower() == ".txt" and entry.is_file():
                images += [image for _, image in _in_list(entry, spec.root, folders, [], suffixes)]
    return images


def _images_of_other_splits(spec: DatasetSpec, split: str, folders: Folders) -> list[ImageFile]:
    """Returns the images of splits that have the same annotation file as ``split``, without stamps, sorted by name."""
    this = spec.split(split)
    others = [
        name
        for name, source in spec.splits.items()
        # A split of the same folders has no other images.
        if source.annotations == this.annotations and source.images != this.images
    ]
    by_name = {image.name: image._replace(stamp=None) for other in others for image in _images_of(spec, other, folders)}
    return [by_name[name] for name in sorted(by_name)]


def _images_beside(spec: DatasetSpec, split: str, known: Collection[str], folders: Folders) -> list[ImageFile]:
    """Returns images that no split names, next to the folders of ``split`` or to the images of its lists, without
    stamps and keys, sorted by name: its label file may have their labels, too. ``known``: names of images to leave
    out."""
    suffixes = image_suffixes(spec.pixels)
    split_entries = {entry for source in spec.splits.values() for entry in source.images}
    entries = spec.split(split).images
    places = {entry.parent for entry in entries if entry.is_dir()}
    if not all(entry.is_dir() for entry in entries):
        places |= {Path(path_of(folder, spec.root)) for folder in {name.rpartition("/")[0] for name in known}}
    names: set[str] = set()
    for place in sorted(places):
        if not place.is_relative_to(spec.root):
            continue
        place_entries = list(folders.entries(str(place)).values())
        inner = [Path(entry.path) for entry in place_entries if query(entry.is_dir)]
        below = itertools.chain.from_iterable(walk(path) for path in inner if path not in split_entries)
        visits = itertools.chain([Visit(str(place), "", place_entries)], below)
        for visit in itertools.islice(visits, _MAX_FOLDERS):
            prefix = folders.name_in(visit.path)
            names |= {prefix + entry.name for entry in visit.entries if _is_image(entry.name, suffixes)}
    return [ImageFile(name, "", None) for name in sorted(names.difference(known))]


def _without_equal_views(
    images: list[ImageFile], labels: list[LabelFile | None] | None, views: dict[str, list[str]], root: Path
) -> tuple[list[ImageFile], list[LabelFile | None], int]:
    """Leaves out images that symbolic links show under another name as well. Of the names of an image, those with label
    files of their own are kept, else the first.

    Args:
        labels: one per image; None: one file has those of all.
        views: see `_SplitImages`.

    Returns:
        The remaining images, their labels, and the number of images left out.
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
        first_with_file: dict[str, int] = {}  # by the real path of the label file
        for i in positions:
            file = labels[i] if labels else None
            if file is not None and file.stamp is not None:
                first_with_file.setdefault(os.path.realpath(path_of(file.name, root)), i)
        dropped |= set(positions) - set(first_with_file.values() or positions[:1])
    kept = [i for i in range(len(images)) if i not in dropped]
    kept_labels = [labels[i] for i in kept] if labels else []
    return [images[i] for i in kept], kept_labels, len(dropped)
