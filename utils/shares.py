"""How a number of things is cut among ranks."""

from __future__ import annotations


def share_bounds(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous share [start, end) of ``count`` items for a rank.

    Shares differ by one at most, and nest: those of 2k ranks cut those of k ranks in two.
    """
    return rank * count // world_size, (rank + 1) * count // world_size
