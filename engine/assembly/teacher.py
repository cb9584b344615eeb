"""The teacher: a trained model whose outputs are targets for another model (``--teacher``, ``--keep-old``).

With ``--teacher`` a model learns from labels and from a larger one's outputs for the same augmented images (Hinton et
al. 2015). With ``--keep-old`` the teacher is the model of ``--weights``; the new model has the teacher's classes
followed by those of the data set, and learns each class from the labels or from the teacher
(models/losses/distillation.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.dataset.spec import DatasetSpec, class_names
from engine.run.run import StartedFrom
from models.detector import Detector
from models.losses.distillation import Teacher
from models.weights.download import fetch_weights
from models.weights.load import detector_of
from models.weights.origin import Origin, origin_of_run, taught_by
from models.weights.read import read_weights
from utils.class_names import class_key
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.distributed.join import check_agreement
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted, listed


@dataclass(frozen=True)
class TeacherFile:
    """A teacher and where it came from."""

    detector: Detector  # on the CPU
    flag: str  # the flag that requested it
    path: str  # absolute
    sha256: str  # checksum of its tensors
    origin: Origin

    @property
    def stored(self) -> dict[str, str]:
        """The path and the checksum, which checkpoints store."""
        return {"path": self.path, "sha256": self.sha256}

    def origin_of_student(self, origin: dict[str, str]) -> dict[str, str]:
        """Returns the origin of a new run from weights of ``origin``, fields of `Origin`."""
        if self.flag == "--keep-old":  # the teacher is these weights
            return origin
        return taught_by(Origin(**origin), self.origin)._asdict()

    def extended(self, spec: DatasetSpec, name: str) -> DatasetSpec:
        """Returns the data set ``spec`` with the classes of the teacher, the file ``name``, before its own
        (``--keep-old``). Raises UserError if the data set labels all classes of the teacher."""
        self._check_channels(spec, name)
        extended = spec.extended(self.detector.names, name)
        labeled = class_names(extended.parts_of(next(iter(extended.splits)))[0], single_cls=False)
        kept = [old for old in self.detector.names if old not in labeled]
        if not kept:
            raise UserError(
                f"--keep-old: {spec.source} has all classes of {name}, so none is left to keep; leave it out, or name "
                "the labeled ones with --classes"
            )
        get_logger().info(
            "--keep-old: %s of %s kept, %s learned from labels; validation scores the latter",
            listed(kept),
            name,
            listed(labeled),
        )
        return extended

    def check(self, spec: DatasetSpec, model: Detector) -> None:
        """Raises UserError if ``model`` cannot learn from the teacher; logs what it learns."""
        flag = self.flag
        detector = self.detector
        _check_distills(model, f"{flag}: {model.spec['name']}", "be taught")
        if detector.strides != model.strides:
            teacher_strides = listed([str(stride) for stride in detector.strides])
            model_strides = listed([str(stride) for stride in model.strides])
            raise UserError(
                f"{flag}: the teacher has strides {teacher_strides}, the model {model_strides}; choose models of the "
                "same strides"
            )
        self._check_channels(spec, self.path)
        known = {class_key(name) for name in detector.names}
        taught = [name for name in model.names if class_key(name) in known]
        if not taught:
            raise UserError(f"{flag}: {self.path} and {spec.source} have no class in common")
        if flag == "--teacher":
            self._log_taught(taught, [name for name in model.names if name not in taught])

    def _log_taught(self, taught: Sequence[str], untaught: Sequence[str]) -> None:
        """Logs the size of the teacher, and the classes that it does and does not teach."""
        size = f"{sum(p.numel() for p in self.detector.parameters()):,} parameters"
        remark = f"; {listed(untaught)} learned from labels alone" if untaught else ""
        classes = counted(len(taught), "class")
        get_logger().info("--teacher: %s, %s, teaches %s%s", self.path, size, classes, remark)

    def _check_channels(self, spec: DatasetSpec, name: str) -> None:
        """Raises UserError if the images of ``spec`` do not have the number of channels that the teacher takes."""
        if self.detector.channels != spec.pixels.channels:
            raise UserError(
                f"{self.flag}: {name} takes images of {counted(self.detector.channels, 'channel')}, {spec.source} has "
                f"images of {spec.pixels.channels}"
            )

    def build(self, model: Detector) -> Teacher:
        """Builds the teacher in the form that the loss of ``model`` takes."""
        teacher = Teacher(
            self.detector,  # type: ignore[arg-type]  # `open_teacher` has checked that its head distills
            model.names,
            dual=model.head.is_dual,
            unlabeled_only=self.flag == "--keep-old",
        )
        return teacher.to(memory_format=torch.channels_last)


def check_teacher(ctx: DistributedContext, config: TrainConfig, *, resumes: bool = False) -> None:
    """Raises UserError for settings that ``--teacher`` or ``--keep-old`` excludes."""
    flag = "--keep-old" if config.keep_old else "--teacher"
    if ctx.eval_ranks:
        raise UserError(f"{flag}: the teacher runs in the training processes only; leave out --eval-ranks")
    if not config.keep_old:
        return
    refusals = {
        "name the model whose classes are kept with --weights": not config.weights,
        f"the model is that of --weights; leave out --model {config.model}": config.model,
        "the teacher is the model of --weights; leave out --teacher": config.teacher and not resumes,
        "with --single-cls there are no new classes; leave out one of the two": config.single_cls,
    }
    for reason, applies in refusals.items():
        if applies:
            raise UserError(f"--keep-old: {reason}")


def open_teacher(ctx: DistributedContext, config: TrainConfig, started_from: StartedFrom | None) -> TeacherFile:
    """Opens the teacher of a run. A resumed run needs the file that it began with, or ``--teacher`` with its new path.

    Raises UserError for a model that cannot teach, and on all processes if their teachers differ.
    """
    flag = "--keep-old" if config.keep_old else "--teacher"
    check_teacher(ctx, config, resumes=started_from is not None)
    source = config.teacher or config.weights
    if started_from is not None:
        source = _source_of_resumed(config, started_from, source)
    path = fetch_weights(source, ctx=ctx, offline=config.offline)
    stored = read_weights(path)
    detector = detector_of(stored)
    _check_distills(detector, f"{flag}: {source}", "teach")
    if len({class_key(name) for name in detector.names}) < len(detector.names):
        raise UserError(f"{flag}: {source} has several classes with the same name: {listed(detector.names)}")
    teacher = TeacherFile(
        detector=detector.eval(),
        flag=flag,
        path=str(Path(path).resolve()),
        sha256=_digest(detector),
        origin=origin_of_run(stored),
    )
    check_agreement(ctx, {"the checksum of the teacher's weights": teacher.sha256})
    if started_from is not None:
        _check_is_same(teacher, config, started_from, source)
    return teacher


def _check_distills(model: Detector, location: str, role: str) -> None:
    """Raises UserError, which begins with ``location``, unless a model of this kind can take the ``role``."""
    if not model.head.distills:
        raise UserError(
            f"{location} has anchors or objectness; only models with anchor-free heads without objectness can {role} "
            "(YOLOv8, YOLOv9, YOLO11, YOLO26)"
        )


def _source_of_resumed(config: TrainConfig, started_from: StartedFrom, source: str) -> str:
    """Returns the file of a resumed run's teacher: ``source`` if the command line names another ``--teacher`` than the
    run began with, or if the file is no longer in its place. Raises UserError if the run has no teacher, or if the file
    is in neither place."""
    if not started_from.description.teacher:
        raise UserError(f"{started_from.path}: this run began without a teacher; leave out --teacher")
    if config.teacher and source != started_from.description.config.teacher:
        return source
    stored_path = started_from.description.teacher.get("path", "")
    for path in (stored_path, source):  # --weights of --keep-old may have moved, or be elsewhere on this node
        if Path(path).is_file():
            return path
    new_path = f"{_flag_of_path(config)} PATH"
    raise UserError(f"{stored_path}: this run's teacher is no longer there; give its new path: {new_path}")


def _check_is_same(teacher: TeacherFile, config: TrainConfig, started_from: StartedFrom, source: str) -> None:
    """Raises UserError if the teacher of a resumed run, the file ``source``, is not the one that the run began with."""
    stored = started_from.description.teacher
    if teacher.sha256 == stored.get("sha256"):
        return
    stored_path = stored.get("path", "")
    if teacher.path == stored_path:
        raise UserError(
            f"{teacher.flag}: {source} has changed since the run began; restore it, or give a copy of it as it was: "
            f"{_flag_of_path(config)} PATH"
        )
    raise UserError(f"{teacher.flag}: {source} is not the teacher that this run began with ({stored_path})")


def _flag_of_path(config: TrainConfig) -> str:
    """Returns the flag that names the teacher's file."""
    return "--weights" if config.keep_old and not config.teacher else "--teacher"


def _digest(detector: Detector) -> str:
    """Returns the SHA-256 of all tensors."""
    digest = hashlib.sha256()
    for tensor in detector.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
