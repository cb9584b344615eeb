"""The charts of a run, and what TensorBoard shows."""

import errno
from unittest.mock import Mock

import numpy as np
import pytest

from engine.evaluation.result import Evaluation
from engine.report.advice import Subject
from engine.train import plots
from engine.train.ledger import Epoch
from tests.engine.train.watched_run import build
from tests.helpers.scoring import evaluation_of, make_result
from tests.helpers.tiny import make_batch
from utils.config.settings import TrainConfig
from utils.drawing.page import Content


@pytest.fixture
def subject(tmp_path) -> Subject:
    """A page says little of a watched trainer, which has no data."""
    return Subject("run", tmp_path, TrainConfig(), stride=32, train=None, validated=Mock(), split="val")


def test_the_report_stays_with_the_best_epoch(tmp_path, monkeypatch, subject):
    shown = []

    def content(subject: Subject, evaluation: Evaluation | None, history: dict[str, np.ndarray]) -> Content:
        shown.append((subject.epoch, subject.best_epoch, evaluation))
        return Content("", "", [], {})

    monkeypatch.setattr(plots, "report_content", content)
    monkeypatch.setattr(plots, "TIME_BUDGET", np.inf)  # after each epoch
    hook = plots.Plots(subject, Mock())
    trainer = build(tmp_path)
    hook.start(trainer)
    evaluations = [evaluation_of(make_result()) for _ in range(4)]
    for epoch, (best_epoch, evaluation) in enumerate(zip((1, 2, 2, 4), evaluations), 1):
        trainer.progress.best_epoch = best_epoch
        hook.epoch_saved(trainer, Epoch(epoch, evaluation=evaluation))
    assert shown == [(best, best, evaluations[best - 1]) for best in (1, 2, 2, 4)]


def test_a_run_goes_on_when_its_plots_cannot_be_drawn(tmp_path, monkeypatch, caplog, subject):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write_image", "write_preview", "report_content"):
        monkeypatch.setattr(plots, name, fail)
    hook = plots.Plots(subject, Mock())
    trainer = build(tmp_path)
    hook.start(trainer)
    trainer.batches = [make_batch(2)]
    hook.after_step(trainer)
    for number in (1, 2):
        trainer.progress.best_epoch = number
        hook.epoch_saved(trainer, Epoch(number, evaluation=evaluation_of(make_result())))
    hook.finish(trainer)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / name}: cannot be drawn ([Errno 28] No space left on device)"
        for name in ("report.html", "train_batch0.jpg", "val_predictions.jpg")
    ]
