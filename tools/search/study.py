"""The study of a search: a journal in its folder, to which any number of processes append.

The processes may be on several machines that share the folder. The journal stores the state of a trial; only its lock
(locks.py) tells whether its process is still running:

    state in the journal    lock    the trial                    what follows
    none                    free    is not drawn yet             `claim` draws it
    running                 held    is run by a process          `report` after each step, then `finish`
    running                 free    was interrupted              `claim` gives it to a process, which continues it
    complete, pruned, fail  free    has ended                    nothing
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tools.search.locks import JOURNAL_LOG, TRIALS_FOLDER, StudyLock, lock_trial
from tools.search.ranges import Scalar, Space
from utils.config.search_settings import SearchConfig
from utils.errors import UserError, first_line
from utils.files.locks import FileLock

HALVING_FACTOR = 3  # reduction factor of successive halving (Li et al. 2020)
_REASON_ATTRIBUTE = "reason"  # attribute of a failed trial
# Attributes of a trial: how many processes of the search have lost its training since its newest step, and that step.
_LOST_AFTER_ATTRIBUTE = "lost after"
# Errors that Optuna raises for lines of the journal that it cannot read.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError)


@dataclass(frozen=True)
class Claim:
    """A trial that this process runs."""

    number: int
    folder: Path
    values: dict[str, Scalar]  # values of the searched hyper-parameters
    trial: optuna.Trial
    lock: FileLock


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial."""

    state: TrialState  # complete, pruned or failed
    fitness: float | None = None  # None if it has failed
    reason: str = ""  # why it failed

    @classmethod
    def scored(cls, fitness: float | None, *, is_pruned: bool = False) -> TrialOutcome:
        """Returns the outcome of a trial that ended without an error; it counts as failed if ``fitness`` is None."""
        if fitness is None:
            return cls.failed("nothing could be scored")
        return cls(TrialState.PRUNED if is_pruned else TrialState.COMPLETE, fitness)

    @classmethod
    def failed(cls, reason: str) -> TrialOutcome:
        """Returns the outcome of a failed trial."""
        return cls(TrialState.FAIL, reason=reason)


class SharedStudy:
    """The study in a folder, which processes share."""

    def __init__(self, config: SearchConfig, space: Space, *, folder: Path, lock: StudyLock, steps: int) -> None:
        """Opens the study in ``folder``, or creates it.

        Args:
            lock: the lock of this folder.
            steps: number of epochs or folds after which a trial reports its fitness.

        Raises UserError if the journal is damaged.
        """
        self._config = config
        self._space = space
        self._folder = folder
        self._lock = lock
        journal = folder / JOURNAL_LOG
        with lock:
            try:
                self.study = _open_study(journal, lock, _Sampler(config.seed), _pruner(config, steps))
                _check_trials(self.trials())
            except _MALFORMED as error:
                message = f"{journal}: damaged ({first_line(error)}); restore it, or choose another --name"
                raise UserError(message) from None
            # A new trial would continue the training of a trial that the journal has lost.
            next_folder = self.folder_of(len(self.trials()))
            if next_folder.exists():
                message = f"{journal}: has lost the trial in {next_folder}; restore it, or choose another --name"
                raise UserError(message)

    def trials(self) -> list[FrozenTrial]:
        """Returns the trials of all processes."""
        return self.study.get_trials(deepcopy=False)

    def folder_of(self, number: int) -> Path:
        """Returns the folder of a trial."""
        return self._folder / TRIALS_FOLDER / f"{number:04}"

    def claim(self) -> Claim | None:
        """Claims an interrupted trial or, if there is none, a new one; returns None if none is left."""
        with self._lock:
            trials = self.trials()
            return self._claim_interrupted(trials) or self._claim_new(trials)

    def _claim_interrupted(self, trials: Sequence[FrozenTrial]) -> Claim | None:
        """Claims the first running trial whose lock is free."""
        for frozen in trials:
            if frozen.state != TrialState.RUNNING:
                continue
            lock = lock_trial(self.folder_of(frozen.number))
            if lock is not None:
                return self._claimed(optuna.Trial(self.study, frozen._trial_id), lock)
        return None

    def _claim_new(self, trials: Sequence[FrozenTrial]) -> Claim | None:
        """Draws a new trial; the first trial of a search has the recipe's values, as far as the ranges hold them."""
        num_started = sum(frozen.state != TrialState.WAITING for frozen in trials)
        if num_started >= self._config.trials:
            return None
        if not trials:
            self.study.enqueue_trial(self._space.baseline_values())
        trial = self.study.ask()
        lock = lock_trial(self.folder_of(trial.number))
        assert lock is not None, "no other process can have locked a new trial"
        return self._claimed(trial, lock)

    def report(self, claim: Claim, step: int, fitness: float) -> bool:
        """Records the fitness after a step; if a step is repeated, its first fitness stays. Returns whether to prune
        the trial, which is only possible at its newest step."""
        frozen = self.trials()[claim.number]
        was_continued = frozen.last_step is not None and step < frozen.last_step
        if step not in frozen.intermediate_values:
            claim.trial.report(fitness, step)
        return not was_continued and claim.trial.should_prune()

    def reported(self, claim: Claim) -> dict[int, float]:
        """Returns the fitness that a trial has reported, by step."""
        return dict(self.trials()[claim.number].intermediate_values)

    def finish(self, claim: Claim, outcome: TrialOutcome) -> None:
        """Ends the trial: records the outcome in the journal, so that no process continues the trial, then releases its
        lock and removes the weights of all scored trials but the best."""
        with self._lock:
            if outcome.reason:
                claim.trial.set_user_attr(_REASON_ATTRIBUTE, outcome.reason)
            # Optuna itself gives a pruned trial the fitness of its last step.
            fitness = outcome.fitness if outcome.state == TrialState.COMPLETE else None
            self.study.tell(claim.number, fitness, state=outcome.state)
            claim.lock.release()
            self.remove_weights(TrialState.COMPLETE, TrialState.PRUNED)

    def remove_weights(self, *states: TrialState) -> None:
        """Removes the weights of trials that have ended in one of ``states``, except those of the best trial. Those of
        failed trials are kept until a process of the search finds no trial left to run: the machine may have failed."""
        trials = self.trials()
        best = best_of(trials)
        for frozen in trials:
            is_best = best is not None and frozen.number == best.number
            if frozen.state in states and not is_best:
                for weights in self.folder_of(frozen.number).rglob("*.pt"):
                    weights.unlink(missing_ok=True)

    def _claimed(self, trial: optuna.Trial, lock: FileLock) -> Claim:
        """Returns the claim of a trial that this process has locked, and draws the values that it does not have yet."""
        return Claim(trial.number, self.folder_of(trial.number), self._space.suggest(trial), trial, lock)


def _open_study(
    journal: Path, lock: StudyLock, sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner
) -> optuna.Study:
    """Opens ``journal``, or creates it. Raises one of `_MALFORMED` if the file is damaged."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module="optuna")
    return optuna.create_study(
        study_name="search",
        storage=JournalStorage(JournalFileBackend(str(journal), lock)),
        direction="maximize",
        load_if_exists=True,
        sampler=sampler,
        pruner=pruner,
    )


def _check_trials(trials: Sequence[FrozenTrial]) -> None:
    """Raises ValueError for a trial whose steps or fitness are not numbers, because Optuna accepts any JSON."""
    for frozen in trials:
        fitness = frozen.values or ()
        if frozen.state == TrialState.COMPLETE and len(fitness) != 1:
            raise ValueError(f"trial {frozen.number} is complete without a fitness")
        if not all(type(step) is int for step in frozen.intermediate_values):
            raise ValueError(f"a step of trial {frozen.number} is not a number")
        if not all(type(value) in (int, float) for value in (*frozen.intermediate_values.values(), *fitness)):
            raise ValueError(f"a fitness of trial {frozen.number} is not a number")


def _pruner(config: SearchConfig, steps: int) -> optuna.pruners.BasePruner:
    """Builds the pruner of ``--pruner``, which ends trials early."""
    first_step = config.prune_after or (1 if config.folds else max(steps // 5, 1))
    if config.pruner == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=first_step)
    if config.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first_step, reduction_factor=HALVING_FACTOR)
    return optuna.pruners.NopPruner()


class _Sampler(optuna.samplers.TPESampler):
    """Draws each value with random numbers of its own, so that a study continues with the values of an uninterrupted
    one, even if its process was killed between two values of a trial."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draws the value of a hyper-parameter in a trial."""
        entropy = (self._seed, trial.number, zlib.crc32(param_name.encode()))
        seed = np.random.SeedSequence(entropy).generate_state(1)[0]
        sampler = optuna.samplers.TPESampler(seed=int(seed))
        return sampler.sample_independent(study, trial, param_name, param_distribution)


def reason_of(frozen: FrozenTrial) -> str:
    """Returns why a trial has failed; "" if it has not."""
    return frozen.user_attrs.get(_REASON_ATTRIBUTE, "")


def rank(frozen: FrozenTrial) -> tuple[float, int]:
    """Returns a sort key of complete trials: by descending fitness, then by number."""
    assert frozen.value is not None, "a complete trial has a fitness"
    return -frozen.value, frozen.number


def best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Returns the complete trial with the highest fitness, the first one of a tie; None if none is complete."""
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    return min(complete, key=rank, default=None)
