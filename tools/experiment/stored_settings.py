"""The settings with which a run, a search or a cross-validation was started, stored in its folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.run.resolve import resolve
from tools.experiment.digests import digests_of_files
from utils.config.flags import flag_name
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig, changed_settings, default_of, names_with
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.safe_io import write_whole

_DIGESTS = "digests"  # key of the stored settings: the digest of each file, and of the data


class StoredSettings:
    """A file that stores the settings with which work was started, and their resolved values, such as the
    hyper-parameters of the recipe and digests of files.

    The work continues only with the same settings, except that settings whose scope is a run or a machine may change
    (`utils.config.settings.Scope`).
    """

    def __init__(self, path: Path, config: TrainConfig, *, may_change: Collection[str] = ()) -> None:
        """``may_change``: names of other settings that may change."""
        self.path = path
        self._config = config
        self._resolved = resolve(config)
        self._names = names_with(type(config), scope="result") - set(may_change)

    def store(self, contents: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Stores the settings.

        Args:
            contents: the resolved values of settings, by their names in messages; plain data.
            digests: digests of content that is too large to be stored, by their names in messages. Digests of the files
                that settings name are added.
        """
        settings, all_digests = self._with_settings(contents, digests)
        write_whole(self.path, yaml.safe_dump(settings | {_DIGESTS: all_digests}, sort_keys=False), durable=True)

    def check_unchanged(self, contents: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Raises UserError that names the first difference between what `store` would store and the stored settings."""
        settings, all_digests = self._with_settings(contents, digests)
        folder = self.path.parent
        stored = load_yaml(self.path)
        if not isinstance(stored, dict) or not isinstance(stored.get(_DIGESTS), dict):
            raise UserError(f"{self.path}: damaged; start again with another --name")
        stored_digests = stored.pop(_DIGESTS)
        contents_compared = stored_digests.keys() & all_digests.keys()
        if not contents_compared.isdisjoint(digests):
            contents_compared.add("data")
        difference = self._difference(stored, settings, contents_compared)
        if difference:
            raise UserError(
                f"{folder}: was started with {difference}; continue with the same settings, or choose another --name"
            )
        names = sorted(stored_digests.keys() | all_digests.keys())
        changed = [name for name in names if stored_digests.get(name) != all_digests.get(name)]
        if changed:
            raise UserError(f"{folder}: {self._describe_change(changed[0], stored_digests, all_digests)}")

    def _describe_change(self, name: str, stored: Mapping[str, str], current: Mapping[str, str]) -> str:
        """Describes how the content ``name``, whose digests differ, has changed, and what to do."""
        shown_name = f"{flag_name(name)} {getattr(self._config, name)}" if hasattr(self._config, name) else name
        if name not in stored:
            change = f"{shown_name} was not there at the start; remove it"
        elif name not in current:
            change = f"the content of {shown_name} is missing, but was there at the start; restore it"
        else:
            change = f"the content of {shown_name} has changed since the start; restore it"
        return f"{change}, or choose another --name"

    def _with_settings(
        self, contents: Mapping[str, Any], digests: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Adds the settings to ``contents``, and the digests of the files that they name to ``digests``."""
        return {**self._result_settings(), **contents}, {**digests_of_files(self._resolved), **digests}

    def _difference(
        self, stored: Mapping[str, Any], current: Mapping[str, Any], contents_compared: Collection[str]
    ) -> str:
        """Describes the first difference between two collections of settings, which omit defaults; "" if there is
        none. A file may have moved if its content, or that of the data, is in ``contents_compared``."""
        defaults = {field.name: default_of(field) for field in dataclasses.fields(self._config)}
        paths = names_with(type(self._config), is_path=True)
        recipe_defaults = {f"hyper-parameter {f.name}": default_of(f) for f in dataclasses.fields(Hyperparameters)}
        for name in dict.fromkeys([*stored, *current]):
            default = defaults.get(name, recipe_defaults.get(name))
            before = stored.get(name, default)
            now = current.get(name, default)
            if name in paths and isinstance(before, str) and _may_be_same_file(name, before, now, contents_compared):
                continue
            if before != now:
                shown_name = flag_name(name) if name in defaults else name
                return f"{shown_name} {_shown(before)}, not {_shown(now)}"
        return ""

    def _result_settings(self) -> dict[str, Any]:
        """Returns the settings that affect the results, without defaults."""
        return {name: value for name, value in changed_settings(self._resolved).items() if name in self._names}


def recipe_contents(config: TrainConfig) -> dict[str, Any]:
    """Returns, as plain data, the hyper-parameters with which ``config`` trains. Raises the errors of `read_recipe`."""
    recipe = read_recipe(config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old)
    return {f"hyper-parameter {name}": value for name, value in dataclasses.asdict(recipe).items()}


def _may_be_same_file(name: str, before: str, now: str, contents_compared: Collection[str]) -> bool:
    """Returns whether a path may change from ``before`` to ``now``: both are one file, or contents are compared."""
    if not os.path.isabs(before) or not os.path.exists(now):
        return False
    return name in contents_compared or (os.path.exists(before) and os.path.samefile(before, now))


def _shown(value: Any) -> Any:
    return "nothing" if value in (None, "", []) else value
