"""Opens the data set that a `DataSource` names. All commands read their data through `open_data`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.read_spec import YAML_FOLDER, load_dataset_spec
from data.spec import DEMO, DatasetSpec, DataSource, FilesSplit, JoinedSplit, class_names
from utils.class_names import class_numbers, typed_classes
from utils.errors import UserError
from utils.files.paths import is_inside
from utils.logger import get_logger
from utils.program_folders import cache_folder, private_folder
from utils.schema import suggestion
from utils.strings import counted

if TYPE_CHECKING:
    from utils.distributed.context import DistributedContext


def open_data(source: DataSource, ctx: DistributedContext) -> DatasetSpec:
    """Opens a data set without reading its images. Every process of the run must call this. Raises UserError."""
    note = f" ({source.stored_in} stores the path of this data set; --data names another)" if source.stored_in else ""
    try:
        spec = _open(source, ctx)
    except UserError as error:
        raise type(error)(f"{error}{note}", whole=True) from None
    if not source.stage:  # the files of a copy exist
        spec = replace(spec, if_missing=spec.if_missing + note)
    if _holds_out_val(source, spec):
        spec = spec.hold_out(source.val_images)
    return with_classes(spec, typed_classes(source.classes))


def _open(source: DataSource, ctx: DistributedContext) -> DatasetSpec:
    """Opens a copy, the demo set, or a data set in its own folder. Only the first process of each node reads files:
    the classes may be in the labels."""
    from utils.distributed.context import once_per_node

    if source.stage:
        from data.stage import stage_dataset

        return stage_dataset(source, ctx, lambda: _open_original(source))
    return once_per_node(ctx, lambda: _open_files(source))


def _open_files(source: DataSource) -> DatasetSpec:
    """Opens a data set in its own folder, or the demo set, which is rendered if necessary."""
    if source.data == DEMO:
        from data.demo import ensure_demo

        return load_dataset_spec(ensure_demo(private_folder(cache_folder(source.cache_dir), "--cache-dir") / DEMO))
    spec = load_dataset_spec(find_data(source.data), source.known_root)
    if source.is_val_optional:
        spec = _without_empty_val(spec)
    for line in spec.notes:
        get_logger().info("%s", line)
    for split in _splits_to_read(source, spec):  # report missing data before weights are read
        spec.check_split(split)
    problem = problem_of_output(Path(source.output), spec) if source.output else ""
    if problem:
        message = f"{source.output}: {problem}; plots there would become images of the data set"
        if not source.continues_output:
            raise UserError(f"{message}; name another folder with --project, or use --no-plots")
        get_logger().warning("%s; move the run to another folder, and continue it there", message)
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


def _without_empty_val(spec: DatasetSpec) -> DatasetSpec:
    """Returns ``spec`` without the split "val" if it is missing or empty, and logs that, as a warning if it is missing:
    its name may be misspelled."""
    if "val" not in spec.splits:
        return spec
    splits = [part.split("val") for part in spec.parts_of("val")]
    paths = [path for s in splits for path in (s.images if isinstance(s, FilesSplit) else s.paths)]
    if not all(map(_is_missing_or_empty, paths)):
        return spec
    consequence = "left out; part of 'train' is held out in its place"
    missing = [path for path in paths if not path.exists()]
    if missing:
        get_logger().warning("%s: 'val' is %s", spec.missing_error(missing[0]), consequence)
    else:
        get_logger().info("%s: 'val' (%s) is empty and %s", spec.source, paths[0], consequence)
    kept = {name: split for name, split in spec.splits.items() if name != "val"}
    return replace(spec, splits=kept, left_out={"val": spec.splits["val"]})


def _is_missing_or_empty(entry: Path) -> bool:
    """Returns whether an entry of a split does not exist, is a folder without entries, or an empty list."""
    if os.path.isdir(entry):
        return not any(not name.startswith(".") for name in os.listdir(entry))
    return not os.path.exists(entry) or (entry.suffix.lower() == ".txt" and not entry.stat().st_size)


def problem_of_output(path: Path, spec: DatasetSpec) -> str:
    """Returns why files in ``path`` would become images of ``spec``, or "" if they would not."""
    for split in (*spec.splits.values(), *spec.left_out.values()):
        for part in split.parts if isinstance(split, JoinedSplit) else ():
            if problem := problem_of_output(path, part):
                return problem
        for folder in split.images if isinstance(split, FilesSplit) else ():
            if os.path.isdir(folder) and is_inside(path, folder):
                return f"is in {folder}, which {spec.source} searches for images"
    return ""


def _open_original(source: DataSource) -> tuple[DatasetSpec, tuple[str, ...]]:
    """Opens a data set in its own folder. Also returns the splits to copy."""
    spec = _open_files(source)
    splits = _splits_to_read(source, spec)
    if source.is_val_optional and "val" in spec.splits:
        splits = tuple(dict.fromkeys((*splits, "val")))
    return spec, splits


def with_classes(spec: DatasetSpec, classes: Sequence[int | str]) -> DatasetSpec:
    """Returns the data set restricted to boxes of ``classes``, numbers or names, which are logged; all boxes if
    ``classes`` is empty. Raises UserError for an unknown class."""
    numbers = sorted(set(class_numbers(classes, dict(enumerate(spec.names)), spec.source)))
    spec = replace(spec, classes=tuple(numbers) if len(numbers) < len(spec.names) else ())
    if spec.classes:
        names = class_names(spec, single_cls=False)
        message = "%d of %s used: %s; boxes of other classes are left out"
        get_logger().info(message, len(names), counted(len(spec.names), "class"), ", ".join(names))
    return spec


def known_by_name(data: str) -> str:
    """Replaces a bare name that is not a file with the YAML of that name in configs/data."""
    is_bare = Path(data).name == data != "" and Path(data).suffix in ("", ".yaml", ".yml")
    listed = YAML_FOLDER / f"{Path(data).stem}.yaml"
    return str(listed) if is_bare and not os.path.exists(data) and os.path.isfile(listed) else data


def find_data(data: str) -> str:
    """Returns the YAML or folder that ``data`` names. Raises UserError with the known names."""
    data = known_by_name(data)
    path = Path(data)
    if data and os.path.exists(data):
        return data
    known = [DEMO, *sorted(p.stem for p in YAML_FOLDER.glob("*.yaml") if p.stem != "template")]
    named = f"data set {data}: no such file{suggestion(path.stem, known)}" if data else "--data: name the data set"
    raise UserError(f"{named}; known by name: {', '.join(known)}")
