"""The data of a run: opened, its loaders, and what identifies it."""

from __future__ import annotations

from dataclasses import dataclass

from data.folds.held_out import hold_out_validation
from data.index.small_boxes import warn_of_small_boxes
from data.loading.build import build_train_loader, build_val_loader
from data.loading.check_settings import warn_of_shared_images
from data.loading.loader import InfiniteDataLoader, ValidationLoader
from data.render.letterbox import CanvasRule
from data.samples.augmented import AugmentedImages
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.open import open_data
from engine.evaluation.metrics import Fitness
from engine.run.restore import EpochData
from engine.run.run import RunPlan, RunSettings
from engine.train.teacher import TeacherFile, open_teacher
from models.detector import Detector
from utils.distributed.context import DistributedContext, broadcast_object


@dataclass(frozen=True)
class RunData:
    """The data set of a run, its fitness metric and its teacher."""

    spec: DatasetSpec
    fitness: Fitness
    teacher: TeacherFile | None


@dataclass(frozen=True)
class Loaders:
    """The loaders of both splits."""

    train: InfiniteDataLoader
    val: ValidationLoader


def open_run_data(ctx: DistributedContext, plan: RunPlan) -> RunData:
    """Opens the data set, on each node's own disk with ``--stage``, and the teacher, if the run has one.

    With ``--keep-old`` the classes of the teacher come before those of the data set. With ``--val-fraction`` the main
    process chooses the validation images of a new run; a run that continues has those of its checkpoint.
    """
    config = plan.config
    checkpoint = plan.checkpoint
    teacher = open_teacher(ctx, config, checkpoint) if config.teacher or config.keep_old else None
    spec = open_data(plan.data_source, ctx)
    if teacher is not None and config.keep_old:
        spec = teacher.extended(spec, config.weights)
    if config.val_fraction:
        spec = hold_out_validation(ctx, config, spec, checkpoint.val_images if checkpoint else [])
    fitness = Fitness.parse(config.fitness, class_names(spec, config.single_cls))
    return RunData(spec, fitness, teacher)


def build_loaders(
    ctx: DistributedContext, settings: RunSettings, data: RunData, model: Detector, samples: AugmentedImages
) -> Loaders:
    """Opens the validation split, and builds the loaders of both. Warns about data that would spoil the result."""
    config = settings.config
    hyp = settings.hyp
    spec = data.spec
    train = build_train_loader(ctx, config, hyp, spec, stride=model.stride, samples=samples)
    canvases = CanvasRule(config.imgsz, model.stride, model.head.squares)
    val = build_val_loader(ctx, config, spec, canvases, tile=spec.tile, hyp=hyp)
    data.fitness.check_objects(val.index.ground_truth())
    if ctx.is_main:
        warn_of_shared_images(spec, train.index, val.index)
        warn_of_small_boxes(train.index, imgsz=config.imgsz, stride=model.stride)
    return Loaders(train, val)


def data_identity(ctx: DistributedContext, loaders: Loaders) -> dict[str, str]:
    """Returns what identifies the data of a run, see `RunDescription.data`. All ranks get that of rank 0: fingerprints
    depend on modification times, and machines with copies of their own have others."""
    train = loaders.train.samples.sample_index
    val = loaders.val.samples.sample_index
    fingerprint = f"{train.fingerprint_as_used()}-{val.fingerprint_as_used()}"
    return broadcast_object(ctx, {"fingerprint": fingerprint, "val_labels": val.label_digest()})


def epoch_data(train: InfiniteDataLoader, identity: dict[str, str]) -> EpochData:
    """Returns what the position in an epoch depends on besides the settings."""
    return EpochData(batches=len(train), images=len(train.samples), fingerprint=identity["fingerprint"])
