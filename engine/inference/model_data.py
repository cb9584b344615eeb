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
from utils.strings import class_difference, class_key, counted


def open_model_data(
    model: InferenceModel, source: DataSource, ctx: DistributedContext, *, single_cls: bool, instead: str = ""
) -> DatasetSpec:
    """Opens ``source`` or, if it names no data set, that of the model's file. Every process of the run must call this.

    Args:
        source: its classes, if it has any, are scored; otherwise those of `classes_to_score`.
        single_cls: all classes count as one, so that the names need not be the model's.
        instead: how to do without a data set, for messages.

    Raises UserError if no data set is named, it cannot be opened, or the model has other classes or channels.
    """
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
    if not source.classes:
        spec = with_classes(spec, classes_to_score(model, spec, single_cls=single_cls))
        if has_kept_classes(model) and not single_cls:
            spec = spec.extended(model.names, str(model.path))
    check_channels(model, spec)
    if not single_cls:
        check_names(model.names, spec, str(model.path))
    return spec


def classes_to_score(model: InferenceModel, spec: DatasetSpec, *, single_cls: bool) -> Sequence[int | str]:
    """Returns the classes of ``spec`` whose boxes are scored where no flag names any; empty: all.

    The first row that is true decides:

    | the model was trained      | classes whose boxes are scored                                                     |
    | -------------------------- | ---------------------------------------------------------------------------------- |
    | without ``--classes``      | all                                                                                |
    | with it, all count as one  | those of the training's ``--classes``: the model's names do not tell them apart    |
    | with it and ``--keep-old``  | the same, of which another data set may have only some; all if it has none of them |
    | with it                    | the model's; all if the data set lacks one of them, for `check_names` to explain   |

    A model with ``--keep-old`` also has the classes of its teacher. `open_model_data` adds them; where the data set
    does not label them, they are ignored.
    """
    # Files of earlier versions have what was typed: maybe numbers, which are those of the training's data set.
    trained = model.stored_words("used_classes") or typed_classes(model.stored_words("classes"))
    if not trained or single_cls:
        return trained
    if has_kept_classes(model):
        keys = {class_key(word) for word in trained if isinstance(word, str)}  # as `DatasetSpec.extended` compares
        numbers = [word for word in trained if isinstance(word, int) and word < len(spec.names)]
        return [*numbers, *(name for name in spec.names if class_key(name) in keys)]
    return model.names if set(model.names).issubset(spec.names) else ()


def has_kept_classes(model: InferenceModel) -> bool:
    """Whether the model has classes of a teacher which its data set may not label (``--keep-old``)."""
    return model.stored("keep_old") is True


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
