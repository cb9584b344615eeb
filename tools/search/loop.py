"""Runs a search: trial after trial, until there are enough."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.kfold.cross_validate import cross_validate, write_results
from tools.kfold.folds import TABLE, make_folds
from tools.runs.experiment import Experiment, open_experiment
from tools.runs.training import train, train_config
from tools.search.ranges import Space, values_text
from tools.search.report import STATES, last_step, write_report
from tools.search.study import (
    JOURNAL,
    REASON,
    TRIALS,
    Claim,
    SharedStudy,
    alone_without_locks,
    best_of,
    has_running_trial,
)
from utils.config.commands import COMMANDS
from utils.config.flags import flags_of
from utils.config.search_settings import SearchConfig
from utils.errors import PeerFailure, UserError
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.process.child import Kind, RunFailed, RunResult
from utils.process.stop_signals import StopSignals
from utils.strings import counted

SETTINGS = "search.yaml"
# In the folder of a trial: its hyper-parameters, and the folder of its training.
RECIPE = "hyp.yaml"
RUN = "run"
STATE_OF_KIND = {Kind.DONE: TrialState.COMPLETE, Kind.PRUNED: TrialState.PRUNED, Kind.FAILED: TrialState.FAIL}
MAX_FAILURES = 3  # failed trials that end a search in which none has succeeded


def search(config: SearchConfig, space: Space, signals: StopSignals) -> None:
    """Runs trials until this and other processes have started ``config.trials``, and writes the report.

    Raises:
        UserError: the settings are wrong, differ from those with which the search was started, or no trial succeeds.
        Stopped: a signal has ended the search.
    """
    experiment = open_experiment(config, SETTINGS)
    with alone_without_locks(experiment.folder.path):
        _search_in_folder(config, space, signals, experiment)


def _search_in_folder(config: SearchConfig, space: Space, signals: StopSignals, experiment: Experiment) -> None:
    log = get_logger()
    folder = experiment.folder
    fitness = experiment.fitness
    try:
        with folder.wait_for_lock():
            experiment.begin_or_check(space.plain())
            study = SharedStudy(config, space, folder.path, steps=config.folds or config.epochs)
            if config.folds:
                make_folds(config, experiment.spec, folder.path, fitness)
            claim = study.claim()  # in here, so that its lock shows to others that this process takes part
        failure = _Search(config, space, study, experiment, signals).run_trials(claim)
    except UserError:
        with folder.wait_for_lock():
            if not has_running_trial(folder.path):
                folder.remove_if_untrained([TABLE, JOURNAL, TRIALS])
        raise
    if failure:
        raise UserError(failure)
    num_running = sum(frozen.state == TrialState.RUNNING for frozen in study.trials())
    if num_running:
        verb = "is" if num_running == 1 else "are"
        log.info("%s %s still running in other processes", counted(num_running, "trial"), verb)
    with study.exclusive():  # so that an older report cannot replace that of another process
        settings = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", noplots=False)
        command = f"{COMMANDS['train'].typed} {shlex.join(flags_of(settings))}"
        lines = write_report(folder.path, study, space, fitness.name, config.unit, command)
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
        """Runs the trial ``claim`` and others until there are enough. Returns the reason to stop before, or ""."""
        log = get_logger()
        num_ended = sum(frozen.state.is_finished() for frozen in self.study.trials())
        if num_ended:
            folder = self.experiment.folder.path
            log.info("continuing %s: %d of %d trials have ended", folder, num_ended, self.config.trials)
        while claim is not None:
            with claim.lock:
                log.info("trial %d: %s", claim.number, " ".join(values_text(claim.values)))
                result = self._run_trial(claim)
            trials = self.study.trials()
            summary = f": {result.reason}" if result.kind == Kind.FAILED else self._result_text(trials, claim.number)
            log.info("trial %d: %s%s", claim.number, STATES[STATE_OF_KIND[result.kind]], summary)
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
        return f"{steps}, {self.experiment.fitness.name} {frozen.value:.4f}{best_text}"

    def _run_trial(self, claim: Claim) -> RunResult:
        """Trains, or cross-validates, with the hyper-parameters of a trial, and records the end in the study.

        Raises `RunFailed` if the training was refused, as every other would be, and `Stopped` after a signal; the trial
        then stays unfinished.
        """
        recipe = claim.folder / RECIPE
        write_whole(recipe, yaml.safe_dump(self.space.recipe(claim.values), sort_keys=False))
        config = replace(self.config, hyp=str(recipe), override=[])  # the recipe includes --set already
        try:
            result, fitness = self._cross_validate(claim, config) if config.folds else self._train(claim, config)
        except RunFailed as error:
            result = error.result
            fitness = None
        except PeerFailure:
            result = RunResult(Kind.FAILED, "a fold could not be scored; the process that scored it has printed why")
            fitness = None
        if result.kind in (Kind.REFUSED, Kind.STOPPED):
            result.check()
        if fitness is None and result.kind != Kind.FAILED:
            result = RunResult(Kind.FAILED, "nothing could be scored")
        self.study.finish(claim, STATE_OF_KIND[result.kind], fitness, result.reason)
        return result

    def _train(self, claim: Claim, config: SearchConfig) -> tuple[RunResult, float | None]:
        """Trains once. Returns how that has ended, and the fitness of the best epoch; None without a validation."""
        values: list[float] = []

        def should_prune(epoch: int, value: float) -> bool:
            values.append(value)
            return self.study.report(claim, epoch, value)

        folder = claim.folder / RUN
        folder.mkdir(exist_ok=True)
        result = train(train_config(config), folder, self.experiment.fitness.column, self.signals, should_prune)
        return result, max(values, default=None)

    def _cross_validate(self, claim: Claim, config: SearchConfig) -> tuple[RunResult, float | None]:
        """Trains once per fold. Returns how that has ended, and the fitness of the images of all folds together; None
        if it is not defined. Raises as `cross_validate` does."""
        fitness = None
        for results in cross_validate(config, self.experiment, claim.folder, self.signals):
            write_results(claim.folder / "results.csv", results, self.experiment.names)
            pooled = self.experiment.fitness.of(results.pooled)
            fitness = None if math.isnan(pooled) else pooled
            number = len(results.folds)
            if fitness is not None and self.study.report(claim, number, fitness) and number < config.folds:
                return RunResult(Kind.PRUNED), fitness
        return RunResult(Kind.DONE), fitness
