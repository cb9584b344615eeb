"""Compares the labels and classes of a data set with those of a run, by the digests in its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from data.folds.held_out import hold_out_validation
from data.loading.open_reader import open_run_val_reader, open_train_reader
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
    """What checkpoints store of the classes, images and labels of a run."""

    names: list[str] = field(default_factory=list)  # of the classes
    train_digest: str = ""  # see `RunDescription.data`; "": not known
    val_digest: str = ""
    val_images: list[str] = field(default_factory=list)  # see `RunDescription.val_images`

    @staticmethod
    def of(description: RunDescription) -> StoredLabels:
        return StoredLabels(
            names=description.names,
            train_digest=description.data.get("train_labels", ""),
            val_digest=description.data.get("val_labels", ""),
            val_images=description.val_images,
        )

    @staticmethod
    def of_best(folder: Path) -> StoredLabels:
        """Returns those of the newest run in ``folder``, from its best.pt; unknown without one."""
        best = best_of_newest_run(folder)
        if best is None:
            return StoredLabels()
        try:
            data = read_part(best, "data")  # checks the sums of the whole file
            names = read_part(best, "names", check_sums=False)
            val_images = read_part(best, "val_images", check_sums=False)
        except UserError:
            return StoredLabels()
        digests = data if isinstance(data, dict) else {}
        return StoredLabels(
            names=names if isinstance(names, list) else [],
            train_digest=str(digests.get("train_labels", "")),
            val_digest=str(digests.get("val_labels", "")),
            val_images=val_images if isinstance(val_images, list) else [],
        )


def has_same_labels(stored: StoredLabels, settings: RunSettings) -> bool:
    """Returns whether the data set of ``settings`` has the classes, and the sizes and labels of images, that a run has
    ``stored``. False if that is not known: if the run has stored no digests, or with ``--keep-old``, whose classes
    depend on the teacher, or if the data set cannot be read. Only rank 0 calls this."""
    config = settings.config
    if not stored.train_digest or not stored.val_digest or config.keep_old:
        return False
    config = replace(config, cache="none", stage="", workers=0)
    get_logger().info("--data %s: comparing its labels with those of the run", config.data)
    ctx = DistributedContext.single()
    try:
        spec = open_data(DataSource.of_training(config), ctx)
        if config.val_fraction:
            spec = hold_out_validation(ctx, config, spec, stored.val_images)
        train = open_train_reader(ctx, config, settings.hyp, spec).sample_index
        val = open_run_val_reader(ctx, config, settings.hyp, spec).sample_index
    except UserError as error:
        get_logger().warning("%s", error)
        return False
    digests = (train.label_digest(), val.label_digest())
    return list(val.names) == stored.names and digests == (stored.train_digest, stored.val_digest)
