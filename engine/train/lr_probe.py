"""Probes the weights of a new run: what the data may change in them follows from how well they detect its objects.

A detector that finds the objects, even as another class, has features that large steps would distort (Kumar et al.,
ICLR 2022), and boxes that other anchors would displace. A detector that finds none of them has to relearn most of its
layers. The probe decides ``lr_mult: null``, whether anchors may be refitted, and from which classes of the weights the
new ones start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from data.index import DatasetIndex
from data.samples.dataset import AugmentedImages
from engine.optim.schedule import new_layers_lr_mult
from models.detector import Detector, build_detector
from models.weights.load import class_count
from models.weights.read import COUNTERS, StoredWeights
from models.weights.transfer import transfer_weights
from utils.batches import BatchRequest, Sample, SampleKey, to_float
from utils.boxes import cxcywh_to_xyxy, iou
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object, gather_on_main
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


class ObjectScores(NamedTuple):
    """How well a detector of C classes finds objects, see `score_on_objects`."""

    labels: np.ndarray  # float32 (n,), class of each object in the data set
    objects: np.ndarray  # float32 (n, C), highest score of each class at each object

    @property
    def mean(self) -> float:
        """Mean over the objects, NaN without objects."""
        return self.objects.max(1).astype(np.float64).mean().item() if len(self.objects) else math.nan

    def similar_classes(self) -> dict[int, int]:
        """Returns, for each class of the data set at whose objects the detector finds anything, its class with the
        highest mean score there."""
        similar = {}
        for label in np.unique(self.labels):
            totals = self.objects[self.labels == label].sum(0, dtype=np.float64)
            if totals.max() > 0:
                similar[int(label)] = int(totals.argmax())
        return similar


@dataclass(frozen=True)
class WeightsProbe:
    """How well the weights of a new run detect the objects of its training split."""

    source: str  # the weights, as ``--weights`` names them
    score: float  # mean of `score_on_objects`; NaN: not measured
    details: str  # number of objects, or why it was not measured
    similar: dict[int, int] = field(default_factory=dict)  # see `ObjectScores.similar_classes`; empty if not measured

    @property
    def detects(self) -> bool:
        """True if the weights detect at least some of the objects."""
        return self.score >= FAMILIAR_SCORE  # False for NaN


def probe_weights(
    ctx: DistributedContext, config: TrainConfig, weights: StoredWeights, dataset: AugmentedImages, model: Detector
) -> WeightsProbe:
    """Measures how well the ``--weights`` of a new run detect its training objects. All processes must call this; each
    tests the weights on its share of the images. ``model``: that of the run, which may be on the meta device.
    """
    max_images = min(MAX_PROBE_IMAGES, len(_images_with_objects(dataset.sample_index)))
    if not config.time:
        max_images = min(max_images, math.ceil(MAX_SHARE_OF_RUN * config.epochs * len(dataset)))
    classes = class_count(model, weights.shapes)
    if not classes:
        return WeightsProbe(config.weights, math.nan, "its class layers are not the model's")
    detector = build_detector(model.spec, classes)
    report = transfer_weights(detector, replace(weights, names=detector.names))  # all classes, whatever their names
    missing = [name for name in report.skipped if not name.endswith(COUNTERS)]
    if missing:
        details = f"{len(missing)} of the model's {len(detector.state_dict())} tensors are not in it"
        return WeightsProbe(config.weights, math.nan, details)
    scores = score_on_objects(detector.eval().fuse().to(ctx.device), dataset, max_images, ctx)
    if not len(scores.objects):
        return WeightsProbe(config.weights, math.nan, "no object in the images examined")
    details = f"{counted(len(scores.objects), 'object')}, mean confidence {scores.mean:.2f}"
    return WeightsProbe(config.weights, scores.mean, details, scores.similar_classes())


def lr_mult_by_score(score: float, epochs: int, planned_steps: float) -> tuple[float, str]:
    """Returns ``lr_mult`` for weights with a mean ``score`` on the training objects, and why: a sentence about them.

    Weights that are already accurate on this data move equally far in `REFERENCE_EPOCHS` to 60 epochs: rate times steps
    is the same.

    Args:
        score: result of `score_on_objects`; NaN: not measured.
        planned_steps: see `StepPlan`.
    """
    if math.isnan(score):
        return LR_MULT_UNFAMILIAR, "this is the default for weights that cannot be tested on these objects"
    if score >= WELL_KNOWN_SCORE:
        longer = f", and have {epochs} epochs" if epochs > REFERENCE_EPOCHS else ""
        share = min(max(REFERENCE_EPOCHS / epochs, MIN_LR_SHARE), 1.0)
        return LR_MULT_FAMILIAR * share, f"they already find these objects{longer}"
    if score < FAMILIAR_SCORE:
        return LR_MULT_UNFAMILIAR, "this is the default for weights that hardly find these objects"
    lr_mult = LR_MULT_FAMILIAR * new_layers_lr_mult(planned_steps)  # few steps: loaded layers also have far to go
    few = f", and have only {counted(int(planned_steps), 'step')}" if lr_mult > LR_MULT_FAMILIAR else ""
    return lr_mult, f"they already find some of these objects{few}"


def _images_with_objects(index: DatasetIndex) -> np.ndarray:
    """Returns the indices of images that have an object: int64 (m,), ascending."""
    return np.unique(index.image_of_box[~index.crowd])


@torch.no_grad()
def score_on_objects(
    detector: Detector, dataset: AugmentedImages, max_images: int, ctx: DistributedContext
) -> ObjectScores:
    """Measures how well a detector finds objects.

    The score of a class at an object is the highest one of any predicted box that overlaps it with an IoU of at least
    `FOUND_IOU`; 0 if there is none. The result is the same on all processes and for any number of processes.

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
    scores_by_batch: dict[str, np.ndarray] = {}
    for number in range(ctx.rank, len(batches), ctx.world_size):
        keys = tuple(SampleKey(i, 0, 0, (side, side)) for i in batches[number].tolist())
        samples = plain.render(BatchRequest(keys, (side, side)))
        scores = _batch_scores(detector, samples, side)
        scores_by_batch |= {f"{name} {number}": array for name, array in scores._asdict().items()}
    shards = broadcast_object(ctx, gather_on_main(ctx, scores_by_batch)) or []
    gathered = {name: array for shard in shards for name, array in shard.items()}
    if not batches:
        return ObjectScores(np.zeros(0, np.float32), np.zeros((0, 0), np.float32))
    return ObjectScores(
        *(np.concatenate([gathered[f"{name} {i}"] for i in range(len(batches))]) for name in ObjectScores._fields)
    )


def _batch_scores(detector: Detector, samples: Sequence[Sample], side: int) -> ObjectScores:
    """Returns the scores in square images of ``side`` pixels, see `score_on_objects`."""
    device = next(detector.parameters()).device
    pixels = torch.from_numpy(np.stack([sample.image.transpose(2, 0, 1) for sample in samples]))
    images = to_float(pixels, device, torch.float32, channels_last=False)
    boxes, scores = detector.decode([level.float() for level in detector(images)])
    classes = []
    object_scores = []
    for sample, image_boxes, image_scores in zip(samples, boxes, scores, strict=True):
        labels = torch.from_numpy(sample.labels[sample.labels[:, 0] >= 0])
        objects = cxcywh_to_xyxy(labels[:, 1:] * side).to(device)
        overlaps = iou(objects[:, None], image_boxes, eps=0.0) >= FOUND_IOU
        classes.append(labels[:, 0])
        numbers, found = overlaps.nonzero(as_tuple=True)
        at_objects = image_scores.new_zeros(len(objects), image_scores.shape[1])
        at_objects.scatter_reduce_(0, numbers[:, None].expand(-1, image_scores.shape[1]), image_scores[found], "amax")
        object_scores.append(at_objects)
    return ObjectScores(torch.cat(classes).cpu().numpy(), torch.cat(object_scores).cpu().numpy())
