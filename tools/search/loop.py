"""Runs a search: trial after trial, until there are enough."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.kfold.cross_validate import cross_validate, write_results
from tools.kfold.folds import FOLDS_CSV, make_folds
from tools.runs.experiment import Experiment, open_experiment
from tools.runs.folder import ContinuedFolder
from tools.runs.training import Pruning, check_has_results, train, train_config
from tools.search.ranges import Space, values_text
from tools.search.report import STATE_NAMES, last_step, write_report
from tools.search.study import (
    JOURNAL_LOG,
    REASON_ATTRIBUTE,
    TRIALS_FOLDER,
    Claim,
    SharedStudy,
    TrialOutcome,
    best_of,
    has_running_trial,
    single_process_without_locks,
)
from utils.child import RunFailed
from utils.config.commands import COMMANDS
from utils.config.flags import flags_of
from utils.config.search_settings import SearchConfig
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.process.result_file import Outcome
from utils.process.stop_signals import StopSignals
from utils.strings import counted

SEARCH_YAML = "search.yaml"
# Names in the folder of a trial: its hyper-parameters, and the folder of its training.
HYP_YAML = "hyp.yaml"
RUN_FOLDER = "run"
MAX_FAILURES = 3  # number of failed trials that ends a search if no trial has a score


def search(config: SearchConfig, space: Space, signals: StopSignals) -> None:
    """Runs trials until this and other processes have started ``config.trials``, and writes the report.

    Raises:
        UserError: the settings are wrong, differ from those with which the search was started, or no trial succeeds.
        Stopped: a signal has ended the search.
    """
    experiment = open_experiment(config, SEARCH_YAML)
    folder = experiment.folder
    with single_process_without_locks(folder.path):
        try:
            study, claim = _join(config, space, experiment)
            search_part = _Search(config=config, space=space, study=study, experiment=experiment, signals=signals)
            failure = search_part.run_trials(claim)
        except UserError:
            _remove_if_untrained(folder)
            raise
        if failure:
            raise UserError(failure)
        _report(config, space, study, experiment)


def _join(config: SearchConfig, space: Space, experiment: Experiment) -> tuple[SharedStudy, Claim | None]:
    """Starts the search in its folder, or joins an existing one, and claims the first trial, whose lock shows other
    processes that this one takes part."""
    folder = experiment.folder
    with folder.wait_for_lock():
        experiment.store_or_verify_settings(space.to_dict())
        study = SharedStudy(config, space, folder.path, steps=config.folds or config.epochs)
        if config.folds:
            make_folds(config, experiment.spec, folder.path, experiment.fitness)
        return study, study.claim()


def _remove_if_untrained(folder: ContinuedFolder) -> None:
    """Removes a search that was refused before any training, unless other processes take part in it."""
    with folder.wait_for_lock():
        if not has_running_trial(folder.path):
            folder.remove_if_untrained([FOLDS_CSV, JOURNAL_LOG, TRIALS_FOLDER])


def _report(config: SearchConfig, space: Space, study: SharedStudy, experiment: Experiment) -> None:
    """Writes the report of all trials, and logs its lines."""
    log = get_logger()
    num_running = sum(frozen.state == TrialState.RUNNING for frozen in study.trials())
    if num_running:
        verb = "is" if num_running == 1 else "are"
        log.info("%s %s still running in other processes", counted(num_running, "trial"), verb)
    settings = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", noplots=False)
    command = f"{COMMANDS['train'].typed} {shlex.join(flags_of(settings))}"
    with study.exclusive():  # so that an older report cannot replace another process's newer one
        lines = write_report(
            experiment.folder.path, study, space, fitness=experiment.fitness.name, unit=config.unit, command=command
        )
    for line in lines:
        log.info("%s", line)


@dataclass(frozen=True)
class _Search:
    """A search that this process takes part in."""

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
            failure = _reason_to_stop(trials)
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

        Raises `RunFailed` if the training was lost, or refused, as every other one would be, and `Stopped` after a
        signal. The trial then stays unfinished, and the next start of the search continues it.
        """
        recipe = claim.folder / HYP_YAML
        write_whole(recipe, yaml.safe_dump(self.space.recipe(claim.values), sort_keys=False), durable=True)
        config = replace(self.config, hyp=str(recipe), override=[])  # the recipe includes --set already
        outcome = self._cross_validate(claim, config) if config.folds else self._train(claim, config)
        self.study.finish(claim, outcome)
        return outcome

    def _train(self, claim: Claim, config: SearchConfig) -> TrialOutcome:
        """Trains once. The trial's fitness is the fitness of the best epoch."""
        values: list[float] = []

        def should_prune(epoch: int, value: float) -> bool:
            values.append(value)
            return self.study.report(claim, epoch, value)

        folder = claim.folder / RUN_FOLDER
        folder.mkdir(exist_ok=True)
        pruning = Pruning(self.experiment.fitness.column, should_prune)
        result = train(train_config(config), folder, self.signals, pruning)
        if result.outcome == Outcome.FAILED:
            return TrialOutcome.failed(result.reason)
        result.check()
        if not values:
            check_has_results(folder)
        return TrialOutcome.scored(max(values, default=None), is_pruned=result.outcome == Outcome.PRUNED)

    def _cross_validate(self, claim: Claim, config: SearchConfig) -> TrialOutcome:
        """Trains once per fold. The trial's fitness is computed over the images of all folds together."""
        fitness = None
        try:
            data_folder = self.experiment.folder.path
            for results in cross_validate(config, self.signals, data_folder=data_folder, folder=claim.folder):
                write_results(claim.folder / "results.csv", results, self.experiment.names)
                pooled = self.experiment.fitness.score_of(results.pooled)
                fitness = None if math.isnan(pooled) else pooled
                number = len(results.folds)
                if fitness is not None and self.study.report(claim, number, fitness) and number < config.folds:
                    return TrialOutcome.scored(fitness, is_pruned=True)
        except RunFailed as error:
            if error.result.outcome != Outcome.FAILED:
                raise
            return TrialOutcome.failed(error.result.reason)
        return TrialOutcome.scored(fitness)


def _reason_to_stop(trials: Sequence[FrozenTrial]) -> str:
    """Returns a message if `MAX_FAILURES` trials have failed before any has a score, because the others would probably
    fail, too; otherwise ""."""
    failed = [frozen for frozen in trials if frozen.state == TrialState.FAIL]
    is_any_scored = any(frozen.intermediate_values for frozen in trials if frozen.state != TrialState.FAIL)
    if len(failed) < MAX_FAILURES or is_any_scored:
        return ""
    last_reason = failed[-1].user_attrs.get(REASON_ATTRIBUTE, "")
    return f"{len(failed)} trials have failed and none has succeeded; stopped. The last one: {last_reason}"
