"""Memory that a device still reads is not released. The device is a stand-in that reads late, by address."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from data.loading.prefetcher import PendingCopies, Prefetcher
from data.shared_memory import BatchSlots
from tests.data.test_shared_memory import batch_in, sent
from utils.structures import Batch


class Event:
    """Behaves like `torch.cuda.Event`."""

    def __init__(self) -> None:
        self.is_done, self.was_waited_for = False, False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = self.was_waited_for = True


class Thing:
    def __init__(self, gone: list[int], number: int) -> None:
        self.gone, self.number = gone, number

    def __del__(self) -> None:
        self.gone.append(self.number)


def test_completed_copies_are_released_in_order():
    held, gone, events = PendingCopies(), [], [Event() for _ in range(3)]
    for number, event in enumerate(events):
        held.add(Thing(gone, number), event)
    held.release()
    assert gone == []
    events[0].is_done = True
    held.release()
    assert gone == [0]
    held.wait()
    assert gone == [0, 1, 2]
    assert [event.was_waited_for for event in events] == [False, True, True]


class Reading(Event):
    """A pending copy: it knows its source address, and reads when it is waited for or told to."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.address, self.nbytes = batch.images.data_ptr(), batch.images.nbytes
        self.bytes = b""

    def synchronize(self) -> None:
        if not self.is_done:
            self.bytes = ctypes.string_at(self.address, self.nbytes)
        super().synchronize()


class LateSide:
    """A stream that delays all copies until they are waited for."""

    def run(self, work) -> tuple[Reading, Reading]:
        reading = work()
        return reading, reading

    def hand_over(self, batch: Reading, done: Reading) -> None:
        pass


def drawn_by_workers(slots: BatchSlots, count: int) -> Iterator[Batch]:
    """All pixels of batch n are n; a free slot is overwritten at once."""
    for number in range(count):
        slot = slots.take(144)
        if slot is None:
            yield batch_in(BatchSlots(1, 144), 0, number)
        else:
            yield sent(batch_in(slots, slot, number), slots, slot)


def late_bytes(count: int, lag: int) -> tuple[list[bool], int]:
    """Whether each batch was read as it was rendered, and from how many addresses."""
    slots, taken, right, places = BatchSlots(4, 144), deque(), [], set()
    prefetcher = Prefetcher(drawn_by_workers(slots, count), device=torch.device("cpu"), render=Reading, side=LateSide())
    with prefetcher:
        for number in range(count):
            taken.append((number, next(prefetcher)))
            prefetcher.prefetch(min(1, count - number - 1))
            if len(taken) > lag:
                taken[0][1].synchronize()
                expected, reading = taken.popleft()
                right.append(reading.bytes == bytes([expected]) * reading.nbytes)
                places.add(reading.address)
    right += [reading.bytes == bytes([expected]) * reading.nbytes for expected, reading in taken]
    return right, len(places)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_no_slot_is_overwritten_while_it_is_read():
    right, places = late_bytes(count=40, lag=2)
    assert right == [True] * 40
    assert places <= 4


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_the_stand_in_detects_overwritten_slots(monkeypatch):
    monkeypatch.setattr(PendingCopies, "add", lambda self, source, done: None)
    right, _ = late_bytes(count=40, lag=2)
    assert not all(right)


def test_closing_waits_for_pending_copies():
    readings = []

    class Side(LateSide):
        def run(self, work):
            readings.append(work())
            return readings[-1], readings[-1]

    batches = (batch_in(BatchSlots(1, 144), 0, number) for number in range(3))
    with Prefetcher(batches, device=torch.device("cpu"), render=Reading, side=Side()) as prefetcher:
        next(prefetcher)
        prefetcher.prefetch(1)
        assert not any(reading.is_done for reading in readings)
    assert [reading.bytes[0] for reading in readings] == [0, 1]
