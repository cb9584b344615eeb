"""The data set on which a model is scored: that of the command line, or else the one that its file names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data.source.dataset_spec import DatasetSpec, DataSource, class_names
from data.source.open import open_data, with_classes
from engine.formats.registry import folder_of
from engine.inference.model import InferenceModel
from utils.config.checks import typed_classes
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.data_location import find_location
from utils.strings import class_difference, counted


def open_model_data(
    model: InferenceModel, source: DataSource, ctx: DistributedContext, *, single_cls: bool, instead: str = ""
) -> DatasetSpec:
    """Opens ``source`` or, if it names no data set, that of the model's file. Every process of the run must call this.

    If ``source`` has no classes, those with which the model was trained are used. With ``single_cls`` all count as one,
    so that the names need not be the model's. ``instead``: how to do without a data set, for messages. Raises UserError
    if no data set is named, it cannot be opened, or the model has other classes or channels.
    """
    classes = source.classes
    stored = model.stored_words("classes")
    if not source.data:
        data, root = find_location(model.info.get("data", {}), folder_of(model.path))
        source = replace(source, data=data, known_root=root, stored_in=str(model.path))
    if not source.data:
        raise UserError(f"{model.path}: does not name its data set; name a YAML with --data{instead}")
    held_out = model.stored_words("val_images")
    if held_out:  # the data set may have no 'val'
        splits = dict.fromkeys("train" if split == "val" else split for split in source.splits)
        source = replace(source, splits=tuple(splits), optional=("val",), val_images=tuple(held_out))
    spec = open_data(source, ctx)
    if model.stored("keep_old") is True and not single_cls and not classes:
        # The data set does not label all of the model's classes.
        known = {*spec.names, *range(len(spec.names))}
        labeled = [name for name in typed_classes(stored) if name in known]
        if labeled:
            spec = spec.use_classes(labeled)
        spec = spec.extended(model.names, str(model.path))
    elif stored and not classes:
        chosen = typed_classes(stored) if single_cls else model.names
        if single_cls or set(chosen).issubset(spec.names):
            spec = with_classes(spec, chosen)
    check_channels(model, spec)
    if not single_cls:
        check_names(model.names, spec, str(model.path))
    return spec


def check_channels(model: InferenceModel, spec: DatasetSpec) -> None:
    """Raises UserError for images of other channels than the model takes."""
    if model.pixels.channels != spec.pixels.channels:
        expected = counted(model.pixels.channels, "channel")
        raise UserError(
            f"{model.path}: takes images of {expected}, those of {spec.source} have {spec.pixels.channels}; name other "
            "data"
        )


def class_columns(model: InferenceModel, spec: DatasetSpec) -> list[int] | None:
    """Returns the model's numbers of the classes of ``spec`` that are used; None: all its classes."""
    names = class_names(spec, single_cls=False)
    if not spec.classes or not set(names).issubset(model.names):
        return None
    return [model.names.index(name) for name in names]


def check_names(names: Sequence[str], spec: DatasetSpec, weights: str) -> None:
    """Raises UserError unless the model's classes are the data set's, in the same order, or the model has all of the
    data set's that are used and more."""
    used = class_names(spec, single_cls=False)
    if spec.classes:
        missing = [name for name in used if name not in names]
        if missing:
            known = ", ".join(names)
            raise UserError(f"{weights}: has no class {missing[0]}, only {known}; choose others with --classes")
        return
    difference = class_difference(names, used)
    if difference:
        raise UserError(
            f"{weights} and {spec.source} do not have the same classes ({difference}); name its own data set with "
            "--data (val.py: or score common --classes, or all classes as one with --single-cls)"
        )
