"""The data set on which a model is scored: given on the command line, or else named in the model's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.open import open_data, with_classes
from data.spec import DatasetSpec, DataSource, class_names
from engine.inference.model import CheckpointModel, InferenceModel
from models.weights.read import read_weights
from utils.class_names import class_difference, class_key
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.safe_io import sha256_of
from utils.strings import counted, listed


def open_model_data(
    model: InferenceModel, source: DataSource, ctx: DistributedContext, *, single_cls: bool
) -> DatasetSpec:
    """Opens ``source`` or, if it names no data set, the one that the model's checkpoint names. Every process must call
    this.

    Args:
        source: its classes, if it names any, are scored; otherwise `classes_to_score` chooses.
        single_cls: all classes count as one, so that the names need not be the model's.

    Raises UserError if no data set is named, it cannot be opened, or the model has other classes or channels.
    """
    checkpoint, training = _checkpoint_of(model)
    if not source.data:
        stored = training.get("data", {})
        data = str(stored.get("source", ""))
        source = replace(source, data=data, known_root=str(stored.get("root", "")), stored_in=str(checkpoint))
    if not source.data:
        raise UserError(f"{model.path}: does not name its data set; name a YAML with --data")
    held_out = training.get("val_images")
    if isinstance(held_out, list) and held_out:  # they serve as "val" of a data set that has none
        source = replace(source, is_val_optional=True, val_images=tuple(map(str, held_out)))
    spec = open_data(source, ctx)
    if source.classes:  # also if they are all of the data set's, the model may have them among others
        spec = replace(spec, classes=spec.classes or tuple(range(len(spec.names))))
    else:
        scored = classes_to_score(model, spec, single_cls=single_cls)
        spec = with_classes(spec, [spec.names.index(name) for name in scored])  # a name may be digits
        if model.has_kept_classes and not single_cls:
            spec = spec.extended(model.names, str(model.path))
    check_channels(model, spec)
    if not single_cls:
        check_names(model.names, spec, str(model.path))
    return spec


def _checkpoint_of(model: InferenceModel) -> tuple[Path, Mapping[str, Any]]:
    """Returns the model's checkpoint and its content. Exported files do not say where their data set is: theirs is the
    one beside them whose name begins theirs, and whose sha256 they state. If it is not there, the content is {}."""
    if isinstance(model, CheckpointModel):
        return model.path, model.info
    for path in sorted(model.path.parent.glob("*.pt")):
        if model.path.name.startswith(path.stem) and sha256_of(path) == model.stored("weights_sha256"):
            return path, read_weights(path).content
    return model.path, {}


def classes_to_score(model: InferenceModel, spec: DatasetSpec, *, single_cls: bool) -> Sequence[str]:
    """Returns the names in ``spec`` of the classes whose boxes are scored if no flag names any; empty: all.

    They are those of the training's ``--classes``: by name, or, where all classes count as one or a teacher's were kept
    (``--keep-old``), those of them that ``spec`` has. If it lacks one of a model's classes, all are scored, for
    `check_names` to explain.

    Raises UserError if all classes count as one, and the data set has none of the training's classes.
    """
    if not model.trained_classes:
        return ()
    if single_cls or model.has_kept_classes:
        keys = {class_key(name) for name in model.trained_classes}
        common = [name for name in spec.names if class_key(name) in keys]
        if single_cls and not common:
            raise UserError(
                f"{model.path}: was trained on --classes {listed(model.trained_classes)}, of which {spec.source} has "
                "none; name its classes with --classes"
            )
        return common
    return model.names if set(model.names).issubset(spec.names) else ()


def check_channels(model: InferenceModel, spec: DatasetSpec) -> None:
    """Raises UserError unless the images have the number of channels that the model takes."""
    if model.pixels.channels != spec.pixels.channels:
        expected = counted(model.pixels.channels, "channel")
        raise UserError(
            f"{model.path}: takes images of {expected}, those of {spec.source} have {spec.pixels.channels}; name other "
            "data"
        )


def class_columns(model: InferenceModel, spec: DatasetSpec) -> list[int] | None:
    """Returns the model's indices of the classes that ``spec`` uses; None: all classes of the model."""
    names = class_names(spec, single_cls=False)
    if not spec.classes or not set(names).issubset(model.names):
        return None
    return [model.names.index(name) for name in names]


def check_names(names: Sequence[str], spec: DatasetSpec, weights: str) -> None:
    """Raises UserError unless the model's classes are the data set's, in the same order. If only some of the data set's
    classes are used, the model must have at least these."""
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
