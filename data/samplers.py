"""Who renders what: batches of sample keys for one rank.

Training: global batch k of an epoch is positions [kB, (k + 1)B) of the epoch's order, on any number of ranks; a rank
renders a contiguous share of it, which may be empty. Validation: a fixed list of batches, dealt out whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from data.epoch_order import EpochOrder
from utils.rng import Stream, keyed_generator
from utils.shares import share_bounds
from utils.structures import SampleKey

QUAD_PROBABILITY = 0.5  # that a quad is four pictures side by side, and not one at twice the size


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a worker is asked for: pictures of one canvas size, each of one key, or of four in a 2 x 2 grid."""

    pictures: tuple[tuple[SampleKey, ...], ...]
    canvas_hw: tuple[int, int]
    slot: int | None = None  # of `data.batch_slots`, to draw into


class KeyedDistributedSampler(DistributedSampler):
    """Sample keys of one rank. Iterating gives those of the epoch that `set_epoch` chose; `requests` gives batches."""

    def __init__(
        self,
        order: EpochOrder,
        *,
        rank: int,
        world_size: int,
        quad: bool = False,
        multi_scale: float = 0.0,
    ) -> None:
        """
        Args:
            order: the epochs' orders, with seed and global batch size.
            rank, world_size: whose share.
            quad: four samples make one picture of twice the size.
            multi_scale: canvases vary within +- this share from batch to batch; 0: never.
        """
        super().__init__(order, num_replicas=world_size, rank=rank, shuffle=True, seed=order.seed)
        self.order = order
        self.quad = quad
        self.multi_scale = multi_scale

    @property
    def num_batches(self) -> int:
        """Batches an epoch, the last perhaps partial. With ``quad``, up to three samples that fill no quad are left
        out at the end of an epoch."""
        usable = len(self.order) // 4 * 4 if self.quad else len(self.order)
        return -(-usable // self.order.batch_size)

    def global_pictures(self, batch: int) -> int:
        """Pictures in global batch ``batch`` of any epoch, over all ranks."""
        size = min(len(self.order) - batch * self.order.batch_size, self.order.batch_size)
        return size // 4 if self.quad else size

    @property
    def most_pixels(self) -> int:
        """No batch of this rank has more."""
        order = self.order
        side = (math.ceil(order.imgsz * (1 + self.multi_scale) / order.stride + order.pad) + 1) * order.stride
        return -(-order.batch_size // self.num_replicas) * side**2

    def __len__(self) -> int:
        """Sample keys of this rank in an epoch."""
        per_picture = 4 if self.quad else 1
        bounds = (share_bounds(self.global_pictures(b), self.rank, self.num_replicas) for b in range(self.num_batches))
        return sum(end - start for start, end in bounds) * per_picture

    def __iter__(self) -> Iterator[SampleKey]:
        for request in self.requests(self.epoch):
            for picture in request.pictures:
                yield from picture

    def requests(self, epoch: int, first_batch: int = 0) -> Iterator[BatchRequest]:
        """This rank's shares of the epoch's batches, from ``first_batch`` on."""
        indices = self.order.indices(epoch)
        for batch in range(first_batch, self.num_batches):
            yield self._request(indices, epoch, batch)

    def _request(self, indices: np.ndarray, epoch: int, batch: int) -> BatchRequest:
        first = batch * self.order.batch_size
        canvas = self._canvas(indices[first : first + self.order.batch_size], epoch, batch)
        start, end = share_bounds(self.global_pictures(batch), self.rank, self.num_replicas)
        if self.quad:
            double = (2 * canvas[0], 2 * canvas[1])
            quads = (self._quad(indices, epoch, first + 4 * i, canvas) for i in range(start, end))
            return BatchRequest(tuple(quads), double)
        keys = self._keys(indices, epoch, range(first + start, first + end), canvas)
        return BatchRequest(tuple((key,) for key in keys), canvas)

    def _keys(self, indices: np.ndarray, epoch: int, positions: range, canvas: tuple[int, int]) -> Iterator[SampleKey]:
        bounds, block = (0, 0), ()
        for position in positions:
            if self.order.block and not bounds[0] <= position < bounds[1]:
                bounds = self.order.block_bounds(position)
                block = tuple(indices[slice(*bounds)].tolist())  # one object, so that it is sent to the worker once
            yield SampleKey(int(indices[position]), epoch, position, canvas, block)

    def _quad(self, indices: np.ndarray, epoch: int, first: int, canvas: tuple[int, int]) -> tuple[SampleKey, ...]:
        """Four samples side by side, or one of the four rendered at twice the size."""
        rng = keyed_generator(self.seed, Stream.QUAD, epoch, first)
        if rng.random() < QUAD_PROBABILITY:
            return tuple(self._keys(indices, epoch, range(first, first + 4), canvas))
        position = first + int(rng.integers(4))
        double = (2 * canvas[0], 2 * canvas[1])
        return tuple(self._keys(indices, epoch, range(position, position + 1), double))

    def _canvas(self, members: np.ndarray, epoch: int, batch: int) -> tuple[int, int]:
        height, width = self.order.canvas(members)
        if self.multi_scale == 0:
            return height, width
        rng = keyed_generator(self.seed, Stream.MULTI_SCALE, epoch, batch)
        factor = rng.uniform(1 - self.multi_scale, 1 + self.multi_scale)
        stride = self.order.stride
        # at least two cells a side: batch norm cannot take one picture of one cell
        return tuple(max(round(side * factor / stride), 2) * stride for side in (height, width))


class EndlessRequests:
    """This rank's requests, epoch after epoch, from a settable start."""

    def __init__(self, sampler: KeyedDistributedSampler) -> None:
        self.sampler = sampler
        self.start = (0, 0)
        self.one_epoch = False  # stop at the end of the start's epoch

    @property
    def most_pixels(self) -> int:
        """No request has more."""
        return self.sampler.most_pixels

    def __iter__(self) -> Iterator[BatchRequest]:
        epoch, batch = self.start
        while True:
            yield from self.sampler.requests(epoch, batch)
            if self.one_epoch:
                return
            epoch, batch = epoch + 1, 0


class ShardedBatches(Sequence[BatchRequest]):
    """Validation: of a fixed list of batches, those numbered rank, rank + world_size, ...; each image once over all
    ranks, nothing padded, and each batch the same on any number of ranks."""

    def __init__(self, batches: Sequence[tuple[np.ndarray, tuple[int, int]]], *, rank: int, world_size: int) -> None:
        self._batches = batches[rank::world_size]

    @property
    def most_pixels(self) -> int:
        """No request has more."""
        return max((len(members) * math.prod(canvas) for members, canvas in self._batches), default=0)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, i: int) -> BatchRequest:
        members, canvas = self._batches[i]
        return BatchRequest(tuple((SampleKey(int(m), 0, int(m), canvas),) for m in members), canvas)
