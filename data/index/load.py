"""Opens the index of a split from its cache file, or scans and caches the split if it is new or has changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.image_io.decode import unread_summary
from data.index.files import Listing, list_split, shards_of, unread_files
from data.index.index import CACHE_VERSION, DatasetIndex, digest_of, index_of, open_cached, write_cache
from data.index.views import as_used, joined
from data.labels.clean import PARSER_VERSION
from data.labels.findings import ScanReport, relative_name
from data.spec.dataset_spec import IGNORED, DatasetSpec, class_names, what_exists
from utils.config.pixels import RGB8
from utils.errors import UserError
from utils.files.caches import hold
from utils.files.folders import cache_folder
from utils.logger import get_logger
from utils.strings import counted

if TYPE_CHECKING:
    from data.index.scan import Scan

# A larger fraction of images without a label file causes a warning. In COCO, 0.9 % of the training images have no
# object and no label file; in VOC and exports of labeling services, every image has a label file. The usual advice is
# at most 10 % backgrounds, and more can be declared with empty files.
MAX_UNLABELED = 0.1
# What to do with files of the images' stems, and with other files, that are not where labels are read.
_OF_IMAGES = {
    ".txt": "move them to {there}",
    ".xml": "if they are Pascal VOC's, add 'annotations: {entry}' to the YAML",
    ".json": "one JSON per image is not read; convert them to YOLO txt or to one COCO JSON",
}
_OTHERS = {
    ".json": "if it is COCO's, add 'annotations: {entry}' to the YAML",
    ".csv": "CSV is not read; export the data set as YOLO txt, COCO JSON or Pascal VOC",
}


class ScannedPart(NamedTuple):
    """What has been read for a split: all of it, or one of the data sets that it joins."""

    spec: DatasetSpec
    index: DatasetIndex  # all images, with the classes of the labels
    scan: Scan | None  # None: shards, which were scanned when they were written


def load_index(
    spec: DatasetSpec,
    split: str,
    *,
    cache_dir: str = "",
    workers: int = 2,
    max_bad: float = 0.1,
    single_cls: bool = False,
    verify: str = "sample",
    fraction: float = 1.0,
    seed: int = 0,
    repeats: bool = True,
    progress: bool = True,
    checked: list[ScannedPart] | None = None,
) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file. Never writes to the
    data set.

    Args:
        cache_dir: folder of cache files and reports; empty: $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep.
        workers: threads of a scan; 0: the calling thread only, else at least one thread per CPU.
        max_bad: largest fraction of images that may be left out because they or their labels cannot be used.
        single_cls: treat all classes as one.
        verify: "sample" or "full", see `data.index.scan.scan_split`.
        fraction: of the usable images, chosen at random by ``seed``; a smaller one is a part of a larger one.
        repeats: keep boxes that equal an earlier one of their image: pycocotools scores them, training does without.
        progress: show a progress bar.
        checked: for a check: receives what has been scanned, in the order of the images. No cache is read or written,
            and what is wrong with the split as a whole is a warning, not an error.

    Raises:
        UserError: data is missing, there is no image, no label file or no object to train on, the names do not match
            the labels, or more than ``max_bad`` of the images are bad.
    """
    part, split = split, "train" if spec.held_out and split == "val" else split
    chooses = bool(spec.classes or spec.class_of)
    refusing = partial(_refusing, checked is not None)
    use = {"fraction": fraction, "seed": seed, "repeats": repeats}
    if spec.split(split).parts:
        options = {"cache_dir": cache_dir, "workers": workers, "max_bad": max_bad, "verify": verify}
        options |= {"progress": progress, "checked": checked}
        index = joined(spec, split, [load_index(part, split, **options) for part in spec.split(split).parts])
        index = as_used(index, spec, part, single_cls=single_cls, **use)
        get_logger().info("%s: %s", part, index.report.summary())
        with refusing():
            _check_some_objects(index, "", spec, part)
            _check_backgrounds(index, spec, part)
        return index
    if shards := shards_of(spec, split):
        from data.index.sharded import sharded_content  # which files do not need

        index = index_of(*sharded_content(shards, spec), spec.as_labeled().names, shards)
        if spec.pixels != RGB8:
            fingerprint = digest_of(index.fingerprint, spec.pixels.content())
            index = replace(index, pixels=spec.pixels, fingerprint=fingerprint)
        if checked is not None:
            checked.append(ScannedPart(spec, index, None))
        whole, index = index.report, as_used(index, spec, part, single_cls=single_cls, **use)
        get_logger().info("%s: %s (shards)", part, index.report.summary())
        for advice in whole.advice:
            get_logger().warning("%s: %s", split, advice)
        with refusing():
            _check_bad_images(whole, split, max_bad, "")
            _check_some_objects(index, shards.name, spec, part)
        return index
    merged = single_cls and not chooses  # by the scan, which then checks no class
    used, spec = spec, spec.as_labeled()
    listing = list_split(spec, split)
    with refusing():  # before its images are read
        _check_some_labels(listing, spec, split)
    fingerprint = _fingerprint(spec, split, listing, merged, verify)
    path = cache_folder(cache_dir) / f"{split}-{fingerprint}.index"
    names = class_names(spec, merged)
    index = open_cached(path, names, spec.root, fingerprint) if checked is None else None
    cached = index is not None
    if index is None:
        from data.index.scan import scan_split  # which a cached split does not need

        scan = scan_split(
            spec,
            split,
            listing,
            workers=workers,
            single_cls=merged,
            show_progress=progress,
            verify=verify,
        )
        index = DatasetIndex(names=names, root=spec.root, fingerprint=fingerprint, **scan.split._asdict())
        if checked is None:
            write_cache(path, index, origin=(os.path.abspath(spec.source), split, merged))
        else:
            checked.append(ScannedPart(used, index, scan))
    index = replace(index, pixels=spec.pixels)
    whole = index.report
    index = as_used(index, used, part, single_cls=single_cls and chooses, **use)
    hold(index, path)
    report_path = path.with_suffix(".txt")
    details = f"; report: {report_path}" if index.report.problems and report_path.exists() else ""
    get_logger().info("%s: %s%s%s", part, index.report.summary(), " (cached)" if cached else "", details)
    if part == split:
        for advice in whole.advice:
            get_logger().warning("%s: %s", split, advice)
        if unread := unread_files(listing.findings):
            get_logger().warning("%s: %s", split, unread_summary(unread))
        _warn_of_missing_labels(listing, spec, split)
    first = next((file.name for file in listing.labels if file.stamp is not None), listing.labels[0].name)
    with refusing():
        _check_bad_images(whole, split, max_bad, details)
        _check_some_objects(index, first, used, part)
    return index


@contextmanager
def _refusing(is_check: bool) -> Iterator[None]:
    """Lets the UserErrors of the block pass; for a check, they are warnings."""
    try:
        yield
    except UserError as error:
        if not is_check:
            raise
        get_logger().warning("%s", error)


def _unlabeled(listing: Listing) -> list[str]:
    """Names of the label files that do not exist."""
    return [file.name for file in listing.labels if file.stamp is None]


def _check_some_labels(listing: Listing, spec: DatasetSpec, split: str) -> None:
    """Raises UserError for a split without any label file, with what to do."""
    missing = _unlabeled(listing)
    if len(missing) == len(listing.labels):
        images = counted(len(listing.images), "image")
        text = f"{spec.source}: '{split}' has {images} and no label file; the first was expected at "
        raise UserError(f"{text}{_absolute(spec, missing[0])}{_labels_elsewhere(listing, spec, split)}")


def _labels_elsewhere(listing: Listing, spec: DatasetSpec, split: str) -> str:
    """What there is instead of the label files of a split, of which none exists, and what to do with it, for a message;
    "" if nothing is found."""
    image, label = (Path(spec.root, file.name) for file in (listing.images[0], listing.labels[0]))
    stems = {os.path.splitext(os.path.basename(file.name))[0] for file in listing.images}
    folders = [image.parent, label.parent]
    if spec.root in image.parents:
        above = dict.fromkeys((image.parent.parent, spec.root))
        folders += [*above, *(folder / name for folder in above for name in _names(folder, folders=True))]
    for folder in folders if spec.splits[split].annotations is None else ():
        files = [folder / name for name in _names(folder)]
        for suffix, advice in _OF_IMAGES.items():
            if count := sum(file.suffix.lower() == suffix and file.stem in stems for file in files):
                entry = f"{{{split}: {relative_name(folder, spec.root)}}}"
                found = counted(count, f"{suffix} file")
                return f"; {folder} has {found}: {advice.format(there=label.parent, entry=entry)}"
        for suffix, advice in _OTHERS.items():
            if file := next((file for file in files if file.suffix.lower() == suffix), None):
                return f"; {file}: {advice.format(entry=f'{{{split}: {relative_name(file, spec.root)}}}')}"
    return what_exists(label)


def _names(folder: Path, *, folders: bool = False) -> list[str]:
    """The sorted names of the files in a folder, or of its folders; none if it cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir() == folders)
    return []


def _warn_of_missing_labels(listing: Listing, spec: DatasetSpec, split: str) -> None:
    missing = _unlabeled(listing)
    if len(missing) > MAX_UNLABELED * len(listing.labels):
        shown = ", ".join(_absolute(spec, name) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        get_logger().warning(
            "%s: %d of %d images have no label file and are treated as backgrounds (expected %s); add empty label "
            "files to avoid this warning",
            split, len(missing), len(listing.labels), shown,
        )  # fmt: skip


def _check_some_objects(index: DatasetIndex, first: str, spec: DatasetSpec, split: str) -> None:
    """Raises UserError for a training split without objects that are not ignored; warns about another split.
    ``first``: a label file, if the split has some of its own."""
    if not index.crowd.all():
        return
    of = f" of the class {' or '.join(index.names[:5])}" if spec.classes or spec.class_of else ""
    text = f"{spec.source}: '{split}' has {counted(len(index), 'image')} and no object{of}"
    text += f" (first label file: {_absolute(spec, first)})" if first else ""
    if split == "train":
        raise UserError(f"{text}; there is nothing to train on")
    text += "; nothing can be scored" + (", and training writes no best.pt" if split == "val" else "")
    get_logger().warning("%s", text)


def _check_backgrounds(index: DatasetIndex, spec: DatasetSpec, split: str) -> None:
    """Raises UserError if a class that has objects is ignored everywhere in every image: nothing is background for it.
    So it is where classes are merged of which each data set leaves one out."""
    whole = (index.boxes_xywh_px[:, 2:] == index.image_hw[index.image_of_box, ::-1]).all(1)
    regions = index.with_boxes(index.crowd & whole & (index.classes != IGNORED))
    images = replace(regions, crowd=np.zeros_like(regions.crowd)).images_of_classes(len(index.names))
    no_background = (images == len(index)) & (index.boxes_of_classes(len(index.names)) > 0)
    if no_background.any():
        name = index.names[no_background.argmax()]
        raise UserError(
            f"{spec.source}: '{split}' has no image in which all objects of '{name}' are labeled: of the classes that "
            "are merged into it, each data set leaves one out; label them, or do not merge them ('classes:' or "
            "--single-cls)"
        )


def _absolute(spec: DatasetSpec, name: str) -> str:
    return os.path.normpath(os.path.join(spec.root, name))


def _check_bad_images(report: ScanReport, split: str, max_bad: float, details: str) -> None:
    total = report.totals["images"] + report.bad_images
    if report.totals["images"] and report.bad_images / total <= max_bad:
        return
    raise UserError(
        f"'{split}': {report.bad_images} of {total} images can't be used (--max-bad is {max_bad:g}): "
        f"{'; '.join((*report.bad_lines, *report.advice))}{details}"
    )


def _fingerprint(spec: DatasetSpec, split: str, listing: Listing, single_cls: bool, verify: str) -> str:
    """32 hex digits that depend on name, size and time of all files, the classes, and the version of this code, but
    not on the path of the data set."""
    settings = [CACHE_VERSION, PARSER_VERSION, listing.label_format.name, split, single_cls, spec.names]
    settings += [verify] if verify != "sample" else []  # "full" may leave out more images
    settings += [spec.pixels.content()] if spec.pixels != RGB8 else []
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
    for files in (listing.images, listing.labels):
        rows = (f"{f.name}\0{f.stamp.size} {f.stamp.mtime_ns}" if f.stamp else f"{f.name}\0" for f in files)
        digest.update("\0\0".join(rows).encode("utf-8", "surrogateescape") + b"\0\0\0")
    digest.update(json.dumps([str(f) for f in listing.findings]).encode())
    return digest.hexdigest()
