"""What the ranks tell each other with a step, and what the host reads of it: one step late, so that it never waits for
the device."""

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
    stop: bool = False  # SIGTERM or SIGUSR1
    interrupt: bool = False  # SIGINT

    def __or__(self, other: StepFlags) -> StepFlags:
        return StepFlags(*(a or b for a, b in zip(self, other)))

    def counted(self, like: Tensor) -> Tensor:
        """A 1 for each flag that is set and a 0 for the others (F,), made on the device without a host sync."""
        values = like.new_zeros(len(self))
        for number, is_set in enumerate(self):
            if is_set:
                values[number].fill_(1)
        return values


@dataclass(frozen=True, slots=True)
class StepValues:
    """The results of one step, on the host."""

    finite: bool  # gradients of the global batch; False: the step was skipped
    local_finite: bool  # this rank's own loss
    grad_norm: float  # before clipping
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalized
    paths: tuple[str, ...]  # images of this rank's shard
    flags: StepFlags  # of all ranks, when the step began


NO_FLAGS = StepFlags()


class DelayedReader:
    """Reads device values one step late: the copy to the host runs while the next step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._pending: deque = deque()

    def push(self, scalars: Sequence[Tensor], losses: Tensor, paths: tuple[str, ...], flags: Tensor) -> None:
        """On the device: finite, local_finite and grad_norm, losses (P,) and flags (F,) of `StepValues`."""
        first = torch.stack(tuple(scalars))
        values = torch.cat([first, flags.to(first), losses.to(first)])
        if self._asynchronous:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning
            event.record()
        else:
            host, event = values, None
        self._pending.append((host, event, paths))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """All but the newest ``leave`` steps, oldest first."""
        ready = []
        while len(self._pending) > leave:
            host, event, paths = self._pending.popleft()
            if event is not None:
                event.synchronize()
            finite, local_finite, norm, save, stop, interrupt, *losses = host.tolist()
            flags = StepFlags(save > 0, stop > 0, interrupt > 0)
            ready.append(StepValues(finite > 0, local_finite > 0, norm, tuple(losses), paths, flags))
        return ready
