"""Settings of the commands in tools/. Those of ``kfold`` and ``search``, which train several times, extend those of
train.py."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.settings import (
    DATA_HELP,
    REQUIRED,
    RUNS,
    RUNS_HELP,
    TRUST_HELP,
    Downloads,
    LossLimit,
    TrainConfig,
    Usage,
    setting,
)
from utils.schema import Bounds

MAX_SHARD_MEGABYTES = 549_755  # half of `data.images.shards.SPAN`
_OUTPUT = Bounds(is_output=True)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """The flags of ``python -m tools.check``."""

    data: str = setting(REQUIRED, DATA_HELP, usage=Usage(positional="DATA", is_keyword=False))
    split: list[str] = setting([], "splits to check; default: all")
    imgsz: int = setting(
        0, f"longer image side in training, pixels; 0: the checkpoint's, or {TrainConfig.imgsz}", Bounds(64, sentinel=0)
    )
    weights: str = setting("", "checkpoint trained on this data; adds the label errors it finds")
    trust: bool = setting(False, TRUST_HELP)
    device: str = setting("", "cpu, mps or 0, for --weights; empty: the best available device")
    json: bool = setting(False, "print all issues as JSON, and nothing else", usage=Usage(is_keyword=False))
    out: str = setting("", "folder for report.html; empty: runs/check/exp, exp2, ...", _OUTPUT)
    plots: bool = setting(True, "write report.html")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(LossLimit):
    """The flags of ``python -m tools.convert``."""

    source: str = setting(REQUIRED, f"{DATA_HELP}; or a folder of Hugging Face", usage=Usage(positional="DATA"))
    out: str = setting(
        REQUIRED, "file to write; out.yaml appears next to it", _OUTPUT, usage=Usage(positional="OUT.json")
    )


@dataclass(frozen=True, kw_only=True)
class ShardConfig(LossLimit):
    """The flags of ``python -m tools.shard``."""

    data: str = setting(REQUIRED, DATA_HELP, usage=Usage(positional="DATA"))
    out: str = setting(REQUIRED, "new folder", _OUTPUT, usage=Usage(positional="OUT"))
    split: list[str] = setting([], "splits to write; default: all")
    megabytes: int = setting(256, "approximate size of a tar file", Bounds(1, MAX_SHARD_MEGABYTES))
    cache_dir: str = setting("", "folder of index caches; empty: ~/.cache/lockstep")


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Downloads):
    """The flags of ``python -m tools.weights``."""

    source: str = setting(REQUIRED, "checkpoint, or a name from configs/weights.yaml", usage=Usage(positional="SOURCE"))
    target: str = setting(
        REQUIRED, "file to write: .safetensors, or .pt for our own format", _OUTPUT, usage=Usage(positional="TARGET")
    )


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The flags of ``python -m tools.demo``."""

    out: str = setting(REQUIRED, "an empty or new folder", _OUTPUT, usage=Usage(positional="OUT"))


@dataclass(frozen=True, kw_only=True)
class KfoldConfig(TrainConfig):
    """The flags of ``python -m tools.kfold``, in addition to those of train.py."""

    data: str = setting(REQUIRED, DATA_HELP)
    folds: int = setting(5, "number of folds", Bounds(2))
    groups: str = setting(
        "", "keep groups of images together: CSV with columns image and group, or a regex that finds it in paths"
    )
    near_duplicates: bool = setting(True, "keep near-duplicate images together, as tools.check finds them")
    plots: bool = setting(False, "write plots for each training")
    project: str = setting("runs/kfold", RUNS_HELP, RUNS)


@dataclass(frozen=True, kw_only=True)
class SearchConfig(KfoldConfig):
    """The flags of ``python -m tools.search``."""

    hyp: str = setting("all", "ranges: all, optimizer, augment or loss of configs/search, or a YAML")
    trials: int = setting(50, "number of trials, over all processes and restarts", Bounds(1))
    pruner: str = setting("median", "what ends unpromising trials early", Bounds(choices=("median", "halving", "none")))
    prune_after: int = setting(
        0, "epochs (with --folds: folds) before a trial may be pruned; 0: a fifth of the epochs, or 1 fold", Bounds(0)
    )
    folds: int = setting(0, "score trials by n-fold cross-validation; 0: on 'val'", Bounds(2, sentinel=0))
    project: str = setting("runs/search", RUNS_HELP, RUNS)

    @property
    def unit(self) -> str:
        """Interval at which a trial reports its fitness."""
        return "fold" if self.folds else "epoch"
