"""Opens the index of a split, by `from_files`, `from_shards` or `joined`: reads it, judges it, and selects its part."""

from __future__ import annotations

from dataclasses import replace

from data.index.from_files import from_files
from data.index.index import DatasetIndex, Scan
from data.index.index_settings import IndexSettings
from data.index.joined import joined
from data.index.judge import (
    refusal_for_losses,
    refusal_without_backgrounds,
    refusal_without_objects,
    warn_of_background_class,
    warn_of_losses,
)
from data.index.loaded import LoadedSplit, raise_or_warn, source_name
from data.index.selection import select_used
from data.index.sharded import from_shards
from data.source.dataset_spec import DatasetSpec
from data.source.files import shards_of
from utils.logger import get_logger


def load_index(spec: DatasetSpec, split: str, settings: IndexSettings | None = None) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file.

    Raises UserError: data is missing, there is no image, no label file or no object to train on, the names do not match
    the labels, or more than the fraction ``settings.max_bad`` of the labels or images is lost.
    """
    return _load(spec, split, settings or IndexSettings(), is_check=False).index


def scan_for_check(spec: DatasetSpec, split: str, settings: IndexSettings) -> tuple[DatasetIndex, tuple[Scan, ...]]:
    """Scans a split and decodes all of its images, without reading or writing a cache.

    Returns its index, and what has been scanned, in the order of the images. Problems of the split as a whole are
    warnings, except those that allow no index (UserError): missing data, no image, names that do not match the labels.
    """
    loaded = _load(spec, split, settings, is_check=True)
    return loaded.index, loaded.scans


def _load(spec: DatasetSpec, split: str, settings: IndexSettings, *, is_check: bool) -> LoadedSplit:
    """Reads a split as a run uses it. Refuses it if there is nothing to learn from."""
    loaded = _load_used(spec, split, settings, title=split, is_check=is_check)
    index = loaded.index
    if loaded.has_labels and not loaded.has_lost_too_much:  # else it has been refused, or a check has warned
        raise_or_warn(refusal_without_objects(index, loaded.first_label, spec, split), is_check=is_check)
    if spec.split(_source_split(spec, split)).parts:
        raise_or_warn(refusal_without_backgrounds(index, spec, split), is_check=is_check)
    source = source_name(spec, split, settings.single_cls, settings.fraction)
    return replace(loaded, index=replace(index, source=source))


def _source_split(spec: DatasetSpec, split: str) -> str:
    """Returns the split whose files have the images of ``split``, which may be held-out training images."""
    return "train" if spec.held_out and split == "val" else split


def _load_used(
    spec: DatasetSpec, split: str, settings: IndexSettings, *, title: str, is_check: bool, is_reported: bool = False
) -> LoadedSplit:
    """Reads a split, judges and reports what is lost of all that was labeled, and only then selects what the run uses.

    Args:
        title: the split in log messages.
        is_reported: whether this is a part of a split that has been reported already.
    """
    source_split = _source_split(spec, split)
    if spec.split(source_split).parts:
        return _load_joined(spec, split, settings, title=title, is_check=is_check, is_reported=is_reported)
    shards = shards_of(spec, source_split)
    if shards:
        loaded = from_shards(shards, spec, is_check=is_check)
    else:
        loaded = from_files(spec, source_split, settings, is_check=is_check)
    report_note = _report_note(loaded)
    loss_refusal = refusal_for_losses(loaded.index.report, spec, source_split, settings.max_bad, report_note)
    raise_or_warn(loss_refusal, is_check=is_check)

    index = select_used(loaded.index, spec, split, settings)
    loaded = replace(loaded, index=index, has_lost_too_much=bool(loss_refusal))
    if not index.report.problems:  # as of a held-out part
        report_note = ""
    if is_reported:
        return loaded
    get_logger().info("%s: %s%s%s", title, index.report.summary(), loaded.note, report_note)
    if split == source_split:  # losses of a held-out part are reported with the training split
        warn_of_losses(loaded, spec, title)
    if split == "train" and not is_check:  # a check reports the use of each class
        warn_of_background_class(index, spec)
    return loaded


def _load_joined(
    spec: DatasetSpec, split: str, settings: IndexSettings, *, title: str, is_check: bool, is_reported: bool
) -> LoadedSplit:
    """Reads the data sets that a split joins, and selects what the run uses of all of them. What is lost is judged part
    by part, as a small part may be of one kind; whether there are objects is not: a part may have backgrounds only."""
    source_split = _source_split(spec, split)
    are_parts_reported = is_reported or split != source_split  # those of a held-out part, with the training split
    part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
    loaded_parts = []
    for part in spec.split(source_split).parts:
        part_title = f"{source_split} of {part.source}"
        loaded_part = _load_used(
            part, source_split, part_settings, title=part_title, is_check=is_check, is_reported=are_parts_reported
        )
        loaded_parts.append(loaded_part)
    loaded = joined(spec, source_split, loaded_parts, is_reported=are_parts_reported)
    index = select_used(loaded.index, spec, split, settings)
    if not is_reported:
        get_logger().info("%s: %s", title, index.report.summary())
    return replace(loaded, index=index)


def _report_note(loaded: LoadedSplit) -> str:
    """Returns where the report of the scan is, for messages; "" if there is none, or nothing in it."""
    path = loaded.report_path
    if path is None or not loaded.index.report.problems or not path.exists():
        return ""
    return f"; report: {path}"
