"""Opens the index of a split in files, from its cache file or by a scan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from data.index.cache_file import IndexCache, fingerprint_of
from data.index.index import DatasetIndex, Scan
from data.index.index_settings import IndexSettings
from data.index.loaded import LoadedSplit, raise_or_warn, source_name
from data.index.missing_labels import no_label_file
from data.index.scan import scan_split
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.files import Listing, list_split
from utils.files.program_folders import cache_folder


def from_files(spec: DatasetSpec, split: str, settings: IndexSettings, *, is_check: bool) -> LoadedSplit:
    """Opens the index of a split from its cache file, or scans the split and writes that file. For a check all images
    are decoded, and no cache is read or written. Raises UserError as `list_split` and `scan_split`, and if no image has
    a label file."""
    listing = list_split(spec.as_labeled(), split)
    labeled = [file.name for file in listing.labels if file.stamp is not None]
    if not labeled:
        raise_or_warn(no_label_file(listing, spec, split), is_check=is_check)  # before the images are read
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
    scanned = scan_split(labeled, split, listing, settings, decode_all=is_check)
    index = replace(scanned.index, fingerprint=fingerprint)
    if is_check:
        return _OpenedIndex(index, cache, scans=(Scan(spec, spec.root, scanned.source, scanned.findings),))
    cache.write(index)
    return _OpenedIndex(replace(index, origins=None), cache)  # as from the cache
