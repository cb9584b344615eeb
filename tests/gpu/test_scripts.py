"""The scripts on a GPU: a training learns, val.py and exported files score as on the CPU, and the modes of training run
that have code of their own there."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import yaml

from tests.gpu.commands import TORCHRUN, run, scores_of
from tests.gpu.machine import Figure, Machine
from tests.helpers.tiny import write_model
from utils.config.export_formats import EXPORT_FORMATS

pytestmark = pytest.mark.gpu
MIN_AP = 0.7  # on the demo data set after the training on a GPU; on a CPU it is 0.88
SAME_AP = 0.01  # AP over few images changes if a single box falls on the other side of a threshold
FORMATS = {"onnx": "last.onnx", "torchscript": "last.torchscript", "pt2": "last.pt2"}


@pytest.fixture(scope="module")
def scores(machine: Machine, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The scores of the trained checkpoint on the device."""
    return scores_of(weights, machine.device, tmp_path_factory.mktemp("val"))


@pytest.mark.quick
def test_a_trained_model_scores_as_on_the_cpu(
    machine: Machine, weights: Path, scores: dict, tmp_path: Path, figure: Figure
):
    on_cpu = scores_of(weights, "cpu", tmp_path)
    for name in ("precision", "recall", "ap50", "ap"):
        figure(f"{name}, and on the CPU", (scores[name], on_cpu[name]))
    assert scores["ap"] >= MIN_AP or not machine.learns
    assert scores["ap"] == pytest.approx(on_cpu["ap"], abs=SAME_AP)
    assert scores["ap50"] == pytest.approx(on_cpu["ap50"], abs=SAME_AP)


@pytest.mark.quick
@pytest.mark.parametrize("name", FORMATS)
def test_an_exported_file_scores_as_the_checkpoint(
    machine: Machine, weights: Path, scores: dict, tmp_path: Path, figure: Figure, name: str
):
    """It is exported on the CPU, and validated on the device."""
    for package in EXPORT_FORMATS[name].packages:
        pytest.importorskip(package)
    run("export.py", "--weights", weights, "--format", name, "--device", "cpu", "--no-check")
    ap = scores_of(weights.with_name(FORMATS[name]), machine.device, tmp_path)["ap"]
    figure(f"{name}: AP, and of the checkpoint", (ap, scores["ap"]))
    assert ap == pytest.approx(scores["ap"], abs=SAME_AP)


@pytest.mark.quick
def test_detect_finds_objects(machine: Machine, weights: Path, data: Path, tmp_path: Path, figure: Figure):
    images = data.parent / "images" / "val"
    run("detect.py", "--weights", weights, "--source", images, "--device", machine.device, "--conf-thres", "0.01",
        "--save-txt", "--project", tmp_path)  # fmt: skip
    detected = len(list(tmp_path.glob("exp/labels/*.txt"))) / len(list(images.iterdir()))
    figure("share of images with detections", detected)
    assert detected > 0.5 or not machine.learns


def assert_trained(folder: Path, epochs: int = 1) -> None:
    """Fails unless the run in ``folder`` has taken all epochs with finite losses and scores."""
    with open(folder / "results.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == epochs
    numbers = [float(row[name]) for row in rows for name in row if name.startswith("train/") or name == "metrics/AP"]
    assert numbers
    assert all(map(math.isfinite, numbers))


@pytest.mark.quick
def test_a_training_in_half_precision(machine: Machine, train_flags: list[object], tmp_path: Path):
    run(*train_flags, "--amp", machine.half, "--optimizer", "SGD", "--project", tmp_path)
    assert_trained(tmp_path / "exp")


def test_another_process_validates_on_the_cpu(machine: Machine, train_flags: list[object], tmp_path: Path):
    """The type of ``--amp`` is one that the GPU has and a CPU may not."""
    run(*train_flags, "--amp", machine.half, "--epochs", 3, "--spawn", 2, "--eval-ranks", 1, "--project", tmp_path)
    assert_trained(tmp_path / "exp", epochs=3)


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [((*TORCHRUN, 1), ("--nominal-batch", "16")), ((), ("--multi-scale",))],
    ids=["DDP, accumulating", "sizes vary"],
)
def test_a_compiled_training(
    machine: Machine, train_flags: list[object], tmp_path: Path, launcher: tuple, flags: tuple
):
    """Of a small model, which compiles faster. A dry run compiles nothing, which would take minutes on a CPU."""
    environment = {"TORCHDYNAMO_DISABLE": "1"} if machine.device == "cpu" else {}
    model = write_model(tmp_path / "tiny.yaml")
    run(*launcher, *train_flags, "--model", model, "--compile", *flags, "--project", tmp_path, **environment)
    assert_trained(tmp_path / "exp")


def test_the_batch_that_is_found_trains(
    machine: Machine, many_images: Path, train_flags: list[object], tmp_path: Path, figure: Figure
):
    """Whether a larger one would, too, is not tried."""
    if machine.device == "cpu":
        pytest.skip("--batch-size -1 needs a GPU")
    run(*train_flags, "--data", many_images, "--imgsz", 640, "--batch-size", -1, "--project", tmp_path)
    settings = yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text(encoding="utf-8"))
    figure("images of 640 px in a batch", settings["config"]["batch_size"])
    assert_trained(tmp_path / "exp")
