"""TFLite files: against the detector that they were made of, and damaged ones.

Most tests need the extra `litert`: `make test-litert`.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import detect
import export
import val
from engine.formats import litert_format
from engine.formats.layouts import make_layout
from engine.formats.litert_format import LiteRtFormat, box_scale
from engine.formats.metadata import ExportMetadata, parse_metadata
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
from tests.helpers.messages import refused
from tests.helpers.scripts import call, error_of
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_detector, write_weights
from utils.errors import UserError

CPU = torch.device("cpu")
FILE = "a.tflite"
PACKAGES = ("litert_torch", "ai_edge_quantizer", "ai_edge_litert")
HAS_PACKAGES = all(importlib.util.find_spec(package) is not None for package in PACKAGES)
NEEDS_PACKAGES = pytest.mark.skipif(not HAS_PACKAGES, reason="needs the extra litert")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """The file of a tiny detector for two images, and the detector."""
    if not HAS_PACKAGES:
        pytest.skip("needs the extra litert")
    folder = tmp_path_factory.mktemp("litert")
    detector = calibrated_detector(TINY_MODEL, NAMES)
    write_all(folder, detector, (FILE,), batch=2)
    return folder / FILE, detector.fuse()


@torch.no_grad()
def test_boxes_and_scores_are_those_of_the_detector(tiny):
    path, fused = tiny
    model = open_model(path, device=CPU, trust=True)
    assert (model.format, model.names, model.input_hw, model.batch) == ("litert", NAMES, (64, 96), 2)
    pixels = noise_images()[:3]
    boxes, scores = model.decode(model(pixels))
    expected_boxes, expected_scores = fused.decode(fused(pixels))
    torch.testing.assert_close(boxes, expected_boxes, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5)


@torch.no_grad()
def test_other_programs_find_channels_last_fractions_and_metadata(tiny):
    from ai_edge_litert.interpreter import Interpreter

    path, fused = tiny
    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    (images,) = interpreter.get_input_details()
    (output,) = interpreter.get_output_details()
    assert images["shape"].tolist() == [2, 64, 96, 3]
    pixels = noise_images()[:2]
    interpreter.set_tensor(images["index"], pixels.permute(0, 2, 3, 1).contiguous().numpy())
    interpreter.invoke()
    (expected,) = make_layout(fused, "raw")(pixels)[:1]
    scaled = expected / torch.tensor([96, 64, 96, 64, *[1] * len(NAMES)])[:, None]
    np.testing.assert_allclose(interpreter.get_tensor(output["index"])[0], scaled, atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read("metadata.json"))
    assert metadata["names"] == str(dict(enumerate(NAMES)))
    assert (metadata["imgsz"], metadata["batch"], metadata["input_layout"]) == ("[64, 96]", "2", "NHWC")


def test_threads_that_share_a_model_get_the_same_bits(tiny):
    model = open_model(tiny[0], device=CPU, trust=True)
    check_threads_get_the_same_bits(model, list(noise_images().split(1)))


@NEEDS_PACKAGES
@torch.no_grad()
@pytest.mark.parametrize("layout", ["raw", "end2end"])
@pytest.mark.parametrize(
    "family", [TINY_ANCHOR_MODEL, *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)]
)
def test_every_family(tmp_path: Path, family: str | dict, layout: str):
    detector = calibrated_detector(shallow_spec(family) if isinstance(family, str) else family, NAMES)
    metadata = write_all(tmp_path, detector, (FILE,), layout=layout)
    pixels = noise_images()[:1]
    expected = make_layout(detector.fuse(), layout, nms_iou=metadata.nms_iou)(pixels)
    (output,) = open_model(tmp_path / FILE, device=CPU, trust=True)(pixels)
    boxes = (slice(None), slice(4)) if layout == "raw" else (..., slice(4))
    near = torch.isclose(output[boxes], expected[boxes], rtol=1e-3, atol=1e-2).float().mean()
    assert near > (0.9999 if layout == "raw" else 0.97)  # rows of almost the same score may change places
    scores = (slice(None), slice(4, None)) if layout == "raw" else (..., 4)
    torch.testing.assert_close(output[scores], expected[scores], rtol=0, atol=1e-4)


@NEEDS_PACKAGES
@pytest.mark.parametrize("flag", ["--half", "--int8"])
def test_export_val_and_detect(tmp_path: Path, capsys: pytest.CaptureFixture, flag: str):
    data = write_dataset(tmp_path / "set", train=4, val=4)
    weights = write_detector(tmp_path / "best.pt", calibrated_detector(TINY_MODEL, ("light", "dark")))
    flags = ["--weights", weights, "--data", data]
    call(export.main, *flags, "--format", "litert", "--no-check")
    exact = (tmp_path / "best.tflite").read_bytes()
    call(export.main, *flags, "--format", "litert", flag, *(["--no-check"] if flag == "--int8" else []))
    exported = tmp_path / f"best_{flag.removeprefix('--')}.tflite"
    assert exported.stat().st_size < (0.6 if flag == "--int8" else 0.7) * len(exact)
    out = ["--device", "cpu", "--project", tmp_path / "runs"]
    call(val.main, "--weights", exported, "--trust", *out, "--workers", "0", "--noplots")
    call(detect.main, "--weights", exported, "--trust", "--source", tmp_path / "set/images/val", *out)
    image = next((tmp_path / "set" / "images" / "val").iterdir())
    (result,) = load(exported, device="cpu", trust=True)(image)
    assert len(result.boxes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: len(content) // 2], "cannot be opened"),
        (lambda content: content[:7], "it is not a TFLite file"),
        (lambda content: b"", "it is not a TFLite file"),
        (lambda content: b"\xff" * 8 + content[8:], "it is not a TFLite file"),
        (lambda content: b"\xff" * 4 + content[4:], "cannot be opened"),
        (lambda content: content.replace(b'"names"', b'"names', 1), "damaged metadata"),
        (lambda content: content[:-5], "damaged metadata"),
    ],
)
def test_a_damaged_file_is_one_line(tiny, tmp_path: Path, change, message: str):
    (tmp_path / FILE).write_bytes(change(tiny[0].read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        open_model(tmp_path / FILE, device=CPU, trust=True)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / FILE) in str(caught.value)


def test_the_metadata_follow_the_model(tmp_path: Path):
    metadata = ExportMetadata(names=NAMES, imgsz_hw=(64, 96), is_ours=True, nms_iou=0.5)
    model = b"\x1c\0\0\0TFL3" + bytes(100)
    LiteRtFormat().write(model, tmp_path / FILE, metadata)
    assert (tmp_path / FILE).read_bytes().startswith(model)
    assert parse_metadata(litert_format.read_metadata(tmp_path / FILE)) == metadata
    (tmp_path / FILE).write_bytes(model)  # a file of another program
    assert litert_format.read_metadata(tmp_path / FILE) == {}
    LiteRtFormat().write(model, tmp_path / FILE, metadata)
    content = (tmp_path / FILE).read_bytes()
    for damaged in (content[:-5], content.replace(b"names", b"nemas", 1), content[: len(model) + 60]):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(UserError, match=f"^{tmp_path / FILE}: damaged metadata"):
            litert_format.read_metadata(tmp_path / FILE)


def test_metadata_that_are_no_mapping_are_damaged(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "metadata.zip", "w") as archive:
        archive.writestr("metadata.json", "[]")
    archived = (tmp_path / "metadata.zip").read_bytes()
    (tmp_path / FILE).write_bytes(b"\x1c\0\0\0TFL3" + bytes(100) + archived)
    with pytest.raises(UserError, match=r"damaged metadata \(metadata.json is not a mapping\)"):
        litert_format.read_metadata(tmp_path / FILE)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same holds for every other format."""
    monkeypatch.setattr("engine.formats.litert_format.import_litert", lambda user: None)
    with refused(f"{tmp_path}/x.tflite: cannot be opened ([Errno 2] No such file or directory: ..."):
        LiteRtFormat().open(tmp_path / "x.tflite", torch.device("cpu"))


def test_box_scale():
    assert box_scale((1, 6, 100), (64, 96), has_rows=False)[0, :, 0].tolist() == [96, 64, 96, 64, 1, 1]
    assert box_scale((1, 300, 6), (64, 96), has_rows=True)[0, 0].tolist() == [96, 64, 96, 64, 1, 1]
    assert box_scale((1, 300), (64, 96), has_rows=True).tolist() == 1


@pytest.mark.skipif(HAS_PACKAGES, reason="for environments without the extra litert")
def test_missing_packages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    weights = write_weights(tmp_path / "tiny.pt", ["light", "dark"])
    line = error_of(capsys, export.main, "--weights", weights, "--format", "litert", "--no-check")
    assert "pip install" in line
    assert "ai-edge-litert" in line
