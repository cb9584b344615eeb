"""Opens the data of a run, and describes it for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from data.folds.held_out import hold_out_validation
from data.index.index import DatasetIndex
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.open import open_data
from engine.assembly.starting_model import StartingModel
from engine.assembly.teacher import TeacherFile, open_teacher
from engine.checkpoint.description import RunDescription
from engine.evaluation.metrics import Fitness
from engine.optim.build import LoadedParameters
from engine.run.run import RunPlan, TrainingRun
from models.detector import Detector
from models.losses.distillation import Teacher
from utils.distributed.context import DistributedContext, broadcast_object
from utils.files.data_location import describe_location


@dataclass(frozen=True)
class RunData:
    """The data set of a run, its fitness metric and its teacher."""

    spec: DatasetSpec
    fitness: Fitness
    teacher: TeacherFile | None

    def build_teacher(self, model: Detector) -> Teacher | None:
        """Builds the teacher as the loss of ``model`` takes it, if there is one."""
        return None if self.teacher is None else self.teacher.build(model)


def open_run_data(ctx: DistributedContext, plan: RunPlan) -> RunData:
    """Opens the data set, on each node's own disk with ``--stage``, and the teacher, if the run has one.

    With ``--keep-old`` the classes of the teacher come before those of the data set. With ``--val-fraction`` the main
    process chooses the validation images of a new run; a run that continues has those of its checkpoint.
    """
    config = plan.settings.config
    checkpoint = plan.checkpoint
    teacher = open_teacher(ctx, config, checkpoint) if config.teacher or config.keep_old else None
    spec = open_data(plan.data_source, ctx)
    if teacher is not None and config.keep_old:
        spec = teacher.extended(spec, config.weights)
    if config.val_fraction:
        spec = hold_out_validation(ctx, config, spec, checkpoint.description.val_images if checkpoint else [])
    fitness = Fitness.parse(config.fitness, class_names(spec, config.single_cls))
    return RunData(spec, fitness, teacher)


def data_identity(ctx: DistributedContext, train: DatasetIndex, val: DatasetIndex) -> dict[str, str]:
    """Returns what identifies the data of a run, see `RunDescription.data`. All ranks get that of rank 0: fingerprints
    depend on modification times, and machines with copies of their own have others.

    ``train``, ``val``: indexes of the samples, which are tiles for data with tiles.
    """
    fingerprint = f"{train.fingerprint_as_used()}-{val.fingerprint_as_used()}"
    return broadcast_object(ctx, {"fingerprint": fingerprint, "val_labels": val.label_digest()})


def describe_run(
    run: TrainingRun, data: RunData, starting_model: StartingModel, loaded: LoadedParameters, identity: dict[str, str]
) -> RunDescription:
    """Returns what all checkpoints of the run say of its settings, data and model."""
    spec = data.spec
    model = starting_model.model
    origin = starting_model.origin
    if data.teacher is not None and run.started_from is None:  # a run that continues has stored both
        origin = data.teacher.origin_of_student(origin)
    root = "" if run.config.stage else str(spec.root)  # a staged copy is of this node alone
    return RunDescription(
        model_spec=model.spec,
        names=list(model.names),
        imgsz=run.config.imgsz,
        bits=spec.pixels.bits,
        hyp=run.hyp,
        config=run.config,
        data=describe_location(spec.source, root, run.folder) | identity,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in starting_model.pretrained.items()},
        new_lr_mult=loaded.new_lr_mult,
        origin=origin,
        teacher=data.teacher.stored if data.teacher else {},
    )
