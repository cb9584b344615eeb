import errno
import math
import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from engine.checkpoint.checkpoint import Progress
from engine.hooks.hook import Epoch, Hook
from engine.hooks.results import ResultsCsv, TensorBoard
from tests.helpers.messages import refused
from tests.helpers.same_content import read_csv
from utils.logger import configure_logging


def settings_of(**values: object) -> SimpleNamespace:
    return SimpleNamespace(by_name=lambda: values)


def trainer_at(epoch: int = 0, **settings: object) -> SimpleNamespace:
    return SimpleNamespace(progress=Progress(epoch=epoch), run=SimpleNamespace(settings=settings_of(**settings)))


def add(results: Hook, rows: Iterable[tuple[int, dict[str, float]]]) -> None:
    for epoch, row in rows:
        results.after_validation(trainer_at(), Epoch(epoch, row))


def test_csv_has_one_header_and_one_row_per_epoch(tmp_path):
    path = tmp_path / "results.csv"
    rows = [{"train/box": 1.5, "val/ap": math.nan}, {"train/box": 1 / 3, "val/ap": 0.25, "later": 3}, {"train/box": 1}]
    add(ResultsCsv(path), enumerate(rows, 1))
    assert path.read_text() == "epoch,train/box,val/ap,later\n1,1.5,nan,\n2,0.33333333,0.25,3\n3,1,,\n"
    new_run = ResultsCsv(path)
    new_run.start(trainer_at())
    assert not path.exists()
    add(new_run, [(1, {"new": 2.0})])
    assert path.read_text() == "epoch,new\n1,2\n"


def test_the_csv_of_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole, resumed = tmp_path / "whole.csv", tmp_path / "resumed.csv"
    rows = [(e, {"loss": 1 / e, **({"ap": e / 7} if e % 2 else {})}) for e in range(1, 7)]
    add(ResultsCsv(whole), rows)
    add(ResultsCsv(resumed), rows[:5])
    after = ResultsCsv(resumed)  # the checkpoint was of epoch 3: epochs 4 and 5 are repeated
    after.start(trainer_at(3))
    assert [r["epoch"] for r in read_csv(resumed)] == ["1", "2", "3"]
    add(after, rows[3:])
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resumed.csv", "whole.csv"]


def test_tensorboard_files_contain_all_results(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.start(trainer_at(epochs=3, data="coco.yaml"))
    add(board, [(1, {"train/box": 1.5}), (2, {"train/box": 0.5})])
    board.finish(trainer_at())
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/box")] == [(1, 1.5), (2, 0.5)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    epochs: 3\n    data: coco.yaml"


def test_missing_tensorboard_causes_one_warning(tmp_path, monkeypatch, capsys):
    configure_logging(True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = TensorBoard(tmp_path)
    board.start(trainer_at())
    add(board, [(1, {"loss": 1.0})])
    board.write(lambda writer: writer.add_scalar("a", 1.0, 1))
    board.finish(trainer_at())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("TensorBoard is off") == 1


def test_a_full_disk_turns_tensorboard_off(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    configure_logging(True)
    board = TensorBoard(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.flush", fail)
    for number in (1, 2):
        add(board, [(number, {"loss": 1.0})])
        board.after_epoch(trainer_at(), None)
    board.finish(trainer_at())
    assert capsys.readouterr().out.count("TensorBoard is off") == 1


@pytest.mark.parametrize("text", ["a\n0\n", "folder", "pipe", "device"])
def test_a_foreign_or_special_results_file_is_one_line(tmp_path, text):
    path = tmp_path / "results.csv"
    special = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero")}
    special.get(text, lambda: path.write_text(text))()
    with refused():
        ResultsCsv(path)
