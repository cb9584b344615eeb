"""Values of a step: requests and sums that ranks exchange, and results that the host reads one step late, so that it
never waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StepFlags(NamedTuple):
    """Requests of any rank to all ranks. They are reduced together with the sums of a step, so they cost nothing and
    all ranks read them after the same step."""

    save: bool = False
    stop: bool = False  # for SIGTERM, SIGUSR1, or a callback
    interrupt: bool = False  # for SIGINT

    def __or__(self, other: StepFlags) -> StepFlags:
        return StepFlags(
            save=self.save or other.save, stop=self.stop or other.stop, interrupt=self.interrupt or other.interrupt
        )

    def as_counts(self, like: Tensor) -> Tensor:
        """Returns 1 for each flag that is set and 0 for the others (F,), made on the device without a host sync."""
        values = like.new_zeros(len(self))
        for number, is_set in enumerate(self):
            if is_set:
                values[number].fill_(1)
        return values

    @staticmethod
    def from_counts(counts: Sequence[float]) -> StepFlags:
        """Converts sums of `as_counts` over ranks back to flags."""
        return StepFlags(*(count > 0 for count in counts))


NO_FLAGS = StepFlags()


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over a step's micro-batches, and then over all ranks, which all-reduce them as one vector."""

    normalizer: Tensor  # ()
    parts: Tensor  # (P,) of the loss
    flags: Tensor  # (F,), see `StepFlags.as_counts`

    def pack(self) -> Tensor:
        """Returns the vector (1 + P + F,)."""
        return torch.cat([self.normalizer.reshape(1), self.parts, self.flags])

    @staticmethod
    def unpack(vector: Tensor) -> StepSums:
        num_flags = len(NO_FLAGS)
        normalizer, parts, flags = vector.split([1, len(vector) - 1 - num_flags, num_flags])
        return StepSums(normalizer=normalizer.squeeze(0), parts=parts, flags=flags)


@dataclass(frozen=True, kw_only=True)
class DeviceValues:
    """The results of one step on the device, in the order in which they are copied to the host."""

    finite: Tensor  # ()
    local_finite: Tensor  # ()
    grad_norm: Tensor  # ()
    flags: Tensor  # (F,)
    losses: Tensor  # (P,)

    def pack(self) -> Tensor:
        """Returns the vector (3 + F + P,), which `StepValues.unpack` reads."""
        scalars = torch.stack([self.finite, self.local_finite, self.grad_norm])
        return torch.cat([scalars, self.flags.to(scalars), self.losses.to(scalars)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """The results of one step, on the host."""

    finite: bool  # gradients of the global batch; False: the step was skipped
    local_finite: bool  # this rank's own loss
    grad_norm: float  # before clipping
    flags: StepFlags  # requests of all ranks when the step began
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalized
    paths: tuple[str, ...]  # images of this rank's shard

    @staticmethod
    def unpack(vector: Sequence[float], paths: tuple[str, ...]) -> StepValues:
        """Reads the vector of `DeviceValues.pack`."""
        finite, local_finite, grad_norm, *others = vector
        num_flags = len(NO_FLAGS)
        return StepValues(
            finite=finite > 0,
            local_finite=local_finite > 0,
            grad_norm=grad_norm,
            flags=StepFlags.from_counts(others[:num_flags]),
            losses=tuple(others[num_flags:]),
            paths=paths,
        )


class _Copy(NamedTuple):
    """A vector on its way to the host."""

    vector: Tensor  # on the host, complete once the event is reached
    event: torch.cuda.Event | None  # None: it is complete
    paths: tuple[str, ...]


class DelayedReader:
    """Reads device values one step late: the copy to the host runs while the next step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._copies: deque[_Copy] = deque()

    def push(self, values: DeviceValues, paths: tuple[str, ...]) -> None:
        """Starts to copy the results of a step. ``paths``: images of this rank's shard."""
        vector = values.pack()
        event = None
        if self._asynchronous:
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            vector = host
            event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning
            event.record()
        self._copies.append(_Copy(vector, event, paths))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """Returns the results of all steps but the newest ``leave``, oldest first."""
        results = []
        while len(self._copies) > leave:
            copy = self._copies.popleft()
            if copy.event is not None:
                copy.event.synchronize()
            results.append(StepValues.unpack(copy.vector.tolist(), copy.paths))
        return results
