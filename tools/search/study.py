"""The study of a search: a journal in its folder, to which any number of processes append, also of several machines
that share the folder. Each holds the lock of the trial that it runs; a running trial whose lock is free was
interrupted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tools.search.ranges import Scalar, Space
from utils.config.search_settings import SearchConfig
from utils.errors import UserError, first_line
from utils.files.locks import FileLock

JOURNAL = "journal.log"
TRIALS = "trials"  # folder of the trials
HALVING_FACTOR = 3  # of the trials at a rung, one in this many goes on (Li et al. 2020)
REASON = "reason"  # attribute of a failed trial
# What Optuna raises for lines that it cannot read.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError)


@dataclass(frozen=True)
class Claim:
    number: int
    folder: Path
    values: dict[str, Scalar]  # of the searched hyper-parameters
    trial: optuna.Trial
    lock: FileLock


class SharedStudy:
    """The study in ``folder``, which is created if there is none. ``steps``: epochs or folds, after which a trial
    reports its fitness. Raises UserError if the journal is damaged."""

    def __init__(self, config: SearchConfig, space: Space, folder: Path, *, steps: int) -> None:
        self._config, self._space, self._folder = config, space, folder
        journal = folder / JOURNAL
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        after = config.prune_after or (1 if config.folds else max(steps // 5, 1))
        pruners = {
            "median": optuna.pruners.MedianPruner(n_warmup_steps=after),
            "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=after, reduction_factor=HALVING_FACTOR),
            "none": optuna.pruners.NopPruner(),
        }
        with self.exclusive():
            try:
                self.study = optuna.create_study(
                    study_name="search",
                    storage=JournalStorage(JournalFileBackend(str(journal), _JournalLock(folder / ".journal.lock"))),
                    direction="maximize",
                    load_if_exists=True,
                    pruner=pruners[config.pruner],
                )
                self._check_trials()
            except _MALFORMED as error:
                text = f"{journal}: damaged ({first_line(error)}); restore it, or choose another --name"
                raise UserError(text) from None
            # A new trial would continue the training of one that the journal has lost.
            if (lost := self.folder_of(len(self.trials()))).exists():
                raise UserError(f"{journal}: has lost the trial in {lost}; restore it, or choose another --name")

    def _check_trials(self) -> None:
        """Raises ValueError for a trial whose steps or fitness are no numbers: Optuna takes any JSON."""
        for frozen in self.trials():
            reported = frozen.intermediate_values
            fitness = [*reported.values(), *(frozen.values or ())]
            if frozen.state == TrialState.COMPLETE and len(frozen.values or ()) != 1:
                raise ValueError(f"trial {frozen.number} is complete without a fitness")
            if not all(type(step) is int for step in reported):
                raise ValueError(f"a step of trial {frozen.number} is no number")
            if not all(type(value) in (int, float) for value in fitness):
                raise ValueError(f"a fitness of trial {frozen.number} is no number")

    def trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def folder_of(self, number: int) -> Path:
        return self._folder / TRIALS / f"{number:04}"

    def claim(self) -> Claim | None:
        """An interrupted trial or, if there is none, a new one; None if none is left for this process."""
        with self.exclusive():
            trials = self.trials()
            for frozen in trials:
                if frozen.state == TrialState.RUNNING and (lock := self._lock(frozen.number)):
                    self._seed_sampler(frozen.number)  # it may not have all values yet
                    return self._claimed(optuna.Trial(self.study, frozen._trial_id), lock)
            begun = sum(frozen.state != TrialState.WAITING for frozen in trials)
            if begun >= self._config.trials:
                return None
            if not trials:
                self.study.enqueue_trial(self._space.known_values(self._config.epochs))
            self._seed_sampler(begun)
            trial = self.study.ask()
            lock = self._lock(trial.number)
            assert lock is not None, "nobody else knows this trial"
            return self._claimed(trial, lock)

    def report(self, claim: Claim, step: int, fitness: float) -> bool:
        """Notes the fitness after a step. Returns whether the trial is worth going on with."""
        frozen = self.trials()[claim.number]
        if step not in frozen.intermediate_values:
            claim.trial.report(fitness, step)
        elif step < frozen.last_step:  # of a former process, which went on
            return True
        return not claim.trial.should_prune()

    def finish(self, claim: Claim, state: TrialState, fitness: float | None = None, reason: str = "") -> None:
        """Ends the trial. Only the best trial keeps its weights."""
        with self.exclusive():
            if reason:
                claim.trial.set_user_attr(REASON, reason)
            self.study.tell(claim.number, fitness if state == TrialState.COMPLETE else None, state=state)
            claim.lock.release()
            kept = best_of(self.trials())
            for frozen in self.trials():
                if frozen.state.is_finished() and (kept is None or frozen.number != kept.number):
                    for weights in self.folder_of(frozen.number).rglob("*.pt"):
                        weights.unlink(missing_ok=True)

    def _claimed(self, trial: optuna.Trial, lock: FileLock) -> Claim:
        return Claim(trial.number, self.folder_of(trial.number), self._space.suggest(trial), trial, lock)

    def _seed_sampler(self, number: int) -> None:
        """The sampler has no state: a study that is continued draws what an uninterrupted one would have drawn."""
        seed = np.random.SeedSequence((self._config.seed, number)).generate_state(1)[0]
        self.study.sampler = optuna.samplers.TPESampler(seed=int(seed))

    def _lock(self, number: int) -> FileLock | None:
        """None if another process holds it."""
        folder = self.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".trial.lock")
        return None if lock.acquire() else lock

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Only one process at a time chooses or ends a trial."""
        with FileLock(self._folder / ".study.lock") as lock:
            lock.acquire(math.inf)
            yield


class _JournalLock(FileLock):
    """Ends with its process: Optuna's own lock stays when a process is killed. Half a line that a killed process or a
    full disk has left is removed before another line is appended."""

    def acquire(self, patience_s: float = math.inf) -> str:
        holder = super().acquire(patience_s)
        with open(self.path.with_name(JOURNAL), "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        return holder


def best_of(trials: list[FrozenTrial]) -> FrozenTrial | None:
    """The complete trial with the highest fitness, the first of equals; None if none is complete."""
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    return max(complete, key=lambda frozen: (frozen.value, -frozen.number), default=None)
