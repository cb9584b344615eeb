"""Resolves the paths in settings, which depend on the working folder.

The paths that a run stores are resolved once, so that a later change of the disk does not change their meaning. A
command is resolved before it is compared with them (compare_files.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from data.dataset.folder import yaml_of_folder
from data.dataset.spec import DEMO
from data.open import known_by_name
from engine.checkpoint.description import NamedFiles
from engine.run.run import PATH_SETTINGS, TrainCommand
from models.spec import built_in_models
from models.weights.catalog import catalog_name, known_weights
from utils.config.flags import flag_name
from utils.config.settings import WEIGHTS_SUFFIXES, TrainConfig, names_with
from utils.distributed.context import DistributedContext
from utils.errors import UserError, os_reason
from utils.files.checksum import sha256_of
from utils.files.paths import normal_path
from utils.files.url import is_http

ConfigT = TypeVar("ConfigT", bound=TrainConfig)


def resolve(config: ConfigT) -> ConfigT:
    """Returns the settings with absolute paths of the files that they name; ``data`` becomes the YAML that is opened.

    A file need not exist: a run that has ended does not need its data.
    """
    paths: dict[str, Any] = {}
    for name in names_with(type(config), is_path=True):
        paths[name] = resolve_path(name, getattr(config, name))
    return replace(config, **paths)


def resolve_path(name: str, value: str) -> str:
    """Returns the absolute path that ``value`` of the setting ``name`` (with ``is_path``) means. Names of models,
    weights and data sets are returned unchanged, as is any value that is not a path, such as a URL."""
    if name == "data":
        return _resolve_data(value)
    if name in ("model", "weights", "teacher"):
        value = os.path.expanduser(value)  # as `load_spec` and `fetch_weights` do
    is_name = name == "model" and not Path(value).suffix  # even if a file or folder has this name
    if not value or is_name or is_http(value):
        return value
    # Not Path.is_file, which raises for a long regular expression (``groups``).
    is_path = os.path.isfile(value) or (name != "groups" and (Path(value).name != value or _is_file_name(name, value)))
    return str(normal_path(value)) if is_path else value


def _is_file_name(name: str, value: str) -> bool:
    """Returns whether a name without a folder can only mean a file of the working folder, which need not exist."""
    suffix = Path(value).suffix.lower()
    if name == "model":
        return suffix in (".yaml", ".yml") and re.sub("[-_]", "", Path(value).stem) not in built_in_models()
    return suffix in WEIGHTS_SUFFIXES and catalog_name(value) not in known_weights()


def _resolve_data(data: str) -> str:
    """Returns the YAML that is opened for ``--data``, or the folder if it has none. Returns "demo" unchanged, and URLs,
    which are refused later."""
    if data in ("", DEMO) or is_http(data):
        return data
    path = normal_path(known_by_name(data))
    yaml = None
    if os.path.isdir(path):  # Path.is_dir raises without permission
        try:
            yaml = yaml_of_folder(path)
        except UserError:  # several YAMLs, or a damaged one: whoever opens the folder says so
            yaml = None
    return str(path if yaml is None else yaml)


def resolve_command(
    ctx: DistributedContext, typed: TrainConfig, explicit_flags: Collection[str], launchers: list[str]
) -> TrainCommand:
    """Returns the command line whose settings are ``typed``, with absolute paths. The other arguments are those of
    `TrainCommand`."""
    return TrainCommand(
        config=resolve(typed),
        explicit_flags=explicit_flags,
        files=NamedFiles(typed=typed_paths(typed)),
        launchers=launchers,
        world_size=ctx.world_size,
        device_type=ctx.device.type,
    )


def typed_paths(typed: TrainConfig) -> dict[str, str]:
    """Returns the absolute paths that a command line names, by setting, whether or not the files exist. URLs, and
    "demo", which means the built-in data set in any folder, stay as they are."""
    paths = {}
    for name in sorted(PATH_SETTINGS):
        value = os.path.expanduser(getattr(typed, name))
        if value:
            paths[name] = value if value == DEMO or is_http(value) else str(normal_path(value))
    return paths


def with_checksums(files: NamedFiles, config: TrainConfig, names: Collection[str] = PATH_SETTINGS) -> NamedFiles:
    """Returns ``files`` with the checksums of those that the settings ``names`` of ``config`` (resolved) have now.
    Raises UserError for a file that cannot be read."""
    sha256 = {name: checksum for name, checksum in files.sha256.items() if name not in names}
    for name in sorted(names):
        path = getattr(config, name)
        if name != "data" and os.path.isabs(path) and os.path.isfile(path):
            try:
                sha256[name] = sha256_of(Path(path))
            except OSError as error:
                reason = os_reason(error)
                raise UserError(f"{flag_name(name)} {path}: cannot be read ({reason})") from None
    return replace(files, sha256=sha256)
