"""Opens the index of a split: lists the files, maps their cached index or scans them, refuses what a run cannot use,
selects the part that it uses, and logs what was found."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.index import DatasetIndex, IndexSettings, LoadedSplit, cache_key_of
from data.index_cache import (
    find_cache_file,
    fingerprint_of,
    image_files_digest,
    open_index,
    read_shards,
    report_file,
    write_index,
)
from data.join import join_parts
from data.labels import Labels
from data.pairing import list_split
from data.scan import scan_split
from data.select import select_used
from data.spec import DatasetSpec, JoinedSplit, ShardSplit, class_names
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.program_folders import cache_folder, private_folder
from utils.strings import counted, listed

_LISTED_CLASSES = 20  # in the line with the boxes of each class


def load_index(
    spec: DatasetSpec, split: str, settings: IndexSettings | None = None, *, max_bad: float = TrainConfig.max_bad
) -> DatasetIndex:
    """Returns the index of the part of a split that a run uses. See `load_split`."""
    return load_split(spec, split, settings or IndexSettings(), max_bad=max_bad).used


def load_split(
    spec: DatasetSpec,
    split: str,
    settings: IndexSettings,
    known_files: Mapping[str, str] | None = None,
    *,
    max_bad: float,
) -> LoadedSplit:
    """Opens a split from its cache file, or scans it and writes that file, and logs what was found.

    ``known_files``: `LoadedSplit.cache_files` of another process of this machine, which are mapped without listing the
    split.

    Raises UserError if data is missing, if there is no image, no label file or no object to train on, or if more than
    the fraction ``max_bad`` of the labels or images is lost.
    """
    loaded = read_split(spec, split, settings, known_files or {})
    reasons = refusal_reasons(loaded, max_bad)
    if reasons:
        raise UserError(reasons[0])
    log_split(loaded, title=split)
    if without_object := no_object(loaded):
        consequence = ", and training writes no best.pt" if split == "val" else ""
        get_logger().warning("%s; nothing can be scored%s", without_object, consequence)
    return loaded


def read_split(spec: DatasetSpec, split: str, settings: IndexSettings, known_files: Mapping[str, str]) -> LoadedSplit:
    """Reads a split without judging what it has lost. ``known_files``: see `load_split`. Raises UserError if data is
    missing, or if there is no image or no label file."""
    source_split = "train" if spec.is_held_out(split) else split
    source = spec.split(source_split)
    note = ""
    cache_file: Path | None = None
    labels: Labels | None = None
    parts: tuple[LoadedSplit, ...] = ()
    if isinstance(source, JoinedSplit):
        part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
        parts = tuple(read_split(part, source_split, part_settings, known_files) for part in source.parts)
        full = join_parts(spec, parts)
    elif isinstance(source, ShardSplit):
        full = read_shards(source.index, spec)
        note = " (shards)"
    else:
        full, labels, cache_file = _read_files(spec, source_split, settings, known_files.get(spec.source))
        note = "" if labels else " (cached)"
    used = select_used(full, spec, split, settings)
    seed = 0 if settings.fraction == 1 else settings.seed  # with a fraction, each seed has its own images and caches
    used = replace(used, cache_key=cache_key_of(spec, split, settings.fraction, seed, sorted(spec.held_out)))
    return LoadedSplit(spec, split, full, used, note, cache_file, labels, parts)


def _read_files(
    spec: DatasetSpec, split: str, settings: IndexSettings, known_file: str | None
) -> tuple[DatasetIndex, Labels | None, Path | None]:
    """Opens the index of a split of files from a cache file, ``known_file`` if there is one, or scans the files.

    Returns the index of all usable images; the labels, unless it was cached; and the cache file, unless none could be
    written.
    """
    labeled = spec.with_label_classes()
    # Classes are selected before they are merged, and a scan that merges all classes does not check them.
    single_cls = settings.single_cls and not (spec.classes or spec.class_of)
    names = class_names(labeled, single_cls)
    if known_file:
        cached = open_index(Path(known_file), names, spec)
        if cached is not None:
            return cached, None, Path(known_file)
    listing = list_split(labeled, split)
    folder = cache_folder(settings.cache_dir)
    key = cache_key_of(spec, split, single_cls)
    file = find_cache_file(folder, key, fingerprint_of(labeled, split, listing, single_cls=single_cls))
    if settings.use_cache:
        private_folder(folder, "--cache-dir")
        cached = open_index(file, names, spec)
        if cached is not None:
            return cached, None, file
    scanned, labels = scan_split(labeled, split, listing, replace(settings, single_cls=single_cls))
    index = replace(scanned, image_files=image_files_digest(listing), pixels=spec.pixels)
    is_cached = settings.use_cache and write_index(file, key, index)
    return index, labels, file if is_cached else None


def refusal_reasons(loaded: LoadedSplit, max_bad: float) -> list[str]:
    """Returns the messages with which a run refuses a split; none if it can be used.

    Joined data sets are judged one by one, because a loss that is small overall may be all of a small data set.
    """
    found: list[str] = []
    for part in loaded.parts or (loaded,):
        report = part.full.report
        if report.has_lost_too_much(max_bad):
            reason = f"{report.loss_summary()} (--max-bad is {max_bad:g}){_report_note(part)}"
            split = "train" if part.spec.is_held_out(part.split) else part.split
            found.append(f"{part.spec.source}: '{split}': {reason}")
    without_object = no_object(loaded)
    if not found and loaded.split == "train" and without_object:
        found.append(f"{without_object}; there is nothing to train on")
    return found


def no_object(loaded: LoadedSplit) -> str:
    """Returns a message if a split has no object, else ""."""
    index = loaded.used
    if not index.crowd.all():
        return ""
    message = f"{loaded.spec.source}: '{loaded.split}' has {counted(len(index), 'image')} and no object"
    if loaded.spec.classes or loaded.spec.class_of:
        message += f" of the class {' or '.join(index.names[:5])}"
    return message


def log_split(loaded: LoadedSplit, *, title: str) -> None:
    """Logs a line about the images and boxes that are used, and one about each kind of finding. ``title``: the split in
    log messages.

    For the parts of a split that is divided, only the first line is logged: the scan that divides it logs the rest.
    """
    is_divided = bool(loaded.spec.held_out)
    if loaded.parts and not is_divided:
        for part in loaded.parts:
            log_split(part, title=f"{part.split} of {part.spec.source}")
        _log_joining(loaded)
    get_logger().info("%s: %s%s%s", title, loaded.used.summary(loaded.split), loaded.note, _report_note(loaded))
    if loaded.parts or is_divided:
        return
    index = loaded.full
    boxes = index.boxes_per_class(len(index.names)).tolist()
    if len(boxes) > 1:
        get_logger().info("%s: %s", title, listed([f"{n} {c:,}" for n, c in zip(index.names, boxes)], _LISTED_CLASSES))
    named = index.crowd & (index.classes >= 0)
    regions = np.bincount(index.classes[named], minlength=len(boxes)).tolist()
    for name, count, num_regions in zip(index.names, boxes, regions):
        if num_regions and not count:
            message = "%s: all %d objects of '%s' are regions around several objects (iscrowd): ignored, not learned"
            get_logger().warning(message, title, num_regions, name)
    for level, line in index.report.lines():
        get_logger().log(level, "%s: %s", title, line)


def _report_note(loaded: LoadedSplit) -> str:
    """Returns the path of the file that lists the findings, for messages, or "" if there is none."""
    report = report_file(loaded.cache_file) if loaded.cache_file else None
    return f"; report: {report}" if report and report.exists() else ""


def _log_joining(loaded: LoadedSplit) -> None:
    """Logs the classes that each joined data set does not label, and whether ids are dropped. Warns about images that
    several data sets share."""
    names = loaded.spec.with_label_classes().names
    for part in loaded.parts:
        unlabeled = [name for name in names if name not in part.used.names]
        if unlabeled:
            message = "%s: %s does not label %s: ignored in its images"
            get_logger().info(message, loaded.split, part.spec.source, listed(unlabeled, 5))
    if len(loaded.parts) > 1 and any(part.used.image_ids is not None for part in loaded.parts):
        message = "%s: ids of joined COCO JSONs are not kept; results have file names and class numbers"
        get_logger().info(message, loaded.split)
    paths = Counter(part.used.path(i) for part in loaded.parts for i in range(len(part.used)))
    num_repeated = paths.total() - len(paths)
    if num_repeated:
        message = "%s: data sets that %s joins share %s, which count more than once"
        get_logger().warning(message, loaded.split, loaded.spec.source, counted(num_repeated, "image"))


def warn_about_shared_images(spec: DatasetSpec, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warns about images that are in both splits."""
    if spec.held_out:
        return
    val_paths = set(real_paths(val))
    shared = len(val_paths.intersection(real_paths(train)))
    if shared:
        count = f"{shared:,}" if shared < len(val_paths) else "all"
        message = "%s: %s of the %s validation images are also training images; scores say little about other images"
        get_logger().warning(message, spec.source, count, f"{len(val_paths):,}")


def warn_about_unused_classes(train: DatasetIndex) -> None:
    """Warns about classes of which the training split has no object, unless no image says anything about them, such as
    about the old classes of --keep-old."""
    boxes = train.boxes_per_class(len(train.names)).tolist()
    ignored = train.names_ignored_everywhere()
    unused = [name for name, count in zip(train.names, boxes) if not count and name not in ignored]
    if unused:
        count = f"{len(unused)} of {counted(len(train.names), 'class')}"
        get_logger().warning("train: no object of %s, which cannot be learned: %s", count, listed(unused, 5))


def real_paths(index: DatasetIndex) -> Iterator[str]:
    """Yields the path of each image, following symbolic links to folders but not to images."""
    real_folders: dict[str, str] = {}
    for path in index.paths:
        folder, _, name = path.rpartition("/")
        if folder not in real_folders:
            real_folders[folder] = os.path.realpath(path_of(folder, index.root))
        yield f"{real_folders[folder]}/{name}"
