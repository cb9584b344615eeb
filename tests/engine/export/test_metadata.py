"""The metadata of exported files, and how they decide on the output: against tensors laid out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.export.formats import Session
from engine.export.metadata import ExportMetadata, parse_metadata
from engine.inference.model import ExportedModel
from utils.boxes import xyxy_to_cxcywh
from utils.errors import UserError

CPU = torch.device("cpu")
NAMES = ("light", "dark", "gray")
OURS = ExportMetadata(
    names=NAMES, imgsz_hw=(64, 96), nms_iou=0.6, validation_iou=0.6, confidence=0.3, squares=True, description="a"
)
BOXES = torch.tensor([[10.0, 20, 30, 60], [0, 0, 64, 64], [40, 8, 48, 24], [1, 2, 3, 5]])
SCORES = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.8], [0.0, 0.0, 0.0], [0.5, 0.6, 0.1]])
OBJECTNESS = torch.tensor([[0.5], [1.0], [0.25], [1.0]])
ROWS = torch.cat((BOXES, SCORES.max(1, keepdim=True).values, SCORES.argmax(1, keepdim=True).float()), 1)
BEST = torch.zeros(4, 3).scatter(1, SCORES.argmax(1, keepdim=True), SCORES.max(1, keepdim=True).values)
COLUMNS = torch.cat((xyxy_to_cxcywh(BOXES), SCORES), 1).T


def opened(run, metadata: ExportMetadata, shape=(None, 3, None, None)) -> ExportedModel:
    return ExportedModel(Session(run, shape), metadata, Path("model.onnx"), CPU)


def decoded(output: Tensor, metadata: ExportMetadata, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Decodes an ``output`` (N, columns) that a file has for every image."""
    model = opened(lambda images: output.expand(len(images), *output.shape) * 1.0, metadata)
    return model.decode(model(torch.zeros(batch, 3, 64, 96)))


@pytest.mark.parametrize(
    ("output", "metadata", "scores"),
    [
        (COLUMNS, OURS, SCORES),
        (COLUMNS, parse_metadata({"names": str(list(NAMES))}), SCORES),
        (ROWS, replace(OURS, end2end=True), BEST),
        (ROWS, parse_metadata({"names": str(list(NAMES)), "args": "{'nms': True}"}), BEST),  # of Ultralytics
        (torch.cat((xyxy_to_cxcywh(BOXES), OBJECTNESS, SCORES), 1), replace(OURS), OBJECTNESS * SCORES),  # of YOLOv5
    ],
)
def test_outputs_are_decoded_as_the_metadata_say(output: Tensor, metadata: ExportMetadata, scores: Tensor):
    found_boxes, found_scores = decoded(output, metadata)
    assert torch.equal(found_boxes, BOXES.expand(2, 4, 4))
    assert torch.equal(found_scores, scores.expand(2, 4, 3))


@pytest.mark.parametrize("images", [1, 4])
def test_batches_are_padded_and_cut_to_a_fixed_number(images: int):
    """Each image's output is its mean, so a mixed-up order or a padding image would show."""

    def run(batch: Tensor) -> Tensor:
        assert len(batch) == 3
        return batch.mean((1, 2, 3))[:, None, None].expand(-1, 7, 5).contiguous()

    pixels = torch.rand(images, 3, 64, 96)
    (output,) = opened(run, OURS, (3, 3, 64, 96))(pixels)
    torch.testing.assert_close(output[:, 0, 0], pixels.mean((1, 2, 3)))


def test_metadata_read_back():
    assert parse_metadata(OURS.as_strings()) == OURS
    model = opened(lambda images: images, OURS)
    assert model.threshold(box_voting=True) == 0.3
    assert model.threshold(box_voting=False) == 0.25  # a chosen threshold holds for its own decoding only
    known = replace(OURS, nms_iou=None, end2end=True, batch=4, dynamic=True, details={"half": True})
    assert parse_metadata(known.as_strings()) == parse_metadata(known.as_data()) == known


def test_metadata_of_other_programs():
    text = {"names": "{0: 'cat', 1: \"dog's\"}", "stride": "32", "imgsz": "[480, 640]", "batch": "2"}
    found = parse_metadata(text | {"task": "detect", "args": "{'dynamic': True}", "end2end": "False"})
    assert (found.names, found.imgsz_hw, found.batch, found.dynamic) == (("cat", "dog's"), (480, 640), 2, True)
    assert found.nms_iou == 0.7
    plain = {"names": {0: "cat\ndog"}, "stride": [8, 16, 32], "imgsz": 64, "end2end": True}  # a YAML's
    found = parse_metadata(plain)
    assert (found.names, found.stride, found.imgsz_hw, found.nms_iou) == (("cat dog",), 32, (64, 64), None)


@pytest.mark.parametrize(
    "entries",
    [
        {"names": "__import__('os').mkdir('ran')"},
        {"names": "{0: open('ran', 'w')}"},
        {"names": "(" * 10_000},
        {"task": "segment"},
        {"lockstep": '{"version": 1, "layout": "raw", "nms_iou": 7}'},
        {"lockstep": '{"version": 99}'},
        {"names": ""},
    ],
)
def test_damaged_metadata_are_refused_and_never_run(entries: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        parse_metadata({"names": "['a']"} | entries)
    assert not (tmp_path / "ran").exists()
