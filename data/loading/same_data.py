"""Checks that all processes of a run have read the same data."""

from __future__ import annotations

import hashlib

import numpy as np

from data.index.index import DatasetIndex
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext


def check_same_data(ctx: DistributedContext, split: str, index: DatasetIndex) -> None:
    """Raises UserError if processes have read different data. Every process of the run must call this."""
    if ctx.world_size > 1:
        check_agreement(ctx, data_facts(split, index))


def data_facts(split: str, index: DatasetIndex) -> dict[str, object]:
    """Returns facts, by their names in messages, that agree between processes that read the same data as ``split``.

    File stamps are not among them, as machines may have separate copies.
    """
    return {
        f"the number of {split} images": len(index),
        "the class names": list(index.names),
        "the channels and bits of the images": str(index.pixels),
        "the size of tiles": index.tile,
        f"the list of {split} images": _digest(index.paths.data, index.paths.offsets),
        f"the sizes of the {split} images": _digest(index.image_hw),
        f"the {split} labels": _digest(index.offsets, index.boxes_xywh_px, index.classes, index.crowd),
    }


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
