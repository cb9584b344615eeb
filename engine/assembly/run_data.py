"""Opens the data of a run: the data set, its fitness metric and its teacher."""

from __future__ import annotations

from dataclasses import dataclass

from data.dataset.spec import DatasetSpec, DataSource, class_names
from data.folds.held_out import hold_out_validation
from data.index.index import DatasetIndex
from data.index.shared_images import warn_of_shared_images
from data.open import open_data
from engine.assembly.teacher import TeacherFile, open_teacher
from engine.evaluation.fitness import Fitness
from engine.report.summary import warn_of_small_boxes
from engine.run.run import StartedFrom
from models.detector import Detector
from models.losses.distillation import Teacher
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


@dataclass(frozen=True)
class RunData:
    """The data set of a run, its fitness metric and its teacher."""

    spec: DatasetSpec
    fitness: Fitness
    teacher: TeacherFile | None
    used_classes: tuple[str, ...]  # names of the data set's classes that ``--classes`` chose

    def build_teacher(self, model: Detector) -> Teacher | None:
        """Builds the teacher in the form that the loss of ``model`` takes, if there is one."""
        return None if self.teacher is None else self.teacher.build(model)

    def check_splits(
        self, ctx: DistributedContext, train: DatasetIndex, val: DatasetIndex, *, imgsz: int, stride: int
    ) -> None:
        """Raises UserError if the validation split has no objects for ``--fitness``. Warns about data that would spoil
        the result."""
        self.fitness.check_objects(val.ground_truth())
        if ctx.is_main:
            warn_of_shared_images(self.spec, train, val)
            warn_of_small_boxes(train, imgsz=imgsz, stride=stride)


def open_run_data(
    ctx: DistributedContext, config: TrainConfig, source: DataSource, started_from: StartedFrom | None
) -> RunData:
    """Opens the data set, on each node's own disk with ``--stage``, and the teacher, if the run has one.

    With ``--keep-old`` the classes of the teacher come before those of the data set. With ``--val-fraction`` the main
    process chooses the validation images of a new run; a run that continues uses the images in its checkpoint.
    """
    teacher = open_teacher(ctx, config, started_from) if config.teacher or config.keep_old else None
    spec = open_data(source, ctx)
    used_classes = class_names(spec, single_cls=False) if config.classes else ()
    if teacher is not None and config.keep_old:
        spec = teacher.extended(spec, config.weights)
    if config.val_fraction:
        spec = hold_out_validation(ctx, config, spec, started_from.description.val_images if started_from else [])
    fitness = Fitness.parse(config.fitness, class_names(spec, config.single_cls))
    return RunData(spec, fitness, teacher, used_classes)
