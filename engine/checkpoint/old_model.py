"""``--keep-old``: a model learns new classes on data that does not label the old ones, and keeps these.

The new model has the classes of the old one, that of --weights, and after them those of the data set. The old classes
are ignored in the labels; what the old model sees in the same augmented images takes their place
(models/losses/distillation.py). Checkpoints contain the old model, so that a run resumes without its file.
"""

from __future__ import annotations

from data.spec.dataset_spec import DatasetSpec, class_names
from engine.checkpoint.run import Run
from models.detector import Detector, build_detector
from models.weights.download import fetch_weights
from models.weights.load import load_detector
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.strings import counted, listed


def check_keep_old(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that ``--keep-old`` excludes."""
    if not config.weights:
        raise UserError("--keep-old: name the model whose classes are kept with --weights")
    if config.model:
        raise UserError(f"--keep-old: the model is that of --weights; leave out --model {config.model}")
    if config.single_cls:
        raise UserError("--keep-old: with --single-cls there are no new classes; leave out one of the two")
    if ctx.eval_ranks:
        raise UserError("--keep-old: the old model runs in the training processes only; leave out --eval-ranks")


def open_old_model(ctx: DistributedContext, run: Run) -> Detector:
    """The model whose classes are kept, in eval mode on the CPU, from ``--weights`` or the checkpoint of a resumed run.

    Raises UserError for a model whose loss cannot take another's outputs.
    """
    if run.checkpoint is None:
        old, _ = load_detector(fetch_weights(run.config.weights, ctx=ctx, offline=run.config.offline))
    else:
        stored, path = run.checkpoint.old_model, run.checkpoint.path
        if not stored:
            raise UserError(f"{path}: damaged checkpoint (no 'old_model', whose classes --keep-old keeps)")
        with errors_of(path), run.checkpoint.errors_of_fit():
            old = build_detector(stored["model_spec"], len(stored["names"]), names=stored["names"])
            old.load_state_dict(stored["weights"])
    if not old.head.distills:
        raise UserError(
            f"--keep-old: {run.config.weights} has anchors or objectness; only models with anchor-free heads without "
            "objectness keep old classes (YOLOv8, YOLOv9, YOLO11, YOLO26)"
        )
    if len(set(old.names)) < len(old.names):
        raise UserError(f"--keep-old: {run.config.weights} has classes of one name: {listed(old.names)}")
    return old.eval()


def with_old_classes(spec: DatasetSpec, old: Detector, weights: str) -> DatasetSpec:
    """The data set ``spec`` with the classes of the old model before its own. Raises UserError if it labels all of
    them."""
    if old.channels != spec.pixels.channels:
        raise UserError(
            f"--keep-old: {weights} takes images of {counted(old.channels, 'channel')}, {spec.source} has images of "
            f"{spec.pixels.channels}"
        )
    extended = spec.extended(old.names, weights)
    labeled = class_names(next(iter(extended.splits.values())).parts[0], single_cls=False)
    kept = [name for name in old.names if name not in labeled]
    if not kept:
        raise UserError(
            f"--keep-old: {spec.source} has all classes of {weights}, so none is to be kept; leave it out, or name the "
            "labeled ones with --classes"
        )
    text = "--keep-old: %s of %s kept, %s learned from labels; validation scores the latter"
    get_logger().info(text, listed(kept), weights, listed(labeled))
    return extended
