"""One trial: a training, or a cross-validation, with the hyper-parameters that the study has chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import yaml
from optuna.trial import TrialState

from engine.evaluation.metrics import Fitness
from tools.kfold.cross_validate import CrossValidation, cross_validate, write_results
from tools.search.ranges import Space
from tools.search.study import Claim, SharedStudy
from tools.training import TrainingFailed, train
from utils.config.search_settings import SearchConfig, train_config
from utils.files.safe_io import write_whole
from utils.machine.stop_signals import StopSignals

RECIPE = "hyp.yaml"  # in the trial's folder
RUN = "run"  # folder of the training


def run_trial(
    config: SearchConfig,
    space: Space,
    study: SharedStudy,
    claim: Claim,
    *,
    folds: Path,
    fitness: Fitness,
    names: tuple[str, ...],
    signals: StopSignals,
) -> tuple[TrialState, str]:
    """Runs or continues a trial, and records how it ended: its state, and the reason of a failure.

    Args:
        folds: the folder with the lists of the folds, with ``--folds``.
        names: of the classes.

    Raises:
        TrainingFailed: the settings or the data are wrong, or the disk is full, so that every trial would fail; the
            trial stays unfinished.
        Stopped: by a signal; the trial stays unfinished.
    """
    recipe = claim.folder / RECIPE
    write_whole(recipe, yaml.safe_dump(space.recipe(claim.values), sort_keys=False))
    # --set is part of the recipe already; "auto" would be another recipe.
    config = replace(config, hyp=str(recipe), override=[])
    best: list[float] = []

    def after_epoch(epoch: int, value: float) -> bool:
        best.append(value)
        return study.report(claim, epoch, value) or epoch >= config.epochs

    def after_fold(number: int, so_far: CrossValidation) -> bool:
        write_results(claim.folder / "results.csv", so_far, names)
        value = fitness.of(so_far.pooled)
        best[:] = [] if math.isnan(value) else [value]
        return not best or study.report(claim, number, value) or number >= config.folds

    try:
        if config.folds:
            is_whole = cross_validate(config, folds, claim.folder, fitness, signals, after_fold) is not None
        else:
            folder = claim.folder / RUN
            folder.mkdir(exist_ok=True)
            is_whole = train(train_config(config), folder, fitness.column, signals, after_epoch)
    except TrainingFailed as error:
        if error.refused:
            raise
        study.finish(claim, TrialState.FAIL, reason=str(error))
        return TrialState.FAIL, str(error)
    if not best:
        reason = "nothing could be scored"
        study.finish(claim, TrialState.FAIL, reason=reason)
        return TrialState.FAIL, reason
    state = TrialState.COMPLETE if is_whole else TrialState.PRUNED
    study.finish(claim, state, max(best))
    return state, ""
