"""Cross-validation: trains once per fold, scores each model on the images of its fold, then all images together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult
from tools.experiment.experiment import open_experiment
from tools.experiment.folder import KFOLD_YAML
from tools.experiment.stored_settings import recipe_values
from tools.experiment.training import train, train_config
from tools.kfold.folds import FOLD_OUTPUTS, data_of, fold_name, make_folds
from tools.kfold.score_fold import run_scoring, validation_of
from tools.kfold.scores import DETECTIONS_FILE, ScoredFold, format_folds, join_folds, read_fold
from utils.config.search_settings import KfoldConfig
from utils.errors import UserError
from utils.files.safe_io import write_csv
from utils.logger import get_logger
from utils.process.signals import StopSignals


@dataclass(frozen=True)
class CrossValidation:
    """Scores of all finished folds: of each fold, and of all their images together."""

    folds: list[EvalResult]
    pooled: EvalResult


def run_folds(config: KfoldConfig, signals: StopSignals) -> None:
    """Runs all folds and writes the tables.

    Raises UserError if the settings are wrong, or differ from those with which the folder was started; also raises the
    errors of `cross_validate`.
    """
    log = get_logger()
    experiment = open_experiment(config, KFOLD_YAML, [FOLD_OUTPUTS])
    folder = experiment.folder
    fitness = experiment.fitness
    with folder.lock_or_fail():
        experiment.store_or_verify_settings(recipe_values(config))
        try:
            make_folds(config, experiment.spec, folder.path, fitness)
            _log_start(folder.path, config.folds)
            for results in cross_validate(config, signals, data_folder=folder.path, folder=folder.path):
                number = len(results.folds)
                log.info(
                    "fold %d of %d: %s %.4f", number, config.folds, fitness.name, fitness.score_of(results.folds[-1])
                )
        except UserError:
            folder.remove_if_untrained()
            raise
        write_results(folder.path / "results.csv", results, experiment.names)
    for line in format_folds(results.folds, results.pooled, experiment.names):
        log.info("%s", line)
    message = "pooled out-of-fold %s %.4f (the best epoch of each fold was chosen on its own images); results are in %s"
    log.info(message, fitness.name, fitness.score_of(results.pooled), folder.path)


def _log_start(folder: Path, num_folds: int) -> None:
    """Logs how many folds are scored, and where the log of a training is if any is left."""
    names = [fold_name(number) for number in range(num_folds)]
    num_scored = sum((folder / name / DETECTIONS_FILE).is_file() for name in names)
    if num_scored:
        get_logger().info("continuing %s: %d of %d folds are scored", folder, num_scored, num_folds)
    if num_scored < num_folds:
        get_logger().info("training; each fold has a log: %s", folder / names[0] / "train.log")


def cross_validate(
    config: KfoldConfig, signals: StopSignals, *, data_folder: Path, folder: Path
) -> Iterator[CrossValidation]:
    """Trains and scores the folds that are not finished yet. Yields the results so far after each fold, whether
    finished now or by a previous process.

    Args:
        data_folder: folder to which `make_folds` has written the YAMLs and lists of the folds.
        folder: parent folder of the training runs: fold1, fold2, ...

    Raises `RunFailed` if a training or scoring has failed, and `Stopped` after a signal.
    """
    scored: list[ScoredFold] = []
    results: list[EvalResult] = []
    for number in range(config.folds):
        run = folder / fold_name(number)
        if not (run / DETECTIONS_FILE).is_file():
            _train_and_score(config, run, data=data_of(data_folder, number), signals=signals)
        scored.append(read_fold(run / DETECTIONS_FILE))
        results.append(scored[-1].result())
        yield CrossValidation(list(results), join_folds(scored).result())


def _train_and_score(config: KfoldConfig, run: Path, *, data: Path, signals: StopSignals) -> None:
    """Trains in the folder ``run``, unless training is complete, and scores the best epoch. ``data``: YAML of the fold.

    Raises the errors of `cross_validate`.
    """
    run.mkdir(parents=True, exist_ok=True)
    train(train_config(config, data=str(data)), run, signals).check()
    best = run / "best.pt"
    if not best.exists():
        raise UserError(f"{run.name}: no epoch could be scored")
    result = run_scoring(validation_of(config, best, data))
    if result.reason:
        reason = f"{run.name} could not be scored: {result.reason} (it is trained; the same command scores it)"
        result = replace(result, reason=reason)
    result.check()


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
