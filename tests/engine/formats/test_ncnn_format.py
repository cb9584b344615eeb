"""ncnn models: against the detector that they were made of, and damaged ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import detect
import export
import val
from engine.formats.ncnn_format import PARAM_FILE, WEIGHTS_FILE
from engine.inference.open_model import open_model
from engine.inference.predictor import load
from tests.engine.formats.exported import NAMES, write_all
from tests.helpers.exports import (
    FAMILIES,
    calibrated_detector,
    check_threads_get_the_same_bits,
    noise_images,
    shallow_spec,
)
from tests.helpers.scripts import call, error_of
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_detector
from utils.errors import UserError

CPU = torch.device("cpu")
FOLDER = "a_ncnn_model"


@pytest.fixture(scope="module")
def packages() -> None:
    for package in ("pnnx", "ncnn"):
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def tiny(packages: None, tmp_path_factory: pytest.TempPathFactory):
    """A folder with the ncnn model of a tiny detector, and the detector."""
    folder = tmp_path_factory.mktemp("ncnn")
    detector = calibrated_detector(TINY_MODEL, NAMES)
    write_all(folder, detector, (FOLDER,))
    return folder / FOLDER, detector.fuse()


@torch.no_grad()
def test_boxes_and_scores_are_those_of_the_detector(tiny):
    path, fused = tiny
    for source in (path, path / PARAM_FILE):
        model = open_model(source, device=CPU, trust=True)
        assert (model.format, model.names, model.input_hw, model.batch, model.nms_iou) == (
            "ncnn",
            NAMES,
            (64, 96),
            1,
            fused.nms_iou,
        )
        pixels = noise_images()[:3]
        found = model.decode(model(pixels))
        boxes, scores = fused.decode(fused(pixels))
        torch.testing.assert_close(found[0], boxes, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(found[1], scores, rtol=0, atol=1e-4)


def test_threads_that_share_a_model_get_the_same_bits(tiny):
    model = open_model(tiny[0], device=CPU, trust=True)
    check_threads_get_the_same_bits(model, list(noise_images().split(1)))


@torch.no_grad()
@pytest.mark.parametrize(
    "family", [TINY_ANCHOR_MODEL, *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)]
)
def test_every_family(tmp_path: Path, packages: None, family: str | dict):
    detector = calibrated_detector(shallow_spec(family) if isinstance(family, str) else family, NAMES)
    write_all(tmp_path, detector, (FOLDER,))
    fused = detector.fuse()
    model = open_model(tmp_path / FOLDER, device=CPU, trust=True)
    pixels = noise_images()[:1]
    boxes, scores = model.decode(model(pixels))
    expected_boxes, expected_scores = fused.decode(fused(pixels))
    torch.testing.assert_close(boxes, expected_boxes, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-4)


def test_half_stores_float16(tiny, tmp_path: Path):
    write_all(tmp_path, calibrated_detector(TINY_MODEL, NAMES), (FOLDER,), half=True)
    size, half_size = ((folder / WEIGHTS_FILE).stat().st_size for folder in (tiny[0], tmp_path / FOLDER))
    assert half_size < 0.6 * size
    pixels = noise_images()[:1]
    exact, rounded = (open_model(folder, device=CPU, trust=True)(pixels)[0] for folder in (tiny[0], tmp_path / FOLDER))
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded[:, 4:], exact[:, 4:], rtol=0, atol=0.02)


def test_the_metadata_are_those_that_readers_of_yolo_exports_know(tiny):
    metadata = yaml.safe_load((tiny[0] / "metadata.yaml").read_text(encoding="utf-8"))
    assert metadata["names"] == dict(enumerate(NAMES))
    assert (metadata["stride"], metadata["imgsz"], metadata["batch"], metadata["task"]) == (32, [64, 96], 1, "detect")


def test_no_text_names_a_path_of_this_machine(tiny):
    texts = [(tiny[0] / name).read_text() for name in (PARAM_FILE, "metadata.yaml")]
    assert not any(re.search(r"(?<![\w.])/\w+/", text) for text in texts)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(pattern: str, replacement: str):
    def change(path: Path) -> None:
        text = path.read_text()
        assert re.search(pattern, text)
        path.write_text(re.sub(pattern, replacement, text, count=1))

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (WEIGHTS_FILE, truncate, "cannot be opened"),
        (WEIGHTS_FILE, Path.unlink, "model.ncnn.bin: no such file; an ncnn model has a .param and a .bin file"),
        (PARAM_FILE, truncate, "cannot be opened"),
        (PARAM_FILE, Path.unlink, "holds 0 .ncnn.param files, not one model"),
        (PARAM_FILE, lambda path: path.write_bytes(b"\0\xff" * 50), "cannot be opened"),
        (PARAM_FILE, lambda path: path.with_name("b.ncnn.param").touch(), "holds 2 .ncnn.param files"),
        (PARAM_FILE, rewrite(r"Swish ", "Missing "), "cannot be opened .*Missing"),
        (PARAM_FILE, rewrite(r"Swish  ", "Deconvolution  "), "cannot be opened"),
        (PARAM_FILE, rewrite(r"6=\d+", "6=-2147483648"), "cannot be opened"),
        (PARAM_FILE, rewrite(r" 1=3 ", " 1=1000000000 "), "cannot be opened"),
        ("metadata.yaml", lambda path: path.write_text("names: [a"), "metadata.yaml"),
        ("metadata.yaml", lambda path: path.write_text("imgsz: [999999999, 5]"), "damaged metadata"),
        ("metadata.yaml", lambda path: path.write_text("imgsz: [65536, 65536]"), "more than any detector needs"),
    ],
)
def test_a_damaged_model_is_one_line(tiny, tmp_path: Path, capfd, file: str, change, message: str):
    folder = shutil.copytree(tiny[0], tmp_path / FOLDER)
    change(folder / file)
    with pytest.raises(UserError, match=message) as caught:
        open_model(folder, device=CPU, trust=True)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert capfd.readouterr().err == ""


def test_modules_in_the_working_folder_are_not_run(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("ncnn", "numpy", "os"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    open_model(tiny[0], device=CPU, trust=True)
    assert not (tmp_path / "ran").exists()


def test_export_val_and_detect(packages: None, tmp_path: Path, capsys: pytest.CaptureFixture):
    data = write_dataset(tmp_path / "set", train=4, val=4)
    weights = write_detector(tmp_path / "best.pt", calibrated_detector(TINY_MODEL, ("light", "dark")))
    call(export.main, "--weights", weights, "--format", "ncnn", "torchscript", "--data", data)
    assert capsys.readouterr().out.count("match, 0 do not;") == 2
    exported = tmp_path / "best_ncnn_model"
    out = ["--device", "cpu", "--project", tmp_path / "runs"]
    call(val.main, "--weights", exported, "--trust", *out, "--workers", "0", "--noplots")
    call(detect.main, "--weights", exported / PARAM_FILE, "--trust", "--source", tmp_path / "set/images/val", *out)
    image = next((tmp_path / "set" / "images" / "val").iterdir())
    (found,), (expected,) = (
        load(path, device="cpu", trust=True)(image) for path in (exported, tmp_path / "best.torchscript")
    )
    torch.testing.assert_close(found.boxes.data, expected.boxes.data, rtol=1e-3, atol=1e-2)
    assert "--trust" in error_of(capsys, val.main, "--weights", exported, *out)
