import builtins
import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from engine.hooks.result_files import CsvTracker, TensorBoardTracker, _pr_counts
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.messages import refused
from utils.logger import configure_logging, get_logger
from utils.structures import EvalResult


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def make_result(classes: int = 2) -> EvalResult:
    confidence = np.linspace(0, 1, 1000)
    recall = np.stack([1 - confidence**2] * classes)
    precision = np.stack([0.5 + 0.5 * confidence] * classes)
    per_class = np.full(classes, 0.5)
    return EvalResult(
        metrics={"AP50": 0.7}, class_metrics={"AP50": per_class}, best_confidence=0.4, ap_small=0.1,
        ap_medium=0.5, ap_large=np.nan, class_targets=np.array([8] + [0] * (classes - 1)),
        confusion=np.eye(classes + 1, dtype=np.int64), confusion_confidence=0.4,
        curve_confidence=confidence, curve_precision=precision, curve_recall=recall,
        pr_recall=np.linspace(0, 1, 101), pr_precision=np.full((classes, 101), 0.5), num_images=4,
    )  # fmt: skip


CALLS = {
    "start": ({"epochs": 3}, 1),
    "epoch": (1, {"loss": 1.0}),
    "image": ("a", np.zeros((2, 2, 3), np.uint8), 1),
    "pr_curves": (make_result(), ["a", "b"], 1),
    "graph": (nn.Identity(), torch.zeros(1)),
    "finish": (Path("absent"),),
    "close": (),
}


@pytest.fixture
def plain_log():
    logger = get_logger()
    before = logger.handlers[:], logger.level, logger.propagate
    configure_logging(True)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(scope="module")
def tensorboard_available():
    pytest.importorskip("tensorboard")


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "images": 0})
    return events.Reload()


def test_csv_has_one_header_and_one_row_per_epoch(tmp_path):
    results = CsvTracker(tmp_path / "results.csv")
    results.epoch(0, {"train/box": 1.5, "val/ap": float("nan")})
    results.epoch(1, {"train/box": 1 / 3, "val/ap": 0.25})
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines == ["epoch,train/box,val/ap", "0,1.5,nan", "1,0.33333333,0.25"]


def test_later_columns_are_added_to_the_header(tmp_path):
    results = CsvTracker(tmp_path / "results.csv")
    results.epoch(0, {"loss": 2.0})
    results.epoch(1, {"loss": 1.0, "ap": 0.5})
    results.epoch(2, {"loss": 0.5})
    assert [r["ap"] for r in rows_of(tmp_path / "results.csv")] == ["", "0.5", ""]


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
    assert [r["epoch"] for r in rows_of(resumed)] == ["0", "1", "2"]
    for epoch in (3, 4, 5):
        after.epoch(epoch, rows[epoch])
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resumed.csv", "whole.csv"]


def test_a_new_run_replaces_an_old_csv(tmp_path):
    CsvTracker(tmp_path / "results.csv").epoch(0, {"old": 1.0})
    results = CsvTracker(tmp_path / "results.csv")
    results.start({}, 0)
    assert not (tmp_path / "results.csv").exists()
    results.epoch(0, {"new": 2.0})
    assert (tmp_path / "results.csv").read_text() == "epoch,new\n0,2\n"


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


@pytest.mark.usefixtures("tensorboard_available")
def test_tensorboard_files_contain_all_results(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({"epochs": 3, "data": "coco.yaml"}, 0)
    tracker.epoch(0, {"train/box": 1.5})
    tracker.epoch(1, {"train/box": 0.5})
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    tracker.image("mosaic", image, 3)
    tracker.pr_curves(make_result(), ["cat", "dog"], 1)
    tracker.close()
    events = events_of(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/box")] == [(0, 1.5), (1, 0.5)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    epochs: 3\n    data: coco.yaml"
    assert events.Images("mosaic")[0].width == 4
    assert "pr/cat" in events.Tags()["tensors"]
    assert "pr/dog" not in events.Tags()["tensors"]  # no ground truth


@pytest.mark.usefixtures("tensorboard_available")
def test_tracing_the_graph_does_not_change_the_model(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    model.train()
    model[1].eval()  # a frozen norm stays frozen
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    tracker = TensorBoardTracker(tmp_path)
    tracker.graph(model, torch.zeros(1, 3, 8, 8))
    tracker.close()
    assert events_of(tmp_path).Tags()["graph"]
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.usefixtures("tensorboard_available")
def test_the_graph_of_a_model_on_a_gpu_is_traced_on_the_cpu(tmp_path, monkeypatch):
    traced = []
    tracker = TensorBoardTracker(tmp_path)
    monkeypatch.setattr(tracker._writer, "add_graph", lambda *args, **options: traced.extend(args))
    with fake_gpu(), torch.device("cuda"):
        tracker.graph(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8, device="cpu"))
    tracker.close()
    assert [next(traced[0].parameters()).device.type, traced[1].device.type] == ["cpu", "cpu"]


@pytest.mark.usefixtures("tensorboard_available", "plain_log")
def test_an_untraceable_model_causes_one_warning(tmp_path, capsys):
    class Stubborn(nn.Module):
        def forward(self, x):
            raise RuntimeError("not today\nsecond line")

    tracker = TensorBoardTracker(tmp_path)
    tracker.graph(Stubborn(), torch.zeros(1))
    tracker.close()
    assert capsys.readouterr().out == "warning: no model graph in TensorBoard: not today\n"


@pytest.mark.usefixtures("plain_log")
def test_missing_tensorboard_causes_one_warning(tmp_path, monkeypatch, capsys):
    true_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError("No module named 'tensorboard'")
        return true_import(name, *args, **kwargs)

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


@pytest.mark.usefixtures("tensorboard_available", "plain_log")
@pytest.mark.parametrize("call", ["start", "image", "pr_curves", "epoch", "close"])
def test_events_that_cannot_be_written_do_not_end_the_run(tmp_path, capsys, call):
    tracker = TensorBoardTracker(tmp_path)
    tracker._writer.close()
    tracker._writer = _FailingWriter()
    getattr(tracker, call)(*CALLS[call])
    for name, arguments in CALLS.items():
        getattr(tracker, name)(*arguments)
    assert capsys.readouterr().out == "warning: TensorBoard is off (No space left on device); results.csv is kept\n"


def test_pr_counts_reproduce_precision_and_recall():
    tp, fp, tn, fn, precision, recall = _pr_counts(make_result(), 0)
    assert np.allclose(tp + fn, 8)
    assert np.allclose(tp / 8, recall)
    seen = tp > 0
    assert np.allclose((tp / np.maximum(tp + fp, 1e-12))[seen], precision[seen])
    assert not tn.any()


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_file_that_is_not_a_results_file_is_one_line(tmp_path, kind):
    path = tmp_path / "results.csv"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero")}[kind]()
    with refused():
        CsvTracker(path)


@pytest.mark.parametrize(
    "text",
    [
        "epoch,a\n0,1\n0,2\n",
        "epoch,a,a\n0,1,2\n",
        "epoch,a\n0,1,2\n",
        "epoch,a\n0\n",
        "epoch,a\n0,0x1\n",
        "a\n0\n",
        "a,b\n",
    ],
)
def test_an_ambiguous_results_file_is_one_line(tmp_path, text):
    path = tmp_path / "results.csv"
    path.write_text(text)
    with refused():
        CsvTracker(path)
    assert path.read_text() == text
