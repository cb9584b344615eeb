"""A training as a child process (`tools.child`), for commands that train several times."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.checkpoint import Checkpoint
from engine.run.folder import LOCK_NAME
from tools.child import start
from utils.config.flags import flags_of
from utils.config.search_settings import KfoldConfig, folder_of
from utils.config.settings import TrainConfig
from utils.errors import INTERRUPTED, REQUEUE, Stopped, UserError
from utils.files.locks import FileLock
from utils.files.results_csv import read_columns
from utils.files.safe_io import open_direct
from utils.logger import configure_logging, get_logger
from utils.machine.limits import DISK_FULL
from utils.machine.stop_signals import StopSignals
from utils.program import start_of

POLL_S = 0.2
PATIENCE_S = 60.0
_FIRST = ("results.csv", "settings.yaml")  # what a training writes before last.pt
_DISK_FULL = ("the disk is full", *map(os.strerror, DISK_FULL))  # in error lines
ERRORS = "errors.txt"  # in the folder of the run: warnings of libraries, and the traceback of a crash


class TrainingFailed(UserError):
    """``refused``: every training would fail, as the settings or the data are wrong, or the disk is full."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


def run_continued(config: KfoldConfig, work: Callable[[StopSignals], None]) -> None:
    """Calls ``work``; after a signal, says that the same command continues it."""
    configure_logging(True)
    with StopSignals() as signals:
        try:
            work(signals)
        except Stopped:
            get_logger().info("stopped; the same command continues the work in %s", folder_of(config))
            raise


def train(
    config: TrainConfig,
    folder: Path,
    column: str,
    signals: StopSignals,
    on_epoch: Callable[[int, float], bool] = lambda epoch, fitness: True,
) -> bool:
    """Trains in ``folder``, from its last.pt if there is one. Returns False if ``on_epoch`` has ended it early.

    Args:
        column: of results.csv: the fitness.
        signals: of this process, entered.
        on_epoch: called with the epoch and its fitness after each validation, also those of former processes; returns
            whether to go on.

    Raises TrainingFailed, UserError if another process trains in ``folder``, and Stopped if a signal to this process or
    to the child has ended the training, which can be resumed.
    """
    wait_for_former(folder)
    last, done = former_training(folder, config)
    table, accepted = (folder / name for name in _FIRST)
    config = replace(config, project=str(folder.parent), name=folder.name, exist_ok=True)
    config = replace(config, resume=str(last) if last else None)
    reported, goes_on = 0, True

    def trains_on() -> bool:
        nonlocal reported, goes_on
        for epoch, fitness in fitness_by_epoch(table, column):
            if goes_on and epoch > reported:
                reported, goes_on = epoch, on_epoch(epoch, fitness)
        return goes_on

    if done:
        return trains_on()
    with (
        signals.deferred(),
        open(folder / ERRORS, "wb", opener=open_direct) as errors,
        start(
            [*start_of("train"), *flags_of(config)], stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=errors
        ) as child,
    ):
        code = _wait(child.process, trains_on, signals)
        reason = child.reason
    if not goes_on:
        return False
    if signals.stop or signals.interrupt or code in (REQUEUE, INTERRUPTED):
        raise Stopped(signals.code if signals.stop or signals.interrupt else code)
    if code:
        is_full = any(text in reason for text in _DISK_FULL)
        raise TrainingFailed(reason, refused=code == 2 and (is_full or not accepted.exists()))
    return True


def wait_for_former(folder: Path) -> None:
    """Waits until processes that train in ``folder``, whose parent was killed, have saved, else raises UserError."""
    if folder.is_dir():
        with FileLock(folder / LOCK_NAME) as lock:
            if holder := lock.acquire(PATIENCE_S):
                raise UserError(f"{folder}: another process is training this run ({holder}); wait for it, or stop it")


def former_training(folder: Path, config: TrainConfig) -> tuple[Path | None, bool]:
    """The checkpoint in ``folder`` to resume from, and whether the training has ended. Without one, removes what a
    training has left that ended before its first checkpoint. Raises TrainingFailed if it is damaged."""
    last = folder / "last.pt"
    if not last.is_file():
        for name in _FIRST:
            (folder / name).unlink(missing_ok=True)
        return None, False
    try:
        checkpoint = Checkpoint.read(last)
    except UserError as error:
        raise TrainingFailed(str(error)) from None
    progress = checkpoint.progress
    epochs = checkpoint.config.epochs if config.time else config.epochs  # that fit into the time
    is_over = progress.stops_early(config.patience, epochs=epochs, val_every=config.val_every)
    return last, progress.epoch >= epochs or is_over


def _wait(child: subprocess.Popen, trains_on: Callable[[], bool], signals: StopSignals) -> int:
    """Waits for the end of the child, which a signal or ``trains_on`` stops."""
    is_stopping = False
    while True:
        code = child.poll()
        is_worth_more = trains_on()
        if code is not None:
            return code
        if not is_stopping and (not is_worth_more or signals.stop or signals.interrupt):
            child.terminate()  # it saves
            is_stopping = True
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)


def fitness_by_epoch(table: Path, column: str) -> Iterator[tuple[int, float]]:
    """The epochs of results.csv that have a fitness; nothing if there is no such file yet."""
    columns = {}
    with suppress(UserError):
        columns = read_columns(table)
    for epoch, fitness in zip(columns.get("epoch", ()), columns.get(column, ())):
        if not math.isnan(fitness):
            yield int(epoch), float(fitness)
