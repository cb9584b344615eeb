from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.data_identity import DataIdentity
from engine.checkpoint.progress import PendingEpoch, Progress
from engine.run.restore import EpochChange, EpochData, adapt_progress, pending_epoch, restore_run, warn_of_lost_results
from engine.run.run import RunSettings, StartedFrom
from models.detector import build_detector
from tests.helpers.run_checkpoints import STORED, checkpoint_of
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL
from tests.helpers.training import continued_run
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext


def inside() -> Progress:
    return Progress(epoch=2, batch=6, step=26, updates=26, loss_sums=[1.0, 2.0], finite_steps=6)


def resumed(
    progress: Progress,
    *,
    epoch_batches: int = 10,
    images: int = 80,
    labels: str = "a",
    stored: dict[str, Any] | None = None,
    hyp: Hyperparameters | None = None,
    **settings: Any,
) -> tuple[Progress, list[str]]:
    config = TrainConfig(**{"batch_size": 8, "epochs": 10, **settings})
    identity = DataIdentity(train_labels=labels, val_labels="b")
    data = EpochData(batches=epoch_batches, images=images, identity=identity)
    checkpoint = checkpoint_of(progress=progress, **(stored or {}))
    return adapt_progress(EpochChange(checkpoint, RunSettings(config, hyp or Hyperparameters()), data))


def test_an_unchanged_resume_prints_nothing():
    boundary = Progress(epoch=3, step=30, updates=30)
    trained = Progress(epoch=2, batch=10, step=30, updates=30, buffers_averaged=True)
    for progress in (inside(), boundary, trained):
        assert resumed(progress) == (progress, [])


def test_more_epochs_keep_the_position_and_print_the_schedules():
    position, lines = resumed(inside(), epochs=20)
    assert position == inside()
    assert lines == ["resume: the learning rate continues from its value after 13% of 20 epochs"]


def test_another_batch_size_keeps_the_position_among_the_images():
    position, lines = resumed(inside(), batch_size=16, epoch_batches=5)
    assert (position.epoch, position.batch, position.step, position.updates) == (2, 3, 13, 13)
    assert (position.loss_sums, position.finite_steps) == ([], 0)
    assert "continues at batch 3 of the 5 of epoch 3" in lines[0]
    position, _ = resumed(inside(), batch_size=4, epoch_batches=20, nominal_batch=20)
    assert (position.batch, position.updates) == (10, 2 * 4 + 2)


@pytest.mark.parametrize(("nominal_batch", "batch", "updates"), [(32, 4, 2 * 3 + 1), (16, 6, 2 * 5 + 3)])
def test_other_steps_repeat_no_batch_whose_losses_are_counted(nominal_batch, batch, updates):
    position, lines = resumed(inside(), nominal_batch=nominal_batch)
    assert (position.epoch, position.batch, position.updates) == (2, batch, updates)
    assert (position.loss_sums, position.finite_steps) == ([], 0)
    assert f"continues at batch {batch} of the 10 of epoch 3" in lines[0]


@pytest.mark.parametrize(("batch_size", "epoch_batches"), [(16, 5), (4, 20), (3, 27), (80, 1), (100, 1)])
def test_an_epoch_whose_steps_are_done_keeps_its_losses_with_another_batch_size(batch_size, epoch_batches):
    """Only its validation is missing: no step follows from which its losses could come."""
    trained = Progress(
        epoch=2, batch=10, step=30, updates=30, loss_sums=[1.0, 2.0], finite_steps=10, buffers_averaged=True
    )
    position, lines = resumed(trained, batch_size=batch_size, epoch_batches=epoch_batches)
    assert (position.epoch, position.batch) == (2, epoch_batches)
    assert position.step == position.updates == 3 * epoch_batches
    assert position.mean_losses(["box", "cls"]) == {"box": 0.1, "cls": 0.2}
    assert position.buffers_averaged
    assert "batch" not in "".join(lines)


def test_changed_images_restart_the_epoch():
    position, lines = resumed(inside(), labels="other", epoch_batches=12, images=96)
    assert (position.epoch, position.batch, position.updates) == (2, 0, 24)
    assert lines[0] == "resume: begins epoch 3 again"


@pytest.mark.parametrize(
    ("stored", "changes", "keeps"),
    [
        ({}, {"labels": "other"}, True),
        ({}, {"labels": "other", "images": 79}, False),  # in as many batches, but in another permutation
        ({}, {"seed": 1}, False),
        ({}, {"rect": True}, False),
        ({}, {"image_weights": True}, False),
        ({}, {"repeat_factor": 0.1}, False),
        ({}, {"quad": True}, True),
        ({}, {"imgsz": 320}, True),
        ({"rect": True}, {"rect": True}, True),
        ({"rect": True}, {"rect": True, "imgsz": 320}, False),
        ({"rect": True}, {"rect": True, "batch_size": 16, "epoch_batches": 5}, False),
        ({"rect": True}, {"rect": True, "labels": "other"}, False),  # or other sizes of images
        ({"image_weights": True}, {"image_weights": True}, True),
        ({"image_weights": True}, {"image_weights": True, "labels": "other"}, False),
        ({"repeat_factor": 0.1}, {"repeat_factor": 0.1}, True),
        ({"repeat_factor": 0.1}, {"repeat_factor": 0.1, "labels": "other"}, False),
    ],
)
def test_another_order_of_the_images_begins_the_epoch_again(stored, changes, keeps):
    values = {"config": dataclasses.replace(STORED["config"], **stored)}
    position, lines = resumed(inside(), stored=values, **changes)
    if keeps:
        assert position == inside()
    else:
        assert (position.epoch, position.batch, position.loss_sums) == (2, 0, [])
        assert "resume: begins epoch 3 again" in lines


@pytest.mark.parametrize(("tile", "keeps"), [(64, False), (0, True)])
def test_another_number_of_background_tiles_begins_the_epoch_again(tile, keeps):
    position, _ = resumed(inside(), stored={"tile": tile}, hyp=Hyperparameters(tile_backgrounds=0.05))
    assert position.batch == (6 if keeps else 0)


@pytest.mark.parametrize("end_reason", ["", "a callback has ended it"])
def test_a_new_position_is_logged_only_if_steps_follow(caplog, end_reason):
    caplog.set_level("INFO", logger="lockstep")
    ctx = DistributedContext.single()
    step = make_train_step(ctx, build_detector(TINY_MODEL, 2))
    stored = checkpoint_of(progress=inside())
    checkpoint = Checkpoint.capture(ctx, step, stored.header, stored.description)
    assert checkpoint is not None
    settings = RunSettings(dataclasses.replace(STORED["config"], batch_size=16), Hyperparameters())
    data = EpochData(batches=5, images=80, identity=STORED["identity"])
    plan = continued_run(settings, inside(), end_reason=end_reason)
    assert restore_run(ctx, plan, checkpoint, step, data).progress.batch == 3
    assert any("continues at batch 3 of the 5" in message for message in caplog.messages) == (not end_reason)


def test_an_epoch_whose_steps_are_done_repeats_none_in_another_order():
    trained = Progress(epoch=2, batch=10, step=30, updates=30, buffers_averaged=True)
    assert resumed(trained, seed=1) == (trained, [])


def test_only_rank_0_keeps_the_weights_of_a_pending_epoch():
    """A float per parameter is a whole model."""
    pending = PendingEpoch(
        row={"time": 1.0}, is_closing=True, progress=Progress(epoch=3), ema={"weight": torch.ones(2)}
    )
    checkpoint = checkpoint_of(progress=Progress(epoch=3), pending=pending)
    ctx = DistributedContext.single()
    assert StartedFrom.of(checkpoint).lacks_scores(10)
    assert not StartedFrom.of(checkpoint_of()).lacks_scores(10)
    assert pending_epoch(ctx, checkpoint) is pending
    on_rank_1 = pending_epoch(dataclasses.replace(ctx, rank=1), checkpoint)
    assert on_rank_1 == dataclasses.replace(pending, ema={})


@pytest.mark.parametrize(("epochs", "close_mosaic", "is_closing"), [(10, 1, False), (10, 8, True), (3, 1, True)])
def test_an_epoch_that_becomes_the_last_is_scored_like_a_pending_one(tmp_path, epochs, close_mosaic, is_closing):
    """``--val-every`` had left it out. It keeps its row, and the loss with which it was trained."""
    (tmp_path / "results.csv").write_text("epoch,time,train/box,speed/data_wait\n2,1,9,9\n3,1.5,0.25,0.01\n")
    progress = Progress(epoch=3)
    ema = {"weight": torch.ones(2)}
    checkpoint = checkpoint_of(
        progress=progress,
        metrics={},
        ema=ema,
        path=tmp_path / "last.pt",
        config=TrainConfig(epochs=epochs, val_every=0),
        hyp=Hyperparameters(close_mosaic=close_mosaic),
    )
    row = {"time": 1.5, "train/box": 0.25, "speed/data_wait": 0.01}
    expected = PendingEpoch(row=row, is_closing=is_closing, progress=progress, ema=ema)
    ctx = DistributedContext.single()
    started_from = StartedFrom.of(checkpoint)
    assert (started_from.lacks_scores(3), started_from.lacks_scores(4)) == (True, False)
    assert pending_epoch(ctx, checkpoint) == expected
    within_epoch = checkpoint_of(progress=Progress(epoch=3, batch=1), metrics={})  # the weights of epoch 3 have gone
    assert not StartedFrom.of(within_epoch).lacks_scores(3)


@pytest.mark.parametrize(
    ("recorded", "is_pending", "lost"),
    [
        ("1 2 3", False, ""),
        ("1 2", True, ""),
        ("1", False, "2 epochs, from epoch 2 to 3"),
        ("", True, "2 epochs, from epoch 1 to 2"),
    ],
)
def test_results_that_a_power_cut_has_taken_are_named(tmp_path, caplog, recorded, is_pending, lost):
    if recorded:
        (tmp_path / "results.csv").write_text("\n".join(["epoch", *recorded.split(), ""]))
    progress = Progress(epoch=3)
    pending = PendingEpoch(row={}, is_closing=False, progress=progress, ema={}) if is_pending else None
    checkpoint = checkpoint_of(progress=progress, pending=pending, path=tmp_path / "last.pt")
    with caplog.at_level("WARNING", "lockstep"):
        warn_of_lost_results(checkpoint)
    messages = [f"{tmp_path}/results.csv: lacks the results of {lost}"] if lost else []
    assert caplog.messages == messages
