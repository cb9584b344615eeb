"""Digests of files that must not change before a run, a search or a cross-validation continues."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from utils.config.settings import TrainConfig, names_with
from utils.files.checksum import sha256_of


def digests_of_files(config: TrainConfig) -> dict[str, str]:
    """Returns the digests of the files that the settings name, by setting: weights, a model's YAML, callbacks. The YAML
    of the data set is left out, because the data is compared instead."""
    files = {name: Path(getattr(config, name)) for name in names_with(type(config), is_path=True) - {"data"}}
    module = _module_file(config.callbacks.partition(":")[0])
    if module is not None:
        files["callbacks"] = module
    # Not Path.is_file: a setting may also be a long regular expression, for which it raises before Python 3.14.
    return {name: sha256_of(path) for name, path in sorted(files.items()) if os.path.isfile(path)}


def _module_file(module: str) -> Path | None:
    """Returns the file from which a training imports ``module``, without importing it here; None if it is not found.
    The working folder comes last (`engine.train.callbacks.UserCallbacks`)."""
    if not module:
        return None
    working_folder = os.getcwd()
    folders = [folder for folder in sys.path if folder not in ("", working_folder)]
    for folder in [*folders, working_folder]:
        path = Path(folder, *module.split("."))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None
