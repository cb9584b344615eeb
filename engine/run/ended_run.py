"""Compares a command with a run that has ended: whether it would have had other results, or may get more epochs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from data.dataset.spec import DataSource
from data.folds.held_out import hold_out_validation
from data.loading.build import open_run_val_reader, open_train_reader
from data.open import open_data
from engine.checkpoint.data_identity import DataIdentity
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import Progress
from engine.run.run import RunSettings
from utils.config.flags import as_flag
from utils.config.settings import Hyperparameters, TrainConfig, names_with
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import log_when_configured

# How long a run trains: with other values, a run that has ended would have the same results, or more epochs.
_LENGTH = ("epochs", "time", "patience")
# With other values, a run that has ended would have had other results. Not so ``callbacks``: no step is left that they
# could change, and those of the run may be what has prevented its report.
_DECIDE_RESULTS = names_with(TrainConfig, scope="result").difference(_LENGTH, {"callbacks"}) | frozenset(
    item.name for item in fields(Hyperparameters)
)


def adds_epochs(stored: TrainConfig, config: TrainConfig, trained: int, *, progress: Progress | None) -> bool:
    """Returns whether ``config`` adds epochs to a run that has ended, or may add some if its last.pt, which would tell
    why it ended, is lost.

    Args:
        stored: the settings of the run so far.
        trained: the epochs that it has trained.
        progress: that of last.pt, which a callback has ended: with ``config``, there is no other reason to end. None:
            it is lost.
    """
    has_more_time = config.time > stored.time
    if progress is not None:
        has_more_epochs = config.epochs > stored.epochs
        has_more_patience = progress.stops_early(stored.patience, epochs=stored.epochs, val_every=stored.val_every)
    else:
        # Only a last.pt stores how many epochs --time has allowed.
        planned = trained if stored.time else max(trained, stored.epochs)
        has_more_epochs = config.time == 0 and config.epochs > planned
        may_have_stopped_early = stored.patience > 0 and (stored.time > 0 or trained < stored.epochs)
        is_more_patient = config.patience == 0 or config.patience > stored.patience
        has_more_patience = may_have_stopped_early and is_more_patient
    return has_more_time or has_more_epochs or has_more_patience


def check_unchanged(
    folder: Path, *, stored: RunSettings, settings: RunSettings, end_reason: str, description: RunDescription | None
) -> None:
    """Raises UserError if the run in ``folder``, which has ended, would have had other results with ``settings``. Only
    rank 0 calls this.

    Args:
        stored: the settings of the run, in which files that have moved have their new paths.
        end_reason: see `EndedRun`.
        description: the run's description, if there is a checkpoint. A data set at another path counts as the same if
            it has the classes, images and labels that are described.
    """
    stored_by_name = stored.by_name()
    for name, value in settings.by_name().items():
        if name not in _DECIDE_RESULTS or value == stored_by_name[name]:
            continue
        reason = ""
        if name == "data" and description is not None:
            reason = _label_difference(description, settings)
            if not reason:
                log_when_configured(f"--data {value}: has the classes, image sizes and labels of the run")
                continue
            reason = f" ({reason})"
        raise UserError(
            f"{as_flag(name, value)}: the run in {folder} has ended, with {stored_by_name[name]!r}{reason}; start a "
            f"new run with another --name; this one: {end_reason}"
        )


def _label_difference(stored: RunDescription, settings: RunSettings) -> str:
    """Returns how the classes, the sizes of images or the labels of the data set of ``settings`` differ from those of
    the run that ``stored`` describes, or why it cannot be read; "" if they do not differ."""
    config = replace(settings.config, cache="none", stage="", workers=0)
    ctx = DistributedContext.single()
    try:
        spec = open_data(DataSource.of_training(config), ctx)
        if config.keep_old:  # the run's classes, which include those of its teacher
            spec = spec.extended(stored.names, config.weights)
        if config.val_fraction:
            spec = hold_out_validation(ctx, config, spec, stored.val_images)
        train = open_train_reader(ctx, config, settings.hyp, spec).sample_index
        val = open_run_val_reader(ctx, config, settings.hyp, spec).sample_index
    except UserError as error:
        return str(error).removeprefix(f"data set {config.data}: ")
    if list(val.names) != stored.names:
        return "its classes differ"
    if DataIdentity.of(train, val) != stored.identity:
        return "its labels or the sizes of its images differ"
    return ""
