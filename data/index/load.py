"""Opens the index of a split from its cache file, or scans and caches the split if it is new or has changed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.image_io.decode import unread_summary
from data.index.files import Listing, list_split, shards_of, unread_files
from data.index.folders import walk
from data.index.index import CACHE_VERSION, DatasetIndex, Scan, digest_of, index_of, open_cached, write_cache
from data.index.views import IndexSettings, as_used, joined
from data.labels.clean import PARSER_VERSION
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS
from data.labels.ledger import refusal, warning
from data.labels.report import ScanReport
from data.labels.yolo import label_folders
from data.spec.dataset_spec import IGNORED, DatasetSpec, class_names, what_exists
from utils.config.pixels import RGB8
from utils.errors import UserError
from utils.files.folders import cache_folder
from utils.files.paths import normal_path, path_of, relative_name
from utils.logger import get_logger
from utils.strings import counted, listed

_BACKGROUND = re.compile("_*back[-_ ]?ground_*", re.IGNORECASE)
_MOST_FOLDERS = 1000  # that are searched for label files if there are none where they are expected
MAX_UNLABELED = 0.1  # of the images, without a label file; COCO has 0.9 %
# What to do with files that are not where labels are read: with the images' stems (True), and others.
_ELSEWHERE = {
    (".txt", True): "{remedy}",
    (".xml", True): "if they are Pascal VOC's, add 'annotations: {entry}' to the YAML",
    (".json", True): "one JSON per image is not supported; convert them to YOLO txt or to one COCO JSON",
    (".json", False): "if it is COCO's, add 'annotations: {entry}' to the YAML",
    (".csv", False): "CSV is not supported; export the data set as YOLO txt, COCO JSON or Pascal VOC",
}


def load_index(spec: DatasetSpec, split: str, *, checked: list[Scan] | None = None, **settings: Any) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file.

    Args:
        checked: for a check: receives what has been scanned, in the order of the images. All images are decoded, no
            cache is read or written, and problems of the split as a whole are warnings, not errors.
        settings: of `IndexSettings`.

    Raises UserError: data is missing, there is no image, no label file or no object to train on, the names do not match
    the labels, or more than the fraction ``max_bad`` of the labels or images is lost.
    """
    use = IndexSettings(**settings)
    source = _source(spec, split, use.single_cls, use.fraction)
    part, split = split, "train" if spec.held_out and split == "val" else split
    is_check = checked is not None
    if parts := spec.split(split).parts:
        whole = replace(use, single_cls=False, fraction=1.0, repeats=True)
        index = joined(spec, split, [load_index(each, split, checked=checked, **asdict(whole)) for each in parts])
        index = as_used(index, spec, part, use)
        get_logger().info("%s: %s", part, index.report.summary())
        _refuse(_without_objects(index, "", spec, part) or _without_backgrounds(index, spec, part), is_check)
        return replace(index, source=source)
    if shards := shards_of(spec, split):
        index, note, first, details = _of_shards(shards, spec, checked), " (shards)", shards.name, ""
        no_label_file = False
        report, index = index.report, as_used(index, spec, part, use)
    else:
        listing = list_split(spec.as_labeled(), split)
        no_label_file = all(file.stamp is None for file in listing.labels)
        if no_label_file:
            images = counted(len(listing.images), "image")
            text = f"{spec.source}: '{split}' has {images} and no label file; the first was expected at "
            text += path_of(listing.labels[0].name, spec.root)
            text += _orphans(listing) or _labels_elsewhere(listing, spec, split)
            _refuse(text, is_check)  # before its images are read
        chooses = bool(spec.classes or spec.class_of)
        merging = replace(use, single_cls=use.single_cls and not chooses)  # by the scan, which then checks no class
        index, path, is_cached = _of_files(listing, spec, split, merging, checked)
        report, index = index.report, as_used(index, spec, part, replace(use, single_cls=use.single_cls and chooses))
        first = next((file.name for file in listing.labels if file.stamp is not None), listing.labels[0].name)
        report_path = path.with_suffix(".txt")
        details = f"; report: {report_path}" if index.report.problems and report_path.exists() else ""
        note = " (cached)" * is_cached + details
    get_logger().info("%s: %s%s", part, index.report.summary(), note)
    too_much_lost = _too_much_lost(report, spec, split, use.max_bad, details)
    _refuse(too_much_lost, is_check)
    if part == split:
        said = too_much_lost or _warn(report, split)
        if not shards and not no_label_file:
            _warn_of_files(listing, spec, split, said)
    if not too_much_lost and not no_label_file:
        _refuse(_without_objects(index, first, spec, part), is_check)
    if split == "train" and not is_check:  # a check reports its use
        _warn_of_background_class(index, spec)
    return replace(index, source=source)


def _of_shards(shards: Path, spec: DatasetSpec, checked: list[Scan] | None) -> DatasetIndex:
    from data.index.sharded import sharded_content  # which files do not need

    index = index_of(*sharded_content(shards, spec), spec.as_labeled().names, shards)
    if spec.pixels != RGB8:
        index = replace(index, pixels=spec.pixels, fingerprint=digest_of(index.fingerprint, spec.pixels.content()))
    if checked is not None:
        checked.append(Scan(spec, index, None, np.arange(len(index)), []))
    return index


def _of_files(
    listing: Listing, spec: DatasetSpec, split: str, settings: IndexSettings, checked: list[Scan] | None
) -> tuple[DatasetIndex, Path, bool]:
    """All usable images with the classes of the labels; the cache file; and whether the index comes from it."""
    labeled = spec.as_labeled()
    fingerprint = _fingerprint(labeled, split, listing, settings)
    folder, source = cache_folder(settings.cache_dir), _source(spec, split, settings.single_cls)
    # Found by the content, so that a data set that has been moved is not scanned again.
    path = next(folder.glob(f"*-{fingerprint}.index"), folder / f"{source}-{fingerprint}.index")
    names = class_names(labeled, settings.single_cls)
    index = open_cached(path, names, spec.root, fingerprint) if checked is None else None
    is_cached = index is not None
    if index is None:
        from data.index.scan import scan_split  # which a cached split does not need

        scan = scan_split(labeled, split, listing, settings, decode_all=checked is not None)
        index = replace(scan.index, fingerprint=fingerprint)
        if checked is None:
            write_cache(path, index)
            with contextlib.suppress(OSError):
                for old in {*folder.glob(f"{source}-*")} - {path, path.with_suffix(".txt")}:
                    old.unlink()
        else:
            checked.append(scan._replace(spec=spec, index=index))
    return replace(index, pixels=spec.pixels), path, is_cached


def _refuse(text: str, is_check: bool) -> None:
    """Raises UserError, or warns for a check; nothing for ""."""
    if text and not is_check:
        raise UserError(text)
    if text:
        get_logger().warning("%s", text)


def _labels_elsewhere(listing: Listing, spec: DatasetSpec, split: str) -> str:
    """For a message: what exists instead of the label files of a split, and what to do with it; "" if nothing does."""
    image, label = (Path(path_of(file.name, spec.root)) for file in (listing.images[0], listing.labels[0]))
    stems = {os.path.splitext(os.path.basename(file.name))[0] for file in listing.images}
    folders = [image.parent, label.parent]
    if spec.root in image.parents:
        above = dict.fromkeys((image.parent.parent, spec.root))
        folders += [*above, *(path for folder in above for path in sorted(folder.glob("[!.]*/")))]
        folders += (Path(visit.path) for visit in itertools.islice(walk(spec.root), _MOST_FOLDERS))
    for folder in folders if spec.splits[split].annotations is None else ():
        files = [path for path in sorted(folder.glob("[!.]*.*")) if path.is_file()]
        for (suffix, of_images), advice in _ELSEWHERE.items():
            found = [path for path in files if path.suffix.lower() == suffix and (path.stem in stems or not of_images)]
            if found:
                what = f"{folder} has {counted(len(found), f'{suffix} file')}" if of_images else str(found[0])
                entry = f"{{{split}: {relative_name(folder if of_images else found[0], spec.root)}}}"
                return f"; {what}: {advice.format(remedy=_remedy(found[0], image, spec.root), entry=entry)}"
    for finding in listing.findings:
        if finding.kind == UNREAD_LABELS:
            return f"; {finding.where} {finding.text}"
    return what_exists(label)


def _remedy(found: Path, image: Path, root: Path) -> str:
    """What to do with .txt files with the names of images, such as ``found`` with that of ``image``."""
    places = [Path(folder) for folder in label_folders(str(image.parent))]
    if found.parent in places:
        return f"they have no row of YOLO txt (first: {found.name})"
    there = next((place for place in places if place.is_relative_to(root)), places[0])
    return f"move them to {there}"


def _orphans(listing: Listing) -> str:
    """For a message: the label files without an image; "" if there are none."""
    found = [finding for finding in listing.findings if finding.kind == ORPHAN]
    if not found:
        return ""
    return f"; {counted(len(found), 'label file')} without an image, first {found[0].where}: {found[0].text}"


def _warn_of_files(listing: Listing, spec: DatasetSpec, split: str, said: str) -> None:
    """About label files in unusual places, files that are not read, and missing label files. ``said``: the warning
    about what is lost, whose kinds of findings are not repeated."""
    if listing.taken:
        image, label = next(iter(listing.taken.items()))
        count = counted(len(listing.taken), "label file")
        get_logger().info("%s: %s with another name or folder than usual, first %s of %s", split, count, label, image)
    if listing.hidden:
        text = "%s: %s left out, which symbolic links show under another name with the same labels"
        get_logger().info(text, split, counted(listing.hidden, "image"))
    for kind in (ORPHAN, UNREAD_LABELS, SECOND_LABEL, SHARED_LABEL):
        found = [finding for finding in listing.findings if finding.kind == kind]
        if found and kind not in said:
            first = found[0]
            get_logger().warning("%s: %s: %d, first %s: %s", split, kind, len(found), first.where, first.text)
    if unread := unread_files(listing.findings):
        get_logger().warning("%s: %s", split, unread_summary(unread))
    missing = [file.name for file in listing.labels if file.stamp is None]
    if len(missing) > MAX_UNLABELED * len(listing.labels):
        shown = listed([path_of(name, spec.root) for name in missing], 3)
        get_logger().warning(
            "%s: %d of %d images have no label file and are treated as backgrounds (expected %s); add empty label "
            "files to avoid this warning",
            split, len(missing), len(listing.labels), shown,
        )  # fmt: skip


def _without_objects(index: DatasetIndex, first: str, spec: DatasetSpec, split: str) -> str:
    """The message about a training split without objects, or ""; warns for others. ``first``: a label file, if any."""
    if not index.crowd.all():
        return ""
    of = f" of the class {' or '.join(index.names[:5])}" if spec.classes or spec.class_of else ""
    text = f"{spec.source}: '{split}' has {counted(len(index), 'image')} and no object{of}"
    text += f" (first label file: {path_of(first, spec.root)})" if first else ""
    if split == "train":
        return f"{text}; there is nothing to train on"
    text += "; nothing can be scored" + (", and training writes no best.pt" if split == "val" else "")
    get_logger().warning("%s", text)
    return ""


def _warn_of_background_class(index: DatasetIndex, spec: DatasetSpec) -> None:
    """Other programs number the background as a class; here it is what is in no box."""
    for number, name in enumerate(index.names):
        if not _BACKGROUND.fullmatch(name):
            continue
        boxes = int(((index.classes == number) & ~index.crowd).sum())
        remedy = f"leave it out with 'ignore: [{name}]' in the YAML"
        if boxes:
            remedy = "its boxes are learned as objects; if they are none, leave it out with --classes or 'ignore:'"
        get_logger().warning(
            "%s: '%s' is one of the classes, with %s: what is in no box is background already; %s",
            spec.source,
            name,
            counted(boxes, "box"),
            remedy,
        )


def _without_backgrounds(index: DatasetIndex, spec: DatasetSpec, split: str) -> str:
    """The message about a class with objects that is ignored everywhere in every image, so that nothing is background
    for it; "" if there is none. This happens if classes are merged of which each data set leaves one out."""
    whole = (index.boxes_xywh_px[:, 2:] == index.image_hw[index.image_of_box, ::-1]).all(1)
    regions = index.with_boxes(index.crowd & whole & (index.classes != IGNORED))
    images = replace(regions, crowd=np.zeros_like(regions.crowd)).images_of_classes(len(index.names))
    no_background = (images == len(index)) & (index.boxes_of_classes(len(index.names)) > 0)
    if not no_background.any():
        return ""
    name = index.names[no_background.argmax()]
    return (
        f"{spec.source}: '{split}' has no image in which all objects of '{name}' are labeled: of the classes that are "
        "merged into it, each data set leaves one out; label them, or do not merge them ('classes:' or --single-cls)"
    )


def _warn(report: ScanReport, split: str) -> str:
    """Says what was corrected, what is probably misread, and what is lost. Returns the line about the latter, or ""."""
    for note in report.notes:
        get_logger().info("%s: %s", split, note)
    for advice in report.advice:
        get_logger().warning("%s: %s", split, advice)
    lost = warning(report.ledger)
    if lost:
        get_logger().warning("%s: %s", split, lost)
    return lost


def _too_much_lost(report: ScanReport, spec: DatasetSpec, split: str, max_bad: float, details: str) -> str:
    """The message about labels and images that are not used; "" unless they are too many."""
    reason = refusal(report.ledger, max_bad)
    if not reason:
        return ""
    return f"{spec.source}: '{split}': {'; '.join((reason, *report.advice))}{details}"


def _source(spec: DatasetSpec, part: str, *settings: object) -> str:
    """See `DatasetIndex.source`."""
    return f"{part}-{digest_of(str(normal_path(spec.source)), *settings)}"


def _fingerprint(spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings) -> str:
    """Depends on name, size and time of all files, the classes, and the version of this code, but not on the folder."""
    facts = [CACHE_VERSION, PARSER_VERSION, listing.label_format.name, split, settings.single_cls, spec.names]
    facts += [spec.pixels.content()] if spec.pixels != RGB8 else []
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for files in (listing.images, listing.labels, *([listing.others] if listing.others else [])):
        rows = (f"{f.name}\0{f.stamp.size} {f.stamp.mtime_ns}" if f.stamp else f"{f.name}\0" for f in files)
        digest.update("\0\0".join(rows).encode("utf-8", "surrogateescape") + b"\0\0\0")
    digest.update(json.dumps([str(f) for f in listing.findings]).encode())
    return digest.hexdigest()
