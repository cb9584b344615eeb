"""Settings of ``python -m tools.kfold`` and ``python -m tools.search``, which train several times."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.settings import TrainConfig, setting
from utils.schema import Bounds


@dataclass(frozen=True, kw_only=True)
class KfoldConfig(TrainConfig):
    """The flags of ``python -m tools.kfold``, in addition to those of train.py."""

    folds: int = setting(5, Bounds(2), aliases=("--kfold",), help="number of folds")
    groups: str = setting(
        "",
        help="keep images of a group together: CSV with columns image and group, or a regex that finds it in the path",
        is_path=True,
    )
    near_duplicates: bool = setting(True, help="keep near-duplicate images together, as tools.check finds them")
    noplots: bool = setting(True, help="do not write plots for each training", scope="run")
    project: str = setting("runs/kfold", Bounds(is_line=True, is_output=True), help="folder of runs", scope="run")


@dataclass(frozen=True, kw_only=True)
class SearchConfig(KfoldConfig):
    """The flags of ``python -m tools.search``."""

    hyp: str = setting(
        "all", help="what to search: all, optimizer, augment or loss of configs/search, or a YAML", scope="recipe"
    )
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
