"""Settings of the commands in tools/. Those of ``kfold`` and ``search``, which train several times, extend those of
train.py."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.settings import DATA_HELP, IMGSZ_ALIASES, TRUST_HELP, Downloads, LossLimit, TrainConfig, setting
from utils.schema import Bounds

ANNOTATION_FORMATS = ("cvat", "labelme", "csv", "huggingface", "imagefolder")  # tools.convert.to_coco.FORMATS
MAX_SHARD_MEGABYTES = 549_755  # half of `data.images.shards.SPAN`
_OUTPUT = Bounds(is_output=True)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """The flags of ``python -m tools.check``."""

    data: str = setting(positional="DATA", help=DATA_HELP, is_keyword=False)
    split: list[str] = setting(factory=list, help="splits to check; default: all")
    imgsz: int = setting(
        0,
        Bounds(64, sentinel=0),
        aliases=IMGSZ_ALIASES,
        help=f"longer image side in training, pixels; 0: the checkpoint's, or {TrainConfig.imgsz}",
    )
    weights: str = setting("", help="checkpoint trained on this data; adds the label errors it finds")
    trust: bool = setting(False, help=TRUST_HELP)
    device: str = setting("", help="cpu, mps or 0, for --weights; empty: the best available device")
    json: bool = setting(False, help="print all issues as JSON, and nothing else", is_keyword=False)
    out: str = setting("", _OUTPUT, help="folder for report.html; empty: runs/check/exp, exp2, ...")
    plots: bool = setting(True, words={"noplots": False}, help="write report.html")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(LossLimit):
    """The flags of ``python -m tools.convert``."""

    source: str = setting(positional="EXPORT", help="folder of the export, or its annotation file")
    out: str = setting(bounds=_OUTPUT, positional="OUT.json", help="file to write; out.yaml appears next to it")
    from_: str = setting(
        "auto", Bounds(choices=("auto", *ANNOTATION_FORMATS)), help="format; auto: by what the files contain"
    )


@dataclass(frozen=True, kw_only=True)
class ShardConfig(LossLimit):
    """The flags of ``python -m tools.shard``."""

    data: str = setting(positional="DATA", help=DATA_HELP)
    out: str = setting(bounds=_OUTPUT, positional="OUT", help="new folder")
    split: list[str] = setting(factory=list, help="splits to write; default: all")
    megabytes: int = setting(256, Bounds(1, MAX_SHARD_MEGABYTES), help="approximate size of a tar file")
    cache_dir: str = setting("", help="folder of index caches; empty: ~/.cache/lockstep")


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Downloads):
    """The flags of ``python -m tools.weights``."""

    source: str = setting(positional="SOURCE", help="checkpoint, or a name from configs/weights.yaml")
    target: str = setting(
        bounds=_OUTPUT, positional="TARGET", help="file to write: .safetensors, or .pt for our own format"
    )


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The flags of ``python -m tools.demo``."""

    out: str = setting(bounds=_OUTPUT, positional="OUT", help="an empty or new folder")


@dataclass(frozen=True, kw_only=True)
class KfoldConfig(TrainConfig):
    """The flags of ``python -m tools.kfold``, in addition to those of train.py."""

    folds: int = setting(5, Bounds(2), aliases=("--kfold",), help="number of folds")
    groups: str = setting(
        "",
        help="keep groups of images together: CSV with columns image and group, or a regex that finds it in paths",
        is_path=True,
    )
    near_duplicates: bool = setting(True, help="keep near-duplicate images together, as tools.check finds them")
    plots: bool = setting(False, words={"noplots": False}, help="write plots for each training", scope="run")
    project: str = setting("runs/kfold", Bounds(is_line=True, is_output=True), help="folder of runs", scope="run")


@dataclass(frozen=True, kw_only=True)
class SearchConfig(KfoldConfig):
    """The flags of ``python -m tools.search``."""

    hyp: str = setting("all", help="ranges: all, optimizer, augment or loss of configs/search, or a YAML", scope="run")
    trials: int = setting(50, Bounds(1), help="number of trials, over all processes and restarts", scope="run")
    pruner: str = setting(
        "median", Bounds(choices=("median", "halving", "none")), help="what ends unpromising trials early"
    )
    prune_after: int = setting(
        0,
        Bounds(0),
        help="epochs (with --folds: folds) before a trial may be pruned; 0: a fifth of the epochs, or 1 fold",
    )
    folds: int = setting(
        0, Bounds(2, sentinel=0), aliases=("--kfold",), help="score trials by n-fold cross-validation; 0: on 'val'"
    )
    project: str = setting("runs/search", Bounds(is_line=True, is_output=True), help="folder of searches", scope="run")

    @property
    def unit(self) -> str:
        """Interval at which a trial reports its fitness."""
        return "fold" if self.folds else "epoch"
