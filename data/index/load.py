"""Opens the index of a split: reads the whole split, checks it, and selects the part that a run uses.

`load_index` reads a split from its cache file, or scans it and writes that file. To list and scan once on each node,
its first process calls `build_index`, and the others `map_index` with the cache files that it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from data.dataset.spec import DatasetSpec, JoinedSplit, ShardSplit, class_names
from data.index.full_split import FullSplit, LoadedSplit
from data.index.index import DatasetIndex, Scan, cache_key_of, digest_of
from data.index.index_settings import IndexSettings
from data.index.join_parts import join_parts
from data.index.messages import check_backgrounds, check_labels, check_losses, check_objects, log_split, objects_problem
from data.index.scan import scan_split
from data.index.select import select_used
from data.index.shards import read_shards
from data.index.store import find_cache_file, fingerprint_of, image_files_digest, open_index, report_file, write_index
from data.listing.listing import list_split
from utils.program_folders import cache_folder


def load_index(spec: DatasetSpec, split: str, settings: IndexSettings | None = None) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file.

    Raises UserError if data is missing, if there is no image, no label file or no object to train on, or if more than
    the fraction ``settings.max_bad`` of the labels or images is lost.
    """
    return build_index(spec, split, settings or IndexSettings())[0]


def build_index(spec: DatasetSpec, split: str, settings: IndexSettings) -> tuple[DatasetIndex, dict[str, str]]:
    """Does what `load_index` does, and also returns the paths of the cache files that `map_index` needs, by cache key:
    one for each data set that the split joins, unless it could not be written."""
    reader = _Reader(settings)
    index = reader.load(spec, split).used
    return replace(index, origins=None), reader.cache_files  # the scans are not kept


def map_index(spec: DatasetSpec, split: str, settings: IndexSettings, cache_files: Mapping[str, str]) -> DatasetIndex:
    """Returns the index that another process of this machine has built, mapping its ``cache_files`` without listing the
    split. A part without a readable file is read like `load_index` does."""
    reader = _Reader(settings, known_files=cache_files)
    return replace(reader.load(spec, split).used, origins=None)


@dataclass(frozen=True, slots=True)
class CheckScan:
    """A split as read by `scan_for_check`."""

    index: DatasetIndex
    scans: tuple[Scan, ...]  # in the order of the images
    refusals: tuple[str, ...]  # messages of `load_index` because of which a run must not use the split
    objects_problem: str  # message about a split without objects; "" if it has any


def scan_for_check(spec: DatasetSpec, split: str, settings: IndexSettings) -> CheckScan:
    """Scans a split and decodes all of its images, without reading or writing a cache.

    Raises UserError for problems that prevent an index: missing data, or no image.
    """
    refusals: list[str] = []
    loaded = _Reader(settings.for_check(refusals)).load(spec, split)
    return CheckScan(
        index=loaded.used,
        scans=loaded.full.scans,
        refusals=tuple(refusals),
        objects_problem=objects_problem(loaded, settings),
    )


class _Reader:
    """Reads splits."""

    def __init__(self, settings: IndexSettings, known_files: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self._known_files = known_files or {}
        self.cache_files: dict[str, str] = {}  # of the data sets read from files so far, by cache key

    def load(self, spec: DatasetSpec, split: str) -> LoadedSplit:
        """Reads a split as a run uses it, logs a summary, and checks that it contains objects to learn from."""
        settings = self._settings
        loaded = self._read(spec, split, settings)
        log_split(loaded, settings, title=split)
        with settings.refusing():
            check_objects(loaded, settings)
        with settings.refusing():
            check_backgrounds(loaded)
        return loaded

    def _read(self, spec: DatasetSpec, split: str, settings: IndexSettings) -> LoadedSplit:
        """Reads all of a split, checks how much of it is lost, and then selects the part that the run uses.

        Joined data sets are checked one by one, because a loss that is small overall may be all of a small data set.
        """
        full_split = "train" if spec.is_held_out(split) else split
        split_files = spec.split(full_split)
        if isinstance(split_files, JoinedSplit):
            part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
            full = join_parts(spec, [self._read(part, full_split, part_settings) for part in split_files.parts])
        else:
            if isinstance(split_files, ShardSplit):
                full = read_shards(split_files.index, spec)
            else:
                full = self._read_files(spec, full_split, settings)
            with settings.refusing():
                check_losses(full, spec, full_split, settings.max_bad)
        used = select_used(full.index, spec, split, settings)
        used = replace(used, cache_key=_cache_key(spec, split, settings), selection=_selection(spec, full.index))
        return LoadedSplit(spec, split, full, used)

    def _read_files(self, spec: DatasetSpec, split: str, settings: IndexSettings) -> FullSplit:
        """Reads a split that consists of files: maps the known cache file or the one of the same files, or scans the
        split and writes that file. Raises UserError like `list_split` and `scan_split`, and if no image has a label
        file."""
        labeled = spec.as_labeled()
        # Classes are selected before they are merged, and a scan that merges all classes does not check them.
        single_cls = settings.single_cls and not (spec.classes or spec.class_of)
        names = class_names(labeled, single_cls)
        cache_key = cache_key_of(spec, split, single_cls)
        if cache_key in self._known_files:
            file = Path(self._known_files[cache_key])
            index = open_index(file, names, spec.root)
            if index is not None:
                return FullSplit(replace(index, pixels=spec.pixels), " (cached)", report_path=report_file(file))

        listing = list_split(labeled, split)
        with settings.refusing():
            check_labels(listing, spec, split)  # before the images are read
        fingerprint = fingerprint_of(labeled, split, listing, single_cls=single_cls)
        file = find_cache_file(cache_folder(settings.cache_dir), cache_key, fingerprint)
        index = open_index(file, names, spec.root) if settings.use_cache else None
        if index is not None:
            self.cache_files[cache_key] = str(file)
            return FullSplit(replace(index, pixels=spec.pixels), " (cached)", report_path=report_file(file))

        scanned = scan_split(labeled, split, listing, replace(settings, single_cls=single_cls))
        index = replace(scanned.index, pixels=spec.pixels, image_files=image_files_digest(listing))
        is_written = settings.use_cache and write_index(file, cache_key, index)
        if is_written:
            self.cache_files[cache_key] = str(file)
        has_labels = bool((listing.label_stamps[:, 0] >= 0).any())
        scan = Scan(spec, spec.root, scanned.source, scanned.findings, has_labels)
        report_path = report_file(file) if is_written else None
        return FullSplit(index, scans=(scan,), has_labels=has_labels, report_path=report_path)


def _cache_key(spec: DatasetSpec, split: str, settings: IndexSettings) -> str:
    """Returns `DatasetIndex.cache_key`. With ``fraction``, runs with other seeds use other images and other caches."""
    if settings.fraction == 1:
        return cache_key_of(spec, split, settings.single_cls, settings.fraction)
    return cache_key_of(spec, split, settings.single_cls, settings.fraction, settings.seed)


def _selection(spec: DatasetSpec, full: DatasetIndex) -> str:
    """Returns `DatasetIndex.selection`. The classes in use belong to it, because they determine which images with lost
    labels are left out. ``full.selection``: digest of the joined data sets' selections, else empty."""
    settings = [sorted(spec.held_out), spec.classes, spec.class_of]
    return digest_of(*settings, full.selection) if full.selection else digest_of(*settings)
