"""Opens the index of a split: reads the whole split, checks it, and selects the part that a run uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from data.index.check_split import check_backgrounds, check_losses, check_objects, objects_problem
from data.index.full_split import LoadedSplit
from data.index.index import DatasetIndex, Scan, cache_key_of, digest_of
from data.index.index_settings import IndexSettings
from data.index.join_parts import join_parts
from data.index.log_split import log_split
from data.index.read_files import read_files
from data.index.read_shards import read_shards
from data.index.selection import select_used
from data.source.dataset_spec import DatasetSpec, JoinedSplit, ShardSplit


def load_index(spec: DatasetSpec, split: str, settings: IndexSettings | None = None) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file.

    Raises UserError if data is missing, if there is no image, no label file or no object to train on, if the names do
    not match the labels, or if more than the fraction ``settings.max_bad`` of the labels or images is lost.
    """
    index = _load(spec, split, settings or IndexSettings()).used
    return replace(index, origins=None)  # the scans are not kept


@dataclass(frozen=True, slots=True)
class CheckScan:
    """A split as read by `scan_for_check`."""

    index: DatasetIndex
    scans: tuple[Scan, ...]  # in the order of the images
    refusals: tuple[str, ...]  # messages of `load_index` because of which a run must not use the split
    objects_problem: str  # message about a split without objects; "" if it has any


def scan_for_check(spec: DatasetSpec, split: str, settings: IndexSettings) -> CheckScan:
    """Scans a split and decodes all of its images, without reading or writing a cache.

    Raises UserError for problems that prevent an index: missing data, no image, or names that do not match the labels.
    """
    refusals: list[str] = []
    loaded = _load(spec, split, settings.for_check(refusals))
    return CheckScan(
        index=loaded.used,
        scans=loaded.full.scans,
        refusals=tuple(refusals),
        objects_problem=objects_problem(loaded, settings),
    )


def _load(spec: DatasetSpec, split: str, settings: IndexSettings) -> LoadedSplit:
    """Reads a split as a run uses it, logs a summary, and checks that it contains objects to learn from."""
    loaded = _read(spec, split, settings)
    log_split(loaded, settings, title=split)
    with settings.refusing():
        check_objects(loaded, settings)
    with settings.refusing():
        check_backgrounds(loaded)
    return loaded


def _read(spec: DatasetSpec, split: str, settings: IndexSettings) -> LoadedSplit:
    """Reads all of a split, checks how much of it is lost, and then selects the part that the run uses.

    Joined data sets are checked one by one, because a loss that is small overall may be all of a small data set.
    """
    full_split = "train" if spec.is_held_out(split) else split
    split_files = spec.split(full_split)
    if isinstance(split_files, JoinedSplit):
        part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
        full = join_parts(spec, full_split, [_read(part, full_split, part_settings) for part in split_files.parts])
    else:
        if isinstance(split_files, ShardSplit):
            full = read_shards(split_files.index, spec)
        else:
            full = read_files(spec, full_split, settings)
        with settings.refusing():
            check_losses(full, spec, full_split, settings.max_bad)
    used = select_used(full.index, spec, split, settings)
    used = replace(used, cache_key=_cache_key(spec, split, settings), selection=_selection(spec, full.index))
    return LoadedSplit(spec, split, full, used)


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
