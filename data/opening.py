"""Which data set a script's ``--data`` and ``--stage`` mean."""

from __future__ import annotations

from collections.abc import Sequence

from data.dataset_yaml import DatasetSpec, load_dataset_spec
from data.demo import default_demo_root, ensure_demo
from data.staging import stage_dataset
from utils.distributed import DistributedContext, torch_distributed_zero_first


def open_dataset(
    data: str, splits: Sequence[str], *, stage: str, cache_dir: str, ctx: DistributedContext, known_root: str = ""
) -> DatasetSpec:
    """The data set ``data``; its images are not looked at yet. Call it on every process of the run.

    Args:
        data: a YAML, or "demo" for the set that is rendered into the cache folder.
        splits: the ones that will be used.
        stage: folder of each node's own disk where they are copied to first; empty: used where they are.
        cache_dir: where the demo set is; empty: ~/.cache/lockstep.
        known_root: where the data set's folder was found before, see `load_dataset_spec`.

    Raises:
        UserError: the YAML cannot be read, or what `stage_dataset` and `ensure_demo` refuse.
    """
    if stage:
        return stage_dataset(data, stage, splits, ctx, known_root=known_root)
    if data != "demo":
        return load_dataset_spec(data, known_root)
    with torch_distributed_zero_first(ctx):
        return load_dataset_spec(ensure_demo(default_demo_root(cache_dir)))
