"""Opens the index of a split in files, from its cache file or by a scan."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path

from data.index.cache_file import IndexCache, fingerprint_of
from data.index.index import DatasetIndex, Scan
from data.index.index_settings import IndexSettings
from data.index.loaded import LoadedSplit, refuse, source_name
from data.index.scan import scan_split
from data.labels.findings import ORPHAN, UNREAD_LABELS
from data.labels.yolo import label_folders
from data.source.dataset_spec import DatasetSpec, class_names, what_exists
from data.source.files import Listing, list_split
from data.source.walk import walk
from utils.files.folders import cache_folder
from utils.files.paths import path_of, relative_name
from utils.strings import counted

_MAX_FOLDERS = 1000  # folders that are searched for label files if there are none where they are expected
# Advice about files in places where no labels are read, by suffix, and whether they have the stems of images.
_ELSEWHERE = {
    (".txt", True): "{remedy}",
    (".xml", True): "if they are Pascal VOC's, add 'annotations: {entry}' to the YAML",
    (".json", True): "one JSON per image is not supported; convert them to YOLO txt or to one COCO JSON",
    (".json", False): "if it is COCO's, add 'annotations: {entry}' to the YAML",
    (".csv", False): "CSV is not supported; export the data set as YOLO txt, COCO JSON or Pascal VOC",
}


def from_files(spec: DatasetSpec, split: str, settings: IndexSettings, *, is_check: bool) -> LoadedSplit:
    """Opens the index of a split from its cache file, or scans the split and writes that file. For a check all images
    are decoded, and no cache is read or written. Raises UserError as `list_split` and `scan_split`, and if no image has
    a label file."""
    listing = list_split(spec.as_labeled(), split)
    labeled = [file.name for file in listing.labels if file.stamp is not None]
    if not labeled:
        refuse(_no_label_file(listing, spec, split), is_check=is_check)  # before the images are read
    if spec.classes or spec.class_of:
        settings = replace(settings, single_cls=False)  # classes are chosen first; a scan that merges checks none
    opened = _open_or_scan(listing, spec, split, settings, is_check=is_check)
    return LoadedSplit(
        replace(opened.index, pixels=spec.pixels),
        note=" (cached)" if opened.is_cached else "",
        scans=opened.scans,
        listing=listing,
        first_label=labeled[0] if labeled else listing.labels[0].name,
        report_path=opened.cache.report_path,
        is_single_cls=settings.single_cls,
    )


@dataclass(frozen=True, slots=True)
class _OpenedIndex:
    """Holds an index, and where it comes from."""

    index: DatasetIndex  # all usable images, with the classes of the labels
    cache: IndexCache
    is_cached: bool = False  # whether the index is from ``cache``
    scans: tuple[Scan, ...] = ()  # for a check: what has been scanned


def _open_or_scan(
    listing: Listing, spec: DatasetSpec, split: str, settings: IndexSettings, *, is_check: bool
) -> _OpenedIndex:
    """Opens the index of a listed split, or scans the split."""
    labeled = spec.as_labeled()
    fingerprint = fingerprint_of(labeled, split, listing, single_cls=settings.single_cls)
    source = source_name(spec, split, settings.single_cls)
    cache = IndexCache.find(cache_folder(settings.cache_dir), source, fingerprint)
    if not is_check:
        cached = cache.open(class_names(labeled, settings.single_cls), spec.root)
        if cached is not None:
            return _OpenedIndex(cached, cache, is_cached=True)
    scan = scan_split(labeled, split, listing, settings, decode_all=is_check)
    index = replace(scan.index, fingerprint=fingerprint)
    if is_check:
        return _OpenedIndex(index, cache, scans=(replace(scan, spec=spec, index=index),))
    cache.write(index)
    return _OpenedIndex(index, cache)


def _no_label_file(listing: Listing, spec: DatasetSpec, split: str) -> str:
    """Returns the message about a split in which no image has a label file."""
    images = counted(len(listing.images), "image")
    expected = path_of(listing.labels[0].name, spec.root)
    message = f"{spec.source}: '{split}' has {images} and no label file; the first was expected at {expected}"
    return message + (_orphans(listing) or _labels_elsewhere(listing, spec, split))


def _labels_elsewhere(listing: Listing, spec: DatasetSpec, split: str) -> str:
    """Returns a hint about what exists instead of the label files of a split, and what to do with it; else ""."""
    image, label = (Path(path_of(file.name, spec.root)) for file in (listing.images[0], listing.labels[0]))
    stems = {os.path.splitext(os.path.basename(file.name))[0] for file in listing.images}
    folders = [image.parent, label.parent]
    if spec.root in image.parents:
        above = dict.fromkeys((image.parent.parent, spec.root))
        folders += [*above, *(path for folder in above for path in sorted(folder.glob("[!.]*/")))]
        folders += (Path(visit.path) for visit in itertools.islice(walk(spec.root), _MAX_FOLDERS))
    for folder in folders if spec.splits[split].annotations is None else ():
        files = [path for path in sorted(folder.glob("[!.]*.*")) if path.is_file()]
        for (suffix, has_image_stem), advice in _ELSEWHERE.items():
            matches = [path for path in files if path.suffix.lower() == suffix]
            if has_image_stem:
                matches = [path for path in matches if path.stem in stems]
            if matches:
                first = matches[0]
                place = f"{folder} has {counted(len(matches), f'{suffix} file')}" if has_image_stem else str(first)
                entry = f"{{{split}: {relative_name(folder if has_image_stem else first, spec.root)}}}"
                return f"; {place}: {advice.format(remedy=_remedy(first, image, spec.root), entry=entry)}"
    for finding in listing.findings:
        if finding.kind == UNREAD_LABELS:
            return f"; {finding.where} {finding.text}"
    return what_exists(label)


def _remedy(text_file: Path, image: Path, root: Path) -> str:
    """Returns what to do with .txt files that have the names of images, such as ``text_file`` with that of
    ``image``."""
    places = [Path(folder) for folder in label_folders(str(image.parent))]
    if text_file.parent in places:
        return f"they have no row of YOLO txt (first: {text_file.name})"
    target = next((place for place in places if place.is_relative_to(root)), places[0])
    return f"move them to {target}"


def _orphans(listing: Listing) -> str:
    """Returns a hint about label files without an image; "" if there are none."""
    orphans = [finding for finding in listing.findings if finding.kind == ORPHAN]
    if not orphans:
        return ""
    return f"; {counted(len(orphans), 'label file')} without an image, first {orphans[0].where}: {orphans[0].text}"
