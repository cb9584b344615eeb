"""The search: trial after trial, until there are enough."""

from __future__ import annotations

import math
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace

import yaml
from optuna.trial import TrialState

from engine.evaluation.metrics import Fitness
from tools.kfold.cross_validate import TABLE, CrossValidation, cross_validate, make_folds, prepare, write_results
from tools.search.ranges import Space, values_text
from tools.search.report import STATES, reached, write_report
from tools.search.study import JOURNAL, REASON, TRIALS, Claim, SharedStudy, best_of
from tools.training import TrainingFailed, train
from utils.config.flags import flags_of
from utils.config.search_settings import SearchConfig, continued, folder_of, train_config
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.machine.stop_signals import StopSignals
from utils.program import COMMANDS
from utils.strings import counted

SETTINGS = "search.yaml"
RECIPE, RUN = "hyp.yaml", "run"  # in the folder of a trial: its hyper-parameters, and the folder of its training
MOST_FAILURES = 3  # trials, before any has succeeded


def search(config: SearchConfig, space: Space, signals: StopSignals) -> None:
    """Runs trials until this and other processes have begun ``config.trials``, and writes the report.

    Raises:
        UserError: the settings are wrong, differ from those with which the search began, or no trial succeeds.
        Stopped: by a signal.
    """
    log = get_logger()
    folder, spec, fitness, names = prepare(config)
    with ExitStack() as stack:
        with FileLock(folder / ".settings.lock").wait("another process that begins this search"):
            made = (TABLE, JOURNAL, TRIALS)
            stack.enter_context(continued(config, folder / SETTINGS, space.plain(), made))
            study = SharedStudy(config, space, folder, steps=config.folds or config.epochs)
            if config.folds:
                make_folds(config, spec, folder, fitness)
        failure = _Search(config, space, study, fitness, names, signals).run_trials()
    if failure:
        raise UserError(failure)
    if elsewhere := sum(frozen.state == TrialState.RUNNING for frozen in study.trials()):
        log.info("run by other processes: %s", counted(elsewhere, "trial"))
    with study.exclusive():  # no older report replaces that of another process
        settings = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", noplots=False)
        command = f"{COMMANDS['train'].typed} {shlex.join(flags_of(settings))}"
        lines = write_report(folder, study, space, fitness.name, config.unit, command)
    for line in lines:
        log.info("%s", line)


@dataclass(frozen=True)
class _Search:
    config: SearchConfig
    space: Space
    study: SharedStudy
    fitness: Fitness
    names: tuple[str, ...]
    signals: StopSignals

    def run_trials(self) -> str:
        """Returns why the search must stop before there are enough trials, or ""."""
        log = get_logger()
        if done := sum(frozen.state.is_finished() for frozen in self.study.trials()):
            log.info("continuing %s: %d of %d trials have ended", folder_of(self.config), done, self.config.trials)
        while (claim := self.study.claim()) is not None:
            with claim.lock:
                log.info("trial %d: %s", claim.number, " ".join(values_text(claim.values)))
                state, reason = self._run_trial(claim)
            trials = self.study.trials()
            frozen, best = trials[claim.number], best_of(trials)
            if not reason:
                steps = f" after {counted(reached(frozen), self.config.unit)}" if state == TrialState.PRUNED else ""
                known = f"; best {best.value:.4f} (trial {best.number})" if best is not None else ""
                end = f"{steps}, {self.fitness.name} {frozen.value:.4f}{known}"
            log.info("trial %d: %s%s", frozen.number, STATES[state], f": {reason}" if reason else end)
            failed = [other for other in trials if other.state == TrialState.FAIL]
            scored = any(other.intermediate_values for other in trials if other.state != TrialState.FAIL)
            if len(failed) >= MOST_FAILURES and not scored:  # then the others would fail, too
                last = failed[-1].user_attrs.get(REASON, "")
                return f"{len(failed)} trials have failed and none has succeeded; stopped. The last one: {last}"
        return ""

    def _run_trial(self, claim: Claim) -> tuple[TrialState, str]:
        """Trains, or cross-validates, with the hyper-parameters of a trial. Returns how it ended, and why it failed.

        Raises TrainingFailed if every trial would fail (wrong settings or data, a full disk), and Stopped after a
        signal; the trial then stays unfinished.
        """
        recipe = claim.folder / RECIPE
        write_whole(recipe, yaml.safe_dump(self.space.recipe(claim.values), sort_keys=False))
        # --set is part of the recipe already; "auto" would be another recipe.
        config, fitness = replace(self.config, hyp=str(recipe), override=[]), self.fitness
        best: list[float] = []

        def after_epoch(epoch: int, value: float) -> bool:
            best.append(value)
            return self.study.report(claim, epoch, value) or epoch >= config.epochs

        def after_fold(number: int, so_far: CrossValidation) -> bool:
            write_results(claim.folder / "results.csv", so_far, self.names)
            value = fitness.of(so_far.pooled)
            best[:] = [] if math.isnan(value) else [value]
            return not best or self.study.report(claim, number, value) or number >= config.folds

        try:
            if config.folds:
                lists = folder_of(config)
                done = cross_validate(config, lists, claim.folder, fitness, self.signals, after_fold)
                is_whole = done is not None
            else:
                folder = claim.folder / RUN
                folder.mkdir(exist_ok=True)
                is_whole = train(train_config(config), folder, fitness.column, self.signals, after_epoch)
            reason = "" if best else "nothing could be scored"
        except TrainingFailed as error:
            if error.refused:
                raise
            reason = str(error)
        state = TrialState.FAIL if reason else TrialState.COMPLETE if is_whole else TrialState.PRUNED
        self.study.finish(claim, state, max(best, default=None), reason)
        return state, reason
