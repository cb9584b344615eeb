"""The data set on which models are scored: that of the command line, or else the one that their files name."""

from __future__ import annotations

from collections.abc import Sequence

from data.index.dataset_yaml import DatasetSpec
from data.open_dataset import open_dataset
from engine.inference.model import InferenceModel
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import find_location
from utils.strings import counted


def open_data(
    models: Sequence[InferenceModel],
    data: str,
    splits: Sequence[str],
    *,
    stage: str,
    cache_dir: str,
    ctx: DistributedContext,
    single_cls: bool,
    instead: str = "",
) -> DatasetSpec:
    """Opens ``data``, or the data set of the first model that names one. Every process of the run must call this.

    Args:
        data: see `open_dataset`; empty: as the models say.
        splits, stage, cache_dir: see `open_dataset`.
        single_cls: all classes count as one, so that the names need not be the models'.
        instead: how to do without a data set, for messages.

    Raises:
        UserError: no data set is named, it cannot be opened, or a model has other classes.
    """
    root = ""
    for model in models:
        if not data:
            data, root = stored_location(model)
    if not data:
        raise UserError(f"{models[0].path}: does not name its data set; name a YAML with --data{instead}")
    spec = open_dataset(data, splits, stage=stage, cache_dir=cache_dir, ctx=ctx, known_root=root)
    if not single_cls:
        for model in models:
            check_names(model.names, spec, str(model.path))
    return spec


def stored_location(model: InferenceModel) -> tuple[str, str]:
    """The YAML and the folder of the data set that the model's file names, see `find_location`."""
    file, folder = model.path, model.path.parent
    is_inside = file.suffix.lower() == ".xml" and (folder / "metadata.yaml").is_file()  # of an OpenVINO folder
    return find_location(model.info.get("data", {}), folder if is_inside else file)


def check_names(names: Sequence[str], spec: DatasetSpec, weights: str) -> None:
    """Raises UserError unless the model's classes are the data set's, in the same order."""
    if what := class_difference(names, spec.names):
        raise UserError(
            f"{weights} and {spec.source} do not have the same classes ({what}); name its own data set with --data "
            "(val.py and engine.compare: or score all classes as one with --single-cls)"
        )


def class_difference(names: Sequence[str], expected: Sequence[str]) -> str:
    """In which way the names of the classes are not those that are expected; "" if they are."""
    if len(names) != len(expected):
        return f"{counted(len(names), 'class')} against {len(expected)}"
    index = next((i for i, (a, b) in enumerate(zip(names, expected)) if a != b), None)
    return "" if index is None else f"class {index} is '{names[index]}' against '{expected[index]}'"
