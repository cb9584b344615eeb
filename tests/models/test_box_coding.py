"""The grids that heads, losses and assigners share."""

import torch

from models.box_coding import cell_centers
from tests.helpers.kernel_count import KernelCount


def test_the_host_does_not_wait_for_a_new_canvas():
    with KernelCount() as counted:
        cell_centers(((22, 18), (11, 9), (6, 5)), (8, 16, 32), torch.device("cpu"))
    assert not counted.waits
    assert counted.kernels, "the canvas was in the cache"
