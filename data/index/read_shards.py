"""Reads a split in shards (`data.images.shards`), as written by `python -m tools.shard`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data.images.shards import Shards, open_shards
from data.index.cache_file import restored_index
from data.index.full_split import FullSplit
from data.index.index import Scan, digest_of_arrays, origins_of_scan
from data.source.dataset_spec import DatasetSpec
from data.source.walk import stamp_of
from utils.class_names import class_difference
from utils.errors import UserError


def read_shards(path: Path, spec: DatasetSpec) -> FullSplit:
    """Reads a split in shards. Raises UserError if the shards are damaged, incomplete or of another version, or if
    their classes differ from those of ``spec``."""
    shards = open_shards(path)
    difference = class_difference(spec.as_labeled().names, shards.meta["names"])
    if difference:
        raise UserError(f"{spec.source}: names: differ from {path.name}: {difference}")
    _check_tar_files(path, shards.meta["shards"])
    index = restored_index(shards.meta, shards.arrays, spec.as_labeled().names, path)
    index = replace(index, image_files=_image_files(shards), pixels=spec.pixels, origins=origins_of_scan(len(index)))
    scan = Scan(spec, root=path, source=None, findings=index.report.findings)
    return FullSplit(index, note=" (shards)", scans=(scan,), first_label=path.name)


def _image_files(shards: Shards) -> str:
    """Returns `DatasetIndex.image_files` for shards, using checksums of the images instead of modification times."""
    return digest_of_arrays(*(shards.arrays[name] for name in ("paths.data", "paths.offsets", "size", "crc")))


def _check_tar_files(path: Path, shards: list[tuple[str, int]]) -> None:
    """Raises UserError unless the tar files of the index ``path`` are complete. Without this check, the problem would
    only show during an epoch. ``shards``: names and sizes in bytes of the tar files."""
    for name, size in shards:
        file = path.with_name(name)
        stamp = stamp_of(file)
        if stamp is None:
            raise UserError(f"{file}: not found (named by {path}); copy it as well")
        if stamp.size != size:
            raise UserError(f"{file}: has {stamp.size:,} bytes, but {path.name} says {size:,}; copy or write it again")
