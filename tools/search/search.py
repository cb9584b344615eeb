"""Runs a search: trial after trial, until there are enough. Processes that share its folder divide the trials.

Optuna's journal has the state of each trial. Whether the process of a running trial is alive, its lock tells: the trial
of a killed process, whose lock is free, is continued by the next process that looks for one.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
import yaml
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tools.experiment.experiment import LOCK, SEARCH_YAML, Experiment, open_experiment
from tools.experiment.training import train, train_config
from tools.kfold.cross_validate import cross_validate, write_results
from tools.kfold.folds import make_folds
from tools.search.ranges import Space, read_space, values_text
from tools.search.report import REASON, TRIALS_CSV, best_of, write_report
from utils.config.commands import COMMANDS
from utils.config.flags import flags_of
from utils.config.tool_settings import SearchConfig
from utils.errors import USER_ERROR, UserError, first_line
from utils.files.locks import FileLock
from utils.files.safe_io import folder_below, open_direct, write_whole
from utils.logger import get_logger
from utils.process.child import RunFailed
from utils.process.signals import StopSignals
from utils.strings import counted

JOURNAL_LOG = "journal.log"
HALVING_FACTOR = 3
MAX_FAILURES = 3  # trials in a row that fail before the search stops
PATIENCE_S = 3.0  # a killed process holds its lock until the kernel has freed its memory


def search(config: SearchConfig, signals: StopSignals) -> None:
    """Runs trials until this and other processes have started ``config.trials``, and writes the report.

    Raises:
        UserError: the settings are wrong or differ from those with which the search was started, a training cannot
            begin, `MAX_FAILURES` trials fail in a row, or no trial succeeds.
        Stopped: a signal has ended the search.
    """
    log = get_logger()
    space = read_space(config)
    experiment = open_experiment(config, SEARCH_YAML, space.to_dict())
    with _search_lock(experiment):
        experiment.store_or_verify_settings()
        study = _open_study(config, experiment.folder / JOURNAL_LOG)
        if config.folds:
            make_folds(config, experiment.spec, experiment.folder, experiment.fitness)
    trials = _Trials(config, space, experiment, study, signals)
    num_ended = sum(frozen.state.is_finished() for frozen in trials.all())
    if num_ended:
        log.info("continuing %s: %d of %d trials have ended", experiment.folder, num_ended, config.trials)
    failures = 0
    while (claim := trials.claim()) is not None:
        trial, lock = claim
        with lock:
            reason = trials.run(trial)
        failures = failures + 1 if reason else 0
        if failures == MAX_FAILURES:
            raise UserError(
                f"stopped after {failures} failed trials in a row; last error: {reason} (the same command continues "
                "with the next trial)"
            )
    settings = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", plots=True)
    command = f"{COMMANDS['train'].typed} {shlex.join(flags_of(settings))}"
    with _search_lock(experiment):
        newest = trials.all()
        for line in write_report(experiment, newest, space, unit=config.unit, command=command):
            log.info("%s", line)
    num_running = sum(frozen.state == TrialState.RUNNING for frozen in newest)
    if num_running:
        log.info("%s running in other processes", counted(num_running, "trial"))
    elif best_of(newest) is None:
        raise UserError(f"{experiment.folder / TRIALS_CSV}: no trial is complete; this table has the reasons")


def _search_lock(experiment: Experiment) -> FileLock:
    """Waits for the lock under which a process starts or joins the search, claims a trial, or writes the report."""
    return FileLock(experiment.folder / LOCK).wait("another process of this search")


def _open_study(config: SearchConfig, journal: Path) -> optuna.Study:
    """Opens the study in ``journal``, or creates it. Raises UserError if the file is damaged."""
    open(journal, "ab", opener=open_direct).close()  # raises where a link leads elsewhere
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module="optuna")
    first_step = config.prune_after or (1 if config.folds else max(config.epochs // 5, 1))
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "median": optuna.pruners.MedianPruner(n_warmup_steps=first_step),
        "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=first_step, reduction_factor=HALVING_FACTOR),
        "none": optuna.pruners.NopPruner(),
    }
    try:
        return optuna.create_study(
            study_name="search",
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
            direction="maximize",
            load_if_exists=True,
            pruner=pruners[config.pruner],
        )
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        message = f"{journal}: damaged ({first_line(error)}); restore it, or choose another --name"
        raise UserError(message) from None


@dataclass(frozen=True)
class _Trials:
    """The trials of a search, as this process claims and runs them."""

    config: SearchConfig
    space: Space
    experiment: Experiment
    study: optuna.Study
    signals: StopSignals

    def all(self) -> list[FrozenTrial]:
        """Returns the trials of all processes."""
        return self.study.get_trials(deepcopy=False)

    def folder_of(self, number: int) -> Path:
        """Returns the folder of a trial, which is made if necessary. Raises PermissionError for a link."""
        return folder_below(self.experiment.folder, f"trials/{number:04}")

    def claim(self) -> tuple[optuna.Trial, FileLock] | None:
        """Claims an interrupted trial or, if there is none, a new one, and its lock; None if none is left. The first
        trial of a search has the recipe's values, as far as the ranges hold them."""
        with _search_lock(self.experiment):
            trials = self.all()
            are_all_started = sum(frozen.state != TrialState.WAITING for frozen in trials) >= self.config.trials
            patience_s = PATIENCE_S if are_all_started else 0.0
            for frozen in trials:
                lock = self._lock(frozen.number, patience_s) if frozen.state == TrialState.RUNNING else None
                if lock is None:
                    continue
                if self.all()[frozen.number].state == TrialState.RUNNING:
                    return self._with_values(optuna.Trial(self.study, frozen._trial_id)), lock
                lock.release()  # its process has ended it meanwhile
            if are_all_started:
                return None
            if not trials:
                self.study.enqueue_trial(self.space.baseline_values())
            trial = self.study.ask()
            new_lock = self._lock(trial.number)
            assert new_lock is not None, "no other process can have locked a new trial"
            return self._with_values(trial), new_lock

    def _lock(self, number: int, patience_s: float = 0.0) -> FileLock | None:
        """Locks a trial; returns None if another process is still running it after ``patience_s`` seconds."""
        lock = FileLock(self.folder_of(number) / LOCK)
        holder = lock.acquire(patience_s)
        return None if holder else lock

    def _with_values(self, trial: optuna.Trial) -> optuna.Trial:
        """Draws the values of a trial. The random numbers are its own, so that a search continues with the values of an
        uninterrupted one."""
        self.study.sampler = optuna.samplers.TPESampler(seed=self.config.seed + trial.number)
        self.space.suggest(trial)
        return trial

    def run(self, trial: optuna.Trial) -> str:
        """Trains, or cross-validates, with the values of a trial, and records its state. Returns why it failed, or "".

        Raises `Stopped` after a signal, and `RunFailed` if the training is refused before it begins, and either no
        trial has succeeded, or this one has begun before: the settings or the machine are the reason, so the trial
        stays unfinished.
        """
        log = get_logger()
        log.info("trial %d: %s", trial.number, " ".join(values_text(trial.params)))
        folder = self.folder_of(trial.number)
        recipe = folder / "hyp.yaml"
        write_whole(recipe, yaml.safe_dump(self.space.recipe(trial.params), sort_keys=False), durable=True)
        config = replace(self.config, hyp=str(recipe), override=[])  # the recipe includes --set already
        reason = ""
        state = TrialState.FAIL
        fitness = None
        try:
            is_pruned = self._cross_validate(trial, config) if config.folds else self._train(trial, config)
            steps = self.all()[trial.number].intermediate_values
            if not steps:
                reason = "nothing could be scored"
            else:
                state = TrialState.PRUNED if is_pruned else TrialState.COMPLETE
                fitness = steps[max(steps)] if config.folds else max(steps.values())
        except RunFailed as error:
            is_refused = error.result.code == USER_ERROR and not error.result.has_begun
            has_begun_before = any(folder.glob("*/settings.yaml"))
            if is_refused and (has_begun_before or best_of(self.all()) is None):
                raise
            reason = error.result.reason
        if reason:
            trial.set_user_attr(REASON, reason)
        self.study.tell(trial.number, fitness if state == TrialState.COMPLETE else None, state=state)
        best = best_of(self.all())
        self._remove_weights(best)
        best_text = "" if best is None else f"; best {best.value:.4f} (trial {best.number})"
        details = reason if fitness is None else f"{self.experiment.fitness.name} {fitness:.4f}{best_text}"
        log.info("trial %d: %s, %s", trial.number, state.name.lower(), details)
        return reason

    def _train(self, trial: optuna.Trial, config: SearchConfig) -> bool:
        """Trains once, and reports the fitness of each epoch. Returns whether the trial is pruned."""
        title = f"trial {trial.number + 1} of {config.trials}"

        def report(epoch: int, fitness: float) -> bool:
            return self._report(trial, epoch, fitness)

        folder = self.folder_of(trial.number) / "run"
        return train(train_config(config), folder, self.signals, title, self.experiment.fitness.column, report)

    def _cross_validate(self, trial: optuna.Trial, config: SearchConfig) -> bool:
        """Trains once per fold, and reports the fitness over the images of all folds together after each. Returns
        whether the trial is pruned."""
        folder = self.folder_of(trial.number)
        for results in cross_validate(config, self.signals, data_folder=self.experiment.folder, folder=folder):
            write_results(folder / "results.csv", results, self.experiment.names)
            fitness = self.experiment.fitness.score_of(results.pooled)
            number = len(results.folds)
            if not math.isnan(fitness) and self._report(trial, number, fitness) and number < config.folds:
                return True
        return False

    def _report(self, trial: optuna.Trial, step: int, fitness: float) -> bool:
        """Records the fitness after a step, and returns whether to prune the trial. A step that is repeated keeps its
        first fitness."""
        frozen = self.all()[trial.number]
        if step in frozen.intermediate_values:
            return False
        trial.report(fitness, step)
        return trial.should_prune()

    def _remove_weights(self, best: FrozenTrial | None) -> None:
        """Removes the weights of all ended trials but the best."""
        for frozen in self.all():
            if frozen.state.is_finished() and (best is None or frozen.number != best.number):
                for weights in self.folder_of(frozen.number).rglob("*.pt"):
                    with contextlib.suppress(FileNotFoundError):  # another process removes them, too
                        weights.unlink()
