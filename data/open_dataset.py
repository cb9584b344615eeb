"""Opens the data set that ``--data`` and ``--stage`` name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from data.index.dataset_yaml import DatasetSpec, Stores, check_exists, known_by_name, load_dataset_spec
from data.index.files import without_empty
from data.index.index import class_names
from utils.config.settings import TrainConfig, typed_classes
from utils.distributed.collectives import torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import cache_folder
from utils.logger import get_logger
from utils.store.client import is_url
from utils.strings import counted


def open_dataset(
    data: str,
    splits: Sequence[str],
    *,
    classes: Sequence[str] = (),
    stage: str,
    cache_dir: str,
    ctx: DistributedContext,
    known_root: str = "",
    optional: Sequence[str] = (),
    stored_in: str = "",
    is_request: bool = True,
) -> DatasetSpec:
    """Opens the data set ``data`` without reading its images. Every process of the run must call this.

    Args:
        data: a YAML, the name of one in configs/data ("coco" or "coco.yaml"), or "demo" for the data set that is
            rendered into the cache folder.
        splits: those that will be read; the others are not staged.
        classes: the only ones that are used, as ``--classes`` names them; empty: all.
        stage: folder on a local disk of each node to which the splits are copied first; empty: no copy.
        cache_dir: the cache folder, which contains the demo set; empty: ~/.cache/lockstep.
        known_root: see `load_dataset_spec`.
        optional: more splits to stage, if the data set has them; empty folders do not count.
        stored_in: the checkpoint or exported file that names ``data``, for messages; empty: the command line does.
        is_request: the user asks for what ``stored_in`` names, as ``--resume`` does; else no address is read.

    Raises:
        UserError: the YAML does not exist or cannot be read; see also `stage_dataset` and `ensure_demo`.
    """
    note = f" ({stored_in} stores the path of this data set; --data names another)" if stored_in else ""
    with _errors_with(note):
        if data != "demo" and not is_url(data):
            data = known_by_name(data)
        if is_url(data) and stored_in and not is_request:
            raise UserError(f"{data}: an address is read only if you name it with --data")
        if stage:
            from data.staging.stage import stage_dataset

            spec = stage_dataset(data, stage, splits, ctx, known_root=known_root, optional=optional)
        elif is_url(data):
            with torch_distributed_zero_first(ctx):
                spec = load_dataset_spec(data, cache_dir=cache_dir)
        elif data != "demo":
            if stored_in and not Path(data).exists():
                raise UserError(f"{data}: no such file")
            check_exists(data)
            spec = load_dataset_spec(
                data, known_root, stores=Stores(cache_dir, "" if stored_in and not is_request else None)
            )
            spec = without_empty(spec, optional)
            if spec.summary:
                get_logger().info("%s", spec.summary)
            for split in splits:  # what is missing is known before weights are read
                spec.check_split(split)
            spec = replace(spec, if_missing=spec.if_missing + note)
        else:
            from data.demo import ensure_demo

            with torch_distributed_zero_first(ctx):
                spec = load_dataset_spec(ensure_demo(cache_folder(cache_dir) / "demo"))
    return with_classes(spec, typed_classes(classes))


def open_splits(ctx: DistributedContext, config: TrainConfig, *, known_root: str, stored_in: str) -> DatasetSpec:
    """The training and validation splits of the data set; with ``--val-fraction`` the latter may be missing.

    ``known_root`` and ``stored_in``: as in `open_dataset`.
    """
    return open_dataset(
        config.data,
        ("train",) if config.val_fraction else ("train", "val"),
        optional=("val",) if config.val_fraction else (),
        classes=config.classes,
        stage=config.stage,
        cache_dir=config.cache_dir,
        ctx=ctx,
        known_root=known_root,
        stored_in=stored_in,
    )


def with_classes(spec: DatasetSpec, classes: Sequence[int | str]) -> DatasetSpec:
    """`DatasetSpec.use_classes`, with a line in the log."""
    spec = spec.use_classes(classes)
    if spec.classes:
        names = class_names(spec, single_cls=False)
        text = "%d of %s used: %s; boxes of other classes are left out"
        get_logger().info(text, len(names), counted(len(spec.names), "class"), ", ".join(names))
    return spec


@contextmanager
def _errors_with(note: str) -> Iterator[None]:
    """Appends ``note`` to the UserErrors of the block."""
    try:
        yield
    except UserError as error:
        error.args = (f"{error}{note}",)
        raise
