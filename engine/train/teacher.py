"""A trained model, the teacher, whose outputs are targets of another: ``--teacher``, and ``--keep-old``.

With ``--teacher`` a model learns from labels and from a larger one's outputs for the same augmented images (Hinton et
al. 2015). With ``--keep-old`` the teacher is the model of ``--weights``; the new model has its classes, and after them
those of the data set, and learns each from the labels or from the teacher (models/losses/distillation.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from data.source.dataset_spec import DatasetSpec, class_names
from engine.checkpoint.checkpoint import Checkpoint
from models.detector import Detector
from models.losses.distillation import Teacher
from models.weights.download import fetch_weights
from models.weights.load import load_detector
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
    flag: str  # that asks for it
    path: str  # absolute
    sha256: str  # of its tensors

    @property
    def stored(self) -> dict[str, str]:
        """What checkpoints contain."""
        return {"path": self.path, "sha256": self.sha256}

    def extended(self, spec: DatasetSpec, name: str) -> DatasetSpec:
        """For ``--keep-old``: the data set ``spec`` with the classes of the teacher, the file ``name``, before its own.
        Raises UserError if it labels all of them."""
        self._check_channels(spec, name)
        extended = spec.extended(self.detector.names, name)
        labeled = class_names(next(iter(extended.splits.values())).parts[0], single_cls=False)
        kept = [old for old in self.detector.names if old not in labeled]
        if not kept:
            raise UserError(
                f"--keep-old: {spec.source} has all classes of {name}, so none is to be kept; leave it out, or name "
                "the labeled ones with --classes"
            )
        text = "--keep-old: %s of %s kept, %s learned from labels; validation scores the latter"
        get_logger().info(text, listed(kept), name, listed(labeled))
        return extended

    def check(self, spec: DatasetSpec, model: Detector) -> None:
        """Raises UserError if ``model`` cannot learn from the teacher; logs what it learns."""
        flag, detector = self.flag, self.detector
        if not model.head.distills:
            raise UserError(
                f"{flag}: {model.spec['name']} has anchors or objectness; only models with anchor-free heads without "
                "objectness can be taught (YOLOv8, YOLOv9, YOLO11, YOLO26)"
            )
        if detector.strides != model.strides:
            strides = f"the teacher has strides {listed(detector.strides)}, the model {listed(model.strides)}"
            raise UserError(f"{flag}: {strides}; choose models of the same strides")
        self._check_channels(spec, self.path)
        taught = [name for name in model.names if name in detector.names]
        if not taught:
            raise UserError(f"{flag}: {self.path} and {spec.source} have no class in common")
        if flag == "--teacher":
            untaught = [name for name in model.names if name not in detector.names]
            left = f"; {listed(untaught)} learned from labels alone" if untaught else ""
            size = f"{sum(p.numel() for p in detector.parameters()):,} parameters"
            get_logger().info("--teacher: %s, %s, teaches %s%s", self.path, size, counted(len(taught), "class"), left)

    def _check_channels(self, spec: DatasetSpec, name: str) -> None:
        if self.detector.channels != spec.pixels.channels:
            raise UserError(
                f"{self.flag}: {name} takes images of {counted(self.detector.channels, 'channel')}, {spec.source} has "
                f"images of {spec.pixels.channels}"
            )

    def build(self, model: Detector) -> Teacher:
        """The teacher as the loss of ``model`` takes it."""
        built = Teacher(self.detector, model.names, dual=model.head.is_dual, unlabeled_only=self.flag == "--keep-old")
        return built.to(memory_format=torch.channels_last)


def check_teacher(ctx: DistributedContext, config: TrainConfig, *, resumes: bool = False) -> None:
    """Raises UserError for settings that ``--teacher`` or ``--keep-old`` excludes."""
    flag = "--keep-old" if config.keep_old else "--teacher"
    if ctx.eval_ranks:
        raise UserError(f"{flag}: the teacher runs in the training processes only; leave out --eval-ranks")
    refusals = {
        "name the model whose classes are kept with --weights": not config.weights,
        f"the model is that of --weights; leave out --model {config.model}": config.model,
        "the teacher is the model of --weights; leave out --teacher": config.teacher and not resumes,
        "with --single-cls there are no new classes; leave out one of the two": config.single_cls,
    }
    for reason, is_given in refusals.items():
        if config.keep_old and is_given:
            raise UserError(f"--keep-old: {reason}")


def open_teacher(ctx: DistributedContext, config: TrainConfig, checkpoint: Checkpoint | None) -> TeacherFile:
    """The teacher of a run. A resumed run needs the file it began with, or ``--teacher`` with where that is now.

    Raises UserError for a model whose loss cannot take another's outputs, and on all processes when theirs differ.
    """
    known = checkpoint.teacher if checkpoint else {}
    flag, begun = "--keep-old" if config.keep_old else "--teacher", checkpoint is not None
    check_teacher(ctx, config, resumes=begun)
    named = config.teacher or config.weights
    if begun:
        stored = Path(known.get("path", ""))
        if not known:
            raise UserError(f"{checkpoint.path}: this run began without a teacher; leave out --teacher")
        if named == checkpoint.config.teacher or not config.teacher:
            if not stored.is_file():
                raise UserError(f"{stored}: no such file, the teacher of this run; name where it is: --teacher PATH")
            named = str(stored)
    path = fetch_weights(named, ctx=ctx, offline=config.offline)
    detector, _ = load_detector(path)
    if not detector.head.distills:
        raise UserError(
            f"{flag}: {named} has anchors or objectness; only models with anchor-free heads without objectness can "
            "teach (YOLOv8, YOLOv9, YOLO11, YOLO26)"
        )
    if len(set(detector.names)) < len(detector.names):
        raise UserError(f"{flag}: {named} has classes of one name: {listed(detector.names)}")
    teacher = TeacherFile(detector.eval(), flag, str(Path(path).resolve()), _digest(detector))
    check_agreement(ctx, {"the checksum of the teacher's weights": teacher.sha256})
    if begun and teacher.sha256 != known.get("sha256"):
        raise UserError(f"{flag}: {named} is not the teacher that this run began with ({stored})")
    return teacher


def _digest(detector: Detector) -> str:
    digest = hashlib.sha256()
    for tensor in detector.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
