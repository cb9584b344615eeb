"""Counter-based random numbers (Philox, Salmon et al., SC'11): the value depends on the key, never on call order.

Everything random on the data path and in the step is drawn from a generator made here. So pixels do not depend on rank,
worker, restart or the order in which samples are rendered, and a checkpoint needs no RNG state.
"""

from __future__ import annotations

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
    """A stream for ``name``, different from all entries of `Stream`."""
    return 2**32 + zlib.crc32(name.encode())


def keyed_generator(seed: int, stream: Stream, *counters: int) -> np.random.Generator:
    """A generator for ``(seed, stream, counters)``, at most three counters (epoch, position, ...) in [0, 2**64).

    Philox's 128-bit key holds seed and stream, the upper three words of its 256-bit counter hold the counters, and the
    lowest word counts draws.
    """
    key = np.array([seed % 2**64, int(stream)], dtype=np.uint64)
    counter = np.zeros(4, dtype=np.uint64)
    counter[1 : 1 + len(counters)] = counters
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def keyed_uniforms(seed: int, stream: int, positions: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """float64 (n, count) in [0, 1). Each row depends only on ``(seed, stream)``, ``count`` and its (epoch, position).

    An epoch has one Philox sequence, and position p its p-th section. So consecutive positions are drawn from one
    generator, which takes much longer to create than to draw from. Use a stream for this or for `keyed_generator`.
    """
    key = np.array([seed % 2**64, int(stream)], dtype=np.uint64)
    steps = -(-count // 4)  # of the counter: each gives four numbers
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
