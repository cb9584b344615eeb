"""Padding of ragged targets."""

import pytest
import torch

from models.losses.base import pad_targets


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
