"""Sheets of images with their labels and detections."""

import numpy as np
import pytest
import torch

from engine.report.sheets import draw_batch
from utils.batches import Batch, Targets
from utils.detections import Detections


def make_batch(images: torch.Tensor, labels: list[np.ndarray], paths: tuple[str, ...]) -> Batch:
    count = len(images)
    none = torch.zeros(count, 4)
    return Batch(images, Targets.from_labels(labels), torch.arange(count), none[:, :2].int(), none.double(), paths)


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(3, 3, 64, 64, dtype=torch.uint8),
        torch.zeros(3, 3, 64, 64, dtype=torch.uint8).contiguous(memory_format=torch.channels_last),
        torch.zeros(3, 5, 64, 64, dtype=torch.uint16),
    ],
    ids=["RGB", "channels_last", "5 channels of 16 bits"],
)
def test_batch_sheet_shows_targets_of_the_right_image(images):
    labels = [np.zeros((0, 5), np.float32) for _ in images]
    labels[1] = np.float32([[0, 0.5, 0.5, 0.5, 0.3]])
    sheet = draw_batch(make_batch(images, labels, ("a/x.jpg", "y.jpg", "z.jpg")), ["thing"])
    assert (sheet.shape, sheet.dtype) == ((130, 130, 3), np.uint8)
    assert sheet[:48, 66:].any()
    assert not sheet[:48, :64].any()
    assert not sheet[66:114, :64].any()
    assert sheet[48:64, :64].any()  # its name
    assert draw_batch(make_batch(images[:0], [], ()), ["thing"]) is None


def test_detection_sheet_pairs_labels_with_predictions():
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    labels = [np.zeros((0, 5), np.float32)] * 2
    detections = Detections(
        boxes_xyxy=torch.tensor([[[8.0, 30, 24, 60], [30, 30, 60, 60]], [[0, 0, 0, 0], [0, 0, 0, 0]]]),
        scores=torch.tensor([[0.9, 0.1], [0.0, 0.0]]),
        classes=torch.zeros(2, 2, dtype=torch.long),
        counts=torch.tensor([2, 0]),
    )
    sheet = draw_batch(make_batch(images, labels, ("a/x.jpg", "y.jpg")), ["t"], detections, threshold=0.1)
    right = sheet[:64, 66:130]
    assert sheet.shape == (64, 4 * 66 - 2, 3)
    assert right[31:48, 8:24].any()
    assert not right[31:48, 30:].any()  # below the confidence threshold
    assert not sheet[:48, 132:196].any()  # the second image has neither
    assert not sheet[:48, 198:].any()
