"""Cross-validation: trains once per fold, scores each model on the images of its fold, then all images together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult
from tools.experiment.experiment import KFOLD_YAML, LOCK, open_experiment
from tools.experiment.training import train, train_config
from tools.kfold.folds import data_of, fold_name, make_folds
from tools.kfold.score_fold import run_scoring, validation_of
from tools.kfold.scores import DETECTIONS_FILE, ScoredFold, format_folds, join_folds, read_fold
from utils.config.recipes import read_recipe
from utils.config.tool_settings import KfoldConfig
from utils.errors import USER_ERROR, UserError
from utils.files.locks import FileLock
from utils.files.safe_io import write_csv
from utils.logger import get_logger
from utils.process.child import RunFailed, RunResult
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
    recipe = read_recipe(config.hyp, config.override, pretrained=bool(config.weights))
    values = {f"hyper-parameter {name}": value for name, value in asdict(recipe).items()}
    experiment = open_experiment(config, KFOLD_YAML, values)
    folder = experiment.folder
    fitness = experiment.fitness
    with FileLock(folder / LOCK) as lock:
        holder = lock.acquire()
        if holder:
            raise UserError(f"{folder}: another process is using this folder ({holder})")
        experiment.store_or_verify_settings()
        make_folds(config, experiment.spec, folder, fitness)
        log.info("each fold has a log, such as %s", folder / fold_name(0) / "train.log")
        for results in cross_validate(config, signals, data_folder=folder, folder=folder):
            score = fitness.score_of(results.folds[-1])
            log.info("fold %d of %d: %s %.4f", len(results.folds), config.folds, fitness.name, score)
        write_results(folder / "results.csv", results, experiment.names)
    for line in format_folds(results.folds, results.pooled, experiment.names):
        log.info("%s", line)
    message = "pooled out-of-fold %s %.4f (the best epoch of each fold was chosen on its own images); results are in %s"
    log.info(message, fitness.name, fitness.score_of(results.pooled), folder)


def cross_validate(
    config: KfoldConfig, signals: StopSignals, *, data_folder: Path, folder: Path
) -> Iterator[CrossValidation]:
    """Trains and scores the folds that are not finished yet. Yields the results so far after each fold, whether
    finished now or by a previous process.

    Args:
        data_folder: folder to which `make_folds` has written the YAMLs and lists of the folds.
        folder: parent folder of the training runs: fold1, fold2, ...

    Raises `RunFailed` if a training or scoring failed, and `Stopped` after a signal.
    """
    scored: list[ScoredFold] = []
    results: list[EvalResult] = []
    for number in range(config.folds):
        run = folder / fold_name(number)
        if not (run / DETECTIONS_FILE).is_file():
            title = f"{run.parent.name}, fold {number + 1} of {config.folds}"
            _train_and_score(config, run, title, data=data_of(data_folder, number), signals=signals)
        scored.append(read_fold(run / DETECTIONS_FILE))
        results.append(scored[-1].result())
        yield CrossValidation(list(results), join_folds(scored).result())


def _train_and_score(config: KfoldConfig, run: Path, title: str, *, data: Path, signals: StopSignals) -> None:
    """Trains in the folder ``run``, unless training is complete, and scores the best epoch.

    ``title``: the fold, for the progress. ``data``: YAML of the fold. Raises the errors of `cross_validate`.
    """
    settings = train_config(config, data=str(data), max_bad=1.0)  # judged for the images of all folds together
    train(settings, run, signals, title, "metrics/AP")
    best = run / "best.pt"
    if not best.exists():
        raise RunFailed(RunResult(USER_ERROR, {"begun": True}, f"{run.name}: no epoch could be scored"))
    run_scoring(validation_of(config, best, data))


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
