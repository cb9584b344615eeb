"""Checkpoints of runs without a model, and folders in which a new run follows an earlier one (``--exist-ok``)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint, StoredState
from engine.checkpoint.data_identity import DataIdentity
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import CheckpointHeader, Progress, RunConditions
from utils.config.settings import Hyperparameters, TrainConfig
from utils.files.torch_file import write_checkpoint

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
    "identity": DataIdentity(train_labels="a", val_labels="b"),
    "val_images": [],
    "tile": 0,
    "pretrained": {},
    "new_lr_mult": 1.0,
    "origin": {},
    "run": RunConditions(epoch_batches=10, images=80, seconds=1.0, world_size=2, device="cpu"),
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
        path=values.get("path", Path()),
    )


def save_checkpoint(path: Path, progress: Progress, **changes) -> Checkpoint:
    """Writes the checkpoint of `checkpoint_of` to ``path``, and returns it."""
    checkpoint = checkpoint_of(progress=progress, path=path, **changes)
    write_checkpoint(checkpoint.content(), path)
    return checkpoint


def name_newest_run(folder: Path, run_id: str) -> None:
    """Makes ``run_id`` the newest run in ``folder``."""
    (folder / "settings.yaml").write_text(f"run_id: {run_id}\n")


def replace_earlier_run(folder: Path) -> None:
    """Makes a new run the newest one in ``folder``, where an earlier run has left its last.pt."""
    save_checkpoint(folder / "last.pt", Progress(), run_id="earlier")
    name_newest_run(folder, "new")
