"""Joins the settings that a checkpoint stores with those of the command line that resumes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from data.source.open import known_by_name
from engine.run.run import RunSettings
from utils.config.paths import is_same_path
from utils.config.recipes import read_recipe, with_overrides
from utils.config.settings import AUTO, FIND_BATCH_SIZE, Hyperparameters, TrainConfig, names_with
from utils.errors import UserError
from utils.files.paths import normal_path

# Settings of the process that resumes, not of the run.
_PROCESS_SETTINGS = names_with(TrainConfig, on_resume="current")
# With other values the stored weights would not fit the model or the optimizer's state its parameters, the order of
# images would be undefined, or the best epoch so far would not be known.
_FIXED_SETTINGS = names_with(TrainConfig, on_resume="fixed")

_CONFIG_NAMES = frozenset(field.name for field in fields(TrainConfig))
# With other values, a run that has ended would have had other results, not only more or fewer epochs.
_DECIDE_RESULTS = names_with(TrainConfig, scope="result") - {"epochs", "time", "patience"} | frozenset(
    field.name for field in fields(Hyperparameters)
)

_PATHS = names_with(TrainConfig, is_path=True)
# Where the run is, which its folder says if the command line names that (``--resume auto``).
_LOCATION = ("project", "name", "exist_ok")

# Flags that leave a run as it is, although they may have another value than its stored settings: by name, a function of
# the settings of the command line.
_KEEPS_STORED: dict[str, Callable[[TrainConfig], bool]] = {
    "batch_size": lambda current: current.batch_size == FIND_BATCH_SIZE,  # found when the run began
    "optimizer": lambda current: current.optimizer == "auto",  # chosen when the run began
    "epochs": lambda current: current.time > 0,  # the time decides about the epochs
}


def merge_settings(
    stored: RunSettings, current: TrainConfig, explicit_flags: Collection[str]
) -> tuple[RunSettings, list[str]]:
    """Returns the settings ``stored`` with those of the command line, and messages, such as those that change. Raises
    UserError for a setting that a run cannot change."""
    config, config_changes = merge_config(stored.config, current, explicit_flags)
    hyp, hyp_changes = merge_hyperparameters(
        stored.hyp, current, explicit_flags, pretrained=bool(stored.config.weights), keep_old=stored.config.keep_old
    )
    return RunSettings(config, hyp), [*config_changes, *hyp_changes]


def check_unchanged(folder: Path, stored: RunSettings, settings: RunSettings) -> None:
    """Raises UserError if the run in ``folder``, which has ended with the settings ``stored``, would have had other
    results with ``settings``."""
    before = stored.by_name()
    for name, value in settings.by_name().items():
        if name == "data" and not os.path.exists(before[name]):  # it has moved; a message says so
            continue
        if name in _DECIDE_RESULTS and value != before[name]:
            flag = f"--{name.replace('_', '-')} {value}" if name in _CONFIG_NAMES else f"--set {name}={value}"
            raise UserError(
                f"{flag}: the run in {folder} has ended, with {before[name]!r}; start a new run with another --name, "
                "or give a larger --epochs, too, to train this one on"
            )


def merge_config(
    stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]
) -> tuple[TrainConfig, list[str]]:
    """Returns the stored settings with those of the command line, and a message for each that changes.

    Raises UserError for a setting that a run cannot change.
    """
    changes: dict[str, Any] = {name: getattr(current, name) for name in _PROCESS_SETTINGS}
    changes["override"] = _joined_overrides(stored, current, explicit_flags)
    if current.resume == AUTO:
        changes |= {name: getattr(current, name) for name in _LOCATION}
    messages = []
    for name in sorted(set(explicit_flags) - changes.keys()):
        if _is_unchanged(name, stored, current):
            continue
        old = getattr(stored, name)
        new = getattr(current, name)
        if name in _FIXED_SETTINGS:
            raise UserError(
                f"--{name.replace('_', '-')} {new}: the run being resumed has {old!r}; start a new run with --weights"
            )
        changes[name] = new
        messages.append(f"resume: {name} {old!r} -> {new!r}")
    drops_time = "epochs" in explicit_flags and "time" not in explicit_flags
    if drops_time and stored.time:
        changes["time"] = 0.0
        messages.append(f"resume: time {stored.time!r} -> 0.0, as --epochs is given")
    return replace(stored, **changes), messages


def _is_unchanged(name: str, stored: TrainConfig, current: TrainConfig) -> bool:
    """Whether the command line leaves the setting ``name`` of the run as it is."""
    if name in _KEEPS_STORED and _KEEPS_STORED[name](current):
        return True
    old = getattr(stored, name)
    new = getattr(current, name)
    if name == "data":
        return _is_same_data(old, new)
    return is_same_path(old, new) if name in _PATHS else old == new


def _is_same_data(stored: str, data: str) -> bool:
    """Whether ``data``, which may be the name of a data set or a folder, is the data set whose YAML or folder a run has
    ``stored``."""
    data = known_by_name(data)
    is_yaml_of_folder = os.path.isdir(data) and normal_path(stored).parent == normal_path(data)
    return is_same_path(stored, data) or is_yaml_of_folder


def _joined_overrides(stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]) -> list[str]:
    """Returns all ``--set`` of the run: another recipe (``--hyp``) drops the stored ones."""
    kept = [] if "hyp" in explicit_flags else stored.override
    added = current.override
    is_repeated = kept[len(kept) - len(added) :] == added  # torchrun restarts with the same command
    return kept if is_repeated else [*kept, *added]


def merge_hyperparameters(
    stored: Hyperparameters,
    current: TrainConfig,
    explicit_flags: Collection[str],
    *,
    pretrained: bool,
    keep_old: bool = False,
) -> tuple[Hyperparameters, list[str]]:
    """Returns the checkpoint's hyper-parameters, or those of ``--hyp`` if it is given, with ``--set`` on top; and
    messages, such as those that changed. ``pretrained``, ``keep_old``: those of the run, see `read_recipe`."""
    messages: list[str] = []
    base = stored
    if "hyp" in explicit_flags:
        base = read_recipe(current.hyp, pretrained=pretrained, keep_old=keep_old, lines=messages)
    hyp = with_overrides(base, current.override if "override" in explicit_flags else ())
    if hyp.lr_mult is None:  # chosen when the run began
        hyp = replace(hyp, lr_mult=stored.lr_mult)
    for field in fields(hyp):
        old = getattr(stored, field.name)
        new = getattr(hyp, field.name)
        if old != new:
            messages.append(f"resume: {field.name} {old!r} -> {new!r}")
    return hyp, messages
