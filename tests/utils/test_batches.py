"""Batches: targets by image, moves to a device as a whole, bytes to fractions."""

import numpy as np
import pytest
import torch

from tests.helpers.kernel_count import KernelCount
from utils.batches import Targets, to_float


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
