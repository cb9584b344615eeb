"""Which data set a script's ``--data`` and ``--stage`` mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.demo.dataset import default_demo_root, ensure_demo
from data.index.dataset_yaml import YAML_FOLDER, DatasetSpec, load_dataset_spec
from data.staging.stage import stage_dataset
from utils.config.yaml_files import suggestion
from utils.distributed.collectives import torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.errors import UserError


def open_dataset(
    data: str, splits: Sequence[str], *, stage: str, cache_dir: str, ctx: DistributedContext, known_root: str = ""
) -> DatasetSpec:
    """The data set ``data``; its images are not looked at yet. Call it on every process of the run.

    Args:
        data: a YAML, one of configs/data by its name ("coco" or "coco.yaml"), or "demo" for the set that is rendered
            into the cache folder.
        splits: the ones that will be used.
        stage: folder of each node's own disk where they are copied to first; empty: used where they are.
        cache_dir: where the demo set is; empty: ~/.cache/lockstep.
        known_root: where the data set's folder was found before, see `load_dataset_spec`.

    Raises:
        UserError: the YAML cannot be read, or what `stage_dataset` and `ensure_demo` refuse.
    """
    if data != "demo":
        data = _known_by_name(data)
    if stage:
        return stage_dataset(data, stage, splits, ctx, known_root=known_root)
    if data != "demo":
        _check_is_there(data)
        return load_dataset_spec(data, known_root)
    with torch_distributed_zero_first(ctx):
        return load_dataset_spec(ensure_demo(default_demo_root(cache_dir)))


def _known_by_name(data: str) -> str:
    """The YAML of configs/data that a bare name means where no file of that name is; anything else as it is."""
    listed = YAML_FOLDER / Path(data).with_suffix(".yaml").name
    is_bare = Path(data).name == data and Path(data).suffix in ("", ".yaml", ".yml")
    return str(listed) if is_bare and not Path(data).exists() and listed.is_file() else data


def _check_is_there(data: str) -> None:
    """Raises UserError naming what may be meant."""
    path = Path(data)
    if path.exists():
        return
    known = ["demo", *sorted(p.stem for p in YAML_FOLDER.glob("*.yaml") if p.stem != "template")]
    hint = f" (did you mean '{path.stem}', of configs/data?)" if path.stem in known else suggestion(path.stem, known)
    raise UserError(f"--data {data}: no such file{hint}; known by name: {', '.join(known)}")
