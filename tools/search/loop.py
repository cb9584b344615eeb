"""Runs a search: trial after trial, until there are enough."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.experiment.experiment import Experiment, open_experiment
from tools.experiment.folder import SEARCH_YAML, ContinuedFolder
from tools.experiment.training import Pruning, check_has_results, train, train_config
from tools.kfold.cross_validate import cross_validate, write_results
from tools.kfold.folds import FOLD_OUTPUTS, make_folds
from tools.search.locks import JOURNAL_LOG, TRIALS_FOLDER, StudyLock, has_running_trial, single_process_without_locks
from tools.search.ranges import Scalar, Space, values_text
from tools.search.report import STATE_NAMES, TRIALS_CSV, last_step, write_report
from tools.search.study import Claim, SharedStudy, TrialOutcome, best_of, reason_of
from utils.config.commands import COMMANDS
from utils.config.flags import flags_of
from utils.config.search_settings import SearchConfig
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.process.child import RunFailed
from utils.process.signals import StopSignals
from utils.strings import counted

# Names in the folder of a trial: its hyper-parameters, and the folder of its training.
HYP_YAML = "hyp.yaml"
RUN_FOLDER = "run"
MAX_FAILURES = 3  # trials in a row that fail before the search stops


def search(config: SearchConfig, space: Space, signals: StopSignals) -> None:
    """Runs trials until this and other processes have started ``config.trials``, and writes the report.

    Raises:
        UserError: the settings are wrong, differ from those with which the search was started, or no trial succeeds.
        Stopped: a signal has ended the search.
    """
    experiment = open_experiment(config, SEARCH_YAML, [FOLD_OUTPUTS, JOURNAL_LOG, TRIALS_FOLDER])
    folder = experiment.folder
    lock = StudyLock(folder.path)
    with single_process_without_locks(folder.path):
        try:
            study, claim = _join(config, space, experiment, lock)
            runner = _TrialRunner(config=config, space=space, study=study, experiment=experiment, signals=signals)
            failure = runner.run_trials(claim)
        except UserError:
            _remove_if_untrained(folder, lock)
            raise
        if failure:
            raise UserError(failure)
        with lock:  # so that an older report cannot replace another process's newer one
            _report(config, space, study, experiment)


def _join(
    config: SearchConfig, space: Space, experiment: Experiment, lock: StudyLock
) -> tuple[SharedStudy, Claim | None]:
    """Starts the search in its folder, or joins an existing one, and claims the first trial, whose lock shows other
    processes that this one takes part."""
    with lock:
        experiment.store_or_verify_settings(space.to_dict())
        folder = experiment.folder.path
        study = SharedStudy(config, space, folder=folder, lock=lock, steps=config.folds or config.epochs)
        if config.folds:
            make_folds(config, experiment.spec, folder, experiment.fitness)
        return study, study.claim()


def _remove_if_untrained(folder: ContinuedFolder, lock: StudyLock) -> None:
    """Removes a search that was refused before any training, unless other processes take part in it."""
    with lock:
        if not has_running_trial(folder.path):
            folder.remove_if_untrained()


def _report(config: SearchConfig, space: Space, study: SharedStudy, experiment: Experiment) -> None:
    """Writes the report of all trials, and logs its lines. Raises UserError if all trials have ended and none is
    complete."""
    log = get_logger()
    settings = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", noplots=False)
    command = f"{COMMANDS['train'].typed} {shlex.join(flags_of(settings))}"
    study.remove_weights(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    trials = study.trials()
    lines = write_report(
        experiment.folder.path, trials, space, fitness=experiment.fitness.name, unit=config.unit, command=command
    )
    num_running = sum(frozen.state == TrialState.RUNNING for frozen in trials)
    if num_running:
        verb = "is" if num_running == 1 else "are"
        log.info("%s %s still running in other processes", counted(num_running, "trial"), verb)
    for line in lines:
        log.info("%s", line)
    if not num_running and best_of(trials) is None:
        raise UserError(f"{experiment.folder.path / TRIALS_CSV}: no trial is complete; this table has the reasons")


@dataclass(frozen=True)
class _TrialRunner:
    """Runs trials in this process, one of those that share a search."""

    config: SearchConfig
    space: Space
    study: SharedStudy
    experiment: Experiment
    signals: StopSignals

    def run_trials(self, claim: Claim | None) -> str:
        """Runs the trial ``claim`` and others until there are enough. Returns the reason for stopping early, or ""."""
        log = get_logger()
        num_ended = sum(frozen.state.is_finished() for frozen in self.study.trials())
        if num_ended:
            folder = self.experiment.folder.path
            log.info("continuing %s: %d of %d trials have ended", folder, num_ended, self.config.trials)
        while claim is not None:
            with claim.lock:
                log.info("trial %d: %s", claim.number, " ".join(values_text(claim.values)))
                outcome = self._run_trial(claim)
            trials = self.study.trials()
            details = self._describe(outcome, trials[claim.number], best_of(trials))
            log.info("trial %d: %s%s", claim.number, STATE_NAMES[outcome.state], details)
            failure = self._reason_to_stop(trials)
            if failure:
                return failure
            claim = self.study.claim()
        return ""

    def _describe(self, outcome: TrialOutcome, frozen: FrozenTrial, best: FrozenTrial | None) -> str:
        """Returns, for the log, why a trial failed, or its fitness and the best fitness so far."""
        if outcome.state == TrialState.FAIL:
            return f": {outcome.reason}"
        steps = ""
        if frozen.state == TrialState.PRUNED:
            steps = f" after {counted(last_step(frozen), self.config.unit)}"
        best_text = "" if best is None else f"; best {best.value:.4f} (trial {best.number})"
        return f"{steps}, {self.experiment.fitness.name} {frozen.value:.4f}{best_text}"

    def _run_trial(self, claim: Claim) -> TrialOutcome:
        """Trains, or cross-validates, with the hyper-parameters of a trial, and records the outcome in the study.

        A trial fails if its training, or the scoring of a fold, fails after it has begun. Before that, the settings,
        the data or the machine are the reason, which would also end the other trials: raises `RunFailed`. Raises
        `Stopped` after a signal. The same command then continues the trial.
        """
        config = self._write_recipe(claim.folder / HYP_YAML, claim.values)
        try:
            outcome = self._cross_validate(claim, config) if config.folds else self._train(claim, config)
        except RunFailed as error:
            if not error.result.has_begun:
                raise
            outcome = TrialOutcome.failed(error.result.reason)
        self.study.finish(claim, outcome)
        return outcome

    def _write_recipe(self, recipe: Path, values: dict[str, Scalar]) -> SearchConfig:
        """Writes a recipe with these values of the searched hyper-parameters, and returns the settings of trainings
        with it."""
        write_whole(recipe, yaml.safe_dump(self.space.recipe(values), sort_keys=False), durable=True)
        return replace(self.config, hyp=str(recipe), override=[])  # the recipe includes --set already

    def _train(self, claim: Claim, config: SearchConfig) -> TrialOutcome:
        """Trains once. The trial's fitness is the fitness of the best epoch."""
        fitness_by_epoch = self.study.reported(claim)  # a power cut may have destroyed rows of results.csv

        def should_prune(epoch: int, fitness: float) -> bool:
            fitness_by_epoch[epoch] = fitness
            return self.study.report(claim, epoch, fitness)

        folder = claim.folder / RUN_FOLDER
        folder.mkdir(exist_ok=True)
        pruning = Pruning(self.experiment.fitness.column, should_prune)
        result = train(train_config(config), folder, self.signals, pruning)
        result.check()
        if config.epochs not in fitness_by_epoch:
            check_has_results(folder)
        fitness = max(fitness_by_epoch.values(), default=None)
        return TrialOutcome.scored(fitness, is_pruned=result.is_pruned)

    def _cross_validate(self, claim: Claim, config: SearchConfig) -> TrialOutcome:
        """Trains once per fold. The trial's fitness is computed over the images of all folds together."""
        fitness = None
        data_folder = self.experiment.folder.path
        for results in cross_validate(config, self.signals, data_folder=data_folder, folder=claim.folder):
            write_results(claim.folder / "results.csv", results, self.experiment.names)
            pooled = self.experiment.fitness.score_of(results.pooled)
            fitness = None if math.isnan(pooled) else pooled
            number = len(results.folds)
            if fitness is not None and self.study.report(claim, number, fitness) and number < config.folds:
                return TrialOutcome.scored(fitness, is_pruned=True)
        return TrialOutcome.scored(fitness)

    def _reason_to_stop(self, trials: Sequence[FrozenTrial]) -> str:
        """Returns a message if the last `MAX_FAILURES` trials have failed, as all others would on a broken machine;
        otherwise, or if no trial is left, ""."""
        ended = sorted((frozen for frozen in trials if frozen.state.is_finished()), key=_ended_at)
        newest = ended[-MAX_FAILURES:]
        have_failed = len(newest) == MAX_FAILURES and all(frozen.state == TrialState.FAIL for frozen in newest)
        if not have_failed or len(ended) >= self.config.trials:
            return ""
        return (
            f"stopped after {MAX_FAILURES} failed trials in a row; last error: {reason_of(newest[-1])} "
            "(the same command continues with the next trial)"
        )


def _ended_at(frozen: FrozenTrial) -> tuple[datetime, int]:
    assert frozen.datetime_complete is not None, "the trial has ended"
    return frozen.datetime_complete, frozen.number
