"""The search: trial after trial, until there are enough."""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from engine.evaluation.metrics import Fitness
from tools.kfold.cross_validate import make_folds, prepare
from tools.kfold.lists import TABLE
from tools.search.ranges import Space, values_text
from tools.search.report import STATES, reached, write_report
from tools.search.study import JOURNAL, REASON, TRIALS, SharedStudy, best_of
from tools.search.trial import run_trial
from utils.config.flags import flags_of
from utils.config.search_settings import SearchConfig, check_stored, folder_of, train_config
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.logger import get_logger
from utils.machine.stop_signals import StopSignals
from utils.program import COMMANDS
from utils.strings import counted

SETTINGS = "search.yaml"
MOST_FAILURES = 3  # trials, before any has succeeded


def search(config: SearchConfig, space: Space, signals: StopSignals) -> None:
    """Runs trials until ``config.trials`` have begun, by this and other processes, and writes the report.

    Raises:
        UserError: the settings are wrong, differ from those with which the search began, or no trial succeeds.
        Stopped: by a signal.
    """
    log = get_logger()
    folder, spec, fitness, names = prepare(config)
    with FileLock(folder / ".settings.lock").wait("another process that begins this search"):
        is_new = check_stored(config, folder / SETTINGS, space.plain())
        study = SharedStudy(config, space, folder, steps=config.folds or config.epochs)
        try:
            if config.folds:
                make_folds(config, spec, folder, fitness)
        except UserError:
            if is_new:
                _forget(folder)
            raise
    try:
        _run_trials(config, space, study, fitness, names, signals)
    except UserError:
        if is_new and not any(frozen.state.is_finished() or frozen.intermediate_values for frozen in study.trials()):
            _forget(folder)
        raise
    if elsewhere := sum(frozen.state == TrialState.RUNNING for frozen in study.trials()):
        log.info("run by other processes: %s", counted(elsewhere, "trial"))
    with study.exclusive():  # no older report replaces that of another process
        lines = write_report(folder, study, space, fitness.name, config.unit, _command(config))
    for line in lines:
        log.info("%s", line)


def _run_trials(
    config: SearchConfig,
    space: Space,
    study: SharedStudy,
    fitness: Fitness,
    names: tuple[str, ...],
    signals: StopSignals,
) -> None:
    log, folder = get_logger(), folder_of(config)
    if done := sum(frozen.state.is_finished() for frozen in study.trials()):
        log.info("continuing %s: %d of %d trials have ended", folder, done, config.trials)
    while (claim := study.claim()) is not None:
        with claim.lock:
            log.info("trial %d: %s", claim.number, " ".join(values_text(claim.values)))
            state, reason = run_trial(
                config, space, study, claim, folds=folder, fitness=fitness, names=names, signals=signals
            )
        trials = study.trials()
        log.info("%s", _line(trials[claim.number], state, reason, fitness, config.unit, best_of(trials)))
        _check_failures(trials)


def _forget(folder: Path) -> None:
    """Removes what a search that could not begin has written, so that corrected settings may begin there."""
    for path in (folder / SETTINGS, folder / JOURNAL, folder / TABLE):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / TRIALS, ignore_errors=True)
    with suppress(OSError):  # it has other files
        folder.rmdir()


def _line(
    frozen: FrozenTrial, state: TrialState, reason: str, fitness: Fitness, unit: str, best: FrozenTrial | None
) -> str:
    text = f"trial {frozen.number}: {STATES[state]}"
    if reason:
        return f"{text}: {reason}"
    steps = f" after {counted(reached(frozen), unit)}" if state == TrialState.PRUNED else ""
    known = f"; best {best.value:.4f} (trial {best.number})" if best is not None else ""
    return f"{text}{steps}, {fitness.name} {frozen.value:.4f}{known}"


def _check_failures(trials: list[FrozenTrial]) -> None:
    """Raises UserError if the first trials have failed, and none has been scored: then the others would fail too."""
    failed = [frozen for frozen in trials if frozen.state == TrialState.FAIL]
    others = [frozen for frozen in trials if frozen.state != TrialState.FAIL]
    if len(failed) >= MOST_FAILURES and not any(frozen.intermediate_values for frozen in others):
        reason = failed[-1].user_attrs.get(REASON, "")
        raise UserError(f"{len(failed)} trials have failed and none has succeeded; stopped. The last one: {reason}")


def _command(config: SearchConfig) -> str:
    """train.py with the settings of the search."""
    kept = train_config(config, hyp="auto", override=[], project="runs/train", name="exp", noplots=False)
    return f"{COMMANDS['train'].typed} {shlex.join(flags_of(kept))}"
