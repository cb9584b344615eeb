"""Pictures of a report, on cases whose outcome is known by construction."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import torch

from engine.evaluation.analysis import BACKGROUND, MISSED
from engine.evaluation.matching import match_detections
from engine.report.images import COLORS, draw_batch, worst_images
from tests.helpers.scoring import make_table
from tests.helpers.synthetic_index import index_of
from utils.batches import Batch, Targets


def test_the_images_with_the_most_errors_come_first_with_each_error(tmp_path):
    """Image 0 is right, 1 has a missed and a misplaced object, 2 a background with a detection of 0.9, 3 with 0.6."""
    for i in range(4):
        cv2.imwrite(str(tmp_path / f"{i}.png"), np.full((200, 300, 3), 90, np.uint8))
    index = index_of(
        names=["a", "b"],
        paths=[f"{i}.png" for i in range(4)],
        image_hw=np.tile((200, 300), (4, 1)),
        offsets=[0, 1, 3, 3, 3],
        boxes_xywh_px=np.array([[10, 10, 80, 80], [10, 10, 80, 80], [150, 100, 80, 80.0]]),
        classes=[0, 0, 1],
    )
    index = replace(index, root=tmp_path)
    table = make_table(
        image=[0, 1, 2, 3],
        boxes=[[10, 10, 90, 90], [50, 50, 130, 130], [0, 0, 50, 50], [0, 0, 50, 50]],
        scores=[0.8, 0.7, 0.9, 0.6],
        classes=[0, 0, 0, 0],
    )
    matches = match_detections(index.ground_truth(), table, 2)
    assert [card.note for card in worst_images(index, matches, BACKGROUND)] == ["2.png", "3.png", "1.png"]
    cards = worst_images(index, matches, MISSED)
    assert [card.note for card in cards] == ["1.png", "2.png", "3.png"]
    assert cards[0].text == "1 missed, 1 misplaced"
    ((_, picture),) = cards[0].photos
    pixels = picture.pixels.astype(int)
    for style in ("missed", "misplaced", "label"):
        assert (np.abs(pixels - [*bytes.fromhex(COLORS[style][1:])]).max(2) < 60).any()


def test_batch_sheet_shows_targets_of_the_right_image():
    images = torch.zeros(3, 5, 64, 64, dtype=torch.uint16)
    labels = [np.zeros((0, 5), np.float32) for _ in images]
    labels[1] = np.float32([[0, 0.5, 0.5, 0.5, 0.3]])
    none = torch.zeros(3, 4)
    paths = ("a/x.jpg", "y.jpg", "z.jpg")
    batch = Batch(images, Targets.from_labels(labels), torch.arange(3), none[:, :2].int(), none.double(), paths)
    sheet = draw_batch(batch, ["thing"])
    assert (sheet.shape, sheet.dtype) == ((130, 130, 3), np.uint8)
    assert sheet[:48, 66:].any()
    assert not sheet[:48, :64].any()
    assert not sheet[66:114, :64].any()
