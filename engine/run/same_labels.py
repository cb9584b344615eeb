"""Compares the labels of a data set with those on which a run was validated, by the digest in its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from data.folds.held_out import hold_out_validation
from data.loading.open_reader import open_run_val_reader
from data.source.dataset_spec import DataSource
from data.source.open import open_data
from engine.checkpoint.description import RunDescription
from engine.checkpoint.newest_run import best_of_newest_run
from engine.run.run import RunSettings
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checkpoint_file import read_part
from utils.logger import get_logger


@dataclass(frozen=True, kw_only=True)
class StoredLabels:
    """What checkpoints store of the validation images of a run."""

    digest: str  # see `RunDescription.data`; "": not known
    images: list[str] = field(default_factory=list)  # see `RunDescription.val_images`

    @staticmethod
    def of(description: RunDescription) -> StoredLabels:
        return StoredLabels(digest=description.data.get("val_labels", ""), images=description.val_images)

    @staticmethod
    def of_best(folder: Path) -> StoredLabels:
        """Returns those of the newest run in ``folder``, from its best.pt; unknown without one."""
        best = best_of_newest_run(folder)
        if best is None:
            return StoredLabels(digest="")
        try:
            data = read_part(best, "data")
            images = read_part(best, "val_images")
        except UserError:
            return StoredLabels(digest="")
        digest = data.get("val_labels", "") if isinstance(data, dict) else ""
        return StoredLabels(digest=str(digest), images=images if isinstance(images, list) else [])


def has_same_labels(stored: StoredLabels, settings: RunSettings) -> bool:
    """Returns whether the data set of ``settings`` has the validation images and labels that a run has ``stored``.
    False if that is not known: if the run has stored no digest, or with ``--keep-old``, whose classes depend on the
    teacher, or if the data set cannot be read. Only rank 0 calls this."""
    config = settings.config
    if not stored.digest or config.keep_old:
        return False
    config = replace(config, cache="none", stage="", workers=0)
    get_logger().info("--data %s: comparing its labels with those of the run", config.data)
    ctx = DistributedContext.single()
    try:
        spec = open_data(DataSource.of_training(config), ctx)
        if config.val_fraction:
            spec = hold_out_validation(ctx, config, spec, stored.images)
        reader = open_run_val_reader(ctx, config, settings.hyp, spec)
    except UserError as error:
        get_logger().warning("%s", error)
        return False
    return reader.sample_index.label_digest() == stored.digest
