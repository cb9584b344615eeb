"""Scores a fold in a process of its own: an internal command that validates the fold's model and writes its detections
to the folder of its training."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from data.loading.build import MAX_VALIDATION_BATCH
from engine.commands.val import open_model_and_data, score
from tools.kfold.scores import DETECTIONS_FILE, ScoredFold, write_fold
from utils.config.parser import parse_config, settings_of_child
from utils.config.settings import FIND_BATCH_SIZE, DataFlags, ValConfig
from utils.config.tool_settings import KfoldConfig
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging
from utils.machine.devices import parse_devices
from utils.process.child import report_started, start_child
from utils.process.signals import StopSignals
from utils.program import command_prefix


def validation_of(config: KfoldConfig, weights: Path, data: Path) -> ValConfig:
    """Returns the settings that validate a fold in one process, with its results in the folder of ``weights``.

    The batch size is the one with which the training validated (at most `MAX_VALIDATION_BATCH`), and the settings of
    the data are the training's.
    """
    batch_size = ValConfig.batch_size
    if config.batch_size != FIND_BATCH_SIZE:
        batch_size = min(config.batch_size, MAX_VALIDATION_BATCH)
    shared = {field.name: getattr(config, field.name) for field in fields(DataFlags)}
    fold_settings = {
        "weights": str(weights),
        "data": str(data),
        "batch_size": batch_size,
        "imgsz": config.imgsz,
        "device": config.device.split(",")[0],
        "max_bad": 1.0,  # judged for the images of all folds together
        "classes": [],  # the checkpoint's, which was trained with --classes
        "stage": "",  # the images are read once
        "spawn": 0,
        "project": str(weights.parent.parent),
        "name": weights.parent.name,
    }
    return ValConfig(**shared | fold_settings)


def run_scoring(validation: ValConfig) -> None:
    """Runs `main` in a process of its own, so that a crash does not end this process, and the device memory is free for
    the next training. Raises `RunFailed` if it failed, and `Stopped` if a signal arrives meanwhile."""
    word, variables = settings_of_child(validation)
    with start_child([*command_prefix("score-fold"), word], variables=variables, stop=signal.SIGKILL) as child:
        child.wait().check()


def main(argv: Sequence[str] | None = None) -> None:
    """Detects objects in the validation images of a fold, and writes the labels and the detections."""
    validation = parse_config(ValConfig, argv)
    configure_logging(True)
    with StopSignals():
        ctx = DistributedContext.single(parse_devices(validation.device)[0])
        model, spec, scored_as = open_model_and_data(validation, ctx)
        report_started(Path(validation.project, validation.name))
        scores = score(scored_as, model, spec, ctx)
        assert scores is not None, "the only process has the scores"
        fold = ScoredFold(scores.truth, scores.evaluation.for_ap, scores.evaluation.detected)
        write_fold(Path(validation.project, validation.name, DETECTIONS_FILE), fold)
