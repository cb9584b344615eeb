"""Opens the index of a split: lists the files, maps their cached index or scans them, refuses what a run cannot use,
and selects the part that it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from data.dataset.spec import DatasetSpec, JoinedSplit, ShardSplit, class_names
from data.index.index import DatasetIndex, IndexSettings, LoadedSplit, Scan, cache_key_of, digest_of
from data.index.join_parts import join_parts
from data.index.messages import log_split, problems, warn_about_no_object
from data.index.scan import scan_split
from data.index.select import select_used
from data.index.store import find_cache_file, fingerprint_of, image_files_digest, open_index, read_shards, write_index
from data.listing.listing import list_split
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.program_folders import cache_folder, private_folder


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
    found = problems(loaded, max_bad)
    if found:
        raise UserError(found[0])
    log_split(loaded, title=split)
    warn_about_no_object(loaded)
    return loaded


def read_split(spec: DatasetSpec, split: str, settings: IndexSettings, known_files: Mapping[str, str]) -> LoadedSplit:
    """Reads a split, whatever it has lost. ``known_files``: see `load_split`. Raises UserError if data is missing, or
    if there is no image or no label file."""
    source_split = "train" if spec.is_held_out(split) else split
    source = spec.split(source_split)
    note = ""
    cache_file: Path | None = None
    parts: tuple[LoadedSplit, ...] = ()
    if isinstance(source, JoinedSplit):
        part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
        parts = tuple(read_split(part, source_split, part_settings, known_files) for part in source.parts)
        full = join_parts(spec, parts)
        scans = tuple(scan for part in parts for scan in part.scans)
    elif isinstance(source, ShardSplit):
        full = read_shards(source.index, spec)
        scans = (Scan(spec, root=source.index, source=None, findings=full.report.findings),)
        note = " (shards)"
    else:
        full, scans, cache_file = _read_files(spec, source_split, settings, known_files.get(spec.source))
        note = "" if scans else " (cached)"
    used = select_used(full, spec, split, settings)
    # With a fraction, runs with other seeds use other images and other caches. The classes in use belong to the
    # selection, because they determine which images with lost labels are left out.
    part_of_images = (settings.fraction,) if settings.fraction == 1 else (settings.fraction, settings.seed)
    selection = [sorted(spec.held_out), spec.classes, spec.class_of, *([full.selection] if full.selection else [])]
    used = replace(
        used, cache_key=cache_key_of(spec, split, settings.single_cls, *part_of_images), selection=digest_of(*selection)
    )
    return LoadedSplit(spec, split, full, used, note, cache_file, scans, parts)


def _read_files(
    spec: DatasetSpec, split: str, settings: IndexSettings, known_file: str | None
) -> tuple[DatasetIndex, tuple[Scan, ...], Path | None]:
    """Opens the index of a split of files from a cache file, ``known_file`` if there is one, or scans the files.

    Returns the index of all usable images; the scan, unless it was cached; and the cache file, unless none could be
    written.
    """
    labeled = spec.as_labeled()
    # Classes are selected before they are merged, and a scan that merges all classes does not check them.
    single_cls = settings.single_cls and not (spec.classes or spec.class_of)
    names = class_names(labeled, single_cls)
    if known_file:
        cached = open_index(Path(known_file), names, spec)
        if cached is not None:
            return cached, (), Path(known_file)
    listing = list_split(labeled, split)
    folder = cache_folder(settings.cache_dir)
    key = cache_key_of(spec, split, single_cls)
    file = find_cache_file(folder, key, fingerprint_of(labeled, split, listing, single_cls=single_cls))
    if settings.use_cache:
        private_folder(folder, "--cache-dir")
        cached = open_index(file, names, spec)
        if cached is not None:
            return cached, (), file
    scanned, scan = scan_split(labeled, split, listing, replace(settings, single_cls=single_cls))
    index = replace(scanned, image_files=image_files_digest(listing), pixels=spec.pixels)
    is_cached = settings.use_cache and write_index(file, key, index)
    return index, (replace(scan, spec=spec),), file if is_cached else None
