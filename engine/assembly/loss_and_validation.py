"""Builds the loss and the validation of a run, shared by training and `--eval-ranks` processes.

Training (build.py) and the processes that validate for it (evaluating_process.py) must compute the same, and the search
for a batch size (batch_size.py) measures the loss of the run itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from data.index.index import DatasetIndex
from data.loading.build import build_run_val_loader
from data.render.letterbox import CanvasRule
from data.source.dataset_spec import DatasetSpec
from engine.evaluation.evaluator import build_evaluator
from engine.run.run import RunSettings
from engine.train.validation import RunValidation
from models.detector import Detector
from models.losses.base import Criterion, class_weights
from models.losses.distillation import Teacher
from models.postprocess.selection import ValidationSettings
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.strings import listed


def build_criterion(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    *,
    class_weights: Tensor | None,
    teacher: Teacher | None = None,
) -> Criterion:
    """Builds the loss of the model's head, with the anchors that it has by now, on the device.

    ``class_weights``: of `choose_class_weights`, computed from the training split.
    """
    criterion = model.head.build_loss(
        settings.hyp, teacher=teacher, label_smoothing=settings.config.label_smoothing, class_weights=class_weights
    )
    return criterion.to(ctx.device)


def choose_class_weights(config: TrainConfig, model: Detector, train: DatasetIndex) -> Tensor | None:
    """Returns the factors of the classes in the loss for ``--cls-pw``, float32 (C,), and logs them; None if all classes
    count alike. ``train``: the training split."""
    if not config.cls_pw:
        return None
    weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw)
    by_weight = weights.argsort(descending=True, stable=True).tolist()
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
    get_logger().info("--cls-pw %g: weights in the loss: %s", config.cls_pw, listed(shown))
    return weights


def build_validation(
    ctx: DistributedContext, settings: RunSettings, spec: DatasetSpec, model: Detector, criterion: Criterion
) -> RunValidation:
    """Opens the validation split of a run, and makes what scores its averaged weights. Every process that validates
    must call this.

    It validates as val.py does, and computes the loss. It runs in float32 whatever the type of training, as the
    threshold that it finds will be used in float32.
    """
    config = settings.config
    canvases = CanvasRule(config.imgsz, model.stride, model.head.squares)
    loader = build_run_val_loader(ctx, config, settings.hyp, spec, canvases)
    evaluator = build_evaluator(ctx, loader, model.nms_iou, ValidationSettings())
    return RunValidation(loader, replace(evaluator, criterion=criterion, fuses=True))
