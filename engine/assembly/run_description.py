"""Describes a run for its checkpoints: its settings, data and model."""

from __future__ import annotations

from engine.assembly.run_data import RunData
from engine.assembly.starting_model import StartingModel
from engine.optim.build import LoadedParameters
from engine.train.checkpoint import DataIdentity, RunDescription
from engine.train.resume import TrainingRun
from utils.files.paths import normal_path


def describe_run(
    run: TrainingRun, data: RunData, starting_model: StartingModel, loaded: LoadedParameters, identity: DataIdentity
) -> RunDescription:
    """Returns the description of a run's settings, data and model that all of its checkpoints store."""
    spec = data.spec
    model = starting_model.model
    origin = starting_model.origin
    if data.teacher is not None and run.started_from is None:  # a run that continues has stored both
        origin = data.teacher.origin_of_student(origin)
    root = "" if run.config.stage else str(spec.root)  # a staged copy exists on this node only
    return RunDescription(
        run_id=run.run_id,
        model_spec=model.spec,
        names=list(model.names),
        used_classes=list(data.used_classes),
        imgsz=run.config.imgsz,
        bits=spec.pixels.bits,
        hyp=run.hyp,
        config=run.config,
        data={"source": str(normal_path(spec.source)), "root": root},
        identity=identity,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in starting_model.pretrained.items()},
        new_lr_mult=loaded.new_lr_mult,
        origin=origin,
        teacher=data.teacher.stored if data.teacher else {},
    )
