"""Values of a step: requests that ranks exchange, and results that the host reads one step late, so that it never waits
for the device."""

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
        return StepFlags(*(mine or theirs for mine, theirs in zip(self, other)))

    def to_tensor(self, like: Tensor) -> Tensor:
        """Returns 1 for each flag that is set and 0 for the others (F,), made on the device without a host sync."""
        values = like.new_zeros(len(self))
        for number, is_set in enumerate(self):
            if is_set:
                values[number].fill_(1)
        return values


NO_FLAGS = StepFlags()


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
        """Reads what a step has pushed: finite, local_finite, grad_norm, sums of the flags over ranks, losses."""
        finite, local_finite, grad_norm, *others = vector
        counts = others[: len(NO_FLAGS)]
        return StepValues(
            finite=finite > 0,
            local_finite=local_finite > 0,
            grad_norm=grad_norm,
            flags=StepFlags(*(count > 0 for count in counts)),
            losses=tuple(others[len(NO_FLAGS) :]),
            paths=paths,
        )


class DelayedReader:
    """Reads the values of steps one step late: the copy to the host runs while the next step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        # On the host, complete once the event is reached, or at once without one.
        self._copies: deque[tuple[Tensor, torch.cuda.Event | None, tuple[str, ...]]] = deque()

    def push(self, vector: Tensor, paths: tuple[str, ...]) -> None:
        """Starts to copy the results of a step (n,), see `StepValues.unpack`. ``paths``: images of this rank's
        shard."""
        event = None
        if self._asynchronous:
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            vector = host
            event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning
            event.record()
        self._copies.append((vector, event, paths))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """Returns the results of all steps but the newest ``leave``, oldest first."""
        results = []
        while len(self._copies) > leave:
            vector, event, paths = self._copies.popleft()
            if event is not None:
                event.synchronize()
            results.append(StepValues.unpack(vector.tolist(), paths))
        return results
