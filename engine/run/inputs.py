"""What a run is made from: its data, weights and teacher as opened, and its model before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from data.samples.dataset import AugmentedImages
from data.samples.readers import SampleReader
from data.spec import DatasetSpec
from engine.evaluation.fitness import Fitness
from engine.run.teacher import TeacherFile
from engine.train.checkpoint import DataFingerprint
from engine.train.lr_probe import WeightsProbe
from models.detector import Detector
from models.losses.distillation import Teacher
from models.weights.read import StoredWeights


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data set and the other files of a run."""

    spec: DatasetSpec  # with the classes of a teacher that are kept, and the images that are held out
    names: tuple[str, ...]  # of the model's classes
    used_classes: list[str]  # names of the data set's classes that --classes chose
    fitness: Fitness
    weights: StoredWeights | None  # from which a new run starts
    meta_model: Detector  # the run's model, on the meta device
    teacher: TeacherFile | None
    samples: AugmentedImages  # of the training split, with the flips of the settings
    val: SampleReader
    fingerprint: DataFingerprint


class LoadedWeights(NamedTuple):
    """The weights with which a model starts."""

    pretrained: dict[str, tuple[int, ...]]  # rows of new classes, by name of each parameter from weights
    tensors: list[Tensor]  # from files, equal on all ranks
    origin: dict[str, str]  # fields of `models.weights.origin.Origin`
    probe: WeightsProbe | None = None  # how well the weights of a new run detect its objects; None: not measured
    lines: Sequence[str] = ()  # of the log


class StartingModel(NamedTuple):
    """A model before its first step."""

    model: Detector  # on its device
    weights: LoadedWeights
    teacher: Teacher | None  # for the loss of this model

    @property
    def is_complete(self) -> bool:
        """Whether all parameters come, or came when the run began, from weights."""
        rows = self.weights.pretrained
        return all(name in rows and not rows[name] for name, _ in self.model.named_parameters())
