"""settings.yaml: the newest run in a folder, with all settings of its last start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from engine.checkpoint.description import NamedFiles
from engine.checkpoint.newest_run import read_settings_yaml
from engine.run.run import RunSettings
from utils.config.settings import Hyperparameters, TrainConfig
from utils.errors import UserError
from utils.files.safe_io import atomic_write
from utils.schema import build, check


@dataclass(frozen=True)
class StoredRun:
    """The content of settings.yaml."""

    run_id: str
    settings: RunSettings


def read_stored_run(folder: Path) -> StoredRun | None:
    """Returns the newest run in ``folder``, with the settings of its last start; None if there is no settings.yaml, or
    a damaged one."""
    stored = read_settings_yaml(folder)
    if stored is None:
        return None
    path = folder / "settings.yaml"
    try:
        run_id = check(stored["run_id"], str, f"{path}: run_id")
        config = build(TrainConfig, stored["config"], f"{path}: config")
        hyp = build(Hyperparameters, stored["hyp"], f"{path}: hyp")
        files = build(NamedFiles, stored["files"], f"{path}: files")
    except (UserError, KeyError):
        return None
    return StoredRun(run_id, RunSettings(config, hyp, files))


def write_stored_run(folder: Path, run: StoredRun) -> None:
    """Writes settings.yaml durably: its id decides which run the other files in ``folder`` belong to."""
    stored = {"run_id": run.run_id, **asdict(run.settings)}
    with atomic_write(folder / "settings.yaml", durable=True) as file:
        file.write(yaml.safe_dump(stored, sort_keys=False).encode())
