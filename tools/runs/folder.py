"""The folder of a search or a cross-validation, in which the same command continues."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from engine.run.new_folder import check_run_dir
from tools.runs.digests import digests_of_files
from utils.config.flags import flag_name
from utils.config.search_settings import KfoldConfig
from utils.config.settings import Hyperparameters, changed_settings, default_of, names_with
from utils.config.yaml_files import load_yaml
from utils.errors import Stopped, UserError
from utils.files.locks import FileLock
from utils.files.paths import normal_path
from utils.files.safe_io import write_whole
from utils.logger import configure_logging, get_logger
from utils.process.stop_signals import StopSignals

_LOCK = ".folder.lock"
_DIGESTS = "digests"  # key of the stored settings: the digest of each file, and of the data


def run_continued(config: KfoldConfig, work: Callable[[StopSignals], None]) -> None:
    """Calls ``work``; after a signal, logs that the same command continues it."""
    configure_logging(True)
    with StopSignals() as signals:
        try:
            work(signals)
        except Stopped:
            get_logger().info("stopped; the same command continues the work in %s", config.folder)
            raise


class ContinuedFolder:
    """The folder of a search or a cross-validation.

    A file in it has the settings with which the work was begun, and their resolved values: the hyper-parameters of the
    recipe, the classes, and digests of the files and the data. The work continues with the same ones only; settings
    whose scope is a run or a machine may change (`utils.config.settings.Scope`).
    """

    def __init__(self, config: KfoldConfig, settings_name: str) -> None:
        """Makes the folder. ``settings_name``: file name of the stored settings. Raises UserError if the folder cannot
        be made."""
        check_run_dir(config.project, config.name, exist_ok=True)
        self.path = config.folder
        self.path.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._settings = self.path / settings_name
        self._is_begun_here = False

    def lock_or_fail(self) -> FileLock:
        """Locks the folder until the end of a ``with`` statement. Raises UserError if another process holds it."""
        lock = FileLock(self.path / _LOCK)
        holder = lock.acquire()
        if holder:
            raise UserError(f"{self.path}: another process works in this folder ({holder})")
        return lock

    def wait_for_lock(self) -> FileLock:
        """Waits until no other process holds the folder, and locks it until the end of a ``with`` statement."""
        return FileLock(self.path / _LOCK).wait("another process that works in this folder")

    def begin_or_check(self, contents: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Stores the settings, or compares them with those that the folder has.

        Args:
            contents: the resolved values of settings, by their names in messages; plain data.
            digests: likewise, of what is too large to be stored. Those of files that settings name are added.

        Raises UserError that names the first difference.
        """
        settings = {**_result_settings(self._config), **contents}
        digests = {**digests_of_files(self._config), **digests}
        if self._settings.exists():
            self._check_unchanged(settings, digests)
            return
        self._is_begun_here = True
        write_whole(self._settings, yaml.safe_dump(settings | {_DIGESTS: digests}, sort_keys=False))

    def remove_if_untrained(self, outputs: Sequence[str]) -> None:
        """Removes the stored settings and the files and folders ``outputs``, so that corrected settings may begin here,
        if this process has begun here and no epoch has been trained."""
        if not self._is_begun_here or any(any(self.path.rglob(name)) for name in ("last.pt", "results.csv")):
            return
        for name in outputs:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._settings.unlink(missing_ok=True)

    def _check_unchanged(self, settings: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Raises UserError if ``settings`` or ``digests`` differ from the stored ones."""
        stored = load_yaml(self._settings) or {}
        if not isinstance(stored, dict) or not isinstance(stored.get(_DIGESTS, {}), dict):
            raise UserError(f"{self._settings}: damaged; start again with another --name")
        stored_digests = stored.pop(_DIGESTS, {})
        difference = _difference(type(self._config), stored, settings)
        if difference:
            raise UserError(
                f"{self.path}: was begun with {difference}; continue with the same settings, or start anew with "
                "another --name"
            )
        for name, digest in stored_digests.items():  # none if an earlier version has begun the work
            if digests.get(name) != digest:
                changed = f"{flag_name(name)} {getattr(self._config, name)}" if hasattr(self._config, name) else name
                raise UserError(
                    f"{self.path}: the content of {changed} has changed since the work was begun; restore it, or start "
                    "anew with another --name"
                )


def _difference(config_type: type[KfoldConfig], stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Names the first difference between two collections of settings, which leave out defaults; "" if there is none."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config_type)}
    may_change = defaults.keys() - names_with(config_type, scope="result")
    recipe_defaults = {f"hyper-parameter {f.name}": default_of(f) for f in dataclasses.fields(Hyperparameters)}
    for name in dict.fromkeys([*stored, *current]):
        if name in may_change:  # stored by an earlier version
            continue
        default = defaults.get(name, recipe_defaults.get(name))
        before = stored.get(name, default)
        now = current.get(name, default)
        if before != now:
            shown_name = flag_name(name) if name in defaults else name
            return f"{shown_name} {_shown(before)}, not {_shown(now)}"
    return ""


def _shown(value: Any) -> Any:
    return "nothing" if value in (None, "", []) else value


def _result_settings(config: KfoldConfig) -> dict[str, Any]:
    """Returns the settings that decide about the results, without defaults, with absolute paths of existing files."""
    names = names_with(type(config), scope="result")
    settings = {name: value for name, value in changed_settings(config).items() if name in names}
    for name in names_with(type(config), is_path=True) & settings.keys():
        if os.path.exists(settings[name]):
            settings[name] = str(normal_path(settings[name]))
    return settings
