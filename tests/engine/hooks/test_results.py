import builtins
import os
from pathlib import Path

import pytest

from engine.hooks.results import CsvTracker, TensorBoardTracker
from tests.helpers.messages import refused
from tests.helpers.same_content import read_csv
from utils.logger import configure_logging

CALLS = {
    "start": ({"epochs": 3}, 1),
    "epoch": (1, {"loss": 1.0}),
    "write": (lambda writer, *given: writer.add_scalar(*given), "a", 1.0, 1),
    "finish": (Path("absent"),),
    "close": (),
}


def test_csv_has_one_header_and_one_row_per_epoch(tmp_path):
    path = tmp_path / "results.csv"
    results = CsvTracker(path)
    results.epoch(0, {"train/box": 1.5, "val/ap": float("nan")})
    results.epoch(1, {"train/box": 1 / 3, "val/ap": 0.25, "later": 3})
    results.epoch(2, {"train/box": 1})
    assert path.read_text() == "epoch,train/box,val/ap,later\n0,1.5,nan,\n1,0.33333333,0.25,3\n2,1,,\n"
    new_run = CsvTracker(path)
    new_run.start({}, 0)
    assert not path.exists()
    new_run.epoch(0, {"new": 2.0})
    assert path.read_text() == "epoch,new\n0,2\n"


def test_the_csv_of_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole, resumed = tmp_path / "whole.csv", tmp_path / "resumed.csv"
    rows = [{"loss": 1 / (e + 1), **({"ap": e / 7} if e % 2 else {})} for e in range(6)]
    first = CsvTracker(whole)
    for epoch, row in enumerate(rows):
        first.epoch(epoch, row)
    before = CsvTracker(resumed)
    for epoch, row in enumerate(rows[:5]):
        before.epoch(epoch, row)
    after = CsvTracker(resumed)  # the checkpoint was of epoch 3: epochs 3 and 4 are repeated
    after.start({}, 3)
    assert [r["epoch"] for r in read_csv(resumed)] == ["0", "1", "2"]
    for epoch in (3, 4, 5):
        after.epoch(epoch, rows[epoch])
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resumed.csv", "whole.csv"]


def test_foreign_or_unwritable_csv_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with refused():
        CsvTracker(tmp_path / "results.csv")
    results = CsvTracker(tmp_path / "other.csv")
    results.epoch(0, {"loss": 1.0})

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("utils.files.safe_io.os.replace", full)
        with refused():
            results.epoch(1, {"loss": 0.5})
    assert (tmp_path / "other.csv").read_text() == "epoch,loss\n0,1\n"  # the old file is complete, and the only one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.csv", "results.csv"]


def test_tensorboard_files_contain_all_results(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({"epochs": 3, "data": "coco.yaml"}, 0)
    tracker.epoch(0, {"train/box": 1.5})
    tracker.epoch(1, {"train/box": 0.5})
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/box")] == [(0, 1.5), (1, 0.5)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    epochs: 3\n    data: coco.yaml"


def test_missing_tensorboard_causes_one_warning(tmp_path, monkeypatch, capsys):
    true_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError("No module named 'tensorboard'")
        return true_import(name, *args, **kwargs)

    configure_logging(True)
    monkeypatch.setattr(builtins, "__import__", without)
    tracker = TensorBoardTracker(tmp_path)
    for name, arguments in CALLS.items():
        getattr(tracker, name)(*arguments)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("TensorBoard is off") == 1


class _FailingWriter:
    """A SummaryWriter on a full disk."""

    def __getattr__(self, name):
        def refuse(*_, **__):
            raise OSError(28, "No space left on device")

        return refuse


@pytest.mark.parametrize("call", ["start", "write", "epoch", "close"])
def test_events_that_cannot_be_written_do_not_end_the_run(tmp_path, capsys, call):
    pytest.importorskip("tensorboard")
    configure_logging(True)
    tracker = TensorBoardTracker(tmp_path)
    tracker._writer.close()
    tracker._writer = _FailingWriter()
    getattr(tracker, call)(*CALLS[call])
    for name, arguments in CALLS.items():
        getattr(tracker, name)(*arguments)
    assert capsys.readouterr().out == "warning: TensorBoard is off (No space left on device); results.csv is kept\n"


@pytest.mark.parametrize(
    "text",
    [
        "epoch,a\n0,1\n0,2\n", "epoch,a,a\n0,1,2\n", "epoch,a\n0,1,2\n", "epoch,a\n0\n", "epoch,a\n0,0x1\n", "a\n0\n",
        "a,b\n", "folder", "pipe", "device",
    ],
)  # fmt: skip
def test_an_ambiguous_or_special_results_file_is_one_line(tmp_path, text):
    path = tmp_path / "results.csv"
    special = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero")}
    special.get(text, lambda: path.write_text(text))()
    with refused():
        CsvTracker(path)
    assert text in special or path.read_text() == text
