"""Reads a split in shards (`data.images.shards`), as written by `python -m tools.shard`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data.dataset.spec import DatasetSpec
from data.images.shards import open_shards
from data.index.full_split import FullSplit
from data.index.index import Scan, digest_of_arrays, origins_of_scan
from data.index.store import restored_index
from utils.class_names import class_difference
from utils.errors import UserError, os_reason


def read_shards(path: Path, spec: DatasetSpec) -> FullSplit:
    """Reads a split in shards. Raises UserError if the shards are damaged or incomplete, or if
    their classes differ from those of ``spec``."""
    shards = open_shards(path)
    meta = shards.meta
    names = spec.as_labeled().names
    difference = class_difference(names, meta["names"])
    if difference:
        raise UserError(f"{spec.source}: names: differ from {path.name}: {difference}")
    for name, size in meta["shards"]:  # incomplete files would only be found during an epoch
        _check_tar_file(path.with_name(name), size, path)
    index = restored_index(meta, shards.arrays, names, path)
    # Checksums of the images replace modification times.
    image_files = digest_of_arrays(*(shards.arrays[name] for name in ("paths.data", "paths.offsets", "size", "crc")))
    index = replace(index, image_files=image_files, pixels=spec.pixels, origins=origins_of_scan(len(index)))
    scan = Scan(spec, root=path, source=None, findings=index.report.findings)
    return FullSplit(index, note=" (shards)", scans=(scan,))


def _check_tar_file(file: Path, size: int, index: Path) -> None:
    try:
        actual_size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: {os_reason(error)} (named by {index}); copy it as well") from None
    if actual_size != size:
        raise UserError(f"{file}: has {actual_size:,} bytes, but {index.name} says {size:,}; copy or write it again")
