"""Structures: padding of ragged targets, batches that move to a device as a whole, labels and detections."""

import numpy as np
import pytest
import torch

from tests.helpers.kernel_count import KernelCount
from utils.structures import Batch, DetectionTable, LabelArrays, Targets, f1_score, pad_targets, to_float


def padded_by_loop(targets: torch.Tensor, batch_size: int, max_targets: int):
    padded = torch.zeros(batch_size, max_targets, 5)
    mask = torch.zeros(batch_size, max_targets, dtype=torch.bool)
    for row in targets.tolist():
        image = int(row[0])
        slot = int(mask[image].sum())
        padded[image, slot] = torch.tensor(row[1:])
        mask[image, slot] = True
    return padded, mask


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 2], [4], [0, 0], [1, 1, 1, 0], []])
def test_pad_targets_equals_a_loop(counts):
    generator = torch.Generator().manual_seed(0)
    targets = torch.rand(sum(counts), 6, generator=generator)
    targets[:, 0] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.long)).float()
    padded, mask = pad_targets(targets, len(counts), 5)
    expected, expected_mask = padded_by_loop(targets, len(counts), 5)
    assert torch.equal(padded, expected)
    assert torch.equal(mask, expected_mask)


def test_targets_are_the_labels_by_image_without_the_regions():
    """-2 in a label is class 0 of a region, -1 all classes. A shard is the same as targets of its images alone."""
    objects = np.float32([[2, 0.5, 0.5, 0.2, 0.2], [-2, 0.1, 0.1, 0.1, 0.1], [0, 0.3, 0.4, 0.1, 0.2]])
    labels = [objects, objects[:0], np.float32([[-1, 0.5, 0.5, 1, 1]]), *[np.repeat(objects[:1], 17, 0)] * 2]
    targets = Targets.from_labels(labels)
    assert (targets.counts, targets.max_targets) == ((2, 0, 0, 17, 17), 32)
    np.testing.assert_array_equal(targets.rows[:3], np.c_[[0, 0, 3], objects[[0, 2, 0]]].astype(np.float32))
    np.testing.assert_array_equal(targets.ignore, np.float32([[0, 0, 0.1, 0.1, 0.1, 0.1], [2, -1, 0.5, 0.5, 1, 1]]))
    for start, end in ((0, 5), (2, 4), (1, 2), (3, 3)):
        share = targets.to(torch.device("cpu")).shard(start, end)
        alone = Targets.from_labels(labels[start:end])
        assert (share.counts, torch.equal(share.rows, alone.rows)) == (alone.counts, True)
        np.testing.assert_array_equal(share.on_host, alone.rows)
        np.testing.assert_array_equal(share.ignore, alone.ignore)


def test_moving_a_batch_moves_what_the_model_and_the_loss_take(monkeypatch):
    batch = Batch(
        images=torch.zeros(1, 3, 4, 4, dtype=torch.uint8),
        targets=Targets.from_labels([np.float32([[1, 0.5, 0.5, 0.2, 0.2]])]),
        indices=torch.zeros(1, dtype=torch.long),
        original_hw=torch.zeros(1, 2, dtype=torch.int32),
        letterbox=torch.zeros(1, 4),
        paths=("a.jpg",),
    )
    moved = batch.to(torch.device("meta"))
    assert {t.device.type for t in (moved.images, moved.targets.rows)} == {"meta"}
    assert {t.device.type for t in (moved.indices, moved.original_hw, moved.letterbox)} == {"cpu"}
    assert (moved.targets.counts, moved.paths) == ((1,), ("a.jpg",))
    np.testing.assert_array_equal(moved.targets.on_host, batch.targets.rows)
    assert batch.images.device.type == "cpu"
    assert np.all(batch.images.numpy() == 0)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch.pin_memory()
    assert [id(tensor) for tensor in pinned] == [id(batch.images), id(batch.targets.rows)]


def detections(images: list[int]) -> DetectionTable:
    number = np.array(images, np.int64)
    return DetectionTable(number, np.arange(4.0 * len(images)).reshape(-1, 4), number / 10, number % 3)


def test_detections_are_joined_and_selected():
    parts = [detections([4, 1]), detections([]), detections([2])]
    joined = DetectionTable.concatenate(parts)
    assert joined.image_index.tolist() == [4, 1, 2]
    assert joined.boxes_xyxy_px.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    chosen = joined.take(np.argsort(joined.image_index))
    assert (chosen.image_index.tolist(), chosen.scores.tolist()) == ([1, 2, 4], [0.1, 0.2, 0.4])
    assert chosen.take(chosen.classes == 2).image_index.tolist() == [2]
    for table in (DetectionTable.concatenate([]), DetectionTable.concatenate(parts[1:2])):
        assert [getattr(table, name).shape for name in table.__slots__] == [(0,), (0, 4), (0,), (0,)]
        assert table.image_index.dtype == table.classes.dtype == np.int64


def test_boxes_know_their_images():
    labels = type("Labels", (LabelArrays,), {})()
    labels.offsets = np.array([0, 2, 2, 5])
    labels.classes = np.array([0, 0, 1, 0, 2])
    labels.crowd = np.array([False, False, False, False, True])
    assert labels.image_of_box.tolist() == [0, 0, 2, 2, 2]
    assert labels.images_per_class(4).tolist() == [2, 1, 0, 0]


def test_f1_is_zero_without_precision_and_recall():
    values = f1_score(np.array([0.5, 0.0, 1.0, np.nan]), np.array([0.25, 0.0, 1.0, np.nan]))
    np.testing.assert_allclose(values, [1 / 3, 0, 1, np.nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_bytes_become_fractions_in_one_pass(dtype, channels_last):
    images = torch.arange(2 * 3 * 16 * 16, dtype=torch.int32).to(torch.uint8).view(2, 16, 16, 3).permute(0, 3, 1, 2)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    laid_out = images.contiguous(memory_format=layout)
    with KernelCount() as count:
        fractions = to_float(laid_out, torch.device("cpu"), dtype, channels_last)
    assert count.kernels == {"div": 1}
    assert fractions.is_contiguous(memory_format=layout)
    assert torch.equal(fractions, images.to(dtype) / 255)
    assert torch.equal(to_float(images, torch.device("cpu"), dtype, channels_last), fractions)
