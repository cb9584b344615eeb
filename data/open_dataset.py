"""Opens the data set that ``--data`` and ``--stage`` name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.demo import ensure_demo
from data.index.dataset_yaml import YAML_FOLDER, DatasetSpec, load_dataset_spec
from data.staging.stage import stage_dataset
from utils.distributed.collectives import torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import cache_folder


def open_dataset(
    data: str, splits: Sequence[str], *, stage: str, cache_dir: str, ctx: DistributedContext, known_root: str = ""
) -> DatasetSpec:
    """Opens the data set ``data`` without reading its images. Every process of the run must call this.

    Args:
        data: a YAML, the name of one in configs/data ("coco" or "coco.yaml"), or "demo" for the data set that is
            rendered into the cache folder.
        splits: the splits to stage.
        stage: folder on a local disk of each node to which the splits are copied first; empty: no copy.
        cache_dir: the cache folder, which contains the demo set; empty: ~/.cache/lockstep.
        known_root: see `load_dataset_spec`.

    Raises:
        UserError: the YAML does not exist or cannot be read; see also `stage_dataset` and `ensure_demo`.
    """
    if data != "demo":
        data = _known_by_name(data)
    if stage:
        return stage_dataset(data, stage, splits, ctx, known_root=known_root)
    if data != "demo":
        _check_exists(data)
        return load_dataset_spec(data, known_root)
    with torch_distributed_zero_first(ctx):
        return load_dataset_spec(ensure_demo(cache_folder(cache_dir) / "demo"))


def _known_by_name(data: str) -> str:
    """Replaces a bare name that is not a file by the YAML of that name in configs/data."""
    is_bare = Path(data).name == data != "" and Path(data).suffix in ("", ".yaml", ".yml")
    listed = YAML_FOLDER / f"{Path(data).stem}.yaml"
    return str(listed) if is_bare and not Path(data).exists() and listed.is_file() else data


def _check_exists(data: str) -> None:
    """Raises UserError with the known names."""
    path = Path(data)
    if data and path.exists():
        return
    known = ["demo", *sorted(p.stem for p in YAML_FOLDER.glob("*.yaml") if p.stem != "template")]
    if path.stem in known:
        hint = f" (did you mean '{path.stem}' of configs/data?)"
    else:
        files = _yaml_files_nearby(path)
        nearby = {file.parent.name if file.stem == "data" else file.stem: str(file) for file in files}
        close = difflib.get_close_matches(path.stem, [*known, *nearby], n=1)
        hint = f" (did you mean '{nearby.get(close[0], close[0])}'?)" if close else ""
    named = data or "''"
    raise UserError(f"--data {named}: no such file{hint}; known by name: {', '.join(known)}")


def _yaml_files_nearby(path: Path) -> Iterator[Path]:
    """YAML files where a data set's may be: in folders of data sets, in the working folder, and beside ``path``."""
    for folder in ("../datasets", "datasets"):
        yield from Path(folder).glob("*/*.y*ml")
    for folder in (Path("."), path.parent):
        yield from folder.glob("*.y*ml")
