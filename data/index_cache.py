"""Stores the index of a split in a cache file, whose name contains a fingerprint of its files, or in shards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.findings import ScanReport, findings_of_json
from data.flat_strings import FlatStrings
from data.geometry import MIN_SIDE_PX
from data.images.shards import open_shards
from data.index import COLUMNS, DatasetIndex, digest_of_arrays
from data.listing import Listing
from data.spec import DatasetSpec
from utils.boxes import clip_xyxy, xywh_to_xyxy
from utils.class_names import class_difference
from utils.errors import UserError, os_reason
from utils.files.array_file import CacheError, open_arrays, write_arrays
from utils.files.paths import path_of
from utils.files.safe_io import read_regular, remove_half_written
from utils.logger import get_logger
from utils.pixels import RGB8

# Increase this when the arrays, the metadata or their meaning change, or the same files yield other boxes, findings or
# losses: all index caches are then built anew.
CACHE_VERSION = 37


def find_cache_file(folder: Path, cache_key: str, fingerprint: str) -> Path:
    """Returns a cache file with this fingerprint, whatever its key, so that a data set that has been moved, or that
    another YAML names, is not scanned again. Without one, returns the file to write."""
    return next(folder.glob(f"*-{fingerprint}.index"), folder / f"{cache_key}-{fingerprint}.index")


def report_file(cache_file: Path) -> Path:
    """Returns the path of the scan's report, a text file that exists if there are findings."""
    return cache_file.with_suffix(".txt")


def open_index(file: Path, names: tuple[str, ...], spec: DatasetSpec) -> DatasetIndex | None:
    """Memory-maps the index in a cache file. Returns None if the file is missing or (with a warning) unusable."""
    try:
        meta, arrays = open_arrays(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CacheError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        get_logger().warning("%s: the cached index can't be used (%s); scanning again", file, reason)
        return None
    return replace(restored_index(meta, arrays, names, spec.root), pixels=spec.pixels)


def write_index(file: Path, cache_key: str, index: DatasetIndex) -> bool:
    """Removes outdated cache files and leftovers of killed processes, and writes a cache file and the report of the
    scan. Returns False, with a warning, if the cache file can't be written."""
    folder = file.parent
    for old in {*folder.glob(f"{cache_key}-*")} - {file, report_file(file)}:
        with contextlib.suppress(OSError):  # another process may have removed it
            old.unlink()
    with contextlib.suppress(OSError):
        remove_half_written(folder)
    meta, arrays = index_content(index)
    try:
        write_arrays(file, meta | {"image_files": index.image_files}, arrays)
    except OSError as error:
        get_logger().warning("%s: the index can't be cached (%s); the next run scans again", folder, error.strerror)
        return False
    if index.report.num_findings:
        try:
            index.report.write(report_file(file))
        except OSError as error:
            get_logger().warning("%s: the report can't be written (%s)", report_file(file), error.strerror)
    return True


def fingerprint_of(spec: DatasetSpec, split: str, listing: Listing, *, single_cls: bool) -> str:
    """Returns a digest of the names, sizes and times of all files, the listing's findings, the classes, and the version
    of this code, and of the contents of label files if their times are meaningless. It does not depend on the folder,
    unless a file of all labels may name it. ``spec``: with the classes as labeled."""
    facts = [CACHE_VERSION, listing.label_format.name, split, single_cls, spec.names, listing.lacks_split]
    if not listing.label_format.is_per_image:
        facts.append(listing.named_root)
    if spec.pixels != RGB8:
        facts.append(spec.pixels.content())
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for names in (listing.images, listing.labels, listing.shared_images):
        digest.update("\0".join(names).encode("utf-8", "surrogateescape") + b"\0\0")
    for stamps in (listing.image_stamps, listing.label_stamps):
        digest.update(np.ascontiguousarray(stamps).data)
    digest.update(json.dumps(listing.findings).encode())
    if _have_one_time(listing):
        for name in listing.labels:
            content = b""  # of a missing or unreadable file, which the scan reports
            with contextlib.suppress(OSError, MemoryError):
                content = read_regular(path_of(name, spec.root))
            digest.update(hashlib.blake2b(content, digest_size=16).digest())
    return digest.hexdigest()


def image_files_digest(listing: Listing) -> str:
    """Returns `DatasetIndex.image_files`."""
    digest = hashlib.blake2b("\0".join(listing.images).encode("utf-8", "surrogateescape"), digest_size=16)
    digest.update(np.ascontiguousarray(listing.image_stamps).data)
    return digest.hexdigest()


def _have_one_time(listing: Listing) -> bool:
    """Returns whether all label files, or a single one and the images, have the same time, in whole seconds, as from an
    archive with a constant time. Then only contents, not sizes and times, can distinguish a corrected label from an old
    one."""
    times = listing.label_stamps[listing.label_stamps[:, 0] >= 0, 1]
    if len(listing.labels) == 1:
        times = np.r_[times, listing.image_stamps[:, 1]]
    return len(np.unique(times)) == 1 and times[0] % 1_000_000_000 == 0


def index_content(index: DatasetIndex) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the metadata and arrays of a file from which `restored_index` restores the index. They do not depend on
    modification times."""
    strings = {"paths": index.paths, "image_ids": index.image_ids}
    report = index.report
    arrays = {name: getattr(index, name) for name in COLUMNS} | {"findings": report.content}
    for name, flat in strings.items():
        if flat is not None:
            arrays[f"{name}.data"] = flat.data
            arrays[f"{name}.offsets"] = flat.offsets
    meta = {
        "id_of_category": index.id_of_category,
        "category_ids": index.category_ids,
        "report": [report.num_findings, report.kinds, report.used_images, report.used_objects],
    }
    return meta, arrays


def restored_index(
    meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray], names: tuple[str, ...], root: Path
) -> DatasetIndex:
    """Restores an index from its `index_content`."""

    def strings(name: str) -> FlatStrings:
        return FlatStrings(arrays[f"{name}.data"], arrays[f"{name}.offsets"])

    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
    num_findings, kinds, used_images, used_objects = meta["report"]
    return DatasetIndex(
        names=names,
        root=root,
        paths=strings("paths"),
        **columns,
        report=ScanReport(arrays["findings"], num_findings, tuple(findings_of_json(kinds)), used_images, used_objects),
        image_files=meta.get("image_files", ""),
        image_ids=strings("image_ids") if "image_ids.data" in arrays else None,
        id_of_category=meta["id_of_category"],
        category_ids=tuple(meta["category_ids"]),
    )


def read_shards(path: Path, spec: DatasetSpec) -> DatasetIndex:
    """Reads the index of a split in shards (`data.images.shards`). Raises UserError if the shards are damaged or
    incomplete, or if their classes differ from those of ``spec``."""
    shards = open_shards(path)
    meta = shards.meta
    names = spec.with_label_classes().names
    difference = class_difference(names, meta["names"])
    if difference:
        raise UserError(f"{spec.source}: names: differ from {path.name}: {difference}")
    for name, size in meta["shards"]:  # incomplete files would only be found during an epoch
        if name != Path(name).name:
            raise UserError(f"{path}: names the file {name}, which is not beside it; write it again")
        file = path.with_name(name)
        try:
            actual_size = file.stat().st_size
        except OSError as error:
            raise UserError(f"{file}: {os_reason(error)} (named by {path}); copy it as well") from None
        if actual_size != size:
            raise UserError(f"{file}: has {actual_size:,} bytes, but {path.name} says {size:,}; copy or write it again")
    index = restored_index(meta, shards.arrays, names, path)
    if not _is_valid(index):
        raise UserError(f"{path}: has boxes, classes or paths that no data set can have; write it again")
    # Checksums of the images replace modification times.
    image_files = digest_of_arrays(*(shards.arrays[name] for name in ("paths.data", "paths.offsets", "size", "crc")))
    return replace(index, image_files=image_files, pixels=spec.pixels)


def _is_valid(index: DatasetIndex) -> bool:
    """Returns whether the paths and labels of an index, which may be a stranger's, are possible results of a scan."""
    if any(os.path.isabs(name) or ".." in name.split("/") for name in index.paths):
        return False
    height, width = index.image_hw.repeat(np.diff(index.offsets), axis=0).T
    corners = xywh_to_xyxy(index.boxes_xywh_px)
    is_inside = np.abs(corners - clip_xyxy(corners, width, height)) <= MIN_SIDE_PX
    is_box = (index.boxes_xywh_px[:, 2:] > 0).all(1) & is_inside.all(1) & np.isfinite(index.area_px)
    return bool((is_box & (index.classes >= -1) & (index.classes < len(index.names))).all())
