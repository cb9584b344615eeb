"""``lr_mult: null``: the learning rate of loaded weights follows from how well they detect the training objects.

A detector that finds the objects, be it under the name of another class, has features that large steps would distort
(Kumar et al., ICLR 2022). One that finds none of them has most of its layers to teach.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from data.index.index import DatasetIndex
from data.samples.augmented import AugmentedImages
from engine.optim.schedule import new_layers_lr_mult
from models.detector import Detector, build_detector
from models.weights.download import fetch_weights
from models.weights.load import class_count
from models.weights.read import COUNTERS, StoredWeights, read_weights
from models.weights.transfer import transfer_weights
from utils.boxes import cxcywh_to_xyxy, iou
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object, gather_arrays
from utils.logger import get_logger
from utils.strings import counted
from utils.structures import SampleKey, to_float

IMAGES = 100  # of the training split, at most
BATCH = 10
PART_OF_RUN = 0.25  # of the images that the run sees, at most: a forward pass is a third of a step or less
SAME_OBJECT = 0.5  # IoU
# Measured on seven data sets, see `benchmarks/LOG.md`.
KNOWN, WELL_KNOWN = 0.05, 0.4  # scores from which the objects are
LR_MULT_OF_KNOWN, LR_MULT_OF_STRANGE = 0.0625, 0.125
EPOCHS = 20  # in more, LR_MULT_OF_KNOWN takes weights that know the objects well too far from the file's
LEAST_SHARE = 1 / 3  # of it; longer runs than 60 epochs were not measured


def choose_lr_mult(
    ctx: DistributedContext, config: TrainConfig, dataset: AugmentedImages, model: Detector, total_steps: int
) -> float:
    """``lr_mult`` for a new run from ``--weights``, with a line in the log. All processes must call this; each tests
    the weights on its part of the images. ``total_steps``: unless ``--time`` decides."""
    path = fetch_weights(config.weights, ctx=ctx, offline=config.offline)
    with_objects = len(_images_with_objects(dataset.index))
    most = min(IMAGES, math.ceil(PART_OF_RUN * config.epochs * len(dataset)), with_objects)
    get_logger().info("lr_mult: testing %s on %s", config.weights, counted(most, "training image"))
    score, how = _measure(read_weights(path), model, dataset, ctx, most)
    epochs, steps = (EPOCHS, math.inf) if config.time else (config.epochs, total_steps)
    lr_mult, reason = lr_mult_by_score(score, epochs, steps)
    get_logger().info("lr_mult %g: %s %s (%s)", lr_mult, config.weights, reason, how)
    return lr_mult


def lr_mult_by_score(score: float, epochs: int, total_steps: float) -> tuple[float, str]:
    """``lr_mult`` and its reason, as the log states it, by the ``score`` of `score_on_objects` (NaN: not measured). In
    `EPOCHS` to 60 epochs, weights that detect the objects well move equally far: rate times steps is the same.
    ``total_steps``: inf if unknown."""
    if math.isnan(score):
        return LR_MULT_OF_STRANGE, "was not tested on the training objects"
    if score >= WELL_KNOWN:
        longer = f", lowered for {epochs} epochs" if epochs > EPOCHS else ""
        share = min(max(EPOCHS / epochs, LEAST_SHARE), 1.0)
        return LR_MULT_OF_KNOWN * share, f"detects the training objects well{longer}"
    if score < KNOWN:
        return LR_MULT_OF_STRANGE, "hardly detects the training objects"
    lr_mult = LR_MULT_OF_KNOWN * new_layers_lr_mult(total_steps)  # loaded layers, too, have far to go in few steps
    few = f", raised for {counted(int(total_steps), 'step')}" if lr_mult > LR_MULT_OF_KNOWN else ""
    return lr_mult, f"detects some of the training objects{few}"


def _measure(
    stored: StoredWeights, model: Detector, dataset: AugmentedImages, ctx: DistributedContext, most: int
) -> tuple[float, str]:
    """`score_on_objects` of the run's ``model`` with all stored weights, those of the classes, too; and on how many
    objects, or why it was not measured (NaN)."""
    classes = class_count(model, stored.shapes)
    if not classes:
        return math.nan, "its class layers are not the model's"
    detector = build_detector(model.spec, classes)
    report = transfer_weights(detector, replace(stored, names=detector.names))  # all classes, whatever their names
    if strange := [name for name in report.skipped if not name.endswith(COUNTERS)]:
        return math.nan, f"{len(strange)} of the model's {len(detector.state_dict())} tensors are not in it"
    score, objects = score_on_objects(detector.eval().fuse().to(ctx.device), dataset, most, ctx)
    if not objects:
        return math.nan, "no object in the images examined"
    return score, f"mean score {score:.3f} of {counted(objects, 'object')}"


def _images_with_objects(index: DatasetIndex) -> np.ndarray:
    """int64 (m,), ascending."""
    return np.unique(index.image_of_box[~index.crowd])


@torch.no_grad()
def score_on_objects(
    detector: Detector, dataset: AugmentedImages, most: int, ctx: DistributedContext
) -> tuple[float, int]:
    """The mean, over the objects of at most ``most`` letterboxed images, of the highest score of a predicted box that
    overlaps the object with an IoU of `SAME_OBJECT` or more, whatever its class; 0 for objects without such a box. And
    the number of objects; without any, the mean is NaN. Both are equal on all processes, and for any number of them.
    Of the images with objects, some at equal distances are taken. ``detector``: in eval mode, with any classes."""
    device, side = next(detector.parameters()).device, dataset.imgsz
    plain = dataset.without_augmentation()
    with_objects = _images_with_objects(plain.index)
    places = np.linspace(0, len(with_objects) - 1, min(most, len(with_objects))).round().astype(np.int64)
    batches = [with_objects[places[first : first + BATCH]] for first in range(0, len(places), BATCH)]
    best = {}
    for number in range(ctx.rank, len(batches), ctx.world_size):
        samples = [plain[SampleKey(i, 0, 0, (side, side))] for i in batches[number].tolist()]
        pixels = torch.from_numpy(np.stack([sample.image.transpose(2, 0, 1) for sample in samples]))
        images = to_float(pixels, device, torch.float32, channels_last=False)
        boxes, scores = detector.decode([level.float() for level in detector(images)])
        found = []
        for sample, own_boxes, own_scores in zip(samples, boxes, scores.amax(-1), strict=True):
            labels = torch.from_numpy(sample.labels[sample.labels[:, 0] >= 0])
            objects = cxcywh_to_xyxy(labels[:, 1:] * side).to(device)
            overlaps = iou(objects[:, None], own_boxes, eps=0.0) >= SAME_OBJECT
            found.append((overlaps * own_scores).amax(1))
        best[str(number)] = torch.cat(found).double().cpu().numpy()
    parts = broadcast_object(ctx, gather_arrays(ctx, best)) or []
    by_batch = {int(number): values for part in parts for number, values in part.items()}
    values = np.concatenate([np.zeros(0), *(by_batch[number] for number in sorted(by_batch))])
    return values.mean().item() if len(values) else math.nan, len(values)
