"""Opens the data set that a `DataSource` names. All commands read their data through `open_data`."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.images.shards import is_shard_path
from data.source.dataset_spec import DEMO, DatasetSpec, DataSource, class_names
from data.source.dataset_yaml import load_dataset_spec, read_yaml
from data.source.missing_data import nearby_paths_hint
from data.source.missing_splits import warn_of_unused_splits, without_empty
from data.source.searched_folders import problem_of_output
from data.source.yaml_paths import YAML_FOLDER, check_length
from utils.class_names import typed_classes
from utils.errors import UserError
from utils.logger import get_logger
from utils.program_folders import cache_folder
from utils.strings import counted

if TYPE_CHECKING:
    from data.source.staging.plan import StagePlan
    from utils.distributed.context import DistributedContext

ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")


def open_data(source: DataSource, ctx: DistributedContext) -> DatasetSpec:
    """Opens a data set without reading its images. Every process of the run must call this. Raises UserError."""
    stored_in = source.stored_in
    note = f" ({stored_in} stores the path of this data set; --data names another)" if stored_in else ""
    try:
        spec = _open(source, ctx)
    except UserError as error:
        error.args = (f"{error}{note}",)
        raise
    if not source.stage:  # the files of a copy exist
        spec = replace(spec, if_missing=spec.if_missing + note)
    if _holds_out_val(source, spec):
        spec = spec.hold_out(source.val_images)
    return with_classes(spec, typed_classes(source.classes))


def _open(source: DataSource, ctx: DistributedContext) -> DatasetSpec:
    """Opens a copy, the demo set, or a data set in its own folder."""
    if source.stage:
        from data.source.staging.stage import stage_dataset

        return stage_dataset(source, ctx, lambda: _plan_copy(source))
    if source.data == DEMO:
        from data.source.demo import ensure_demo
        from utils.distributed.context import torch_distributed_zero_first  # `check_data` needs no torch

        if _is_data_set(DEMO):  # not if it has the runs of `make demo`
            get_logger().warning("--data %s: the built-in demo set; for ./%s, write ./%s", DEMO, DEMO, DEMO)
        with torch_distributed_zero_first(ctx):
            return load_dataset_spec(ensure_demo(cache_folder(source.cache_dir) / DEMO))
    return _open_files(source)


def _is_data_set(path: str) -> bool:
    """Returns whether there is a YAML or folder of a data set at ``path``."""
    try:
        load_dataset_spec(path)
    except (UserError, OSError):
        return False
    return True


def _open_files(source: DataSource) -> DatasetSpec:
    """Opens a data set in its own folder."""
    with _permission_errors_named(source.data):
        if source.stored_in and not Path(known_by_name(source.data)).exists():
            raise UserError(f"{source.data}: no such file")
        spec = without_empty(load_dataset_spec(find_data(source.data), source.known_root), source.optional)
        for line in spec.notes:
            get_logger().info("%s", line)
        splits = _splits_to_read(source, spec)
        for split in splits:  # report missing data before weights are read
            spec.check_split(split)
        _check_output(source, spec)
        warn_of_unused_splits(spec, {*splits, *source.optional})
    return spec


def _holds_out_val(source: DataSource, spec: DatasetSpec) -> bool:
    """Returns whether training images serve as the split "val" of ``spec``."""
    return bool(source.val_images) and "train" in spec.splits and "val" not in spec.splits


def _splits_to_read(source: DataSource, spec: DatasetSpec) -> tuple[str, ...]:
    """Returns the splits of ``spec`` that ``source`` requires. "train" takes the place of a "val" that is held out of
    it."""
    if not _holds_out_val(source, spec):
        return source.splits
    return tuple(dict.fromkeys("train" if split == "val" else split for split in source.splits))


def _check_output(source: DataSource, spec: DatasetSpec) -> None:
    """Raises UserError if the folder for the command's plots is searched for images of ``spec``. Logs a warning instead
    if a run continues there."""
    problem = problem_of_output(Path(source.output), spec) if source.output else ""
    if not problem:
        return
    message = f"{source.output}: {problem}; plots there would become images of the data set"
    if not source.continues_output:
        raise UserError(f"{message}; name another folder with --project, or use --noplots")
    get_logger().warning("%s; move the run to another folder, and continue it there", message)


def _plan_copy(source: DataSource) -> StagePlan:
    """Opens a data set in its own folder and lists the files to copy."""
    from data.source.staging.plan import plan_stage

    spec = _open_files(source)
    optional = [split for split in source.optional if split in spec.splits]
    splits = dict.fromkeys((*_splits_to_read(source, spec), *optional))
    with _permission_errors_named(source.data):
        return plan_stage(spec, tuple(splits))


@contextlib.contextmanager
def _permission_errors_named(data: str) -> Iterator[None]:
    """Raises UserError for a file or folder of the data set ``data`` that this user may not read."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"data set {data}: {error.filename}: permission denied; let this user read it") from None


def with_classes(spec: DatasetSpec, classes: Sequence[int | str]) -> DatasetSpec:
    """Calls `DatasetSpec.use_classes` and logs the classes that are used."""
    spec = spec.use_classes(classes)
    if spec.classes:
        names = class_names(spec, single_cls=False)
        message = "%d of %s used: %s; boxes of other classes are left out"
        get_logger().info(message, len(names), counted(len(spec.names), "class"), ", ".join(names))
    return spec


def check_data(data: str, splits: Sequence[str], classes: Sequence[str] = ()) -> None:
    """Raises UserError for obvious mistakes in ``--data`` and ``--classes``. If only the annotations contain the class
    names, nothing more is checked yet, because reading them may take long. Needs no torch."""
    if data == DEMO:
        return
    with _permission_errors_named(data):
        data = find_data(data)
        values = None if Path(data).is_dir() else read_yaml(Path(data))
        if not isinstance(values, dict) or values.get("names") is not None or "annotations" not in values:
            spec = load_dataset_spec(data).use_classes(typed_classes(classes))
            for split in splits:
                spec.check_split(split)


def known_by_name(data: str) -> str:
    """Replaces a bare name that is not a file with the YAML of that name in configs/data."""
    is_bare = Path(data).name == data != "" and Path(data).suffix in ("", ".yaml", ".yml")
    listed = YAML_FOLDER / f"{Path(data).stem}.yaml"
    return str(listed) if is_bare and not os.path.exists(data) and os.path.isfile(listed) else data


def find_data(data: str) -> str:
    """Returns the YAML or folder that ``data`` names. Raises UserError with the known names."""
    data = known_by_name(data)
    path = Path(data)
    check_length(path, "data set")
    if data and path.exists():
        if path.suffix.lower() in ARCHIVES and path.is_file():
            raise UserError(f"data set {data}: an archive; unpack it and name the folder, or the YAML in it")
        if is_shard_path(path) and path.is_file():
            raise UserError(f"data set {data}: an index of shards; name its folder, or the YAML in it")
        return data
    known = [DEMO, *sorted(p.stem for p in YAML_FOLDER.glob("*.yaml") if p.stem != "template")]
    hint = _similar_data(path, known)
    if not hint and data:
        hint = nearby_paths_hint(path)
    shown = data or "''"
    raise UserError(f"data set {shown}: no such file{hint}; known by name: {', '.join(known)}")


def _similar_data(path: Path, known: Sequence[str]) -> str:
    """Returns a hint with a known name, or the path of a YAML nearby, similar to ``path``; "" if there is none."""
    if path.stem in known:
        return f" (did you mean '{path.stem}'?)"
    folders = (("../datasets", "*/*.y*ml"), ("datasets", "*/*.y*ml"), (".", "*.y*ml"), (path.parent, "*.y*ml"))
    files = (file for folder, pattern in folders for file in Path(folder).glob(pattern))
    nearby = {file.parent.name if file.stem == "data" else file.stem: str(file) for file in files}
    close = difflib.get_close_matches(path.stem, [*known, *nearby], n=1)
    return f" (did you mean '{nearby.get(close[0], close[0])}'?)" if close else ""
