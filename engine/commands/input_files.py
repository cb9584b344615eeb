"""Checks of the files and flags of a command. They need no torch, so a misspelled path ends a command at once.

train.py has none, and val.py skips them when several processes run: opening the files reports the same mistakes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from data.images.kinds import IMAGE_SUFFIXES
from data.open import check_data
from engine.inference.sources import source_files
from models.spec import load_spec
from models.weights.catalog import check_weights
from utils.config.export_formats import format_of
from utils.config.settings import DetectConfig, TrainConfig, ValConfig
from utils.errors import UserError, all_mistakes


def check_model_and_data(config: TrainConfig, splits: Sequence[str]) -> None:
    """Raises UserError for a data set without ``splits``, a model or starting weights that are missing, or YAMLs that
    cannot be read."""
    with all_mistakes() as mistakes:
        with mistakes.collecting():
            check_data(config.data, splits, config.classes)
        with mistakes.collecting():
            if config.model:
                load_spec(config.model)
        with mistakes.collecting():
            if config.weights:
                _check_checkpoint("--weights", config.weights)
        with mistakes.collecting():
            if config.teacher:
                _check_checkpoint("--teacher", config.teacher)


def check_scoring_files(weights: str, data: str, splits: Sequence[str] = (), classes: Sequence[str] = ()) -> None:
    """Raises UserError for weights that are missing, or a data set that cannot be read or does not have ``classes``. If
    ``data`` is empty, the weights name the data set, which is checked when they are read."""
    with all_mistakes() as mistakes:
        with mistakes.collecting():
            if data:
                check_data(data, splits, classes)
        with mistakes.collecting():
            if weights:
                _check_weights("--weights", weights)


def check_validation(config: ValConfig) -> None:
    """Raises UserError for missing weights of val.py, or a data set that cannot be read or lacks the split or the
    classes."""
    splits = [config.task]
    if config.task == "val" and os.path.exists(os.path.expanduser(config.weights)):
        splits = []  # checked when the weights are read: with --val-fraction, a model has its own validation images
    check_scoring_files(config.weights, config.data, splits, config.classes)


def check_detection(config: DetectConfig) -> None:
    """Raises UserError for a missing source or missing weights of detect.py."""
    with all_mistakes() as mistakes:
        with mistakes.collecting():
            source_files(config.source)
        with mistakes.collecting():
            _check_weights("--weights", config.weights)


def _check_checkpoint(flag: str, path: str) -> None:
    """Raises UserError as `_check_weights` does, and for an exported model, which cannot be trained."""
    if format_of(path) is not None:
        raise UserError(
            f"{flag} {path}: is an exported model; name a checkpoint, such as the .pt that it was made from"
        )
    _check_weights(flag, path)


def _check_weights(flag: str, weights: str) -> None:
    """Raises UserError for weights that are missing, or a file of another kind, by its suffix."""
    suffix = Path(weights).suffix.lower()
    if suffix in (".yaml", ".yml"):
        raise UserError(f"{flag} {weights}: is a YAML; a data set's is for --data, a model's for train.py --model")
    if suffix in IMAGE_SUFFIXES:
        raise UserError(f"{flag} {weights}: is an image, not weights")
    check_weights(weights)
