import errno
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.evaluation.metrics import score_detections
from engine.hooks.end_log import ClassScores, Summary
from engine.hooks.hook import Epoch, Hook
from engine.hooks.writers import TensorBoard
from engine.train.checkpoint import PendingEpoch, Progress
from tests.helpers.scoring import evaluation_of, make_ground_truth, make_table
from tests.helpers.training import HookTraining, hook_training, started_from
from utils.logger import configure_logging


def trainer_at(epoch: int = 0, *, folder: Path = Path(), is_pending: bool = False) -> HookTraining:
    """Returns a new run, or one that has continued after ``epoch``, whose scores it may still lack."""
    progress = Progress(epoch=epoch)
    pending = PendingEpoch(row={}, is_closing=False, progress=progress, ema={}) if is_pending else None
    return hook_training(
        folder, progress=progress, started_from=started_from(progress, pending=pending) if epoch else None
    )


BOXES = [[10, 10, 50, 50], [100, 100, 80, 80]]  # x, y, width, height
TRUTH = make_ground_truth(
    np.array(BOXES),
    classes=np.array([0, 1]),
    area=np.array([2500, 6400]),
    image=np.arange(2),
    num_images=2,
    num_classes=3,
)
NAMES = ["dog", "cat", "never seen"]


def scored(number: int, *, finds: int, is_best: bool) -> Epoch:
    """Returns an epoch whose model finds the first objects exactly, and nothing else."""
    corners = [(x, y, x + w, y + h) for x, y, w, h in BOXES[:finds]]
    table = make_table(image=range(finds), boxes=corners, scores=[0.9] * finds, classes=range(finds))
    return Epoch(number, evaluation=evaluation_of(score_detections(TRUTH, table, 3)), is_best=is_best)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def add(results: Hook, rows: Iterable[tuple[int, dict[str, float]]]) -> None:
    for epoch, row in rows:
        results.record(trainer_at(), Epoch(epoch, row))


@pytest.mark.parametrize(
    ("epochs", "progress", "title", "scores"),
    [
        ([(2, True), (1, False)], Progress(epoch=2, best_epoch=1), "best.pt, after epoch 1:", ["1.0000", "1.0000"]),
        (
            [(1, True), (2, True), (0, False)],
            Progress(epoch=4, best_epoch=2),
            "best.pt, after epoch 2:",
            ["1.0000"] * 2,
        ),
        # resumed after the best epoch, or with the best one validated again
        ([(1, False), (1, False)], Progress(epoch=2), "last.pt, after epoch 2:", ["1.0000", "0.0000"]),
        ([(1, False), (1, False)], Progress(epoch=3), "newest validation, after epoch 2:", ["1.0000", "0.0000"]),
        ([(1, False), (1, False)], Progress(epoch=2, best_epoch=2), "best.pt, after epoch 2:", ["1.0000", "0.0000"]),
    ],
)
def test_the_scores_of_each_class_are_logged_at_the_end(capsys, epochs, progress, title, scores):
    configure_logging(True)
    hook = ClassScores(TRUTH, NAMES)
    hook.finish(trainer_at())
    assert capsys.readouterr().out == ""  # nothing was validated
    for number, (finds, is_best) in enumerate(epochs, 1):
        hook.report(trainer_at(), scored(number, finds=finds, is_best=is_best))
    hook.report(trainer_at(), Epoch(len(epochs) + 1))  # which is not validated
    trainer = trainer_at()
    trainer.progress = progress
    hook.finish(trainer)
    first, *table = capsys.readouterr().out.splitlines()
    assert first == title
    assert [line.split()[0] for line in table] == ["class", "all", "dog", "cat"]  # no score without objects
    assert [line.split()[-1] for line in table[2:]] == scores
    assert max(map(len, table)) <= 80


def test_no_table_is_logged_without_objects(capsys):
    configure_logging(True)
    none = np.zeros(0, int)
    empty = make_ground_truth(np.zeros((0, 4)), classes=none, area=none, image=none, num_images=2, num_classes=3)
    hook = ClassScores(empty, NAMES)
    result = score_detections(empty, make_table(), 3)
    hook.report(trainer_at(), Epoch(1, evaluation=evaluation_of(result)))
    hook.finish(trainer_at())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("best_epoch", "files", "line"),
    [
        (2, ["best.pt", "last.pt"], "; best AP 0.5000 in epoch 2: {folder}/best.pt"),
        (2, ["last.pt"], "; best AP 0.5000 in epoch 2: best.pt is no longer there; weights: {folder}/last.pt"),
        (-1, ["last.pt"], ", no epoch has a score; weights: {folder}/last.pt"),
    ],
)
def test_the_last_line_names_weights_that_exist(tmp_path, caplog, best_epoch, files, line):
    for name in files:
        (tmp_path / name).touch()
    trainer = hook_training(tmp_path, progress=Progress(epoch=3, best_epoch=best_epoch, best_fitness=0.5))
    with caplog.at_level("INFO", "lockstep"):
        Summary("AP").finish(trainer)
    assert caplog.messages == ["done: 3 epochs" + line.format(folder=tmp_path)]


@pytest.mark.parametrize(
    ("first", "lacks_scores", "values"),
    [(1, False, [7.0]), (4, False, [1.0, 2.0, 3.0, 7.0]), (3, True, [1.0, 2.0, 7.0])],
    ids=["new, --exist-ok", "resumed", "scored later"],
)
def test_tensorboard_has_each_epoch_of_the_run_once(tmp_path, monkeypatch, first, lacks_scores, values):
    """TensorBoard reads files in the order of their names, which contain the second at which they were made."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: next(seconds)))
    epochs = 3 if lacks_scores else 9
    progress = Progress(epoch=3 if lacks_scores else first - 1)
    metrics = {} if lacks_scores else {"metrics/AP": 0.5}
    resumed = hook_training(progress=progress, started_from=started_from(progress, metrics=metrics))
    resumed.set_epochs(epochs)
    rows = [(epoch, {"train/box": float(epoch)}) for epoch in range(1, 6)]
    for trainer, tracked in (
        (trainer_at(), rows),
        (resumed if first > 1 else trainer_at(), [(first, {"train/box": 7.0})]),
    ):
        board = TensorBoard(tmp_path)
        board.start(trainer)
        add(board, tracked)
        board.close()
    events = accumulator.EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    assert [event.value for event in events.Scalars("train/box")] == values
    assert [event.step for event in events.Scalars("train/box")] == [*range(1, first), first]
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "imgsz: " in text


@pytest.mark.parametrize("failure", ["missing", "full disk"])
def test_a_tensorboard_that_fails_costs_one_warning(tmp_path, monkeypatch, capsys, failure):
    configure_logging(True)
    if failure == "missing":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    else:
        pytest.importorskip("tensorboard")
        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.flush", full_disk)
    board = TensorBoard(tmp_path)
    board.start(trainer_at())
    for number in (1, 2):
        add(board, [(number, {"loss": 1.0})])
        board.after_epoch(trainer_at(), None)
    board.close()
    assert capsys.readouterr().out.count("TensorBoard is off") == 1
