"""Runs a search: trial after trial, until there are enough."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.continued import begin_or_check, folder_of, remove_if_untrained, train_config
from tools.kfold.cross_validate import Comparison, CrossValidation, cross_validate, open_comparison, write_results
from tools.kfold.folds import TABLE, make_folds
from tools.search.ranges import Space, values_text
from tools.search.report import STATES, last_step, write_report
from tools.search.study import JOURNAL, REASON, TRIALS, Claim, SharedStudy, best_of, is_any_trial_held
from tools.training import TrainingFailed, train
from utils.config.flags import flags_of
from utils.config.search_settings import SearchConfig
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.machine.stop_signals import StopSignals
from utils.program import COMMANDS
from utils.strings import counted

SETTINGS = "search.yaml"
# In the folder of a trial: its hyper-parameters, and the folder of its training.
RECIPE = "hyp.yaml"
RUN = "run"
MAX_FAILURES = 3  # failed trials that end a search in which none has succeeded


def search(config: SearchConfig, space: Space, signals: StopSignals) -> None:
    """Runs trials until this and other processes have started ``config.trials``, and writes the report.

    Raises:
        UserError: the settings are wrong, differ from those with which the search was started, or no trial succeeds.
        Stopped: a signal has ended the search.
    """
    log = get_logger()
    comparison = open_comparison(config)
    folder = comparison.folder
    fitness = comparison.fitness
    is_new = False
    try:
        with _joining(folder):
            is_new = begin_or_check(config, folder / SETTINGS, comparison.contents | space.plain())
            study = SharedStudy(config, space, folder, steps=config.folds or config.epochs)
            if config.folds:
                make_folds(config, comparison.spec, folder, fitness)
            claim = study.claim()  # in here, so that its lock shows to others that this process takes part
        failure = _Search(config, space, study, comparison, signals).run_trials(claim)
    except UserError:
        if is_new:
            with _joining(folder):
                if not is_any_trial_held(folder):
                    remove_if_untrained(folder, [SETTINGS, TABLE, JOURNAL, TRIALS])
        raise
    if failure:
        raise UserError(failure)
    num_running = sum(frozen.state == TrialState.RUNNING for frozen in study.trials())
    if num_running:
        log.info("still running in other processes: %s", counted(num_running, "trial"))
    with study.exclusive():  # so that an older report cannot replace that of another process
        settings = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", noplots=False)
        command = f"{COMMANDS['train'].typed} {shlex.join(flags_of(settings))}"
        lines = write_report(folder, study, space, fitness.name, config.unit, command)
    for line in lines:
        log.info("%s", line)


def _joining(folder: Path) -> FileLock:
    """Lets one process at a time begin or join the search in ``folder``, or remove it, for a ``with`` statement."""
    return FileLock(folder / ".settings.lock").wait("another process that begins this search")


@dataclass(frozen=True)
class _Outcome:
    """How a trial has ended."""

    state: TrialState
    fitness: float | None = None  # None: failed
    failure: str = ""  # why it has failed

    @classmethod
    def of(cls, fitness: float | None, *, is_complete: bool) -> _Outcome:
        """Returns the outcome of a trial that was trained to its end, or ended early."""
        if fitness is None:
            return cls(TrialState.FAIL, failure="nothing could be scored")
        return cls(TrialState.COMPLETE if is_complete else TrialState.PRUNED, fitness)


@dataclass(frozen=True)
class _Search:
    """A search that this process takes part in."""

    config: SearchConfig
    space: Space
    study: SharedStudy
    comparison: Comparison
    signals: StopSignals

    def run_trials(self, claim: Claim | None) -> str:
        """Runs the trial ``claim`` and others until there are enough. Returns the reason to stop before, or ""."""
        log = get_logger()
        num_ended = sum(frozen.state.is_finished() for frozen in self.study.trials())
        if num_ended:
            log.info("continuing %s: %d of %d trials have ended", folder_of(self.config), num_ended, self.config.trials)
        while claim is not None:
            with claim.lock:
                log.info("trial %d: %s", claim.number, " ".join(values_text(claim.values)))
                outcome = self._run_trial(claim)
            trials = self.study.trials()
            summary = f": {outcome.failure}" if outcome.failure else self._result_text(trials, claim.number)
            log.info("trial %d: %s%s", claim.number, STATES[outcome.state], summary)
            failed = [frozen for frozen in trials if frozen.state == TrialState.FAIL]
            is_any_scored = any(frozen.intermediate_values for frozen in trials if frozen.state != TrialState.FAIL)
            if len(failed) >= MAX_FAILURES and not is_any_scored:  # the others would fail, too
                last_reason = failed[-1].user_attrs.get(REASON, "")
                return f"{len(failed)} trials have failed and none has succeeded; stopped. The last one: {last_reason}"
            claim = self.study.claim()
        return ""

    def _result_text(self, trials: Sequence[FrozenTrial], number: int) -> str:
        """Returns the fitness of a trial that did not fail, and the best fitness so far, for the log."""
        frozen = trials[number]
        steps = ""
        if frozen.state == TrialState.PRUNED:
            steps = f" after {counted(last_step(frozen), self.config.unit)}"
        best = best_of(trials)
        best_text = "" if best is None else f"; best {best.value:.4f} (trial {best.number})"
        return f"{steps}, {self.comparison.fitness.name} {frozen.value:.4f}{best_text}"

    def _run_trial(self, claim: Claim) -> _Outcome:
        """Trains, or cross-validates, with the hyper-parameters of a trial.

        Raises TrainingFailed if every trial would fail (wrong settings or data, a full disk), and Stopped after a
        signal; the trial then stays unfinished.
        """
        recipe = claim.folder / RECIPE
        write_whole(recipe, yaml.safe_dump(self.space.recipe(claim.values), sort_keys=False))
        config = replace(self.config, hyp=str(recipe), override=[])  # the recipe includes --set already
        try:
            outcome = self._cross_validate(claim, config) if config.folds else self._train(claim, config)
        except TrainingFailed as error:
            if error.refused:
                raise
            outcome = _Outcome(TrialState.FAIL, failure=str(error))
        self.study.finish(claim, outcome.state, outcome.fitness, outcome.failure)
        return outcome

    def _train(self, claim: Claim, config: SearchConfig) -> _Outcome:
        """Trains once. The fitness is that of the best epoch."""
        values: list[float] = []

        def after_epoch(epoch: int, value: float) -> bool:
            values.append(value)
            return self.study.report(claim, epoch, value) or epoch >= config.epochs

        folder = claim.folder / RUN
        folder.mkdir(exist_ok=True)
        is_complete = train(train_config(config), folder, self.comparison.fitness.column, self.signals, after_epoch)
        return _Outcome.of(max(values, default=None), is_complete=is_complete)

    def _cross_validate(self, claim: Claim, config: SearchConfig) -> _Outcome:
        """Trains once per fold. The fitness is that of the images of all folds together."""
        fitness = self.comparison.fitness
        pooled_fitness = math.nan

        def after_fold(number: int, so_far: CrossValidation) -> bool:
            nonlocal pooled_fitness
            write_results(claim.folder / "results.csv", so_far, self.comparison.names)
            pooled_fitness = fitness.of(so_far.pooled)
            if math.isnan(pooled_fitness):
                return True
            return self.study.report(claim, number, pooled_fitness) or number >= config.folds

        results = cross_validate(config, self.comparison.folder, claim.folder, fitness, self.signals, after_fold)
        known_fitness = None if math.isnan(pooled_fitness) else pooled_fitness
        return _Outcome.of(known_fitness, is_complete=results is not None)
