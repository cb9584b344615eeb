"""Opens the index of a split: lists the files, maps their cached index or scans them, refuses what a run cannot use,
and selects the part that it uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data.dataset.spec import DatasetSpec, JoinedSplit, ShardSplit, class_names
from data.index.index import DatasetIndex, IndexSettings, LoadedSplit, Scan, cache_key_of, digest_of
from data.index.join_parts import join_parts
from data.index.messages import log_split, problems, warn_of_no_object
from data.index.scan import scan_split
from data.index.select import select_used
from data.index.store import (
    find_cache_file,
    fingerprint_of,
    image_files_digest,
    open_index,
    read_shards,
    report_file,
    write_index,
)
from data.listing.listing import list_split
from utils.errors import UserError
from utils.program_folders import cache_folder, private_folder


def load_index(
    spec: DatasetSpec, split: str, settings: IndexSettings | None = None, cache_files: dict[str, str] | None = None
) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file.

    ``cache_files``: by key, one for each data set that the split joins. Files that another process of this machine has
    written are mapped without listing the split; the others are added, unless they could not be written.

    Raises UserError if data is missing, if there is no image, no label file or no object to train on, or if more than
    the fraction ``settings.max_bad`` of the labels or images is lost.
    """
    settings = settings or IndexSettings()
    loaded = read_split(spec, split, settings, cache_files)
    found = problems(loaded, settings.max_bad)
    if found:
        raise UserError(found[0])
    log_split(loaded, title=split)
    warn_of_no_object(loaded)
    return loaded.used


def read_split(
    spec: DatasetSpec, split: str, settings: IndexSettings, cache_files: dict[str, str] | None = None
) -> LoadedSplit:
    """Reads a split, whatever it has lost. ``cache_files``: see `load_index`. Raises UserError if data is missing, or
    if there is no image or no label file."""
    cache_files = {} if cache_files is None else cache_files
    source_split = "train" if spec.is_held_out(split) else split
    source = spec.split(source_split)
    note = ""
    report_path: Path | None = None
    parts: tuple[LoadedSplit, ...] = ()
    if isinstance(source, JoinedSplit):
        part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
        parts = tuple(read_split(part, source_split, part_settings, cache_files) for part in source.parts)
        full = join_parts(spec, parts)
        scans = tuple(scan for part in parts for scan in part.scans)
    elif isinstance(source, ShardSplit):
        full = read_shards(source.index, spec)
        scans = (Scan(spec, root=source.index, source=None, findings=full.report.findings),)
        note = " (shards)"
    else:
        full, scans, report_path = _read_files(spec, source_split, settings, cache_files)
        note = "" if scans else " (cached)"
    used = select_used(full, spec, split, settings)
    # With a fraction, runs with other seeds use other images and other caches. The classes in use belong to the
    # selection, because they determine which images with lost labels are left out.
    part_of_images = (settings.fraction,) if settings.fraction == 1 else (settings.fraction, settings.seed)
    selection = [sorted(spec.held_out), spec.classes, spec.class_of, *([full.selection] if full.selection else [])]
    used = replace(
        used, cache_key=cache_key_of(spec, split, settings.single_cls, *part_of_images), selection=digest_of(*selection)
    )
    return LoadedSplit(spec, split, full, used, note, report_path, scans, parts)


def _read_files(
    spec: DatasetSpec, split: str, settings: IndexSettings, cache_files: dict[str, str]
) -> tuple[DatasetIndex, tuple[Scan, ...], Path | None]:
    """Opens the index of a split of files from a cache file, or scans the files. ``cache_files``: see `load_index`.

    Returns the index of all usable images; the scan, unless it is cached; and the path of its report, if it is cached
    now.
    """
    labeled = spec.as_labeled()
    # Classes are selected before they are merged, and a scan that merges all classes does not check them.
    single_cls = settings.single_cls and not (spec.classes or spec.class_of)
    names = class_names(labeled, single_cls)
    key = cache_key_of(spec, split, single_cls)
    if key in cache_files:
        written = Path(cache_files[key])
        cached = open_index(written, names, spec.root)
        if cached is not None:
            return replace(cached, pixels=spec.pixels), (), report_file(written)
    listing = list_split(labeled, split)
    folder = cache_folder(settings.cache_dir)
    file = find_cache_file(folder, key, fingerprint_of(labeled, split, listing, single_cls=single_cls))
    if settings.use_cache:
        private_folder(folder, "--cache-dir")
        cached = open_index(file, names, spec.root)
        if cached is not None:
            cache_files[key] = str(file)
            return replace(cached, pixels=spec.pixels), (), report_file(file)
    scanned, scan = scan_split(labeled, split, listing, replace(settings, single_cls=single_cls))
    index = replace(scanned, image_files=image_files_digest(listing), pixels=spec.pixels)
    scans = (replace(scan, spec=spec),)
    if not settings.use_cache or not write_index(file, key, index):
        return index, scans, None
    cache_files[key] = str(file)
    return index, scans, report_file(file)
