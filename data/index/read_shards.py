"""Reads a split in shards (`data.image_io.shards`), as written by `python -m tools.shard`."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from data.image_io.shards import Shards, open_shards, require
from data.index.cache_file import restored_index
from data.index.full_split import FullSplit
from data.index.index import ARRAYS, REPORT_COLUMNS, Scan, digest_of_arrays, origins_of_scan
from data.labels.clean import MIN_SIDE_PX
from data.labels.ledger import Ledger
from data.source.dataset_spec import IGNORED, DatasetSpec
from data.source.walk import stamp_of
from utils.class_names import class_difference
from utils.errors import UserError
from utils.schema import Count, check

VERSION = 9  # increase it when the layout or the meaning of the arrays or the metadata changes
_SLACK = 1e-6  # pixels by which a box may exceed its image


class _Meta(TypedDict):
    names: list[str]
    totals: dict[str, Count]
    categories: list[tuple[int, str, bool]]  # see `Category`
    category_ids: list[int]
    ledger: Ledger
    advice: list[str]
    notes: list[str]


def read_shards(path: Path, spec: DatasetSpec) -> FullSplit:
    """Reads a split in shards. Raises UserError if the shards are of another version, malformed or incomplete, or if
    their classes differ from those of ``spec``."""
    shards = open_shards(path)
    meta, arrays = _content_of(shards, spec)
    _check_tar_files(path, meta["shards"])
    index = restored_index(meta, arrays, spec.as_labeled().names, path)
    index = replace(index, image_files=_image_files(shards), pixels=spec.pixels, origins=origins_of_scan(len(index)))
    scan = Scan(spec, root=path, source=None, findings=index.report.findings)
    return FullSplit(index, note=" (shards)", scans=(scan,), first_label=path.name)


def _image_files(shards: Shards) -> str:
    """Returns `DatasetIndex.image_files` for shards, using checksums of the images instead of modification times."""
    return digest_of_arrays(*(shards.arrays[name] for name in ("paths.data", "paths.offsets", "size", "crc")))


def _content_of(shards: Shards, spec: DatasetSpec) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the metadata and arrays from which `restored_index` can restore an index. Raises UserError if they are
    of another version or malformed, or if their classes differ from those of ``spec``."""
    path = shards.path
    meta = shards.meta
    arrays = shards.arrays
    try:
        if meta["version"] != VERSION:
            age = "an earlier" if meta["version"] < VERSION else "a later"
            raise UserError(
                f"{path}: was written by {age} version of this program (index version {meta['version']}; this program "
                f"reads {VERSION}); write it again"
            )
        _check(check(meta, _Meta, str(path)), arrays, len(shards))
        difference = class_difference(spec.as_labeled().names, meta["names"])
        if difference:
            raise UserError(f"{spec.source}: names: differ from {path.name}: {difference}")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not an index of shards ({error}); write it again") from None
    return meta, arrays


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


def _check(meta: dict[str, Any], arrays: dict[str, np.ndarray], count: int) -> None:
    """Raises ValueError, or another error for wrong types, unless a scan could have produced these labels. ``count``:
    number of images."""
    num_boxes = len(arrays["classes"])
    num_names = len(meta["names"])
    num_rows = {"image_hw": count, "incomplete": count, "offsets": count + 1}
    for name, (dtype, row) in ARRAYS.items():
        shape = (num_rows.get(name, num_boxes), *row)
        require(arrays[name].dtype == dtype and arrays[name].shape == shape, f"wrong array {name}")
    for name in ("incomplete", "crowd", "repeated"):  # a file may contain bytes that are not booleans
        require(bool((arrays[name].view(np.uint8) <= 1).all()), f"wrong {name}")
    column_lengths = {len(arrays[f"report.{column}.offsets"]) for column in REPORT_COLUMNS}
    require(len(column_lengths) == 1, "wrong report")
    offsets = arrays["offsets"]
    require(offsets[0] == 0 and offsets[-1] == num_boxes and bool((np.diff(offsets) >= 0).all()), "wrong offsets")
    require(bool((arrays["image_hw"] > 0).all()), "wrong image_hw")
    classes = arrays["classes"]
    is_class = (classes >= 0) | (arrays["crowd"] & (classes == IGNORED))
    require(bool((is_class & (classes < num_names)).all()), "wrong classes")
    require(bool(np.isfinite(arrays["area_px"]).all()), "wrong area_px")
    require(_are_boxes_inside(arrays), "wrong boxes_xywh_px")
    require("image_ids.data" not in arrays or _are_image_ids(arrays, count), "wrong image_ids")
    require(meta["totals"]["images"] == count, "wrong totals")
    require(len(meta["category_ids"]) in (0, num_names), "wrong category_ids")
    require(len({category_id for category_id, *_ in meta["categories"]}) == len(meta["categories"]), "wrong categories")


def _are_boxes_inside(arrays: dict[str, np.ndarray]) -> bool:
    """Returns whether all boxes have a positive size and are inside their images. NaN counts as outside."""
    xywh = arrays["boxes_xywh_px"]
    sides = xywh[:, 2:]
    far_corners = xywh[:, :2] + sides
    sizes_wh = np.repeat(arrays["image_hw"][:, ::-1], np.diff(arrays["offsets"]), axis=0)
    is_inside = (xywh[:, :2] >= 0) & (sides + _SLACK >= MIN_SIDE_PX) & (far_corners <= sizes_wh + _SLACK)
    return bool(is_inside.all())


def _are_image_ids(arrays: dict[str, np.ndarray], count: int) -> bool:
    """Returns whether there is a JSON integer or string for each image."""
    data = arrays["image_ids.data"].tobytes()
    ends = arrays["image_ids.offsets"].tolist()
    ids = [json.loads(data[start:end]) for start, end in itertools.pairwise(ends)]
    return len(ids) == count and all(type(image_id) in (int, str) for image_id in ids)
