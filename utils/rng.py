"""Counter-based random numbers (Philox, Salmon et al., SC'11): a value depends on its key, never on the order of calls.

All random numbers of the data path and the training step come from generators created here. So pixels do not depend on
rank, worker, restart or rendering order, and a checkpoint needs no RNG state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The purpose of a draw. Streams are independent, so adding draws to one does not change the others."""

    PERMUTATION = 0
    AUGMENT = 1
    ALBUMENTATIONS = 2
    MULTI_SCALE = 3
    QUAD = 4
    INIT = 5
    ANCHORS = 6
    DEMO = 7
    IMAGE_WEIGHTS = 8
    MIXUP = 9


def named_stream(name: str) -> int:
    """Returns the number of a stream for ``name``, different from all members of `Stream`."""
    return 2**32 + zlib.crc32(name.encode())


def keyed_generator(seed: int, stream: int, *counters: int) -> np.random.Generator:
    """Creates the generator of ``(seed, stream, counters)``: at most three counters (epoch, position, ...) < 2**64.

    Philox's 128-bit key holds seed and stream, the upper three words of its 256-bit counter hold the counters, and the
    lowest word counts draws.
    """
    key = np.array([seed % 2**64, int(stream)], dtype=np.uint64)
    counter = np.zeros(4, dtype=np.uint64)
    counter[1 : 1 + len(counters)] = counters
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def keyed_uniforms(seed: int, stream: int, positions: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """Draws ``count`` numbers in [0, 1) for each of n (epoch, position) pairs: float64 (n, count).

    A row depends only on ``(seed, stream)``, ``count`` and its pair. Each epoch has one Philox sequence, and position p
    uses its p-th section. Consecutive positions can therefore share a generator, whose creation takes much longer than
    drawing. Use a stream either here or in `keyed_generator`, not in both.
    """
    key = np.array([seed % 2**64, int(stream)], dtype=np.uint64)
    steps = math.ceil(count / 4)  # each step of the counter gives four numbers
    rows = np.empty((len(positions), 4 * steps))
    first = 0
    for last in range(1, len(positions) + 1):
        epoch, position = positions[last - 1]
        if last < len(positions) and positions[last] == (epoch, position + 1):
            continue
        counter = np.array([positions[first][1] * steps, epoch, 0, 0], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        rows[first:last] = generator.random((last - first, 4 * steps))
        first = last
    return rows[:, :count]
