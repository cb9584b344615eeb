"""The stand-ins of a GPU refuse what CUDA would leave undefined, and what waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.fake_streams import FakeEvent, StreamOrder
from tests.helpers.kernel_count import NoSync

CUDA = torch.device("cuda", 0)


@pytest.fixture
def order() -> Iterator[StreamOrder]:
    with fake_gpu(), StreamOrder() as order:
        yield order


def copy_on_a_stream() -> tuple[Tensor, FakeEvent]:
    """Starts a copy to the device on a stream of its own. Returns its result, and the event of its end."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        values = torch.ones(4).to(CUDA, non_blocking=True)
        return values, stream.record_event()


def test_values_of_a_stream_that_is_not_waited_for_are_refused(order):
    values, done = copy_on_a_stream()
    values.record_stream(torch.cuda.current_stream())
    with pytest.raises(AssertionError, match="stream 0 did not wait for stream 1"):
        values.add(1)
    torch.cuda.current_stream().wait_event(done)
    values.add(1)
    assert not order.waits


def test_an_event_before_the_work_is_not_enough(order):
    stream = torch.cuda.Stream()
    before = stream.record_event()
    with torch.cuda.stream(stream):
        values = torch.ones(4).to(CUDA, non_blocking=True)
    values.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(before)
    with pytest.raises(AssertionError, match="did not wait"):
        values.add(1)


def test_memory_that_another_stream_may_give_away_is_refused(order):
    values, done = copy_on_a_stream()
    torch.cuda.current_stream().wait_event(done)
    with pytest.raises(AssertionError, match="stream 1 may give away memory that stream 0 uses"):
        values.add(1)
    values.record_stream(torch.cuda.current_stream())
    values.add(1)


@pytest.mark.parametrize("method", ["tolist", "numpy"])
def test_values_that_the_host_has_not_waited_for_are_refused(order, method):
    values = torch.ones(4, device=CUDA).to("cpu", non_blocking=True)
    with pytest.raises(AssertionError, match="the host did not wait for stream 0"):
        getattr(values, method)()
    torch.cuda.current_stream().record_event().synchronize()
    assert list(getattr(values, method)()) == [0, 0, 0, 0]
    assert order.waits == {"event": 1}


def test_waits_of_the_host_are_counted(order):
    values = torch.ones(4, device=CUDA)
    values.to("cpu")
    values.sum().item()
    torch.cuda.synchronize()
    assert order.waits == {"copy": 1, "value": 1, "device": 1}


VALUES = torch.arange(4.0)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda: VALUES[0].item(), "local_scalar_dense waits"),
        (lambda: float(VALUES.sum()), "local_scalar_dense waits"),
        (lambda: bool(VALUES.any()), "waits"),
        (lambda: VALUES.nonzero(), "nonzero waits"),
        (lambda: VALUES[VALUES > 1], "mask waits"),
        (lambda: VALUES.masked_select(VALUES > 1), "masked_select waits"),
        (lambda: VALUES.unique(), "unique2 waits"),
        (lambda: VALUES.equal(VALUES), "equal waits"),
        (lambda: VALUES.to("meta"), "a copy to meta that waits"),
        (lambda: torch.empty(4, device="meta").copy_(VALUES), "a copy to meta that waits"),
    ],
)
def test_what_waits_for_the_device_is_refused(operation: Callable[[], object], message: str):
    with pytest.raises(AssertionError, match=message), NoSync():
        operation()


def test_what_does_not_wait_is_allowed():
    with NoSync():
        VALUES.to("meta", non_blocking=True)
        torch.empty(4, device="meta").copy_(VALUES, non_blocking=True)
        VALUES.double()
        VALUES[torch.tensor([0, 2])].where(VALUES[:2] > 1, 0).sum()
