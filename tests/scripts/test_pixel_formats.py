"""Images of five channels of 12 bits through train.py, val.py, detect.py, export.py and tools.check."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

import detect
import export
import train
import val
from engine.export.parity import largest_difference
from engine.inference.predictor import load
from engine.inference.runtimes.open import open_model
from engine.report.plots import draw_batch
from tests.engine.report.test_plots import make_batch
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.same_content import same_content
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model
from tools.check import __main__ as check
from utils.config.pixels import PixelFormat, as_rgb8
from utils.entrypoint import run_main
from utils.files.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
FIVE12 = {"channels": 5, "bits": 12}


def as_arrays(data: Path) -> Path:
    """Replaces the images of a data set by arrays of five channels of 12 bits."""
    for path in data.parent.glob("images/*/*.png"):
        image = cv2.imread(str(path))[..., [2, 1, 0, 1, 0]].astype(np.uint16)
        np.save(path.with_suffix(".npy"), image * 16)
        path.unlink()
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | FIVE12))
    return data


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """The YAML, and a run of one epoch."""
    root = tmp_path_factory.mktemp("five")
    data, model = as_arrays(write_dataset(root / "set")), write_model(root / "tiny.yaml")
    flags = ["--data", data, "--model", model, "--epochs", "1", "--project", root, "--cache", "disk"]
    flags += ["--optimizer", "SGD"]
    flags += ["--cache-dir", root / "cache", *SMALL]
    run_main(train.main, list(map(str, flags)))
    return data, root / "exp"


def test_the_checkpoint_has_the_format_and_sheets_are_drawn(trained):
    _, run = trained
    assert open_model(run / "best.pt", device=torch.device("cpu")).pixels == PixelFormat(5, 12)
    images = torch.zeros((2, 5, 64, 64), dtype=torch.uint16)
    batch = make_batch(images, [np.float32([[1, 0.5, 0.5, 0.3, 0.3]]), np.zeros((0, 5), np.float32)], ("a", "b"))
    assert draw_batch(batch, ["light", "dark"]).dtype == np.uint8


def test_files_arrays_and_tensors_give_the_same_detections(trained, tmp_path):
    data, run = trained
    predictor = load(run / "best.pt", device="cpu", conf=0.0, max_det=5)
    path = sorted(data.parent.glob("images/val/*.npy"))[0]
    image = np.load(path)
    (expected,) = predictor(path)
    assert len(expected) == 5
    assert np.array_equal(expected.image, as_rgb8(np.rint(image * (65535 / 4095)).astype(np.uint16)))
    tensor = torch.from_numpy(image.astype(np.float32) / 4095).permute(2, 0, 1)
    for other in (image, tensor, torch.from_numpy(image).permute(2, 0, 1)):
        assert torch.equal(predictor(other)[0].boxes.data, expected.boxes.data)
    assert torch.equal(next(predictor.stream(path)).boxes.data, expected.boxes.data)
    assert expected.plot().shape == (64, 64, 3)
    for wrong in (image[..., :4], image[..., 0]):
        with refused():
            predictor(wrong, color="rgb")
    with refused():
        predictor(np.full_like(image, 65535))


def test_the_folder_is_detected_scored_and_checked(trained, tmp_path, capsys):
    data, run = trained
    common = ["--device", "cpu", "--project", str(tmp_path)]
    source, conf = ["--source", str(data.parent / "images/val")], ["--conf-thres", "0"]
    run_main(detect.main, ["--weights", str(run / "best.pt"), *source, *conf, "--save-crop", "--name", "d", *common])
    assert len(list((tmp_path / "d").glob("*.jpg"))) == 5
    scored = ["--weights", str(run / "best.pt"), "--workers", "0", "--cache-dir", str(tmp_path), *common]
    run_main(val.main, [*scored, "--name", "v", "--noplots"])
    assert json.loads((tmp_path / "v" / "results.json").read_text())
    copied = shutil.copytree(data.parent, tmp_path / "set")
    for first, second in (
        ("images/train/000.npy", "images/val/again.npy"),
        ("labels/train/000.txt", "labels/val/again.txt"),
    ):
        shutil.copy(copied / first, copied / second)  # near-duplicates are shown
    flags = ["--weights", str(run / "best.pt"), "--device", "cpu", "--out", str(tmp_path / "c")]
    with pytest.raises(SystemExit, match=r"^1$"):
        check.main([str(copied / data.name), *flags])
    assert "data:image/jpeg" in (tmp_path / "c" / "report.html").read_text()


def test_exported_files_compute_the_same_and_know_the_format(trained, tmp_path):
    pytest.importorskip("onnxruntime")
    _, run = trained
    weights = tmp_path / "best.pt"
    weights.write_bytes((run / "best.pt").read_bytes())
    run_main(export.main, ["--weights", str(weights), "--format", "onnx", "torchscript", "--no-check"])
    model = open_model(weights, device=torch.device("cpu"))
    for name in ("best.onnx", "best.torchscript"):
        exported = open_model(tmp_path / name, device=torch.device("cpu"), trust=True)
        assert exported.pixels == PixelFormat(5, 12)
        box, score = largest_difference(model, exported, torch.rand(1, 5, 64, 64))
        assert box < 1e-4
        assert score < 1e-4
    card = (tmp_path / "best.md").read_text()
    assert "5 channels, times 1/4095" in card
    assert "float32 (1, 5, 64, 64)" in card


def test_a_model_for_other_channels_is_one_line(trained, tmp_path, capsys):
    _, run = trained
    other = write_dataset(tmp_path / "rgb")
    best = str(run / "best.pt")
    takes = "takes images of 5 channels, those of"
    assert re.search(f"{takes} .* have 3", error_of(capsys, val.main, "--weights", best, "--data", other))
    flags = ["--weights", best, "--data", other, "--project", tmp_path, "--cache-dir", tmp_path, *SMALL]
    assert re.search(f"{takes} .* have 3", error_of(capsys, train.main, *flags))
    assert re.search(f"{takes} .* have 3", error_of(capsys, check.main, other, "--weights", best, "--device", "cpu"))
    source = other.parent / "images/val/000.png"
    message = error_of(
        capsys, detect.main, "--weights", best, "--source", source, "--device", "cpu", "--project", tmp_path
    )
    assert "000.png: 3 channels; the data set or the model has 5" in message


@pytest.mark.slow
def test_a_run_has_the_same_bits_on_two_processes_and_when_it_is_resumed(tmp_path):
    data, model = as_arrays(write_dataset(tmp_path / "set")), write_model(tmp_path / "tiny.yaml")
    flags = ["--data", data, "--model", model, "--project", tmp_path, "--cache-dir", tmp_path, *SMALL]
    flags += ["--batch-size", "8", "--optimizer", "SGD", "--virtual-ranks", "2", "--quad"]
    flags += ["--cache", "ram", "--save-period", "1", "--epochs", "2"]

    def run(*command):
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    two = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run(python(), "train.py", *flags, "--name", "one")
    run(*two, "train.py", *flags, "--name", "two")
    (tmp_path / "again").mkdir()
    for name, copy in (("epoch1.pt", "last.pt"), ("results.csv", "results.csv")):
        (tmp_path / "again" / copy).write_bytes((tmp_path / "one" / name).read_bytes())
    run(python(), "train.py", "--resume", tmp_path / "again" / "last.pt")
    one, *others = (read_checkpoint(tmp_path / name / "last.pt") for name in ("one", "two", "again"))
    for other in others:
        same_content(one["model"], other["model"])
        same_content(one["ema"], other["ema"])
