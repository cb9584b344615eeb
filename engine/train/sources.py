"""What a run is made from, read once: data set, weights, teacher and model; then the images of both splits.

Mistakes in files that are quick to read are refused before images are scanned, which may take hours.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from data.folds.held_out import hold_out_validation
from data.load import warn_about_shared_images, warn_about_unused_classes
from data.loading.build import open_run_val_reader, open_train_samples
from data.open import open_data
from data.samples.dataset import AugmentedImages
from data.samples.readers import SampleReader
from data.spec import DatasetSpec, class_names
from engine.evaluation.fitness import Fitness
from engine.train.checkpoint import Checkpoint, DataFingerprint
from engine.train.resume import RunPlan
from engine.train.teacher import TeacherFile, open_teacher
from models.detector import Detector, build_meta_detector
from models.weights.download import fetch_weights
from models.weights.load import check_shapes, class_count, model_of, names_for
from models.weights.read import StoredWeights, read_weights, shapes_of
from models.weights.transfer import match_weights
from utils.class_names import class_difference
from utils.config.image_size import check_image_size
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError, errors_of

DEFAULT_MODEL = "yolov8n"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The opened files of a run. No image is read yet."""

    spec: DatasetSpec  # with the classes of a teacher that are kept, and the images that are held out
    names: tuple[str, ...]  # of the model's classes
    used_classes: list[str]  # names of the data set's classes that --classes chose
    fitness: Fitness
    weights: StoredWeights | None  # from which a new run starts
    meta_model: Detector  # the run's model, on the meta device
    is_complete: bool  # all of its parameters come, or came when the run began, from weights
    teacher: TeacherFile | None


def open_sources(ctx: DistributedContext, plan: RunPlan) -> Sources:
    """Opens what the settings of a run name. Every rank must call this.

    Raises UserError for a data set, weights, a teacher or a model that cannot be used, or that do not fit each other or
    the settings.
    """
    config = plan.settings.config
    opened = open_data(plan.data_source, ctx)
    read = None
    if plan.checkpoint is None and config.weights:
        read = read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    teacher = open_teacher(ctx, config, read, plan.stored)
    spec = _with_teacher_and_held_out(ctx, plan, opened, teacher)
    names = tuple(class_names(spec, config.single_cls))
    fitness = Fitness.parse(config.fitness, names)
    meta_model = _meta_model(config, names, spec.pixels.channels, read, plan.checkpoint)
    _check_model(config, meta_model, ctx.device)
    weights = None
    if read is not None and teacher is not None and config.keep_old:
        weights = replace(read, names=teacher.detector.names)  # also of a file without names
    elif read is not None:
        weights = _with_names(read, meta_model)
    pretrained: Mapping[str, Sequence[int]] = plan.stored.pretrained if plan.stored else {}
    if weights is not None:
        report, _ = match_weights(meta_model, weights)
        pretrained = report.pretrained(meta_model)
    return Sources(
        spec=spec,
        names=names,
        used_classes=list(class_names(opened, single_cls=False)) if config.classes else [],
        fitness=fitness,
        weights=weights,
        is_complete=all(name in pretrained and not pretrained[name] for name, _ in meta_model.named_parameters()),
        meta_model=meta_model,
        teacher=teacher,
    )


def _with_teacher_and_held_out(
    ctx: DistributedContext, plan: RunPlan, opened: DatasetSpec, teacher: TeacherFile | None
) -> DatasetSpec:
    """Returns the data set with the classes of a teacher that are kept, and with the images that ``--val-fraction``
    holds out."""
    config = plan.settings.config
    extended = opened if teacher is None or not config.keep_old else teacher.extend(opened, config.weights)
    if not config.val_fraction:
        return extended
    stored = plan.stored
    return hold_out_validation(ctx, config, extended, stored.val_images if stored else [])  # rank 0 chooses new ones


def _meta_model(
    config: TrainConfig,
    names: Sequence[str],
    channels: int,
    weights: StoredWeights | None,
    checkpoint: Checkpoint | None,
) -> Detector:
    """Builds the run's model on the meta device: the checkpoint's, or that of the settings or weights. Raises UserError
    if the classes of a checkpoint are not ``names``, in this order, or its weights do not fit its model."""
    if checkpoint is None:
        source = config.model or (model_of(weights) if weights else DEFAULT_MODEL)
        return build_meta_detector(source, len(names), names=names, channels=channels)
    path = checkpoint.path
    stored = checkpoint.description
    difference = class_difference(stored.names, names)
    if difference:
        raise UserError(
            f"{path}: the run and {config.data} do not have the same classes ({difference}); for other classes start a "
            f"new run with --weights {shlex.quote(str(path))}"
        )
    check_shapes(path, stored.model_spec, stored.names, shapes_of(checkpoint.state.model))
    with errors_of(path):
        return build_meta_detector(stored.model_spec, len(names), names=names, channels=channels)


def _check_model(config: TrainConfig, meta_model: Detector, device: torch.device) -> None:
    """Raises UserError for a size of images, frozen layers or kernels that the model does not allow."""
    check_image_size(config.imgsz, meta_model.stride, min_cells=2)  # batch norm needs more than one image of one cell
    frozen = layers_to_freeze(meta_model, config.freeze)
    rest = [layer for index, layer in enumerate(meta_model.model) if index not in frozen]
    if frozen and not any(p.requires_grad for layer in rest for p in layer.parameters()):
        raise UserError(f"{_freeze_flag(config.freeze)}: leaves no layer to train")
    check_kernels(config, meta_model, device)


def check_kernels(config: TrainConfig, model: nn.Module, device: torch.device) -> None:
    """Raises UserError for a layer whose gradient torch cannot compute deterministically on a GPU, with
    ``--deterministic``."""
    if not config.deterministic or device.type != "cuda":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Upsample) and module.mode == "bicubic":
            raise UserError(
                f"--deterministic: layer {name} (Upsample, bicubic) has no deterministic gradient on a GPU; "
                "make it nearest or bilinear in the model YAML, or leave out --deterministic"
            )


def layers_to_freeze(model: Detector, numbers: Sequence[int]) -> set[int]:
    """Returns the layers of ``--freeze``, whose ``numbers`` are indices, or a single n for layers 0 to n - 1. Raises
    UserError for layers that the model does not have."""
    layers = set(range(numbers[0])) if len(numbers) == 1 else set(numbers)
    last = len(model.model) - 1
    if min(numbers, default=0) < 0 or max(layers, default=0) > last:
        raise UserError(f"{_freeze_flag(numbers)}: the model has layers 0 to {last}")
    return layers


def _freeze_flag(numbers: Sequence[int]) -> str:
    return f"--freeze {' '.join(map(str, numbers))}"


def _with_names(weights: StoredWeights, meta_model: Detector) -> StoredWeights:
    """Returns the weights with the names of their classes, which are assumed or dropped, with a line in the log, if the
    file has none or others than its class layers (`names_for`)."""
    classes = class_count(meta_model, weights.shapes)
    return replace(weights, names=names_for(classes, weights.names, weights.path)) if classes else weights


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Both splits of a run."""

    samples: AugmentedImages  # of the training split, with the flips of the settings
    val: SampleReader
    fingerprint: DataFingerprint


def open_run_data(ctx: DistributedContext, plan: RunPlan, sources: Sources) -> RunData:
    """Scans both splits, or reads the indexes of an earlier scan. Every rank must call this. Raises UserError for a
    split without images or with too many bad ones, and if processes have read different data."""
    config = plan.settings.config
    hyp = plan.settings.hyp
    samples = open_train_samples(ctx, config, hyp, sources.spec, stride=sources.meta_model.stride)
    val = open_run_val_reader(ctx, config, hyp, sources.spec)
    sources.fitness.check_objects(val.image_index.ground_truth())
    if ctx.is_main and plan.takes_steps:
        warn_about_shared_images(sources.spec, samples.reader.image_index, val.image_index)
        warn_about_unused_classes(samples.reader.image_index)
    fingerprint = DataFingerprint.of(samples.sample_index, val.sample_index)
    return RunData(samples=samples, val=val, fingerprint=fingerprint)
