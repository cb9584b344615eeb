"""The teacher: a trained model whose outputs are targets for another model (``--teacher``, ``--keep-old``).

With ``--teacher`` a model learns from labels and from a larger one's outputs for the same augmented images (Hinton et
al. 2015). With ``--keep-old`` the teacher is the model of ``--weights``; the new model has the teacher's classes
followed by those of the data set, and learns each class from the labels or from the teacher
(models/losses/distillation.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from data.spec import DatasetSpec, class_names
from models.detector import Detector
from models.losses.distillation import Teacher
from models.weights.download import fetch_weights
from models.weights.load import detector_of
from models.weights.origin import Origin, origin_of_run
from models.weights.read import read_weights
from utils.class_names import class_key
from utils.config.settings import TrainConfig
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted, listed


@dataclass(frozen=True)
class TeacherFile:
    """A teacher and where it came from."""

    detector: Detector  # on the CPU
    flag: str  # the flag that requested it
    source: str  # its name in the settings
    path: str  # absolute
    sha256: str  # checksum of its tensors
    origin: Origin

    def extend(self, spec: DatasetSpec, name: str) -> DatasetSpec:
        """Returns the data set ``spec`` with the classes of the teacher, the file ``name``, before its own
        (``--keep-old``). Raises UserError if the data set labels all classes of the teacher."""
        self._check_channels(spec)
        extended = spec.extended(self.detector.names, name)
        labeled = class_names(extended.parts_of(next(iter(extended.splits)))[0], single_cls=False)
        kept = [old for old in self.detector.names if old not in labeled]
        if not kept:
            raise UserError(
                f"--keep-old: {spec.source} has all classes of {name}, so none is left to keep; leave it out, or name "
                "the labeled ones with --classes"
            )
        message = "--keep-old: %s of %s kept, %s learned from labels; validation scores the latter"
        get_logger().info(message, listed(kept), name, listed(labeled))
        return extended

    def build(self, spec: DatasetSpec, model: Detector) -> Teacher:
        """Builds the teacher in the form that the loss of ``model`` takes, and logs what it teaches. Raises UserError
        if the model cannot learn from it."""
        _check_distills(model, f"{self.flag}: {model.spec['name']}", "be taught")
        self._check_channels(spec)
        if self.detector.strides != model.strides:
            theirs = listed([str(stride) for stride in self.detector.strides])
            ours = listed([str(stride) for stride in model.strides])
            raise UserError(f"{self.flag}: the teacher has strides {theirs}, the model {ours}; they must be the same")
        keeps_old = self.flag == "--keep-old"
        detector = self.detector
        teacher = Teacher(
            detector,  # type: ignore[arg-type]  # `open_teacher` has checked that its head distills
            model.names,
            dual=model.head.is_dual,
            unlabeled_only=keeps_old,
        )
        untaught = [name for number, name in enumerate(model.names) if number not in teacher.distilled_classes]
        if len(untaught) == len(model.names):
            raise UserError(f"{self.flag}: {self.path} and {spec.source} have no class in common")
        if not keeps_old:
            size = f"{sum(p.numel() for p in detector.parameters()):,} parameters"
            remark = f"; {listed(untaught)} learned from labels alone" if untaught else ""
            classes = counted(len(teacher.distilled_classes), "class")
            get_logger().info("--teacher: %s, %s, teaches %s%s", self.path, size, classes, remark)
        return teacher.to(memory_format=torch.channels_last)

    def _check_channels(self, spec: DatasetSpec) -> None:
        """Raises UserError if the images of ``spec`` do not have the number of channels that the teacher takes."""
        if self.detector.channels != spec.pixels.channels:
            raise UserError(
                f"{self.flag}: {self.path} takes images of {counted(self.detector.channels, 'channel')}, {spec.source} "
                f"has images of {spec.pixels.channels}"
            )


def open_teacher(ctx: DistributedContext, config: TrainConfig) -> TeacherFile | None:
    """Opens the teacher of a run; None if it has none. Raises UserError for a model that cannot teach, and on all
    processes if their teachers differ."""
    if not config.teacher and not config.keep_old:
        return None
    flag = "--keep-old" if config.keep_old else "--teacher"
    source = config.teacher or config.weights
    teacher = read_weights(fetch_weights(source, ctx=ctx, offline=config.offline))
    detector = detector_of(teacher).eval()
    _check_distills(detector, f"{flag}: {source}", "teach")
    if len({class_key(name) for name in detector.names}) < len(detector.names):
        raise UserError(f"{flag}: {source} has several classes with the same name: {listed(detector.names)}")
    digest = hashlib.sha256()
    for tensor in detector.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    sha256 = digest.hexdigest()
    check_agreement(ctx, {"the checksum of the teacher's weights": sha256})
    return TeacherFile(detector, flag, source, str(teacher.path.resolve()), sha256, origin_of_run(teacher))


def _check_distills(model: Detector, location: str, role: str) -> None:
    """Raises UserError, which begins with ``location``, unless a model of this kind can take the ``role``."""
    if not model.head.distills:
        raise UserError(
            f"{location} has anchors or objectness; only models with anchor-free heads without objectness can {role} "
            "(YOLOv8, YOLOv9, YOLO11, YOLO26)"
        )
