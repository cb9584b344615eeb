"""Reads a split that consists of files, from its cache file or by a scan."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from data.index.cache_file import IndexCache, file_rows, fingerprint_of
from data.index.full_split import FullSplit
from data.index.index import Scan, cache_key_of
from data.index.index_settings import IndexSettings
from data.index.scan import scan_split
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.diagnosis.missing_labels import check_label_files
from data.source.files import list_split
from utils.program_folders import cache_folder


def read_files(spec: DatasetSpec, split: str, settings: IndexSettings) -> FullSplit:
    """Reads a split from its cache file, or scans it and writes that file.

    Raises UserError like `list_split` and `scan_split`, and if no image has a label file.
    """
    labeled = spec.as_labeled()
    listing = list_split(labeled, split)
    with settings.refusing():
        check_label_files(listing, spec, split)  # before the images are read

    # Classes are selected before they are merged, and a scan that merges all classes does not check them.
    single_cls = settings.single_cls and not (spec.classes or spec.class_of)
    image_rows = file_rows(listing.images)
    fingerprint = fingerprint_of(labeled, split, listing, image_rows, single_cls=single_cls)
    cache_key = cache_key_of(spec, split, single_cls)
    cache = IndexCache.find(cache_folder(settings.cache_dir), cache_key, fingerprint)
    index = cache.open(class_names(labeled, single_cls), spec.root) if settings.use_cache else None
    note = " (cached)"
    scans: tuple[Scan, ...] = ()
    if index is None:
        note = ""
        scanned = scan_split(labeled, split, listing, replace(settings, single_cls=single_cls))
        index = scanned.index
        scans = (Scan(spec, spec.root, scanned.source, scanned.findings, listing.has_labels),)
        if settings.use_cache:
            cache.write(index)
    return FullSplit(
        replace(index, pixels=spec.pixels, image_files=hashlib.blake2b(image_rows, digest_size=16).hexdigest()),
        note=note,
        scans=scans,
        listing=listing,
        first_label=next((file.name for file in listing.labels if file.stamp is not None), listing.labels[0].name),
        report_path=cache.report_path,
    )
