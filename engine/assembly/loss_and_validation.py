"""Builds the loss of a run, with what it takes from the training split (anchors, class weights), and the validation.

Training (build.py) and the processes that validate for it (evaluating_process.py) must compute the same, and the search
for a batch size (batch_size.py) measures the loss of the run itself.
"""

from __future__ import annotations

from torch import Tensor

from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex
from data.loading.build import build_run_val_loader
from data.render.letterbox import CanvasRule
from engine.assembly.weights_probe import WeightsProbe
from engine.evaluation.evaluator import Evaluator, tile_stitcher
from engine.evaluation.tables import protocol_text
from engine.run.run import RunSettings
from engine.train.validation import RunValidation
from models.autoanchor import check_anchors
from models.detector import Detector
from models.losses.base import Criterion, class_weights
from models.losses.distillation import Teacher
from models.postprocess.detections import select_for_validation
from models.postprocess.selection import ValidationSettings
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.logger import get_logger
from utils.strings import listed


def fit_model_anchors(
    ctx: DistributedContext, settings: RunSettings, model: Detector, train: DatasetIndex, probe: WeightsProbe | None
) -> None:
    """Checks the anchors of a model, if it has any, against the boxes of the training split, and refits them if needed.

    Loaded weights predict boxes relative to their anchors, so weights that detect the objects keep them. All ranks use
    the anchors of rank 0: the search compares sums of floats, which other processors may round differently.
    """
    anchors = model.head.anchors
    if anchors is None:
        return
    config = settings.config
    reason_to_keep = ""
    if config.noautoanchor:
        reason_to_keep = "refitting is off"
    elif probe is not None and probe.detects:
        reason_to_keep = f"{probe.source} detects training objects with them ({probe.details})"
    fitted = None
    if ctx.is_main:
        sides = train.sides_at(config.imgsz)
        message = check_anchors(
            sides, model.head, anchor_t=settings.hyp.anchor_t, reason_to_keep=reason_to_keep, seed=config.seed
        )
        get_logger().info("%s", message)
        fitted = anchors.cpu()
    anchors.copy_(broadcast_object(ctx, fitted))


def choose_class_weights(config: TrainConfig, model: Detector, train: DatasetIndex) -> Tensor | None:
    """Returns the class weights of the loss for ``--cls-pw``, float32 (C,), and logs them; None if all classes have
    equal weight. ``train``: the training split."""
    if not config.cls_pw:
        return None
    weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw)
    by_weight = weights.argsort(descending=True, stable=True).tolist()
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
    get_logger().info("--cls-pw %g: weights in the loss: %s", config.cls_pw, listed(shown))
    return weights


def build_criterion(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    *,
    class_weights: Tensor | None,
    teacher: Teacher | None = None,
) -> Criterion:
    """Builds the loss of the model's head, with its current anchors, on the device.

    ``class_weights``: result of `choose_class_weights`.
    """
    criterion = model.head.build_loss(
        settings.hyp, teacher=teacher, label_smoothing=settings.config.label_smoothing, class_weights=class_weights
    )
    return criterion.to(ctx.device)


def build_validation(
    ctx: DistributedContext, settings: RunSettings, spec: DatasetSpec, model: Detector, criterion: Criterion
) -> RunValidation:
    """Opens the validation split of a run, and builds the evaluator of its averaged weights. Every process that
    validates must call this.

    It validates as val.py does, and also computes the loss. It runs in float32 whatever the precision of training,
    because the threshold that it finds will be used in float32.
    """
    config = settings.config
    canvases = CanvasRule(config.imgsz, model.stride, model.head.squares)
    loader = build_run_val_loader(ctx, config, settings.hyp, spec, canvases)
    evaluator = Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=len(loader.index.names),
        postprocess=select_for_validation,
        ctx=ctx,
        tiles=tile_stitcher(loader, model.nms_iou, ValidationSettings()),
        criterion=criterion,
        fuses=True,
        protocol=protocol_text(canvases, box_voting=model.nms_iou is not None, tile=loader.index.tile),
    )
    return RunValidation(loader, evaluator)
