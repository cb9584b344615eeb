"""The folder of a search or a cross-validation. It stores the settings, so that the same command continues there."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from utils.config.flags import flag_name
from utils.config.search_settings import KfoldConfig
from utils.config.settings import Hyperparameters, TrainConfig, changed_settings, default_of, names_with
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.files.safe_io import write_whole


def train_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Returns the settings of a single training of a search or cross-validation."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


def check_started_once(config: KfoldConfig) -> None:
    """Raises UserError for flags that make no sense where the same command continues."""
    for flag, is_set in (("--resume", config.resume is not None), ("--exist-ok", config.exist_ok)):
        if is_set:
            raise UserError(f"{flag}: leave it out; the same command continues the work in {folder_of(config)}")
    if config.export:
        raise UserError("--export: leave it out; export.py exports the weights that you choose in the end")
    if config.time:
        raise UserError("--time: leave it out; trainings that are compared have the same --epochs")
    if config.val_fraction and config.folds:
        raise UserError("--val-fraction: leave it out; each fold is held out in turn")


def folder_of(config: KfoldConfig) -> Path:
    """Returns the folder of a search or cross-validation. It is not numbered (exp2, ...), so the same command continues
    it."""
    return Path(config.project) / config.name


def begin_or_check(config: KfoldConfig, path: Path, contents: dict[str, Any]) -> bool:
    """Writes the settings to the YAML file ``path``, or compares them with those that it stores.

    ``contents``: other values by name that must not change either, such as the hyper-parameters of the file that
    ``--hyp`` names. Returns whether the file is new. Raises UserError that names the first setting that differs.
    """
    settings = _fixed_settings(config) | contents
    if path.exists():
        _check_unchanged(config, settings, path)
        return False
    write_whole(path, yaml.safe_dump(settings, sort_keys=False))
    return True


def remove_if_untrained(folder: Path, names: Sequence[str]) -> None:
    """Removes the files and folders ``names`` in ``folder``, so that corrected settings may begin there, unless an
    epoch has been trained."""
    if any(any(folder.rglob(name)) for name in ("last.pt", "results.csv")):
        return
    for name in names:
        _remove(folder / name)


def _check_unchanged(config: KfoldConfig, settings: dict[str, Any], path: Path) -> None:
    """Raises UserError if ``settings`` differ from those stored at ``path``. Either leaves out what has its default."""
    setting_defaults = {field.name: default_of(field) for field in dataclasses.fields(config)}
    recipe_defaults = {f"hyper-parameter {f.name}": default_of(f) for f in dataclasses.fields(Hyperparameters)}
    defaults = setting_defaults | recipe_defaults
    stored = load_yaml(path) or {}
    if not isinstance(stored, dict):
        raise UserError(f"{path}: damaged; start again with another --name")
    may_change = setting_defaults.keys() - names_with(type(config), scope="result")
    for name in dict.fromkeys([*stored, *settings]):
        if name in may_change:  # stored by an earlier version
            continue
        before = stored.get(name, defaults.get(name))
        now = settings.get(name, defaults.get(name))
        if before != now:
            setting_name = flag_name(name) if name in setting_defaults else name
            raise UserError(
                f"{path.parent}: was begun with {setting_name} {_shown(before)}, not {_shown(now)}; continue with the "
                "same settings, or start anew with another --name"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fixed_settings(config: KfoldConfig) -> dict[str, Any]:
    """Returns the settings that must not change when a command is continued, with absolute paths of existing files."""
    fixed_names = names_with(type(config), scope="result")
    fixed = {name: value for name, value in changed_settings(config).items() if name in fixed_names}
    for name in names_with(type(config), is_path=True) & fixed.keys():
        if os.path.exists(fixed[name]):
            fixed[name] = str(normal_path(fixed[name]))
    return fixed


def _shown(value: Any) -> Any:
    return "nothing" if value in (None, "", []) else value
