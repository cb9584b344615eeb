"""Warnings about a run that begins: settings without effect, data that mislead, and how it could give more."""

from __future__ import annotations

import shlex

from data.dataset.spec import DEMO
from data.index.index import DatasetIndex
from data.index.messages import warn_of_shared_images, warn_of_unused_classes
from engine.optim.schedule import few_steps_warning, random_weights_warning
from engine.report.summary import small_boxes
from engine.train.check_settings import unused_settings
from engine.train.sources import RunData, Sources
from engine.train.trainer import TrainingRun
from models.detector import Detector
from models.weights.read import StoredWeights
from utils.class_names import class_key
from utils.logger import get_logger
from utils.strings import listed

MAX_LISTED = 8  # most classes that an advised flag lists


def advise(run: TrainingRun, sources: Sources, data: RunData) -> None:
    """Logs the warnings about a run, on rank 0."""
    model = run.step.ema.module
    config = run.config
    train = data.samples.reader.image_index
    log = get_logger()
    for line in unused_settings(run.ctx, run.settings, model, tile=sources.spec.tile):
        log.warning("%s", line)
    warn_of_shared_images(sources.spec, train, data.val.image_index)
    warn_of_unused_classes(train)
    lines = [small_boxes(train, imgsz=config.imgsz, stride=model.stride)]
    if not config.time:
        lines.append(few_steps_warning(run.choices.steps, config))
    if run.started_from is None:
        if sources.weights is not None and not config.keep_old:
            lines.append(unlearned_classes(config.weights, sources.weights, model, train))
        if config.data != DEMO:
            lines.append(random_weights_warning(len(train), weights=config.weights, model=config.model))
    for line in filter(None, lines):
        log.warning("%s", line)


def unlearned_classes(source: str, weights: StoredWeights, model: Detector, train: DatasetIndex) -> str:
    """Returns a warning about classes that the weights ``source`` and the data set name and no training image labels:
    their objects are background to the loss. "" if there are none."""
    known = {class_key(name) for name in weights.names or ()}
    ignored = train.names_ignored_everywhere()
    is_labeled = train.boxes_per_class(model.num_classes) > 0
    unlabeled = [name for name, has_label in zip(model.names, is_labeled) if not has_label and name not in ignored]
    unlearned = [name for name in unlabeled if class_key(name) in known]
    if not unlearned:
        return ""
    kept = [shlex.quote(name) for name, has_label in zip(model.names, is_labeled) if has_label]
    classes = " ".join(kept) if len(kept) <= MAX_LISTED else "and the labeled classes"
    remedy = f"--keep-old --classes {classes} keeps them (best with --freeze {len(model.model) - 1})"
    if not model.head.distills:
        remedy = "--keep-old, which would keep them, needs weights of YOLOv8, YOLOv9, YOLO11 or YOLO26"
    return f"no training image labels {listed(unlearned)}, known to {source}: training will unlearn them; {remedy}"
