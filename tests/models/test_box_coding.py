"""The grids that heads, losses and assigners share."""

import pytest
import torch

from models.box_coding import cell_centers, grid_levels
from tests.helpers.kernel_count import KernelCount

CPU = torch.device("cpu")
STRIDES = (8, 16, 32)
SHAPES = ((20, 12), (10, 6), (5, 3))


def test_grid_levels_equal_tensors_of_their_numbers():
    levels = grid_levels(SHAPES, STRIDES, CPU)
    expected = {
        "strides": torch.tensor([[8.0], [16.0], [32.0]]),
        "last": torch.tensor([[11.0, 19.0], [5.0, 9.0], [2.0, 4.0]]),
        "columns": torch.tensor([12, 6, 3]),
        "offset": torch.tensor([0, 240, 300]),
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(getattr(levels, name), tensor, rtol=0, atol=0)  # compares types and shapes, too
    assert levels.cells == 315


@pytest.mark.parametrize("make", [cell_centers, grid_levels])
def test_the_host_does_not_wait_for_a_new_canvas(make):
    with KernelCount() as counted:
        make(((22, 18), (11, 9), (6, 5)), STRIDES, CPU)
    assert not counted.waits
    assert counted.kernels, "the canvas was in the cache"
