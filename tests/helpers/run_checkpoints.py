"""Checkpoints of runs without a model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.train.checkpoint import (
    Checkpoint,
    CheckpointHeader,
    DataFingerprint,
    Progress,
    RunDescription,
    SaveContext,
    StoredState,
)
from utils.config.settings import Hyperparameters, TrainConfig

STORED = {
    "run_id": "run",
    "model_spec": {},
    "names": [],
    "used_classes": [],
    "imgsz": 640,
    "bits": 8,
    "config": TrainConfig(batch_size=8, epochs=10),
    "hyp": Hyperparameters(),
    "data": {},
    "identity": DataFingerprint(train_labels="a", val_labels="b"),
    "val_images": [],
    "tile": 0,
    "pretrained": {},
    "new_lr_mult": 1.0,
    "origin": {},
    "command": TrainConfig(),
    "run": SaveContext(epoch_batches=10, images=80, seconds=1.0, world_size=2, device="cpu"),
    "progress": Progress(),
    "metrics": {"AP": 0.5},
    "model": {},
    "ema": {},
    "optimizer": {},
    "scaler": {},
}


def checkpoint_of(**changes) -> Checkpoint:
    """Returns a checkpoint with the values of `STORED`, except ``changes``, by their keys in the file."""
    values: dict[str, Any] = STORED | changes

    def part(kind: type) -> Any:
        return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})

    return Checkpoint(
        header=part(CheckpointHeader),
        description=part(RunDescription),
        state=part(StoredState),
        rows=values.get("rows", []),
        path=values.get("path", Path()),
    )
