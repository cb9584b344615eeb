"""The charts of a run, and what TensorBoard shows."""

import errno
import time
from unittest.mock import Mock

import numpy as np
import pytest

from engine.hooks import plots
from engine.hooks.hook import Epoch
from engine.hooks.plots import TimeBudget, add_image, add_pr_curves
from engine.hooks.writers import TensorBoard
from models.detector import build_detector
from tests.helpers.scoring import evaluation_of, make_result
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL
from tests.helpers.training import hook_training
from utils.distributed.context import DistributedContext

NAMES = ("Katze", "größer", "снег", "猫")


def test_tensorboard_shows_images_and_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path)
    tracker.start(hook_training())
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


@pytest.mark.parametrize("renders", [False, True])
def test_a_run_goes_on_when_its_plots_cannot_be_drawn(tmp_path, monkeypatch, caplog, renders):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Loader:
        index = None

        def __len__(self) -> int:
            return 1

        def render(self, *_: int) -> None:
            if not renders:
                fail()

    for name in ("write_image", "write_preview"):
        monkeypatch.setattr(plots, name, fail)
    monkeypatch.setattr(plots, "draw_batch", lambda *_: np.zeros((4, 4, 3), np.uint8))
    monkeypatch.setattr(plots.ReportPage, "write", lambda *_: None)
    monkeypatch.setattr(plots, "read_columns", fail)
    (tmp_path / "results.csv").touch()
    hook = plots.Plots(None, None, Mock())
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, len(NAMES), names=NAMES))
    trainer = hook_training(tmp_path, step=step, loader=Loader())
    hook.start(trainer)
    for number in (1, 2):
        hook.report(trainer, Epoch(number, evaluation=evaluation_of(make_result())))
    hook.after_training(trainer)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / name}: cannot be drawn ([Errno 28] No space left on device)"
        for name in ("train_batch0.jpg", "val_predictions.jpg", "report.html")
    ]


def test_work_after_epochs_takes_its_share_of_the_time():
    done = []

    def work(validation: int | None) -> None:
        done.append(validation)
        time.sleep(0.02)

    rare = TimeBudget(work, 1e-4)
    frequent = TimeBudget(work, 1.0)
    for number in (1, 2, 3, None):  # the last epoch is not validated
        rare.after_epoch(number)
    assert done == [1]  # the others would have to wait for 200 s
    for _ in range(2):
        rare.catch_up()
    assert done == [1, 3]
    rare.after_epoch(None)
    rare.catch_up()
    assert done == [1, 3, None]  # a validation is drawn once
    until = time.monotonic() + 20
    number = 4
    while done[-1] != 5 and time.monotonic() < until:
        frequent.after_epoch(number)
        number = (done[-1] or 3) + 1
        time.sleep(0.01)
    assert done == [1, 3, None, 4, 5]
