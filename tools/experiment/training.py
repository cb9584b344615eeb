"""Runs trainings in processes of their own, for commands that train several times: a crash ends only one of them."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from utils.config.parser import settings_of_child
from utils.config.settings import AUTO, TrainConfig
from utils.errors import Stopped
from utils.files.results_csv import read_columns
from utils.files.safe_io import folder_below, open_direct
from utils.process.child import start_child
from utils.process.signals import StopSignals
from utils.program import command_prefix

POLL_S = 0.5
# File in the folder of a run, with warnings of libraries and tracebacks, including those from before a resume.
ERRORS_TXT = "errors.txt"


def train_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Returns the settings of a single training of a search or cross-validation."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


def train(
    config: TrainConfig,
    folder: Path,
    signals: StopSignals,
    title: str,
    column: str,
    on_epoch: Callable[[int, float], bool] = lambda epoch, fitness: False,
) -> bool:
    """Trains in ``folder``, or continues the training there (``--resume auto``), and shows its progress in one line.

    Args:
        config: the settings of the experiment, whose folder ``folder`` is in.
        signals: the entered signals of this process; they stop the training, which can be resumed.
        title: what is trained, for the progress.
        column: the fitness in results.csv.
        on_epoch: called once with each epoch that has a fitness, and the fitness, also for epochs of previous
            processes. True ends the training.

    Returns whether ``on_epoch`` has ended the training. Raises `RunFailed` if it failed, `Stopped` after a signal, and
    PermissionError if a link leads out of the experiment's folder.
    """
    folder_below(config.folder, folder.relative_to(config.folder))
    config = dataclasses.replace(config, project=str(folder.parent), name=folder.name, resume=AUTO)
    word, variables = settings_of_child(config)
    is_ended = False
    reported: set[int] = set()
    with (
        open(folder / ERRORS_TXT, "ab", opener=open_direct) as errors,
        tqdm(desc=title, total=config.epochs, unit="epoch", leave=False, disable=None) as bar,
        signals.deferred(),
        start_child(
            [*command_prefix("train"), word],
            variables=variables,
            stop=signal.SIGKILL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        ) as child,
    ):
        result = None
        while result is None:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(POLL_S)
            result = child.poll()
            table = folder / "results.csv"
            columns = read_columns(table) if table.exists() else {}
            for epoch, fitness in zip(columns.get("epoch", ()), columns.get(column, ())):
                if epoch not in reported and not np.isnan(fitness) and not is_ended:
                    reported.add(epoch)
                    is_ended = on_epoch(int(epoch), float(fitness)) and epoch < config.epochs
                    bar.set_postfix_str(f"{column.removeprefix('metrics/')} {fitness:.3f}", refresh=False)
                    bar.update(int(epoch) - bar.n)
            if result is None and (is_ended or signals.received):
                child.process.terminate()  # the training saves before it ends
    if signals.received:
        raise Stopped(signals.code)
    if not is_ended:
        result.check()
    return is_ended
