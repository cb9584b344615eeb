"""Opens what a run is made from, and builds its model.

First come data set, weights, teacher and the shapes of the model, then both splits: mistakes in files that are quick to
read are refused before images are scanned, which may take hours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from data.folds.held_out import hold_out_validation
from data.load import warn_about_shared_images, warn_about_unused_classes
from data.loading.build import open_run_val_reader, open_train_samples
from data.open import open_data
from data.spec import class_names
from engine.evaluation.fitness import Fitness
from engine.run.starts import Inputs, RunStart
from engine.run.teacher import open_teacher
from engine.train.checkpoint import DataFingerprint
from models.detector import Detector, build_detector
from models.losses.distillation import Teacher
from utils.config.image_size import check_image_size
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted


def open_inputs(ctx: DistributedContext, start: RunStart) -> Inputs:
    """Opens what the settings of a run name: first the files that are quick to read, then the images of both splits, or
    the indexes of an earlier scan. Every rank must call this.

    Raises UserError for a data set, weights, a teacher or a model that cannot be used, or that do not fit each other or
    the settings, and if processes have read different data.
    """
    config = start.settings.config
    hyp = start.settings.hyp
    opened = open_data(start.data_source, ctx)
    teacher = open_teacher(ctx, config)
    if teacher is not None:
        start.check_teacher(teacher)
    spec = opened if teacher is None or not config.keep_old else teacher.extend(opened, config.weights)
    if config.val_fraction:
        spec = hold_out_validation(ctx, config, spec, start.val_images)
    names = tuple(class_names(spec, config.single_cls))
    fitness = Fitness.parse(config.fitness, names)
    meta_model, weights = start.open_model(ctx, names, spec.pixels.channels)
    _check_model(config, meta_model, ctx.device)
    samples = open_train_samples(ctx, config, hyp, spec, stride=meta_model.stride)
    val = open_run_val_reader(ctx, config, hyp, spec)
    fitness.check_objects(val.image_index.ground_truth())
    if ctx.is_main and start.takes_steps:
        warn_about_shared_images(spec, samples.reader.image_index, val.image_index)
        warn_about_unused_classes(samples.reader.image_index)
    return Inputs(
        spec=spec,
        used_classes=list(class_names(opened, single_cls=False)) if config.classes else [],
        fitness=fitness,
        meta_model=meta_model,
        weights=weights,
        teacher=teacher,
        samples=samples,
        val=val,
        fingerprint=DataFingerprint(
            train_labels=samples.sample_index.label_digest(), val_labels=val.sample_index.label_digest()
        ),
    )


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


def build_model(ctx: DistributedContext, config: TrainConfig, inputs: Inputs) -> tuple[Detector, Teacher | None]:
    """Builds the model of a run on its device, with random weights, and what teaches it."""
    spec = inputs.spec
    names = inputs.meta_model.names
    model = build_detector(
        inputs.meta_model.spec, len(names), names=names, seed=config.seed, channels=spec.pixels.channels
    )
    layers = layers_to_freeze(model, config.freeze)
    if layers:
        freeze_layers(model, layers)
        get_logger().info("frozen: layers %s", ", ".join(map(str, sorted(layers))))
    parameters = sum(p.numel() for p in model.parameters())
    get_logger().info("%s: %s parameters, %s", model.spec["name"], f"{parameters:,}", counted(len(names), "class"))
    model = model.to(ctx.device).to(memory_format=torch.channels_last)
    return model, None if inputs.teacher is None else inputs.teacher.build(spec, model)


def freeze_layers(model: Detector, layers: Collection[int]) -> None:
    """Stops gradients and batch statistics of ``model.model[i]`` for each i in ``layers``.

    From now on, their batch norms use the stored statistics even in training mode.
    """
    for index in layers:
        layer = model.model[index]
        layer.requires_grad_(False)
        for module in layer.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(False)
                module.register_forward_pre_hook(_keep_statistics)


def _keep_statistics(module: nn.Module, _inputs: tuple) -> None:
    module.training = False
