from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.progress import Progress
from engine.run.best_epoch import keep_best_epoch
from tests.helpers.run_checkpoints import STORED, save_checkpoint
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.torch_file import read_checkpoint

BEFORE = Progress(epoch=4, best_epoch=3, best_fitness=0.3)
LATER = Progress(epoch=9, best_epoch=9, best_fitness=0.5)
OTHER_TRAIN = replace(STORED["identity"], train_labels="other")
OTHER_VAL = replace(STORED["identity"], val_labels="other")


@pytest.mark.parametrize(
    ("files", "changes", "best", "aside"),
    [
        ({"best": replace(BEFORE, epoch=3)}, {}, 3, []),  # nothing to do
        ({"best": replace(BEFORE, epoch=3)}, {"config": TrainConfig(epochs=20)}, 3, []),
        ({"best": LATER}, {"config": TrainConfig(epochs=20)}, -1, ["best9.pt"]),
        ({"best": LATER, "epoch3": replace(BEFORE, epoch=3)}, {"config": TrainConfig(epochs=20)}, 3, ["best9.pt"]),
        ({"best": LATER, "epoch3": replace(LATER, epoch=3)}, {"config": TrainConfig(epochs=20)}, -1, ["best9.pt"]),
        # The epoch was trained twice, with other settings.
        ({"best": replace(BEFORE, epoch=3, best_fitness=0.4)}, {"config": TrainConfig(epochs=20)}, -1, ["best3.pt"]),
        ({"best": LATER, "best9": LATER}, {"config": TrainConfig(epochs=20)}, -1, ["best9-2.pt", "best9.pt"]),
        ({"best": LATER}, {}, -1, []),  # the run repeats epoch 9, and writes the file again
        # A file that has moved changes no step; a teacher of other content does.
        (
            {"best": LATER},
            {"config": TrainConfig(batch_size=8, epochs=10, teacher="/new/t.pt", model="/m.yaml")},
            -1,
            [],
        ),
        ({"best": LATER}, {"teacher": {"path": "/t.pt", "sha256": "other"}}, -1, ["best9.pt"]),
        ({}, {}, -1, []),
        ({"best": replace(BEFORE, epoch=3)}, {"imgsz": 96, "config": TrainConfig(imgsz=96)}, -1, ["best3.pt"]),
        ({"best": replace(BEFORE, epoch=3)}, {"identity": OTHER_TRAIN}, 3, []),
        ({"best": replace(BEFORE, epoch=3)}, {"identity": OTHER_VAL}, -1, ["best3.pt"]),
        ({"best": LATER}, {"identity": OTHER_TRAIN}, -1, ["best9.pt"]),
    ],
)
def test_the_best_epoch_of_a_resumed_run_is_that_of_its_best_pt(tmp_path: Path, files, changes, best, aside):
    for name, progress in files.items():
        save_checkpoint(tmp_path / f"{name}.pt", progress)
    checkpoint = save_checkpoint(tmp_path / "epoch4.pt", BEFORE)
    description = replace(checkpoint.description, **changes)
    single = DistributedContext.single()
    checkpointer = Checkpointer(tmp_path, ctx=single, description=description)
    progress = replace(BEFORE)
    keep_best_epoch(single, checkpoint.description, checkpointer, progress)
    checkpointer.flush()
    assert (progress.best_epoch, progress.best_fitness) == (best, 0.3 if best == 3 else -1.0)
    assert sorted(path.name for path in tmp_path.glob("best?*.pt")) == aside
    if best == 3:
        assert read_checkpoint(tmp_path / "best.pt")["progress"]["epoch"] == 3


def test_a_best_pt_is_kept_when_a_run_goes_back_to_before_its_first_validation(tmp_path: Path):
    save_checkpoint(tmp_path / "best.pt", LATER)
    start = Progress(epoch=1)
    checkpoint = save_checkpoint(tmp_path / "epoch1.pt", start)
    changes = {"config": TrainConfig(epochs=20)}
    description = replace(checkpoint.description, **changes)
    single = DistributedContext.single()
    checkpointer = Checkpointer(tmp_path, ctx=single, description=description)
    keep_best_epoch(single, checkpoint.description, checkpointer, start)
    assert start == Progress(epoch=1)
    assert not (tmp_path / "best.pt").exists()
    assert read_checkpoint(tmp_path / "best9.pt")["progress"]["epoch"] == 9


@pytest.mark.parametrize(("run_id", "best"), [("run", 3), ("other", -1)])
def test_the_best_pt_of_another_run_with_the_same_scores_is_not_taken(tmp_path: Path, run_id, best):
    """The file stays until this run has a better epoch."""
    checkpoint = save_checkpoint(tmp_path / "last.pt", BEFORE, run_id="run")
    save_checkpoint(tmp_path / "best.pt", replace(BEFORE, epoch=3), run_id=run_id)
    single = DistributedContext.single()
    checkpointer = Checkpointer(tmp_path, ctx=single, description=checkpoint.description)
    progress = replace(BEFORE)
    keep_best_epoch(single, checkpoint.description, checkpointer, progress)
    assert progress.best_epoch == best
    assert (tmp_path / "best.pt").exists()
