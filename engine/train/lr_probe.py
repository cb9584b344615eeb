"""Measures how well loaded weights already detect the training objects, which decides what may change in them.

A detector that finds the objects, even as another class, has features that large steps would distort (Kumar et al.,
ICLR 2022), and boxes that other anchors would displace. A detector that finds none of them has to relearn most of its
layers. The probe decides ``lr_mult: null``, whether anchors may be refitted, and from which classes of the weights the
new ones start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from data.samples.dataset import AugmentedImages
from engine.optim.schedule import new_layers_lr_mult
from models.detector import Detector, build_detector
from models.weights.load import class_count
from models.weights.read import COUNTERS, StoredWeights
from models.weights.transfer import transfer_weights
from utils.batches import BatchRequest, SampleKey, to_float
from utils.boxes import cxcywh_to_xyxy, iou
from utils.config.settings import TrainConfig
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


@dataclass(frozen=True)
class WeightsProbe:
    """How well the weights of a new run detect the objects of its training split."""

    score: float  # mean over the objects of the highest score of any class; NaN: not measured
    details: str  # number of objects, or why it was not measured
    similar: dict[int, int] = field(default_factory=dict)  # most similar class of the weights, by class of the data set

    @property
    def detects(self) -> bool:
        """True if the weights detect at least some of the objects."""
        return self.score >= FAMILIAR_SCORE  # False for NaN


def probe_weights(
    config: TrainConfig, weights: StoredWeights, dataset: AugmentedImages, model: Detector, device: torch.device
) -> WeightsProbe:
    """Measures how well the ``--weights`` of a new run detect its training objects. ``model``: that of the run, which
    may be on the meta device."""
    classes = class_count(model, weights.shapes)
    if not classes:
        return WeightsProbe(math.nan, "its class layers are not the model's")
    detector = build_detector(model.spec, classes)
    report = transfer_weights(detector, replace(weights, names=detector.names))  # all classes, whatever their names
    missing = [name for name in report.skipped if not name.endswith(COUNTERS)]
    if missing:
        details = f"{len(missing)} of the model's {len(detector.state_dict())} tensors are not in it"
        return WeightsProbe(math.nan, details)
    max_images = MAX_PROBE_IMAGES
    if not config.time:
        max_images = min(max_images, math.ceil(MAX_SHARE_OF_RUN * config.epochs * len(dataset)))
    labels, scores = score_on_objects(detector.eval().fuse().to(device), dataset, max_images)
    if not len(labels):
        return WeightsProbe(math.nan, "no object in the images examined")
    mean = scores.max(1).astype(np.float64).mean().item()
    similar = {}
    for label in np.unique(labels):
        totals = scores[labels == label].sum(0, dtype=np.float64)
        if totals.max() > 0:  # the detector finds something at the objects of this class
            similar[int(label)] = int(totals.argmax())
    return WeightsProbe(mean, f"{counted(len(labels), 'object')}, mean confidence {mean:.2f}", similar)


@torch.no_grad()
def score_on_objects(detector: Detector, dataset: AugmentedImages, max_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Measures how well a detector of C classes finds objects: the score of a class at an object is the highest one of
    any predicted box that overlaps it with an IoU of at least `FOUND_IOU`; 0 if there is none.

    Args:
        detector: in eval mode, with any classes.
        max_images: largest number of letterboxed images, evenly spaced among those with objects.

    Returns the class of each object in the data set, float32 (n,), and the scores, float32 (n, C).
    """
    side = dataset.reader.imgsz
    if side is None:
        raise ValueError("images of different sizes make no batch: the samples need an imgsz")
    plain = dataset.without_augmentation()
    index = plain.sample_index
    with_objects = np.unique(index.image_of_box[~index.crowd])
    count = min(max_images, len(with_objects))
    sampled = with_objects[np.linspace(0, len(with_objects) - 1, count).round().astype(np.int64)]
    device = next(detector.parameters()).device
    labels: list[np.ndarray] = [np.zeros(0, np.float32)]
    scores: list[np.ndarray] = []
    for first in range(0, count, BATCH_IMAGES):
        keys = tuple(SampleKey(i, 0, 0, (side, side)) for i in sampled[first : first + BATCH_IMAGES].tolist())
        samples = plain.render(BatchRequest(keys, (side, side)))
        pixels = torch.from_numpy(np.stack([sample.image.transpose(2, 0, 1) for sample in samples]))
        images = to_float(pixels, device, torch.float32, channels_last=False)
        boxes, class_scores = detector.decode([level.float() for level in detector(images)])
        for sample, image_boxes, image_scores in zip(samples, boxes, class_scores, strict=True):
            rows = sample.labels[sample.labels[:, 0] >= 0]
            objects = cxcywh_to_xyxy(torch.from_numpy(rows[:, 1:]) * side).to(device)
            overlaps = iou(objects[:, None], image_boxes, eps=0.0) >= FOUND_IOU
            numbers, found = overlaps.nonzero(as_tuple=True)
            best = image_scores.new_zeros(len(objects), image_scores.shape[1])
            best.scatter_reduce_(0, numbers[:, None].expand(-1, image_scores.shape[1]), image_scores[found], "amax")
            labels.append(rows[:, 0])
            scores.append(best.cpu().numpy())
    return np.concatenate(labels), np.concatenate(scores) if scores else np.zeros((0, 0), np.float32)


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
