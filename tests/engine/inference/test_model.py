"""Models opened for inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.export.formats import Session
from engine.export.metadata import ExportMetadata
from engine.inference.model import ExportedModel, open_model
from engine.inference.predict import Predictor
from models.detector import build_detector
from models.postprocess.detections import select_for_validation
from tests.helpers.selection import select
from tests.helpers.tiny import TINY_MODEL, write_detector
from utils.errors import UserError

CPU = torch.device("cpu")


def test_a_checkpoint_opened_for_inference_equals_its_detector(tmp_path: Path):
    detector = build_detector({**TINY_MODEL, "end2end": True}, 2, names=("light", "dark")).eval()
    write_detector(tmp_path / "a.pt", detector, progress={"confidence": 0.25})
    images = torch.rand(2, 3, 64, 64)
    # The threshold is that of the branch that training validates.
    for nms, iou, confidence in ((False, None, 0.25), (True, 0.7, None)):
        model = open_model(tmp_path / "a.pt", device=CPU, nms=nms)
        assert (model.nms_iou, model.confidence, model.imgsz) == (iou, confidence, 64)
        assert model.is_unscored_branch == nms
        expected = detector.fuse(one_to_one=not nms).to(memory_format=torch.channels_last)
        found = model.decode(model(images))
        assert all(torch.equal(a, b) for a, b in zip(found, expected.decode(expected(images))))
        detections = select_for_validation(model, model(images)).for_ap
        wanted = select(*found, conf_thres=0.001, iou_thres=iou, max_det=300)
        assert all(torch.equal(a, b) for a, b in zip(detections, wanted))


def test_a_file_that_takes_no_square_tiles_says_how_to_use_it():
    """Nobody has written --tile: the file stores that its model was trained on tiles."""
    metadata = ExportMetadata(names=("a",), imgsz_hw=(64, 96), details={"tile": 64})
    session = Session(lambda images: torch.zeros(len(images), 5, 5), (None, 3, 64, 96))
    model = ExportedModel(session, metadata, Path("model.onnx"), CPU)
    with pytest.raises(UserError, match=r"--tile 0 \(in Python: tiles=False\)"):
        Predictor(model)
    assert Predictor(model, tiles=False).tiles is None


def test_rows_of_an_end2end_file_are_not_moved_by_box_voting():
    rows = torch.tensor([[[0.0, 0, 20, 20, 0.9, 0], [0, 0, 20, 18, 0.8, 1], [40, 40, 60, 60, 0.7, 1]]])
    metadata = ExportMetadata(names=("a", "b"), imgsz_hw=(64, 64), end2end=True)
    session = Session(lambda images: rows.repeat(len(images), 1, 1), (None, 3, 64, 64))
    predictor = Predictor(ExportedModel(session, metadata, Path("model.onnx"), CPU), color="rgb")
    image = np.zeros((64, 64, 3), np.uint8)
    for settings, kept in (({}, [0, 1, 2]), ({"agnostic": True}, [0, 2]), ({"iou": 0.5}, [0, 1, 2])):
        assert torch.equal(predictor(image, **settings)[0].boxes.data, rows[0, kept])
