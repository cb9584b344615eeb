"""The folder of an experiment, in which the same command continues the work."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.experiment.stored_settings import StoredSettings
from utils.config.search_settings import KfoldConfig
from utils.errors import Stopped, UserError
from utils.files.locks import FileLock
from utils.files.new_folder import check_run_dir
from utils.logger import configure_logging, get_logger
from utils.process.signals import StopSignals

KFOLD_YAML = "kfold.yaml"
SEARCH_YAML = "search.yaml"
_LOCK = ".folder.lock"
# Work of which a folder contains at most one, by the file with its settings.
_WORK = {KFOLD_YAML: "a cross-validation", SEARCH_YAML: "a search", "settings.yaml": "a training"}


def run_continued(config: KfoldConfig, work: Callable[[StopSignals], None]) -> None:
    """Calls ``work``; after a signal, logs that the same command continues the work."""
    configure_logging(True)
    with StopSignals() as signals:
        try:
            work(signals)
        except Stopped:
            get_logger().info("stopped; the same command continues the work in %s", config.folder)
            raise


def check_folder(config: KfoldConfig, settings_name: str) -> None:
    """Raises UserError if `ContinuedFolder` could not create the folder, or if it contains other work, whose files
    would be overwritten. ``settings_name``: see `ContinuedFolder`."""
    check_run_dir(config.project, config.name, exist_ok=True)
    for name, work in _WORK.items():
        if name != settings_name and (config.folder / name).exists():
            raise UserError(f"{config.folder}: contains {work}; choose another --name")


class ContinuedFolder:
    """The folder of an experiment.

    It contains a file with the settings with which the work was started, the classes, and digests of the data
    (`StoredSettings`).
    """

    def __init__(self, config: KfoldConfig, settings_name: str, outputs: Sequence[str]) -> None:
        """Creates the folder, which `check_folder` has accepted.

        Args:
            settings_name: file name of the stored settings.
            outputs: names, or glob patterns of names, of all files and folders that the work writes, besides the
                settings, before its first training has saved anything.
        """
        self.path = config.folder
        self.path.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._settings_file = self.path / settings_name
        self._outputs = outputs
        self._was_started_here = False

    def lock_or_fail(self) -> FileLock:
        """Locks the folder until the end of a ``with`` statement. Raises UserError if another process holds it."""
        lock = FileLock(self.path / _LOCK)
        holder = lock.acquire()
        if holder:
            raise UserError(f"{self.path}: another process is using this folder ({holder})")
        return lock

    def store_or_verify_settings(self, values: Mapping[str, Any], data_digests: Mapping[str, str]) -> None:
        """Stores the settings, or compares them with the ones stored in the folder.

        See `StoredSettings` for the arguments. Raises UserError that names the first difference.
        """
        settings = StoredSettings(self._settings_file, self._config, values, data_digests)
        if self._settings_file.exists():
            settings.check_unchanged()
            return
        self._was_started_here = not self._existing_outputs()  # else the settings have been lost
        settings.store()

    def remove_if_untrained(self) -> None:
        """Removes the stored settings and the outputs, if this process has started the work and no epoch has been
        trained, so that the command can start over here with corrected settings."""
        has_trained = any(path.name in ("last.pt", "results.csv") for path in self.path.rglob("*"))
        if has_trained or not self._was_started_here:
            return
        for path in self._existing_outputs():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._settings_file.unlink(missing_ok=True)

    def _existing_outputs(self) -> list[Path]:
        return [path for pattern in self._outputs for path in self.path.glob(pattern)]
