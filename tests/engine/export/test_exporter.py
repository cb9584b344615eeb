"""The confidence thresholds that an export stores, the names of its files, and the errors of its steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.export.description import describe_file
from engine.export.exporter import Exporter, file_path
from engine.export.options import resolve_options
from engine.export.thresholds import Thresholds, trained_thresholds
from engine.inference.model import CheckpointModel
from models.detector import build_detector
from models.postprocess.selection import DEFAULT_CONFIDENCE
from tests.helpers.exports import options
from tests.helpers.tiny import TINY_MODEL
from utils.config.settings import ExportConfig
from utils.errors import FailedCheck, UserError

PROGRESS = {"confidence": 0.4, "plain_confidence": 0.3, "scored_confidence": 0.5}


@pytest.mark.parametrize(
    ("needs_nms", "layout", "box_voting", "output"),
    [
        (True, "raw", True, 0.3),  # its readers have NMS, but no voting
        (True, "end2end", True, 0.5),  # validation's NMS and voting are in the graph
        (True, "end2end", False, 0.3),  # validation has scored boxes that voted
        (False, "raw", True, 0.3),  # only the best class of a box
        (False, "end2end", True, 0.5),  # every class of a box, as in validation
    ],
)
def test_the_threshold_of_training_is_that_of_the_output(needs_nms: bool, layout: str, box_voting: bool, output: float):
    """Without a check of all images, the thresholds are those of training's validation."""
    detector = build_detector(TINY_MODEL | {"end2end": not needs_nms}, 2, names=("a", "b")).fuse()
    assert (detector.nms_iou is not None) == needs_nms
    model = CheckpointModel(detector, {"imgsz": 64, "progress": PROGRESS}, Path("best.pt"), torch.device("cpu"))
    config = resolve_options(ExportConfig(weights="best.pt", layout=layout, box_voting=box_voting), detector, 64)
    assert trained_thresholds(model, config) == Thresholds(output, 0.4)


def test_the_branch_that_training_does_not_validate_has_no_threshold_and_no_ap():
    """The thresholds and the AP in a checkpoint are those of the one-to-one branch."""
    detector = build_detector(TINY_MODEL | {"end2end": True}, 2, names=("a", "b"))
    info = {"imgsz": 64, "progress": PROGRESS | {"best_fitness": 0.5}}
    for nms, thresholds, ap in ((False, Thresholds(0.3, 0.4), 0.5), (True, Thresholds(None, None), None)):
        fused = detector.fuse(one_to_one=not nms)
        model = CheckpointModel(fused, info, Path("best.pt"), torch.device("cpu"))
        config = resolve_options(ExportConfig(weights="best.pt", nms=nms), fused, 64)
        assert trained_thresholds(model, config) == thresholds
        metadata = describe_file(model, config, None, trained_thresholds(model, config), checked="no")
        assert (metadata.confidence, metadata.details["ap"]) == (thresholds.output, ap)
        assert model.threshold(box_voting=True) == (DEFAULT_CONFIDENCE if nms else 0.4)


def test_a_file_names_the_data_set_and_takes_nothing_else_from_its_description():
    """A foreign checkpoint may describe its data in any way."""
    location = {"source": "/a/data.yaml", "root": "/a"}
    stored = location | {"license": "abc"}
    detector = build_detector(TINY_MODEL, 2, names=("a", "b")).fuse()
    model = CheckpointModel(detector, {"imgsz": 64, "data": stored}, Path("best.pt"), torch.device("cpu"))
    config = resolve_options(ExportConfig(weights="best.pt"), detector, 64)
    metadata = describe_file(model, config, None, trained_thresholds(model, config), checked="no")
    assert metadata.data == location


@pytest.mark.parametrize(
    ("format_name", "flags", "file"),
    [
        ("onnx", {}, "best.onnx"),
        ("onnx", {"half": True}, "best_half.onnx"),
        ("onnx", {"nms": True}, "best_nms.onnx"),
        ("onnx", {"nms": True, "layout": "end2end", "int8": True}, "best_nms_end2end_int8.onnx"),
        ("openvino", {"int8": True}, "best_int8_openvino_model"),
        ("ncnn", {"half": True}, "best_half_ncnn_model"),
        ("torchscript", {"layout": "end2end", "half": True}, "best_end2end_half.torchscript"),
    ],
)
def test_files_of_other_branches_layouts_and_precisions_have_other_names(format_name: str, flags: dict, file: str):
    assert file_path(Path("run/best.pt"), options(**flags), format_name) == Path("run", file)


@pytest.mark.parametrize("failing", ["write", "check", "publish"])
def test_an_error_of_the_check_is_not_one_of_writing(tmp_path: Path, monkeypatch, failing: str):
    """For example, a runtime may fail to open a shared library."""

    def step(name: str) -> None:
        if name == failing:
            raise OSError(2, "No such file or directory", "libruntime.so")

    def write(graph: object, path: Path, metadata: object) -> None:
        step("write")
        path.touch()

    def compare(*_: object, **__: object) -> None:
        step("check")

    file_format = SimpleNamespace(build=lambda graphs: None, write=write, requirements=lambda graph: "")
    reference = SimpleNamespace(compare=compare)
    monkeypatch.setattr("engine.export.exporter.load_format", lambda name: file_format)
    monkeypatch.setattr("engine.export.exporter.open_model", lambda *_, **__: None)
    monkeypatch.setattr("engine.export.exporter.Reference", lambda *_: reference)
    detector = build_detector(TINY_MODEL, 2, names=("a", "b")).fuse()
    model = CheckpointModel(detector, {"imgsz": 64, "progress": PROGRESS}, tmp_path / "best.pt", torch.device("cpu"))
    data = SimpleNamespace(checked=[], checks_all_images=False, spec=None, calibration=None)
    exporter = Exporter(detector=detector, model=model, options=options(), data=data)
    with pytest.raises(OSError if failing == "check" else UserError) as caught:
        exporter.export("torchscript", lambda path: step("publish"))
    assert str(caught.value).startswith(
        "[Errno 2]" if failing == "check" else f"{tmp_path}/best.torchscript: cannot be"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("openvino_passes", [True, False])
def test_a_refused_8_bit_file_names_openvino_if_that_passes(tmp_path: Path, monkeypatch, openvino_passes: bool):
    """yolov5#10164."""
    pytest.importorskip("openvino")

    def write(graph: object, path: Path, metadata: object) -> None:
        path.touch()

    def compare(file: Path, *_: object, **__: object) -> SimpleNamespace:
        passes = openvino_passes and "openvino" in file.name
        return SimpleNamespace(violations=lambda allowed: [] if passes else ["AP"], worst_image="a.png", ap=0.5)

    file_format = SimpleNamespace(build=lambda graphs: None, write=write, requirements=lambda graph: "")
    monkeypatch.setattr("engine.export.exporter.load_format", lambda name: file_format)
    monkeypatch.setattr("engine.export.exporter.open_model", lambda file, **_: file)
    monkeypatch.setattr("engine.export.exporter.Reference", lambda *_: SimpleNamespace(compare=compare))
    detector = build_detector(TINY_MODEL, 2, names=("a", "b")).fuse()
    model = CheckpointModel(detector, {"imgsz": 64, "progress": PROGRESS}, tmp_path / "best.pt", torch.device("cpu"))
    data = SimpleNamespace(checked=[], checks_all_images=False, spec=None, calibration=None)
    exporter = Exporter(detector=detector, model=model, options=options(int8=True), data=data)
    with pytest.raises(FailedCheck) as caught:
        exporter.export("onnx", lambda path: None)
    assert ("--format openvino --int8" in str(caught.value)) == openvino_passes
    assert "--no-check" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["best_int8.onnx.failed"]


@pytest.mark.parametrize(("tile", "stored"), [(0, 0.9), (96, 0.3)])
def test_a_check_of_single_tiles_does_not_replace_the_thresholds_of_training(
    tmp_path: Path, monkeypatch, tile: int, stored: float
):
    """Those of training are for the joined detections of an image's tiles, which detect.py shows."""
    written = []

    def write(graph: object, path: Path, metadata: object) -> None:
        written.append(metadata)
        path.touch()

    file_format = SimpleNamespace(build=lambda graphs: None, write=write, requirements=lambda graph: "")
    shown = SimpleNamespace(plain_confidence=0.9, scored_confidence=0.9, threshold=0.9)
    reference = SimpleNamespace(shown=shown, compare=lambda *_, **__: None)
    monkeypatch.setattr("engine.export.exporter.load_format", lambda name: file_format)
    monkeypatch.setattr("engine.export.exporter.open_model", lambda *_, **__: None)
    monkeypatch.setattr("engine.export.exporter.Reference", lambda *_: reference)
    detector = build_detector(TINY_MODEL, 2, names=("a", "b")).fuse()
    info = {"imgsz": 64, "progress": PROGRESS, "tile": tile}
    model = CheckpointModel(detector, info, tmp_path / "best.pt", torch.device("cpu"))
    data = SimpleNamespace(checked=[], checks_all_images=True, spec=None, calibration=None)
    Exporter(detector=detector, model=model, options=options(), data=data).export("onnx", lambda path: None)
    assert written[0].confidence == stored
