"""That `NoSync` refuses what waits for a device, without a GPU: copies to ``meta`` are copies between devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.kernel_count import NoSync

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
