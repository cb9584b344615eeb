"""Counter-based random numbers (Philox, Salmon et al., SC'11): the value depends on the key, never on call order.

Everything random on the data path and in the step is drawn from a generator made here, so that pixels do not
depend on rank, worker, restart or the order in which samples are rendered, and a checkpoint has no RNG to save.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a draw is for. Two streams never share numbers, so adding draws to one leaves the others as they were."""

    PERMUTATION = 0
    AUGMENT = 1
    ALBUMENTATIONS = 2
    MULTI_SCALE = 3
    QUAD = 4
    INIT = 5
    ANCHORS = 6
    DEMO = 7
    IMAGE_WEIGHTS = 8


def keyed_generator(seed: int, stream: Stream, *counters: int) -> np.random.Generator:
    """A generator for ``(seed, stream, counters)``; equal arguments give equal numbers on every machine.

    At most three counters (epoch, position, ...), each in [0, 2**64). Philox's 128-bit key holds seed and stream, the
    upper three words of its 256-bit counter hold the counters, and the lowest word is left to count the draws.
    """
    if len(counters) > 3:
        raise ValueError(f"at most 3 counters, got {len(counters)}")
    key = np.array([seed % 2**64, int(stream)], dtype=np.uint64)
    counter = np.zeros(4, dtype=np.uint64)
    counter[1 : 1 + len(counters)] = counters
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
