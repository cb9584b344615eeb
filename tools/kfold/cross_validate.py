"""Cross-validation: trains once per fold, scores each model on the images of its fold, then all images together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.source.dataset_spec import DatasetSpec, DataSource, class_names
from data.source.open import open_data
from engine.evaluation.metrics import METRICS, Fitness
from tools.continued import begin_or_check, folder_of, remove_if_untrained, train_config
from tools.kfold.folds import TABLE, data_of, make_folds
from tools.kfold.scores import ScoredFold, format_folds, pool, read_fold, score_fold
from tools.training import TrainingFailed, train
from utils.config.recipes import read_recipe
from utils.config.search_settings import KfoldConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.run_folders import check_run_dir
from utils.files.safe_io import write_csv
from utils.logger import get_logger
from utils.machine.stop_signals import StopSignals
from utils.structures import EvalResult

SETTINGS = "kfold.yaml"
DETECTIONS = "detections.npz"  # file in the folder of a finished fold


@dataclass(frozen=True)
class Comparison:
    """What the trainings of a cross-validation or a search have in common."""

    folder: Path  # of the results
    spec: DatasetSpec
    names: tuple[str, ...]  # of the classes that are trained
    fitness: Fitness  # by which trainings are compared

    @property
    def contents(self) -> dict[str, Any]:
        """What the data set YAML says that must not change while the comparison continues, as plain data."""
        return {"the classes": list(self.names)}


@dataclass(frozen=True)
class CrossValidation:
    """Scores of all finished folds: of each alone, and of their images together."""

    folds: list[EvalResult]
    pooled: EvalResult


def open_comparison(config: KfoldConfig) -> Comparison:
    """Opens the data and creates the folder of the results, for ``tools.kfold`` and ``tools.search``."""
    if config.keep_old:
        raise UserError("--keep-old: the labels cannot score the classes that it keeps; use train.py")
    source = DataSource(config.data, classes=tuple(config.classes), cache_dir=config.cache_dir)
    spec = open_data(source, DistributedContext.single())
    names = class_names(spec, config.single_cls)
    fitness = Fitness.parse(config.fitness, names)
    check_run_dir(config.project, config.name, exist_ok=True)
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    return Comparison(folder, spec, names, fitness)


def run_folds(config: KfoldConfig, signals: StopSignals) -> None:
    """Implements ``python -m tools.kfold``.

    Raises UserError if the settings are wrong, or differ from those with which the folder was started, and as `train`
    does.
    """
    log = get_logger()
    comparison = open_comparison(config)
    folder = comparison.folder
    fitness = comparison.fitness

    def after_fold(number: int, so_far: CrossValidation) -> bool:
        log.info("fold %d of %d: %s %.4f", number, config.folds, fitness.name, fitness.of(so_far.folds[-1]))
        return True

    with FileLock(folder / ".kfold.lock") as lock:
        holder = lock.acquire()
        if holder:
            raise UserError(f"{folder}: another process is working on these folds ({holder})")
        is_new = begin_or_check(config, folder / SETTINGS, comparison.contents | recipe_contents(config))
        try:
            make_folds(config, comparison.spec, folder, fitness)
            log.info("training; each fold has a log: %s", folder / "fold1" / "train.log")
            results = cross_validate(config, folder, folder, fitness, signals, after_fold)
        except UserError:
            if is_new:
                remove_if_untrained(folder, [SETTINGS, TABLE])
            raise
        assert results is not None, "after_fold never ends the folds"
        write_results(folder / "results.csv", results, comparison.names)
    for line in format_folds(results.folds, results.pooled, comparison.names):
        log.info("%s", line)
    message = "%s of all images, each scored by a model that has not seen it: %.4f; results are in %s"
    log.info(message, fitness.name, fitness.of(results.pooled), folder)


def recipe_contents(config: KfoldConfig) -> dict[str, Any]:
    """Returns, as plain data, the hyper-parameters with which each fold is trained."""
    recipe = read_recipe(config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old)
    return {f"hyper-parameter {name}": value for name, value in asdict(recipe).items()}


def cross_validate(
    config: KfoldConfig,
    lists: Path,
    folder: Path,
    fitness: Fitness,
    signals: StopSignals,
    on_fold: Callable[[int, CrossValidation], bool] = lambda number, so_far: True,
) -> CrossValidation | None:
    """Trains and scores every fold that is not finished yet. Raises as `train` does.

    Args:
        lists: folder in which `make_folds` has written the lists.
        folder: parent folder of the trainings: fold1, fold2, ...
        on_fold: called after each fold with the number of finished folds and their results. If it returns False, the
            remaining folds are skipped and the result is None.
    """
    scored: list[ScoredFold] = []
    results: list[EvalResult] = []
    so_far = None
    for number in range(config.folds):
        data = data_of(lists, number)
        run = folder / f"fold{number + 1}"
        detections = run / DETECTIONS
        if not detections.is_file():
            run.mkdir(parents=True, exist_ok=True)
            train(train_config(config, data=str(data)), run, fitness.column, signals)
            if not (run / "best.pt").is_file():
                raise TrainingFailed(f"fold {number + 1}: no epoch could be scored")
            score_fold(config, run / "best.pt", data, detections)
        scored.append(read_fold(detections))
        results.append(scored[-1].result())
        so_far = CrossValidation(list(results), pool(scored).result())
        if not on_fold(number + 1, so_far):
            return None
    return so_far


def write_results(path: Path, results: CrossValidation, names: Sequence[str]) -> None:
    """Writes a table with one row per fold and one for all images together, with the AP of each class."""
    rows = [("fold", "images", *(metric.name for metric in METRICS), *(f"AP:{name}" for name in names))]
    labeled_results = [(str(number), result) for number, result in enumerate(results.folds, 1)]
    labeled_results.append(("pooled", results.pooled))
    for label, result in labeled_results:
        values = [*(result.metrics[metric.name] for metric in METRICS), *result.class_ap.tolist()]
        cells = ("" if math.isnan(value) else f"{value:.6f}" for value in values)
        rows.append((label, str(result.num_images), *cells))
    write_csv(path, rows)
