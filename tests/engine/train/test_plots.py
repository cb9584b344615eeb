"""The charts of a run, and what TensorBoard shows."""

import errno
from unittest.mock import Mock

import numpy as np
import pytest

from engine.train import plots
from engine.train.hooks import TensorBoard
from engine.train.plots import add_image, add_pr_curves
from engine.train.trainer import Epoch
from tests.engine.train.watched_trainer import build
from tests.helpers.scoring import evaluation_of, make_result
from tests.helpers.tiny import make_batch

NAMES = ("Katze", "größer", "снег", "猫")


def test_tensorboard_shows_images_and_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path)
    tracker.start(build())
    tracker.write(add_image, "mosaic", np.arange(48, dtype=np.uint8).reshape(4, 4, 3), 3)
    tracker.write(add_pr_curves, make_result((8, 0)), ["cat", "dog"], 1)
    tracker.close()  # also after an error
    tracker.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "images": 0}).Reload()
    assert events.Images("mosaic")[0].width == 4
    assert "pr/cat" in events.Tags()["tensors"]
    assert "pr/dog" not in events.Tags()["tensors"]  # no ground truth


def test_counts_of_pr_curves_reproduce_precision_and_recall():
    writer = Mock()
    add_pr_curves(writer, make_result((8,)), ["cat"], 1)
    curve = writer.add_pr_curve_raw.call_args.kwargs
    tp = curve["true_positive_counts"]
    fp = curve["false_positive_counts"]
    fn = curve["false_negative_counts"]
    recall = curve["recall"]
    precision = curve["precision"]
    assert np.allclose(tp + fn, 8)
    assert np.allclose(tp / 8, recall)
    seen = tp > 0
    assert np.allclose((tp / np.maximum(tp + fp, 1e-12))[seen], precision[seen])
    assert not curve["true_negative_counts"].any()


def test_a_run_goes_on_when_its_plots_cannot_be_drawn(tmp_path, monkeypatch, caplog):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write_image", "write_preview"):
        monkeypatch.setattr(plots, name, fail)
    monkeypatch.setattr(plots, "draw_batch", lambda *_: np.zeros((4, 4, 3), np.uint8))
    monkeypatch.setattr(plots.ReportPage, "write", fail)
    monkeypatch.setattr(plots, "subject_of", Mock())
    hook = plots.Plots(Mock())
    trainer = build(folder=tmp_path)
    hook.start(trainer)
    trainer.batches = [make_batch(2)]
    hook.after_step(trainer)
    for number in (1, 2):
        hook.epoch_saved(trainer, Epoch(number, evaluation=evaluation_of(make_result())))
    hook.finish(trainer)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / name}: cannot be drawn ([Errno 28] No space left on device)"
        for name in ("report.html", "train_batch0.jpg", "val_predictions.jpg")
    ]
