"""Probes the weights of a new run: what the data may change in them follows from how well they detect its objects.

A detector that finds the objects, even as another class, has features that large steps would distort (Kumar et al.,
ICLR 2022), and boxes that other anchors would displace. A detector that finds none of them has to relearn most of its
layers. The probe decides ``lr_mult: null``, and whether anchors may be refitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from data.index.index import DatasetIndex
from data.samples.batch_request import BatchRequest
from data.samples.dataset import AugmentedImages
from engine.optim.schedule import StepPlan, new_layers_lr_mult
from engine.run.run import RunSettings
from models.detector import Detector, build_detector
from models.weights.download import fetch_weights
from models.weights.load import class_count
from models.weights.read import COUNTERS, StoredWeights, read_weights
from models.weights.transfer import transfer_weights
from utils.batches import Sample, SampleKey, to_float
from utils.boxes import cxcywh_to_xyxy, iou
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object, gather_arrays
from utils.logger import get_logger
from utils.strings import counted

MAX_PROBE_IMAGES = 100  # maximum number of training images that are examined
BATCH_IMAGES = 10
MAX_SHARE_OF_RUN = 0.25  # maximum fraction of the run's images; a forward pass takes at most a third of a step
FOUND_IOU = 0.5  # minimum IoU at which a predicted box counts as finding an object
# Minimum mean scores of weights that know the objects, or know them well. Measured on seven data sets, see
# `benchmarks/LOG.md`.
FAMILIAR_SCORE = 0.05
WELL_KNOWN_SCORE = 0.4
LR_MULT_FAMILIAR = 0.0625
LR_MULT_UNFAMILIAR = 0.125
REFERENCE_EPOCHS = 20  # in longer runs, LR_MULT_FAMILIAR moves weights that know the objects well too far
MIN_LR_SHARE = 1 / 3  # lowest fraction of LR_MULT_FAMILIAR; runs of more than 60 epochs were not measured


class LrMult(NamedTuple):
    """A value of ``lr_mult``."""

    value: float
    reason: str  # for the log, such as "detects the training objects well"


class ObjectScore(NamedTuple):
    """A measure of how well a detector finds objects, see `score_on_objects`."""

    mean: float  # NaN without objects
    objects: int


@dataclass(frozen=True)
class WeightsProbe:
    """How well the weights of a new run detect the objects of its training split."""

    source: str  # the weights, as ``--weights`` names them
    score: float  # mean of `score_on_objects`; NaN: not measured
    details: str  # number of objects, or why it was not measured

    @property
    def detects(self) -> bool:
        """True if the weights detect at least some of the objects."""
        return self.score >= FAMILIAR_SCORE  # False for NaN

    def choose_lr_mult(self, config: TrainConfig, steps: StepPlan) -> float:
        """Returns ``lr_mult`` for the run, and logs it."""
        epochs = REFERENCE_EPOCHS if steps.is_timed else config.epochs
        lr_mult = lr_mult_by_score(self.score, epochs, steps.planned_steps)
        get_logger().info("lr_mult %g: %s %s (%s)", lr_mult.value, self.source, lr_mult.reason, self.details)
        return lr_mult.value


def probe_weights(
    ctx: DistributedContext, settings: RunSettings, dataset: AugmentedImages, model: Detector
) -> WeightsProbe | None:
    """Measures how well the ``--weights`` of a new run detect its training objects; None if nothing depends on it. All
    processes must call this; each tests the weights on its share of the images."""
    config = settings.config
    if not config.weights or (settings.hyp.lr_mult is not None and model.head.anchors is None):
        return None
    path = fetch_weights(config.weights, ctx=ctx, offline=config.offline)
    max_images = min(MAX_PROBE_IMAGES, len(_images_with_objects(dataset.sample_index)))
    if not config.time:
        max_images = min(max_images, math.ceil(MAX_SHARE_OF_RUN * config.epochs * len(dataset)))
    get_logger().info("testing %s on %s", config.weights, counted(max_images, "training image"))
    return _measure(config.weights, read_weights(path), model, dataset, ctx, max_images)


def lr_mult_by_score(score: float, epochs: int, planned_steps: float) -> LrMult:
    """Returns ``lr_mult`` for weights with a mean ``score`` on the training objects.

    Weights that detect the objects well move equally far in `REFERENCE_EPOCHS` to 60 epochs: rate times steps is the
    same.

    Args:
        score: result of `score_on_objects`; NaN: not measured.
        planned_steps: see `StepPlan`.
    """
    if math.isnan(score):
        return LrMult(LR_MULT_UNFAMILIAR, "was not tested on the training objects")
    if score >= WELL_KNOWN_SCORE:
        longer = f", lowered for {epochs} epochs" if epochs > REFERENCE_EPOCHS else ""
        share = min(max(REFERENCE_EPOCHS / epochs, MIN_LR_SHARE), 1.0)
        return LrMult(LR_MULT_FAMILIAR * share, f"detects the training objects well{longer}")
    if score < FAMILIAR_SCORE:
        return LrMult(LR_MULT_UNFAMILIAR, "hardly detects the training objects")
    lr_mult = LR_MULT_FAMILIAR * new_layers_lr_mult(planned_steps)  # few steps: loaded layers also have far to go
    few = f", raised for {counted(int(planned_steps), 'step')}" if lr_mult > LR_MULT_FAMILIAR else ""
    return LrMult(lr_mult, f"detects some of the training objects{few}")


def _measure(
    source: str,
    stored: StoredWeights,
    model: Detector,
    dataset: AugmentedImages,
    ctx: DistributedContext,
    max_images: int,
) -> WeightsProbe:
    """Measures `score_on_objects` of the run's ``model`` with all stored weights, including those of the class layers
    and the anchors."""
    classes = class_count(model, stored.shapes)
    if not classes:
        return WeightsProbe(source, math.nan, "its class layers are not the model's")
    detector = build_detector(model.spec, classes)
    report = transfer_weights(detector, replace(stored, names=detector.names))  # all classes, whatever their names
    missing = [name for name in report.skipped if not name.endswith(COUNTERS)]
    if missing:
        details = f"{len(missing)} of the model's {len(detector.state_dict())} tensors are not in it"
        return WeightsProbe(source, math.nan, details)
    score = score_on_objects(detector.eval().fuse().to(ctx.device), dataset, max_images, ctx)
    if not score.objects:
        return WeightsProbe(source, math.nan, "no object in the images examined")
    return WeightsProbe(source, score.mean, f"mean score {score.mean:.3f} of {counted(score.objects, 'object')}")


def _images_with_objects(index: DatasetIndex) -> np.ndarray:
    """Returns the indices of images that have an object: int64 (m,), ascending."""
    return np.unique(index.image_of_box[~index.crowd])


@torch.no_grad()
def score_on_objects(
    detector: Detector, dataset: AugmentedImages, max_images: int, ctx: DistributedContext
) -> ObjectScore:
    """Measures how well a detector finds objects.

    The score of an object is the highest score of any predicted box, of any class, that overlaps it with an IoU of at
    least `FOUND_IOU`; 0 if there is none. Returns the mean over the objects, NaN without objects: the same on all
    processes and for any number of processes.

    Args:
        detector: in eval mode, with any classes.
        max_images: largest number of letterboxed images, evenly spaced among those with objects.
    """
    side = dataset.reader.imgsz
    if side is None:
        raise ValueError("images of different sizes make no batch: the samples need an imgsz")
    plain = dataset.without_augmentation()
    images_with_objects = _images_with_objects(plain.sample_index)
    count = min(max_images, len(images_with_objects))
    sampled = images_with_objects[np.linspace(0, len(images_with_objects) - 1, count).round().astype(np.int64)]
    batches = [sampled[first : first + BATCH_IMAGES] for first in range(0, count, BATCH_IMAGES)]
    scores_by_batch = {}
    for number in range(ctx.rank, len(batches), ctx.world_size):
        keys = tuple(SampleKey(i, 0, 0, (side, side)) for i in batches[number].tolist())
        samples = plain.render(BatchRequest(keys, (side, side)))
        scores_by_batch[str(number)] = _object_scores(detector, samples, side)
    shards = broadcast_object(ctx, gather_arrays(ctx, scores_by_batch)) or []
    gathered = {int(number): scores for shard in shards for number, scores in shard.items()}
    scores = np.concatenate([np.zeros(0), *(gathered[number] for number in sorted(gathered))])
    return ObjectScore(scores.mean().item() if len(scores) else math.nan, len(scores))


def _object_scores(detector: Detector, samples: Sequence[Sample], side: int) -> np.ndarray:
    """Returns the scores of the objects in square images of ``side`` pixels, see `score_on_objects`: float64 (n,)."""
    device = next(detector.parameters()).device
    pixels = torch.from_numpy(np.stack([sample.image.transpose(2, 0, 1) for sample in samples]))
    images = to_float(pixels, device, torch.float32, channels_last=False)
    boxes, scores = detector.decode([level.float() for level in detector(images)])
    object_scores = []
    for sample, image_boxes, image_scores in zip(samples, boxes, scores.amax(-1), strict=True):
        labels = torch.from_numpy(sample.labels[sample.labels[:, 0] >= 0])
        objects = cxcywh_to_xyxy(labels[:, 1:] * side).to(device)
        overlaps = iou(objects[:, None], image_boxes, eps=0.0) >= FOUND_IOU
        object_scores.append((overlaps * image_scores).amax(1))
    return torch.cat(object_scores).double().cpu().numpy()
