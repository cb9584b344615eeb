"""The settings with which a run, a search or a cross-validation was started, stored in its folder.

Two kinds of entries are stored and compared, each by its name in messages:

- values, which are plain data: settings without their defaults, the hyper-parameters of a recipe, class names
- digests: of the data, and of the files that settings name
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.train.resume import resolve
from tools.experiment.digests import digests_of_files
from utils.config.flags import flag_name
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig, changed_settings, default_of, names_with
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.safe_io import write_whole

_DIGESTS = "digests"  # key of the file; all other keys are names of values


class StoredSettings:
    """A file with the settings with which work was started.

    The work continues only with the same settings, except that settings whose scope is a run or a machine may change
    (`utils.config.settings.Scope`).
    """

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        values: Mapping[str, Any],
        data_digests: Mapping[str, str],
        *,
        may_change: Collection[str] = (),
    ) -> None:
        """
        Args:
            values: values besides those of ``config``.
            data_digests: digests of the data.
            may_change: names of other settings that may change.
        """
        self.path = path
        self._config = config
        resolved = resolve(config)
        names = names_with(type(config), scope="result") - set(may_change)
        settings = {name: value for name, value in changed_settings(resolved).items() if name in names}
        self._values = {**settings, **values}
        self._data_digests = data_digests
        self._digests = {**digests_of_files(resolved), **data_digests}

    def store(self) -> None:
        """Writes the file."""
        write_whole(self.path, yaml.safe_dump({**self._values, _DIGESTS: self._digests}, sort_keys=False), durable=True)

    def check_unchanged(self) -> None:
        """Raises UserError that names the first difference from the file."""
        folder = self.path.parent
        values = load_yaml(self.path)
        if not isinstance(values, dict) or not isinstance(values.get(_DIGESTS), dict):
            raise UserError(f"{self.path}: damaged; start again with another --name")
        digests = values.pop(_DIGESTS)
        difference = self._value_difference(values, digests)
        if difference:
            raise UserError(
                f"{folder}: was started with {difference}; continue with the same settings, or choose another --name"
            )
        change = self._digest_difference(digests)
        if change:
            raise UserError(f"{folder}: {change}, or choose another --name")

    def _value_difference(self, stored_values: Mapping[str, Any], stored_digests: Mapping[str, str]) -> str:
        """Describes the first difference from the stored values; "" if there is none."""
        may_move = self._settings_that_may_move(stored_digests)
        settings = dataclasses.asdict(self._config)
        defaults = _defaults_by_name(self._config)
        paths = names_with(type(self._config), is_path=True)
        for name in dict.fromkeys([*stored_values, *self._values]):
            stored = stored_values.get(name, defaults.get(name))
            current = self._values.get(name, defaults.get(name))
            is_same = stored == current
            if not is_same and name in paths:
                is_same = _may_be_same_file(stored, current, is_content_compared=name in may_move)
            if not is_same:
                shown_name = flag_name(name) if name in settings else name
                return f"{shown_name} {_shown(stored)}, not {_shown(current)}"
        return ""

    def _settings_that_may_move(self, stored_digests: Mapping[str, str]) -> set[str]:
        """Returns the settings whose file may have moved since the start, because digests compare its content. The YAML
        of the data may if they compare the data."""
        compared = stored_digests.keys() & self._digests.keys()
        return compared if compared.isdisjoint(self._data_digests) else {*compared, "data"}

    def _digest_difference(self, digests: Mapping[str, str]) -> str:
        """Describes the first difference from the stored ``digests``, and what to do; "" if there is none."""
        settings = dataclasses.asdict(self._config)
        for name in dict.fromkeys([*digests, *self._digests]):
            shown_name = f"{flag_name(name)} {settings[name]}" if name in settings else name
            if name not in digests:
                return f"{shown_name} was not there at the start; remove it"
            if name not in self._digests:
                return f"the content of {shown_name} is missing, but was there at the start; restore it"
            if digests[name] != self._digests[name]:
                return f"the content of {shown_name} has changed since the start; restore it"
        return ""


def recipe_values(config: TrainConfig) -> dict[str, Any]:
    """Returns, as plain data by their names in messages, the hyper-parameters with which ``config`` trains. Raises the
    errors of `read_recipe`."""
    recipe = read_recipe(config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old)
    return {value_name(name): value for name, value in dataclasses.asdict(recipe).items()}


def value_name(hyperparameter: str) -> str:
    """Returns the name of the value of a hyper-parameter."""
    return f"hyper-parameter {hyperparameter}"


def _defaults_by_name(config: TrainConfig) -> dict[str, Any]:
    """Returns the defaults of settings and hyper-parameters, by the names of their values."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config)}
    for field in dataclasses.fields(Hyperparameters):
        defaults[value_name(field.name)] = default_of(field)
    return defaults


def _may_be_same_file(stored: Any, current: Any, *, is_content_compared: bool) -> bool:
    """Returns whether a path may change from ``stored`` to ``current``: both are one file, or contents are compared."""
    if not isinstance(stored, str) or not os.path.isabs(stored) or not os.path.exists(current):
        return False
    return is_content_compared or (os.path.exists(stored) and os.path.samefile(stored, current))


def _shown(value: Any) -> Any:
    return "nothing" if value in (None, "", []) else value
