"""Outputs of exported files, decoded: against tensors laid out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.formats.metadata import ExportMetadata, parse_metadata
from engine.formats.model_format import Session
from engine.inference.exported_model import ExportedModel
from engine.inference.open_model import is_exported, open_model, open_weights
from engine.inference.predictor import Predictor
from models.detector import build_detector
from models.postprocess.detections import detections_to_score
from tests.helpers.messages import refused
from tests.helpers.selection import select
from tests.helpers.tiny import TINY_MODEL, write_detector
from utils.boxes import xyxy_to_cxcywh

CPU = torch.device("cpu")
NAMES = ("light", "dark", "gray")
OURS = ExportMetadata(
    names=NAMES, imgsz_hw=(64, 96), is_ours=True, nms_iou=0.6, validation_iou=0.6, confidence=0.3, squares=True
)
BOXES = torch.tensor([[10.0, 20, 30, 60], [0, 0, 64, 64], [40, 8, 48, 24], [1, 2, 3, 5], [9, 9, 40, 40]])
SCORES = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.8], [0.0, 0.0, 0.0], [0.5, 0.6, 0.1], [0.4, 0.3, 0.2]])


def made(session: Session, metadata: ExportMetadata) -> ExportedModel:
    path = Path("model.onnx")
    return ExportedModel(session, metadata, path, CPU, partial(open_model, path, device=CPU))


def opened(output: Tensor, metadata: ExportMetadata, shape=(None, 3, None, None)) -> ExportedModel:
    """Returns a file whose output for every image is ``output`` (N, columns)."""

    def run(images: Tensor) -> Tensor:
        assert shape[0] in (None, len(images))
        return output.expand(len(images), *output.shape) * 1.0

    return made(Session(run, {}, shape), metadata)


def decoded(model: ExportedModel, batch: int = 2) -> tuple[Tensor, Tensor]:
    return model.decode(model(torch.zeros(batch, 3, 64, 96)))


def test_raw_columns():
    output = torch.cat((xyxy_to_cxcywh(BOXES), SCORES), 1).T
    for metadata in (OURS, replace(OURS, is_ours=False)):  # a foreign file has the same layout
        boxes, scores = decoded(opened(output, metadata))
        assert torch.equal(boxes, BOXES.expand(2, 5, 4))
        assert torch.equal(scores, SCORES.expand(2, 5, 3))


def test_rows_scatter_their_score_into_the_column_of_the_class():
    best, classes = SCORES.max(1, keepdim=True)
    rows = torch.cat((BOXES, best, classes.float()), 1)
    boxes, scores = decoded(opened(rows, replace(OURS, end2end=True)), batch=1)
    assert torch.equal(boxes[0], BOXES)
    assert torch.equal(scores[0], torch.zeros(5, 3).scatter(1, classes, best))


def test_class_numbers_are_rounded_and_those_beyond_the_names_refused():
    """Rows without a score, which fill up the output, may have any class."""
    rows = torch.cat((BOXES[:4], torch.tensor([[0.9, 1.9998], [0.8, 0.0], [0.0, -1.0], [0.0, torch.nan]])), 1)
    _, scores = decoded(opened(rows, replace(OURS, end2end=True)), batch=1)
    assert scores[0].tolist() == [[0, 0, pytest.approx(0.9)], [pytest.approx(0.8), 0, 0], [0, 0, 0], [0, 0, 0]]
    for number, message in (
        (3.0, "model.onnx: predicts class 3, but its classes are 0 to 2"),
        (-1.0, "model.onnx: predicts class -1, but its classes are 0 to 2"),
        (77.0, "model.onnx: predicts class 77, but its classes are 0 to 2"),
        (torch.nan, "model.onnx: predicts class nan, but its classes are 0 to 2"),
    ):
        rows[1, 5] = number
        with refused(message):
            decoded(opened(rows, replace(OURS, end2end=True)))


def test_an_output_for_another_number_of_images_is_refused():
    """A file whose input takes any batch, while its graph was made for one image."""
    output = torch.cat((xyxy_to_cxcywh(BOXES), SCORES), 1).T[None]
    session = Session(lambda images: output, {}, (None, 3, 64, 96))
    model = ExportedModel(session, OURS, Path("a.onnx"), CPU, reopen=lambda: model)
    assert decoded(model, batch=1)[0].shape == (1, 5, 4)
    with refused("a.onnx: returns results of 1 for a batch of 2 images"):
        decoded(model, batch=2)


def test_objectness_of_foreign_files():
    objectness = torch.tensor([[0.5], [1.0], [0.25], [1.0], [0.0]])
    foreign = ExportMetadata(names=NAMES, imgsz_hw=(64, 96))
    boxes, scores = decoded(opened(torch.cat((xyxy_to_cxcywh(BOXES), objectness, SCORES), 1), foreign))
    assert torch.equal(boxes[1], BOXES)
    assert torch.equal(scores[1], objectness * SCORES)


@pytest.mark.parametrize("images", [1, 3, 4, 7])
def test_batches_are_padded_and_cut_to_a_fixed_number(images: int):
    """Each image's output is its mean, so a mixed-up order or a padding image would show."""

    def run(batch: Tensor) -> Tensor:
        assert len(batch) == 3
        return batch.mean((1, 2, 3))[:, None, None].expand(-1, 7, 5).contiguous()

    session = Session(run, {}, (3, 3, 64, 96))
    model = made(session, OURS)
    pixels = torch.rand(images, 3, 64, 96)
    (output,) = model(pixels)
    torch.testing.assert_close(output[:, 0, 0], pixels.mean((1, 2, 3)))
    with refused("model.onnx: takes inputs of 64x96 pixels (height x width), not 96x64"):
        model(torch.zeros(1, 3, 96, 64))


def means(images: Tensor) -> Tensor:
    """Returns an output for the three classes of `OURS`."""
    return images.mean((1, 2, 3))[:, None, None].expand(-1, 7, 5).contiguous()


@pytest.mark.parametrize(
    ("sides", "stated", "canvas"),
    [
        ((None, 64), (96, 64), (96, 64)),
        ((64, None), (96, 100), (64, 128)),  # rounded up to whole strides
        ((None, 96), None, (96, 96)),
        ((None, None), (64, 90), None),
    ],
)
def test_a_file_with_one_fixed_side_takes_one_canvas(sides, stated, canvas):
    model = made(Session(means, {}, (None, 3, *sides)), replace(OURS, imgsz_hw=stated))
    assert model.input_hw == canvas
    assert model.canvases(model.imgsz).canvas_hw((300, 200)) == (canvas or (96, 96))


def test_an_error_of_the_runtime_is_one_line_with_the_file():
    """Except for limits of the machine, which are explained where a program ends."""

    def run(images: Tensor) -> Tensor:
        if images.shape[2] == 128:
            raise RuntimeError("Shapes do\nnot match")
        if images.shape[2] == 256:
            raise MemoryError
        return means(images)

    model = made(Session(run, {}, (None, 3, None, None)), OURS)
    with refused("model.onnx: cannot process an image of 128x96 pixels (Shapes do not match)"):
        model(torch.zeros(1, 3, 128, 96))
    with pytest.raises(MemoryError):
        model(torch.zeros(1, 3, 256, 96))


@pytest.mark.parametrize(
    ("shape", "metadata", "message"),
    [
        ((7, 5), replace(OURS, names=("a",)), "model.onnx: its output [1, 7, 5] does not fit 1 class"),
        ((300, 6), ExportMetadata(), "model.onnx: holds no class names, nor their number; export it with its metadata"),
        ((5,), OURS, "model.onnx: its output [1, 5] is not a detector's"),
    ],
)
def test_unfit_outputs_are_refused(shape: tuple[int, ...], metadata: ExportMetadata, message: str):
    with refused(message):
        opened(torch.zeros(shape), metadata)


def test_classes_without_names_are_numbered():
    assert opened(torch.zeros(7, 50), ExportMetadata()).names == ("0", "1", "2")


def test_metadata_reads_back():
    assert parse_metadata(OURS.as_strings()) == OURS
    known = replace(OURS, nms_iou=None, end2end=True, batch=4, dynamic=True, details={"half": True})
    known = replace(known, data={"source": "/a/data.yaml", "root": "/a"})
    assert parse_metadata(known.as_strings()) == known
    voting = replace(known, box_voting=True)
    assert parse_metadata(voting.as_strings()) == voting
    older = known.as_strings()
    older["lockstep"] = json.dumps({k: v for k, v in json.loads(older["lockstep"]).items() if k != "box_voting"})
    assert parse_metadata(older) == known


def test_foreign_metadata_is_read_without_running_it():
    text = {"names": "{0: 'cat', 1: \"dog's\"}", "stride": "32", "imgsz": "[480, 640]", "batch": "2"}
    text["end2end"] = "False"
    found = parse_metadata(text | {"task": "detect", "args": "{'dynamic': True}"})
    assert (found.names, found.imgsz_hw, found.batch, found.dynamic) == (("cat", "dog's"), (480, 640), 2, True)
    plain = {"names": {0: "cat"}, "stride": 32, "imgsz": [64, 64], "batch": 1}  # a YAML's
    assert parse_metadata(plain).names == ("cat",)
    assert parse_metadata({"stride": "[8, 16, 32]"}).stride == 32


def lockstep_metadata(data: str) -> str:
    return f'{{"version": 1, "layout": "raw", "data": {data}}}'


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("names", "__import__('os').getcwd()", """damaged metadata ('names' is "__import__('os').getcwd()")"""),
        ("names", "{0: open('x')}", """damaged metadata ('names' is "{0: open('x')}")"""),
        ("names", "{1: 'cat'}", "damaged metadata ('names' does not number the classes from 0)"),
        ("names", "((((", "damaged metadata ('names' is '((((')"),
        ("names", "{0: 1", "damaged metadata ('names' is '{0: 1')"),
        ("stride", "[1, 'a']", "damaged metadata: stride: must be a whole number, got 'a'"),
        ("imgsz", "['x', 640]", "damaged metadata: imgsz_hw: element 1: must be a whole number, got 'x'"),
        ("batch", "-1", "damaged metadata: batch: must be at least 1, got -1"),
        ("imgsz", "[1, 2, 3]", "damaged metadata: imgsz_hw: must be 2 values, got (1, 2, 3)"),
        ("task", "segment", "the model's task is 'segment', not detection"),
        ("lockstep", lockstep_metadata("7"), "damaged metadata: data: must be 'key: value' lines, got 7"),
        ("lockstep", lockstep_metadata('{"source": 7}'), "damaged metadata: data: source: must be text, got 7"),
        ("lockstep", lockstep_metadata('["a"]'), "damaged metadata: data: must be 'key: value' lines, got ['a']"),
        ("lockstep", '{"version": 99}', "exported by a newer version (format 99); update this program"),
    ],
)
def test_damaged_metadata_is_one_line_and_never_run(key: str, value: str, message: str):
    with refused(message):
        parse_metadata({key: value})


def test_a_checkpoint_opened_for_inference_equals_its_detector(tmp_path: Path):
    detector = build_detector({**TINY_MODEL, "end2end": True}, 2, names=("light", "dark")).eval()
    write_detector(tmp_path / "a.pt", detector, progress={"confidence": 0.25})
    images = torch.rand(2, 3, 64, 64)
    # The threshold is that of the branch that training validates.
    for nms, iou, confidence in ((False, None, 0.25), (True, 0.7, None)):
        model = open_model(tmp_path / "a.pt", device=CPU, nms=nms)
        assert (model.nms_iou, model.validation_iou, model.confidence, model.imgsz) == (iou, 0.7, confidence, 64)
        assert model.is_unscored_branch == nms
        expected = detector.fuse(one_to_one=not nms).to(memory_format=torch.channels_last)
        found = model.decode(model(images))
        assert all(torch.equal(a, b) for a, b in zip(found, expected.decode(expected(images))))
        detections = detections_to_score(model, model(images))
        wanted = select(*found, conf_thres=0.001, iou_thres=iou, max_det=300)
        assert all(torch.equal(a, b) for a, b in zip(detections, wanted))


def test_false_and_zero_are_stored_values(tmp_path: Path):
    stored = {"tile": 0, "config": {"single_cls": False, "max_bad": 0.0, "tile": 64, "data": None}}
    model = open_model(write_detector(tmp_path / "a.pt", build_detector(TINY_MODEL, 1), **stored), device=CPU)
    assert [model.stored(key) for key in ("single_cls", "max_bad", "tile", "data")] == [False, 0.0, 0, None]
    assert model.tile == 0


def test_class_names_of_older_files_become_one_line(tmp_path: Path):
    broken = ("dog\ncat", "\x1b[31mred  x", "plain")
    detector = build_detector(TINY_MODEL, 3, names=broken).eval()
    model = open_model(write_detector(tmp_path / "a.pt", detector), device=CPU)
    assert model.names == ("dog cat", " [31mred  x", "plain")
    assert parse_metadata({"names": str(list(broken))}).names == model.names


@pytest.mark.parametrize("name", ["a.onnx", "a.xml", "a.torchscript", "a.pt2"])
def test_missing_and_damaged_files(tmp_path: Path, name: str):
    if name == "a.onnx":
        pytest.importorskip("onnxruntime")
    if name == "a.xml":
        pytest.importorskip("openvino")
    for missing in (name, f"{300 * 'x'}{name}"):  # no system has names of 300 characters
        with refused(f"{missing}: no such file"):
            open_model(tmp_path / missing, device=CPU)
    (tmp_path / name).write_bytes(b"not a model")
    (tmp_path / "a.bin").write_bytes(b"")
    of_torch = name in ("a.torchscript", "a.pt2")
    reason = "truncated, or not an archive of torch" if of_torch else "cannot be opened (...)"
    with refused(f"{name}: {reason}"):
        open_model(tmp_path / name, device=CPU, trust=True)
    if of_torch:
        write_detector(tmp_path / name, build_detector(TINY_MODEL, 1))
        program = name.removeprefix("a.")
        with refused(f"{name}: contains no {program} program; a checkpoint's name must end with .pt"):
            open_model(tmp_path / name, device=CPU, trust=True)


def test_an_exported_file_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "best.onnx").write_bytes(b"not ONNX")
    with refused(f"{tmp_path}/best.onnx: cannot be opened (...)"):
        open_weights("~/best.onnx", device="cpu")
    (tmp_path / "folder").mkdir()
    for name in ("best.xml", "best.bin"):
        (tmp_path / "folder" / name).touch()
    assert is_exported("~/folder")


@pytest.mark.parametrize("settings", [{"iou": 0.45}, {"agnostic": True}])
def test_boxes_vote_once(settings: dict):
    """The rows of the file have voted already; further NMS moves none of them."""
    rows = torch.tensor([[10.0, 10, 30, 30, 0.6, 0], [10, 10, 30, 24, 0.5, 0]])
    voted = replace(OURS, nms_iou=None, end2end=True, box_voting=True)
    predictor = Predictor(opened(rows, voted, (None, 3, 64, 96)), conf=0.1, color="rgb", **settings)
    (result,) = predictor(np.zeros((64, 96, 3), np.uint8))
    assert result.boxes.data.tolist() == [pytest.approx(rows[0].tolist())]


def test_a_file_that_takes_no_square_tiles_says_how_to_use_it():
    """Nobody has written --tile: the file stores that its model was trained on tiles."""
    model = opened(torch.zeros(7, 5), replace(OURS, details={"tile": 64}), (None, 3, 64, 96))
    with refused(
        "the exported model takes only 64x96 pixels (height x width), but it was trained on square tiles; detect in "
        "whole images with --tile 0 (in Python: tiles=False)"
    ):
        Predictor(model)
    assert Predictor(model, tiles=False).image_detector.tiles is None
