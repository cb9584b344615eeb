"""An experiment: several trainings that are compared, by a search or a cross-validation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.dataset.spec import DatasetSpec, DataSource, class_names
from data.folds.held_out import scan_settings
from data.index.load import load_index
from data.open import open_data
from engine.evaluation.fitness import Fitness
from tools.experiment.folder import ContinuedFolder, check_folder
from utils.config.tool_settings import KfoldConfig
from utils.distributed.context import DistributedContext

SPLITS = ("train", "val")  # splits that a training uses; "test" stays apart


@dataclass(frozen=True)
class Experiment:
    """The data, the fitness and the folder that all trainings share."""

    folder: ContinuedFolder  # folder of the results
    spec: DatasetSpec
    names: tuple[str, ...]  # names of the trained classes
    fitness: Fitness  # metric that compares trainings
    digests: dict[str, str]  # digest of the images and labels, by split

    def store_or_verify_settings(self, values: Mapping[str, Any]) -> None:
        """Starts the work in the folder, or checks that the data, the classes, the settings and further ``values`` are
        still the same (`ContinuedFolder.store_or_verify_settings`)."""
        self.folder.store_or_verify_settings({"the classes": list(self.names), **values}, self.digests)


def open_experiment(config: KfoldConfig, settings_name: str, outputs: Sequence[str]) -> Experiment:
    """Opens the data and creates the results folder, for ``tools.kfold`` and ``tools.search``.

    ``settings_name``, ``outputs``: see `ContinuedFolder`. Raises UserError if the folder or the data cannot be used, or
    the fitness is unknown.
    """
    check_folder(config, settings_name)
    source = DataSource(
        config.data,
        classes=tuple(config.classes),
        cache_dir=config.cache_dir,
        output=str(config.folder) if config.plots else "",
        continues_output=(config.folder / settings_name).exists(),
    )
    spec = open_data(source, DistributedContext.single())
    names = class_names(spec, config.single_cls)
    fitness = Fitness.parse(config.fitness, names)
    digests = {f"the split '{split}'": _digest_of(spec, split, config) for split in SPLITS if split in spec.splits}
    return Experiment(ContinuedFolder(config, settings_name, outputs), spec, names, fitness, digests)


def _digest_of(spec: DatasetSpec, split: str, config: KfoldConfig) -> str:
    """Returns a digest of the names, sizes and labels of a split's images. Raises the errors of `load_index`."""
    index = load_index(spec, split, scan_settings(config))
    content = "\n".join([index.label_digest(), *index.paths])
    return hashlib.blake2b(content.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
