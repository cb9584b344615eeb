"""An experiment: trainings that are compared, by a search or a cross-validation, in one folder.

The same command continues the work in the folder. A file in it has the settings, the class names and digests of the
data and of the files that settings name; the work continues only if they are the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.dataset.spec import DatasetSpec, DataSource, class_names
from data.folds.held_out import index_to_divide
from data.open import open_data
from engine.evaluation.fitness import Fitness
from models.spec import load_spec
from models.weights.catalog import check_weights
from utils.config.flags import flag_name
from utils.config.settings import default_of, names_with
from utils.config.tool_settings import KfoldConfig
from utils.config.values import plain_value
from utils.config.yaml_files import load_yaml
from utils.distributed.context import DistributedContext
from utils.errors import Stopped, UserError, refuse
from utils.files.checksum import sha256_of
from utils.files.new_folder import check_run_dir, increment_path
from utils.files.safe_io import write_whole
from utils.logger import configure_logging, get_logger
from utils.machine.limits import require_posix
from utils.process.signals import StopSignals

SPLITS = ("train", "val")  # splits that a training uses; "test" stays apart
KFOLD_YAML = "kfold.yaml"
SEARCH_YAML = "search.yaml"
LOCK = ".lock"
_TRAINED = ("settings.yaml", "results.csv", "last.pt", "best.pt")  # files of a training that has begun
# Work of which a folder contains at most one, by the file with its settings.
_WORK = {KFOLD_YAML: "a cross-validation", SEARCH_YAML: "a search", "settings.yaml": "a training"}


@dataclass(frozen=True)
class Experiment:
    """The data, the fitness and the folder that all trainings share."""

    folder: Path
    spec: DatasetSpec
    names: tuple[str, ...]  # names of the trained classes
    fitness: Fitness  # metric that compares trainings
    settings_file: Path
    settings: dict[str, Any]  # what must not change, by names for messages

    def store_or_verify_settings(self) -> None:
        """Starts the work in the folder, or checks that the settings are those with which it was started. The caller
        holds the folder's lock.

        A folder in which no training has begun is cleared, and started with the new settings. Raises UserError
        that names the first difference.
        """
        if self.settings_file.exists():
            stored = load_yaml(self.settings_file)
            if stored == self.settings:
                return
            if any(path.name in _TRAINED for path in self.folder.rglob("*")):
                raise UserError(
                    f"{self.folder}: was started with {_difference(stored, self.settings)}; continue with the same "
                    "settings, or choose another --name"
                )
            for path in self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:
                    path.unlink()
        write_whole(self.settings_file, yaml.safe_dump(self.settings, sort_keys=False), durable=True)


def _difference(stored: Any, current: Mapping[str, Any]) -> str:
    if not isinstance(stored, dict):
        return "settings that are damaged"
    name = next(name for name in (*stored, *current) if stored.get(name) != current.get(name))
    return f"{name} {stored.get(name, 'not set')}, not {current.get(name, 'not set')}"


def run_experiment(config: KfoldConfig, work: Callable[[StopSignals], None]) -> None:
    """Checks the flags, the model and the weights, and calls ``work``. After a signal, logs that the same command
    continues. Raises UserError for what cannot be used."""
    refuse_unsupported_flags(config)
    if config.model:
        load_spec(config.model)
    for weights in filter(None, (config.weights, config.teacher)):
        check_weights(weights)
    configure_logging(True)
    with StopSignals() as signals:
        try:
            work(signals)
        except Stopped:
            get_logger().info("stopped; the same command continues the work in %s", config.folder)
            raise


def refuse_unsupported_flags(config: KfoldConfig) -> None:
    """Raises UserError for flags that make no sense if several trainings are compared, or if the same command continues
    the work in its folder."""
    continues = f"leave it out; the same command continues the work in {config.folder}"
    refuse(
        [
            (config.resume is not None, f"--resume: {continues}"),
            (config.exist_ok, f"--exist-ok: {continues}"),
            (config.export, "--export: leave it out; export.py exports the weights that you finally choose"),
            (config.time, "--time: leave it out; compared trainings must have the same --epochs"),
            (config.keep_old, "--keep-old: the data has no labels to score the kept classes; use train.py"),
            (config.val_fraction and config.folds, "--val-fraction: leave it out; each fold is held out in turn"),
        ]
    )


def open_experiment(config: KfoldConfig, settings_name: str, values: Mapping[str, Any]) -> Experiment:
    """Opens the data and creates the folder.

    Args:
        settings_name: `KFOLD_YAML` or `SEARCH_YAML`.
        values: the hyper-parameters, or their ranges, by names for messages.

    Raises UserError if the folder has other work, the data cannot be used, or the fitness is unknown.
    """
    require_posix("comparing trainings")
    folder = config.folder
    check_run_dir(config.project, config.name, exist_ok=True)
    for name, work in _WORK.items():
        if name != settings_name and (folder / name).exists():
            raise UserError(f"{folder}: contains {work}; choose another --name")
    source = DataSource(
        config.data,
        splits=("train",) if config.folds or config.val_fraction else SPLITS,  # folds hold out the validation images
        classes=tuple(config.classes),
        cache_dir=config.cache_dir,
        output=str(folder) if config.plots else "",
        continues_output=(folder / settings_name).exists(),
    )
    spec = open_data(source, DistributedContext.single())
    names = class_names(spec, config.single_cls)
    fitness = Fitness.parse(config.fitness, names)
    settings = {**_settings_of_results(config), "classes": list(names), **values}
    for split in SPLITS:
        if split in spec.splits:
            index = index_to_divide(spec, split, config)
            content = "\n".join([index.label_digest(), *index.paths])
            digest = hashlib.blake2b(content.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
            settings[f"the digest of the split '{split}'"] = digest
    increment_path(config.project, config.name, exist_ok=True)
    return Experiment(folder, spec, names, fitness, folder / settings_name, settings)


def _settings_of_results(config: KfoldConfig) -> dict[str, Any]:
    """Returns the settings that affect results and differ from their defaults, by flag. A file that a setting names may
    move: its digest is compared, and of the data set, its images and labels."""
    files = names_with(type(config), is_path=True)
    settings: dict[str, Any] = {}
    for name in sorted(names_with(type(config), scope="result") - {"data"}):
        value = getattr(config, name)
        if value == default_of(type(config).__dataclass_fields__[name]):
            continue
        if name in files and os.path.isfile(value):
            value = f"of digest {sha256_of(Path(value))}"
        settings[flag_name(name)] = plain_value(name, value)  # a URL is more than its text
    return settings
